"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from paracore.ops.rms_norm import rms_norm
from paracore.parallel.placement import ParameterPlacement


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dim; see `ops.rms_norm`.

    The weight is replicated over the `tp_size` ranks. partial_gradient: each rank normalises other
    data (its own heads), so the weight's gradients must be summed over tp; see `GradientSync`.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        tp_size: int = 1,
        partial_gradient: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))
        self.placements = {
            "weight": ParameterPlacement.replicate((features,), tp_size, partial_gradient=partial_gradient)
        }

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x: [..., features]. Returns the same shape and dtype.

        With a residual, of x's shape and dtype: returns the norm of h = x + residual, and h.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps, residual=residual)

    def extra_repr(self) -> str:
        """Say what the module's repr shows."""
        return f"{self.weight.numel()}, eps={self.eps}"
