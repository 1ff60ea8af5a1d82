"""The feed-forward part of a decoder block."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from paracore.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from paracore.ops.swiglu import swiglu
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.overlap import Overlap


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), the intermediate features cut over the tp axis (Shazeer 2020).

    The activation is elementwise, so it needs no communication between the two cuts: forward costs
    one all-reduce (of y), backward one (of dx). With sequence_parallel x and y hold this rank's S/T tokens:
    forward costs an all-gather (of x) and a reduce-scatter (of y), backward two all-gathers (of x again and
    of dy) and a reduce-scatter (of dx).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        tp: MeshAxis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        overlap: Overlap | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": bias, "sequence_parallel": sequence_parallel, "overlap": overlap}
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, tp, seed=0, **options)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, tp, seed=1, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, tp, seed=2, **options)

    def forward(self, x: Tensor, length: int | None = None) -> Tensor:
        """x: [S, B, H], the same on every rank. Returns [S, B, H], the same on every rank.

        With sequence_parallel both are [S/T, B, H], and length, S, must be given.
        """
        gate, up = column_parallel(x, self.gate_proj, self.up_proj, length=length)  # [S, B, I/T] each
        y: Tensor = self.down_proj(swiglu(gate, up))
        return y
