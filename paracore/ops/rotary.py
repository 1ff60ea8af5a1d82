"""Rotary position embedding of queries and keys, in one pass over both."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from paracore import trace
from paracore.errors import UsageError
from paracore.ops.fresh import fresh
from paracore.ops.implementations import Implementation, Operation, dtype_name
from paracore.reference import accumulation_dtype


class RotaryKernels(Protocol):
    """What a module of kernels offers; `paracore.reference_layers` defines it."""

    def rotate_pair(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        q_out: Tensor,
        k_out: Tensor,
        inverse: bool,
    ) -> None:
        """Write q and k, turned by the angles of their positions, to q_out and k_out."""


OPERATION: Operation[RotaryKernels] = Operation(
    "rotary",
    {
        "triton": Implementation("paracore.kernels.rotary", (torch.float32, torch.bfloat16, torch.float16)),
        "native": Implementation("paracore._C", (torch.float32, torch.bfloat16)),
        "reference": Implementation("paracore.reference_layers"),
    },
)


def rotary_embedding(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    may_overwrite: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by the angles of their positions (Su et al. 2021), dims i and i + D/2 as pairs.

    q: [S, B, Hq, D], k: [S, B, Hk, D], of one float dtype, any strides. cos, sin: [P, D/2], the tables of
    positions 0 to P - 1 as `paracore.reference.rotary_tables` makes them, in float32 or better; constants.
    positions: [S] or [S, B] int64, the row of each token; by default token s takes row s. Returns new
    tensors. Backward keeps the tables only. Autocast changes nothing.

    may_overwrite: q and k are given up: what is returned lies in their memory, for fresh memory takes several
    times as long as the mathematics. New tensors are returned all the same where autograd forbids to write to
    theirs (leaves and views that require gradients), where they are not contiguous or share memory, and under
    torch.compile, which decides itself.

    Rows beyond the tables are a RuntimeError, on a GPU an assertion of the device. impl: "triton", "native",
    "reference" or None; see `paracore.ops.implementations`. Raises UsageError for other shapes, dtypes or
    devices, or when the implementation refuses.
    """
    _check_arguments(q, k, cos, sin, positions)
    dtype = accumulation_dtype(q.dtype)
    if positions is None:
        positions = torch.arange(q.size(0), device=q.device)
    else:
        within = ((positions >= 0) & (positions < cos.size(0))).all()
        torch._assert_async(within, f"positions must be from 0 to {cos.size(0) - 1}, the rows of cos and sin")
    positions = (positions if positions.dim() == 2 else positions[:, None]).expand(q.shape[:2])
    cos, sin = (table.to(dtype).contiguous() for table in (cos, sin))
    rotated: tuple[Tensor, Tensor]
    if may_overwrite and not torch.compiler.is_compiling() and _can_be_overwritten(q, k):
        rotated = _RotateInPlace.apply(q, k, cos, sin, positions, impl)
    else:
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        rotated = _rotate(q, k, cos, sin, positions, False, impl)
    return rotated


def _check_arguments(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    if q.dim() != 4 or q.size(3) % 2 or not q.is_floating_point():
        raise UsageError(
            f"q is {dtype_name(q.dtype)} {list(q.shape)}, must be a float tensor [S, B, Hq, D] with an even D"
        )
    S, B, _, D = q.shape
    if k.dim() != 4 or k.dtype != q.dtype or k.device != q.device or (*k.shape[:2], k.size(3)) != (S, B, D):
        raise UsageError(
            f"k is {dtype_name(k.dtype)} {list(k.shape)} on {k.device}, must be {dtype_name(q.dtype)} "
            f"[{S}, {B}, Hk, {D}] on {q.device}, as q"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if (
            table.dim() != 2
            or table.shape != cos.shape
            or table.size(1) != D // 2
            or table.dtype not in (torch.float32, torch.float64)
            or table.device != q.device
        ):
            raise UsageError(
                f"{name} is {dtype_name(table.dtype)} {list(table.shape)} on {table.device}, must be "
                f"float32 or float64 [P, {D // 2}] on {q.device}, cos and sin alike"
            )
        if table.requires_grad and torch.is_grad_enabled():
            raise UsageError(f"{name} requires a gradient, which tables do not get: detach it")
    if positions is None:
        if cos.size(0) < S:
            raise UsageError(f"cos has {cos.size(0)} rows, must have at least S={S} where positions are None")
    elif (
        positions.dtype != torch.int64
        or list(positions.shape) not in ([S], [S, B])
        or positions.device != q.device
    ):
        raise UsageError(
            f"positions is {dtype_name(positions.dtype)} {list(positions.shape)} on {positions.device}, must "
            f"be int64 [{S}] or [{S}, {B}] on {q.device}"
        )


def _can_be_overwritten(q: Tensor, k: Tensor) -> bool:
    shared = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    tracked = torch.is_grad_enabled() and any(x.requires_grad and (x.is_leaf or x._is_view()) for x in (q, k))
    return q.is_contiguous() and k.is_contiguous() and not shared and not tracked


def _range(inverse: bool) -> trace.Context:
    return trace.range("paracore.rotary.backward" if inverse else "paracore.rotary.forward")


@torch.library.custom_op("paracore::rotate_pair", mutates_args=())
def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool, impl: str | None
) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = fresh(q, q.shape), fresh(k, k.shape)
    with _range(inverse):
        OPERATION.choose(impl, q).rotate_pair(q, k, cos, sin, positions, q_out, k_out, inverse)
    return q_out, k_out


@_rotate.register_fake
def _(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool, impl: str | None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


class _Context(FunctionCtx):
    """What backward finds: the tables and positions saved, and these."""

    saved_tensors: tuple[Tensor, ...]
    inverse: bool
    impl: str | None


def _setup_context(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool, str | None],
    output: tuple[Tensor, Tensor],
) -> None:
    _, _, cos, sin, positions, ctx.inverse, ctx.impl = inputs
    ctx.save_for_backward(cos, sin, positions)


def _differentiate(
    ctx: _Context, dq: Tensor, dk: Tensor
) -> tuple[Tensor, Tensor, None, None, None, None, None]:
    cos, sin, positions = ctx.saved_tensors
    return *_rotate(dq, dk, cos, sin, positions, not ctx.inverse, ctx.impl), None, None, None, None, None


_rotate.register_autograd(_differentiate, setup_context=_setup_context)


@torch.library.custom_op("paracore::rotate_pair_", mutates_args=("q", "k"))
def _rotate_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool, impl: str | None
) -> None:
    with _range(inverse):
        OPERATION.choose(impl, q).rotate_pair(q, k, cos, sin, positions, q, k, inverse)


class _RotateInPlace(torch.autograd.Function):
    """An operator that mutates its arguments cannot have a gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, impl: str | None
    ) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(q, k)
        ctx.save_for_backward(cos, sin, positions)
        ctx.inverse, ctx.impl = False, impl
        _rotate_(q, k, cos, sin, positions, False, impl)
        return q, k

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        return _differentiate(ctx, dq, dk)[:-1]
