"""What takes over norms and MLPs, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paracore.dropin.report import Derived
from paracore.nn.linear import ColumnParallelLinear, column_parallel
from paracore.ops.linear import linear
from paracore.ops.rms_norm import rms_norm
from paracore.ops.swiglu import swiglu
from paracore.reference import accumulation_dtype


class RMSNorm(Derived):
    """The RMSNorm of Llama and its relatives, and torch's; with a residual to add before if there is one."""

    if TYPE_CHECKING:
        weight: nn.Parameter

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """hidden_states: [..., H]. With a residual returns the norm of their sum, and the sum."""
        eps = getattr(self, "variance_epsilon", None) or getattr(self, "eps", None)
        if eps is None:  # torch's, of the dtype that it computes in
            eps = torch.finfo(accumulation_dtype(hidden_states.dtype)).eps
        if residual is None:
            return rms_norm(hidden_states, self.weight, eps)
        return rms_norm(hidden_states, self.weight, eps, residual=residual)


def project(x: Tensor, *layers: nn.Module, tokens: int | None) -> list[Tensor]:
    """Feed one input to several linear layers; over tp it is gathered, and its gradient reduced, once."""
    cut = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
    if len(cut) == len(layers):
        return column_parallel(x, *cut, length=tokens)
    return [layer(x) for layer in layers]


class MLP(Derived):
    """down(silu(gate(x)) * up(x))."""

    if TYPE_CHECKING:
        gate_proj: nn.Module
        up_proj: nn.Module
        down_proj: nn.Module

    def forward(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """x: [..., H]. tokens: N where x is a part of them."""
        gate, up = project(x, self.gate_proj, self.up_proj, tokens=tokens)
        y: Tensor = self.down_proj(swiglu(gate, up))
        return y


class Linear(Derived):
    """x W^T + b, by way of float32 where a CPU has no units for 16-bit numbers."""

    if TYPE_CHECKING:
        weight: nn.Parameter
        bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        return linear(x, self.weight, self.bias)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is torch's RMSNorm over the last dim, with a weight, as torch computes it."""
    return type(module) is nn.RMSNorm and len(module.normalized_shape) == 1 and module.weight is not None
