"""The feed-forward part of a decoder block."""

from __future__ import annotations

from torch import Tensor, nn

from paracore import reference
from paracore.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from paracore.parallel.mesh import MeshAxis


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), the intermediate features cut over the tp axis (Shazeer 2020).

    The activation is elementwise, so it needs no communication between the two cuts: forward costs
    one all-reduce (of y), backward one (of dx).
    """

    def __init__(self, hidden_size: int, intermediate_size: int, tp: MeshAxis, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, tp, bias=bias, seed=0)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, tp, bias=bias, seed=1)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, tp, bias=bias, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, B, H], the same on every rank. Returns [S, B, H], the same on every rank."""
        gate, up = column_parallel(x, self.gate_proj, self.up_proj)  # [S, B, I/T] each
        y: Tensor = self.down_proj(reference.swiglu(gate, up))
        return y
