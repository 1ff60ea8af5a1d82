"""RMSNorm, with the residual addition that precedes it in a pre-norm Transformer if wanted."""

from __future__ import annotations

from typing import Protocol, overload

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from paracore.errors import UsageError
from paracore.ops.implementations import Implementation, Operation, dtype_name


class RMSNormKernels(Protocol):
    """What a module of kernels offers. x, residual, dy, dh, h: [rows, D], last dim contiguous."""

    def rms_norm_forward(
        self, x: Tensor, weight: Tensor, residual: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, h = x + residual (x itself without one), and rstd [rows] in float32 or better."""

    def rms_norm_backward(
        self, dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return dx, which is the residual's gradient too, and dweight."""


def _triton_limits(x: Tensor) -> str | None:
    from paracore.kernels.rms_norm import MAX_HIDDEN_SIZE  # not above: triton need not be installed

    if x.size(-1) <= MAX_HIDDEN_SIZE:
        return None
    return f"the last dim of x is {x.size(-1)}, must be at most {MAX_HIDDEN_SIZE}"


OPERATION: Operation[RMSNormKernels] = Operation(
    "rms_norm",
    {
        "triton": Implementation(
            "paracore.kernels.rms_norm", (torch.float32, torch.bfloat16, torch.float16), _triton_limits
        ),
        "native": Implementation("paracore._C", (torch.float32, torch.bfloat16)),
        "reference": Implementation("paracore.reference"),
    },
)


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., *, residual: None = ..., impl: str | None = ...
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., *, residual: Tensor, impl: str | None = ...
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """weight * h / sqrt(mean(h^2) + eps) over the last dim (Zhang & Sennrich 2019, equation 4).

    x: [..., D] float; weight: [D] in float32 or x's dtype. Without `residual`, h is x and the result is
    y [..., D] in x's dtype. With `residual`, of x's shape and dtype, h = x + residual in x's dtype and
    the result is (y, h): h is the residual of the next layer. Statistics and the weight's gradient are
    taken in float32 (float64 for float64). Backward keeps h, weight and one number per row. Autocast
    changes nothing, as with `torch.nn.functional.rms_norm`.

    Rows may be strided; tensors whose last dim is not contiguous, or whose rows do not lie at one
    stride, are copied. impl: "triton", "native", "reference" or None; see `paracore.ops.implementations`.
    Raises UsageError for other shapes, dtypes or devices, or when the implementation refuses.
    """
    _check_arguments(x, weight, residual)
    y, h, _ = _forward(x, weight, residual, eps, impl)
    return y if residual is None else (y, h)


def _check_arguments(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if x.dim() == 0 or x.size(-1) == 0 or not x.is_floating_point():
        raise UsageError(
            f"x is {dtype_name(x.dtype)} {list(x.shape)}, must be a float tensor [..., D] with D >= 1"
        )
    if list(weight.shape) != [x.size(-1)]:
        raise UsageError(f"weight has shape {list(weight.shape)}, must be [{x.size(-1)}], the last dim of x")
    if weight.dtype not in (torch.float32, x.dtype):
        raise UsageError(
            f"weight is {dtype_name(weight.dtype)}, must be float32 or x's dtype {dtype_name(x.dtype)}"
        )
    if weight.device != x.device:
        raise UsageError(f"weight is on {weight.device}, must be on x's device {x.device}")
    if residual is None:
        return
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise UsageError(
            f"residual is {dtype_name(residual.dtype)} {list(residual.shape)} on {residual.device}, must be "
            f"as x: {dtype_name(x.dtype)} {list(x.shape)} on {x.device}"
        )


def _rows(x: Tensor) -> Tensor:
    """View [..., D] as [rows, D] with the last dim contiguous; copy only what cannot be viewed so."""
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Give a new tensor [rows, D] the shape of `like`; not as a view, for those may not be written to."""
    return rows.resize_(like.shape)


@torch.library.custom_op("paracore::rms_norm", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, impl: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, h, rstd [rows]. Without a residual h is empty: a functional op may not return its input."""
    kernels = OPERATION.choose(impl, x)
    rows = None if residual is None else _rows(residual)
    y, h, rstd = kernels.rms_norm_forward(_rows(x), weight.contiguous(), rows, eps)
    return _shaped(y, x), x.new_empty(0) if residual is None else _shaped(h, x), rstd


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, impl: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape)
    h = x.new_empty(0 if residual is None else x.shape)
    return y, h, x.new_empty(x.numel() // x.size(-1), dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op("paracore::rms_norm_backward", mutates_args=())
def _backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor, impl: str | None
) -> tuple[Tensor, Tensor]:
    kernels = OPERATION.choose(impl, h)
    arriving = None if dh is None else _rows(dh)
    dx, dweight = kernels.rms_norm_backward(_rows(dy), arriving, _rows(h), weight.contiguous(), rstd)
    return dx.view(h.shape), dweight


@_backward.register_fake
def _(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor, impl: str | None
) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), weight.new_empty(weight.shape)


class _Context(FunctionCtx):
    """What backward finds: h, weight and rstd saved, and these."""

    saved_tensors: tuple[Tensor, ...]
    has_residual: bool
    impl: str | None


def _setup_context(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor | None, float, str | None],
    output: tuple[Tensor, Tensor, Tensor],
) -> None:
    x, weight, residual, _, ctx.impl = inputs
    _, h, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(h if ctx.has_residual else x, weight, rstd)
    ctx.mark_non_differentiable(rstd)


def _differentiate(
    ctx: _Context, dy: Tensor, dh: Tensor, _: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
    h, weight, rstd = ctx.saved_tensors
    dx, dweight = _backward(dy, dh if ctx.has_residual else None, h, weight, rstd, ctx.impl)
    return dx, dweight, dx if ctx.has_residual else None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
