"""The definition of every operation in plain torch: the oracle of the tests, and the last resort.

Each is exact in float64: no intermediate is kept in less than the larger of float32 and the input's
dtype. Kernels are judged against these functions in float64.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over `dtype` are taken: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = ...) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """weight * h / sqrt(mean(h^2) + eps) over the last dim (Zhang & Sennrich 2019, equation 4).

    h is x, or x + residual in x's dtype. x, residual: [..., D] in any float dtype; weight: [D].
    Returns [..., D] in x's dtype, and h too when there is a residual.
    """
    y, h, _ = rms_norm_forward(x, weight, residual, eps)
    return y if residual is None else (y, h)


def rms_norm_forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and h as `rms_norm`, and rstd = 1 / sqrt(mean(h^2) + eps) [...], which backward needs."""
    h = x if residual is None else x + residual
    exact = h.to(accumulation_dtype(h.dtype))
    rstd = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (exact * rstd * weight).to(h.dtype), h, rstd.squeeze(-1)


def rms_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dx [..., D], the gradient of x and residual alike, and dweight [D]; `rms_norm` derived by hand.

    dy, dh: what arrives at y and at h, [..., D].
    """
    dtype = accumulation_dtype(h.dtype)
    normalized = h.to(dtype) * rstd.unsqueeze(-1)
    g = dy.to(dtype) * weight
    dx = (g - normalized * (g * normalized).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if dh is not None:
        dx = dx + dh
    dweight = (dy.to(dtype) * normalized).flatten(0, -2).sum(0)
    return dx.to(h.dtype), dweight.to(weight.dtype)


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position times every frequency, in float64.

    In float32 the angle of position 100,000 is already off by 0.004, hence float64.
    positions: [S] integers; inverse_frequencies: [D/2] in radians per position. Returns two [S, D/2].
    """
    angles = positions.double().unsqueeze(-1) * inverse_frequencies.double()
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), dims paired as (i, i + D/2) as Llama and Qwen do.

    x: [..., D]; cos, sin: broadcastable to [..., D/2]. Returns [..., D] in x's dtype.
    """
    dtype = accumulation_dtype(x.dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    hidden: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """softmax(softcap(scale * q k^T) + bias) v, each query head using the key/value head of its group.

    q: [B, Hq, Sq, D]; k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv]; Hkv divides Hq. `scale` defaults to
    1/sqrt(D). softcap(s) is cap * tanh(s / cap), or s where the cap is 0 (Gemma 2). `sink` [Hq] is the
    logit of one more key, whose value is zero. hidden: boolean, bias: float, kept: what dropout
    multiplies the weights with, all broadcastable to [B, Hq, Sq, Sk]; `causal` hides later keys. A query
    that sees nothing gets zero. Returns [B, Hq, Sq, Dv] in q's dtype; differentiable by autograd.
    """
    B, Hq, Sq, D = q.shape
    Hkv, Sk = k.size(1), k.size(2)
    dtype = accumulation_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):  # it would take the products in 16 bits
        # Query heads of one group share a key head: fold them into rows, so that keys are not repeated.
        rows = (q.to(dtype) * (D**-0.5 if scale is None else scale)).reshape(B, Hkv, Hq // Hkv * Sq, D)
        logits = (rows @ k.to(dtype).mT).view(B, Hq, Sq, Sk)
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias
        if causal:
            later = torch.ones(Sq, Sk, dtype=torch.bool, device=q.device).triu(1)
            hidden = later if hidden is None else hidden | later
        if hidden is not None:
            logits = logits.masked_fill(hidden, float("-inf"))
        if sink is not None:
            column = sink.to(dtype).view(1, Hq, 1, 1).expand(B, Hq, Sq, 1)
            logits = torch.cat([logits, column], dim=-1)
        sees_nothing = (logits == float("-inf")).all(-1, keepdim=True)
        weights = logits.masked_fill(sees_nothing, 0.0).softmax(-1).masked_fill(sees_nothing, 0.0)[..., :Sk]
        if kept is not None:
            weights = weights * kept
        weights = weights.reshape(B, Hkv, Hq // Hkv * Sq, Sk)
        return (weights @ v.to(dtype)).view(B, Hq, Sq, v.size(-1)).to(q.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), elementwise, in gate's dtype."""
    dtype = accumulation_dtype(gate.dtype)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(logits)[label] over the labels that are not `ignore_index`, and their number.

    The caller divides: only it knows over which ranks the valid tokens must be counted.
    logits: [..., V]; labels: [...] int64. Returns two scalars, the sum in float32 or better.
    """
    total = F.cross_entropy(
        logits.to(accumulation_dtype(logits.dtype)).flatten(0, -2),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
    )
    return total, (labels != ignore_index).sum()
