"""Attention in steps: a running state goes in and comes out, some keys at a time, in any number of steps.

This is what ring attention is made of. What is updated in place carries no autograd, so these functions
refuse tensors that require gradients: call them within an `autograd.Function`, or without gradients.

    state = start_state(q, v_dim, sink)
    for k, v, terms in steps:  # terms: PackedTerms, the mask for these keys
        continue_(state, q, k, v, terms)
    out, lse = finish(state, q)

    delta = row_delta(out, dout)
    for k, v, terms in steps:
        backward_(dout, q, k, v, lse, delta, dq, dk, dv, terms)  # adds to dq, dk and dv

On the same implementation the result has the same bits as that of one step, if the keys are cut at
multiples of its key tile. The mathematics is in `paracore.reference_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paracore import trace
from paracore.errors import UsageError
from paracore.ops.attention import OPERATION
from paracore.ops.attention_terms import PackedTerms, empty_in_order_of, last_dim_contiguous, require_qkv
from paracore.ops.implementations import dtype_name
from paracore.reference import accumulation_dtype
from paracore.reference_attention import LOG2_E


class AttentionState(NamedTuple):
    """What is known of each query row from the keys so far, in float32 (float64 for float64)."""

    row_max: Tensor  # [B, Hq, Sq], of log2(e) * logit; -inf where nothing was seen
    row_sum: Tensor  # [B, Hq, Sq], of exponentials relative to row_max
    acc: Tensor  # [B, Hq, Sq, Dv], of exponentials times values, not divided yet


def start_state(q: Tensor, v_dim: int, sink: Tensor | None = None) -> AttentionState:
    """Return the state before any key. q: [B, Hq, Sq, D]; sink: [Hq], the logit of a key of value 0."""
    dtype = accumulation_dtype(q.dtype)
    acc = q.new_zeros([*q.shape[:3], v_dim], dtype=dtype)
    if sink is None:
        row_max = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        return AttentionState(row_max, torch.zeros_like(row_max), acc)
    row_max = (sink.to(dtype) * LOG2_E).view(1, -1, 1).expand(q.shape[:3]).contiguous()
    return AttentionState(row_max, torch.ones_like(row_max), acc)


def continue_(
    state: AttentionState, q: Tensor, k: Tensor, v: Tensor, terms: PackedTerms, impl: str | None = None
) -> None:
    """Let q see the keys k with values v, where terms.first and terms.end show them; updates `state`."""
    require_qkv(q, k, v)
    _require_state(state, q, v)
    _refuse_gradients(q, k, v, *state)
    _continue(q, k, v, *state, *terms, impl)


def finish(state: AttentionState, q: Tensor, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Return out [B, Hq, Sq, Dv] in q's dtype and order of dims, and lse [B, Hq, Sq]."""
    _refuse_gradients(*state)
    out, lse = _finish(*state, q, impl)
    return out, lse


def row_delta(out: Tensor, dout: Tensor, impl: str | None = None) -> Tensor:
    """Return sum(out * dout) over the last dim, [B, Hq, Sq]; subtract the gradient of lse, if it has one."""
    if out.shape != dout.shape or out.dtype != dout.dtype:
        raise UsageError(
            f"dout is {dtype_name(dout.dtype)} {list(dout.shape)}, must be as out: "
            f"{dtype_name(out.dtype)} {list(out.shape)}"
        )
    _refuse_gradients(out, dout)
    delta: Tensor = _delta(out, dout, impl)
    return delta


