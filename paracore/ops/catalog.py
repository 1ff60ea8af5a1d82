"""Every operation that has more than one implementation, for the tools that list or check them all."""

from __future__ import annotations

from typing import Any

from paracore.ops import adamw, attention, cross_entropy, embedding, rms_norm, rotary, swiglu
from paracore.ops.implementations import Operation

OPERATIONS: tuple[Operation[Any], ...] = (
    rms_norm.OPERATION,
    attention.OPERATION,
    swiglu.OPERATION,
    rotary.OPERATION,
    embedding.OPERATION,
    cross_entropy.OPERATION,
    adamw.OPERATION,
)
