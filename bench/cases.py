"""The cases that `paracore bench` knows, by name."""

from __future__ import annotations

from paracore.bench.adamw import AdamW
from paracore.bench.attention import Attention
from paracore.bench.case import Case
from paracore.bench.optimizer_step import OptimizerStep
from paracore.bench.ring_attention import RingAttention
from paracore.bench.rms_norm import RMSNorm

CASES: dict[str, Case] = {
    case.name: case for case in (AdamW(), Attention(), OptimizerStep(), RingAttention(), RMSNorm())
}