def backward_(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    terms: PackedTerms,
    impl: str | None = None,
) -> None:
    """Add to dq, dk and dv what the keys k contribute. lse, delta: [B, Hq, Sq], of all keys.

    dq, dk, dv: shaped as q, k, v, all in float32 (float64 for float64).
    """
    require_qkv(q, k, v)
    wide = accumulation_dtype(q.dtype)
    for name, buffer, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if buffer.shape != like.shape or buffer.dtype != wide or buffer.stride(-1) != 1:
            raise UsageError(
                f"{name} is {dtype_name(buffer.dtype)} {list(buffer.shape)}, must be {dtype_name(wide)} "
                f"{list(like.shape)} with its last dim contiguous"
            )
    _refuse_gradients(dout, q, k, v, lse, delta, dq, dk, dv)
    _backward(dout, q, k, v, lse, delta, dq, dk, dv, *terms, impl)


def _require_state(state: AttentionState, q: Tensor, v: Tensor) -> None:
    wide, rows = accumulation_dtype(q.dtype), [*q.shape[:3]]
    shapes = (rows, rows, [*rows, v.size(-1)])
    for name, tensor, shape in zip(state._fields, state, shapes, strict=True):
        if list(tensor.shape) != shape or tensor.dtype != wide or not tensor.is_contiguous():
            raise UsageError(
                f"{name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, must be contiguous "
                f"{dtype_name(wide)} {shape}"
            )


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UsageError(
            "a tensor requires a gradient, but nothing here is recorded: use `attention`, or call this "
            "within an autograd.Function or torch.no_grad()"
        )


@torch.library.custom_op("paracore::attention_continue_", mutates_args=("row_max", "row_sum", "acc"))
@trace.operation("paracore.attention.continue")
def _continue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    acc: Tensor,
    first: Tensor,
    end: Tensor,
    alibi_slopes: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    floats: list[float],
    integers: list[int],
    impl: str | None,
) -> None:
    kernels = OPERATION.choose(impl, q, v)
    q, k, v = last_dim_contiguous(q), last_dim_contiguous(k), last_dim_contiguous(v)
    terms = PackedTerms(first, end, alibi_slopes, query_positions, key_positions, floats, integers)
    kernels.attention_continue(q, k, v, row_max, row_sum, acc, **terms.unpack())


@torch.library.custom_op("paracore::attention_finish", mutates_args=())
@trace.operation("paracore.attention.finish")
def _finish(
    row_max: Tensor, row_sum: Tensor, acc: Tensor, q: Tensor, impl: str | None
) -> tuple[Tensor, Tensor]:
    out = empty_in_order_of(q, acc.size(-1))
    return out, OPERATION.choose(impl, q, acc).attention_finish(row_max, row_sum, acc, out)


@_finish.register_fake
def _(row_max: Tensor, row_sum: Tensor, acc: Tensor, q: Tensor, impl: str | None) -> tuple[Tensor, Tensor]:
    return empty_in_order_of(q, acc.size(-1)), torch.empty_like(row_max)


@torch.library.custom_op("paracore::attention_delta", mutates_args=())
@trace.operation("paracore.attention.delta")
def _delta(out: Tensor, dout: Tensor, impl: str | None) -> Tensor:
    kernels = OPERATION.choose(impl, out, out)
    return kernels.attention_delta(last_dim_contiguous(out), last_dim_contiguous(dout))


@_delta.register_fake
def _(out: Tensor, dout: Tensor, impl: str | None) -> Tensor:
    return out.new_empty(out.shape[:3], dtype=accumulation_dtype(out.dtype))


@torch.library.custom_op("paracore::attention_backward_", mutates_args=("dq", "dk", "dv"))
@trace.operation("paracore.attention.backward")
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    first: Tensor,
    end: Tensor,
    alibi_slopes: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    floats: list[float],
    integers: list[int],
    impl: str | None,
) -> None:
    kernels = OPERATION.choose(impl, q, v)
    dout = last_dim_contiguous(dout)
    q, k, v = last_dim_contiguous(q), last_dim_contiguous(k), last_dim_contiguous(v)
    terms = PackedTerms(first, end, alibi_slopes, query_positions, key_positions, floats, integers)
    kernels.attention_backward(dout, q, k, v, lse, delta, dq, dk, dv, True, **terms.unpack())
