"""What the matrix product of `paracore.kernels.matmul` computes, in plain torch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from paracore.reference import accumulation_dtype

Activation = Literal["none", "relu", "gelu", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return activation(a b^T + bias), [M, N] in `dtype`, a's if it is None.

    a: [M, K], b: [N, K], bias: [N]. All of it is computed in float32 or better, and rounded once, at the end.
    gelu is the approximation by tanh (Hendrycks & Gimpel 2016), silu x sigmoid(x).
    """
    wide = accumulation_dtype(a.dtype)
    y = a.to(wide) @ b.to(wide).T
    if bias is not None:
        y += bias.to(wide)
    if activation == "relu":
        y = F.relu(y)
    elif activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation == "silu":
        y = F.silu(y)
    return y.to(dtype or a.dtype)
