"""The cases that `paracore bench` knows, by name."""

from __future__ import annotations

from paracore.bench.adamw import AdamW
from paracore.bench.attention import Attention
from paracore.bench.case import Case
from paracore.bench.cross_entropy import CrossEntropy
from paracore.bench.linear_cross_entropy import LinearCrossEntropy
from paracore.bench.matmul import Matmul
from paracore.bench.optimizer_step import OptimizerStep
from paracore.bench.ring_attention import RingAttention
from paracore.bench.rms_norm import RMSNorm
from paracore.bench.rope import Rope
from paracore.bench.swiglu import SwiGLU

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        AdamW(),
        Attention(),
        CrossEntropy(),
        LinearCrossEntropy(),
        Matmul(),
        OptimizerStep(),
        RingAttention(),
        RMSNorm(),
        Rope(),
        SwiGLU(),
    )
}
