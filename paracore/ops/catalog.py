"""Every operation that has more than one implementation, for the tools that list or check them all."""

from __future__ import annotations

from typing import Any

from paracore.ops import adamw, attention, rms_norm
from paracore.ops.implementations import Operation

OPERATIONS: tuple[Operation[Any], ...] = (rms_norm.OPERATION, attention.OPERATION, adamw.OPERATION)
