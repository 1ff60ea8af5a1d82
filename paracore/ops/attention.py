"""Fused attention: softmax of masked, scaled products, times the values; forward and backward."""

from __future__ import annotations

from typing import Any, Literal, Protocol, Unpack, cast, overload

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from paracore import trace
from paracore.errors import UsageError
from paracore.ops.attention_terms import (
    PackedTerms,
    empty_in_order_of,
    last_dim_contiguous,
    pack_terms,
    require_qkv,
)
from paracore.ops.autocast import autocast
from paracore.ops.implementations import Implementation, Operation
from paracore.parallel.masks import Mask, causal
from paracore.parallel.positions import Positions
from paracore.reference import accumulation_dtype
from paracore.reference_attention import Terms

MAX_HEAD_DIM = 256


class AttentionKernels(Protocol):
    """What a module of kernels offers; `paracore.reference_attention` defines it, shapes and all."""

    def attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, **terms: Unpack[Terms]
    ) -> Tensor:
        """Write the attention of all keys to `out`; return lse."""

    def attention_continue(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
        acc: Tensor,
        **terms: Unpack[Terms],
    ) -> None:
        """Continue the state, in place, with the keys of k."""

    def attention_finish(self, row_max: Tensor, row_sum: Tensor, acc: Tensor, out: Tensor) -> Tensor:
        """Write acc / row_sum to `out`; return lse."""

    def attention_delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """Return sum(out * dout) over the last dim."""

    def attention_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        accumulate: bool,
        **terms: Unpack[Terms],
    ) -> None:
        """Write the gradients to dq, dk, dv, or add them if `accumulate`."""


def _head_dim_limit(q: Tensor, v: Tensor) -> str | None:
    if max(q.size(-1), v.size(-1)) <= MAX_HEAD_DIM:
        return None
    return f"the head dims are {q.size(-1)} and {v.size(-1)}, must be at most {MAX_HEAD_DIM}"


OPERATION: Operation[AttentionKernels] = Operation(
    "attention",
    {
        "triton": Implementation(
            "paracore.kernels.attention", (torch.float32, torch.bfloat16, torch.float16), _head_dim_limit
        ),
        "native": Implementation("paracore._C", (torch.float32, torch.bfloat16), _head_dim_limit),
        "reference": Implementation("paracore.reference_attention"),
    },
)

_CAUSAL = causal()


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = ...,
    *,
    scale: float | None = ...,
    softcap: float = ...,
    sink: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | None = ...,
    return_lse: Literal[False] = ...,
    impl: str | None = ...,
    query_positions: Positions | Tensor | None = ...,
    key_positions: Positions | Tensor | None = ...,
    first_batch: int = ...,
    first_head: int = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = ...,
    *,
    scale: float | None = ...,
    softcap: float = ...,
    sink: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    dropout_p: float = ...,
    seed: int | None = ...,
    return_lse: Literal[True],
    impl: str | None = ...,
    query_positions: Positions | Tensor | None = ...,
    key_positions: Positions | Tensor | None = ...,
    first_batch: int = ...,
    first_head: int = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = _CAUSAL,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    impl: str | None = None,
    query_positions: Positions | Tensor | None = None,
    key_positions: Positions | Tensor | None = None,
    first_batch: int = 0,
    first_head: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softcap(scale * q k^T) - ALiBi) v over the keys that `mask` shows (Dao et al. 2022).

    q: [B, Hq, Sq, D]; k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv]; one float dtype, any strides; Hkv divides
    Hq, and each query head uses the key head of its group. Returns out [B, Hq, Sq, Dv] in q's dtype, its
    dims in memory in the order of q's, and with `return_lse` also the logarithm of the sum of
    exponentials, [B, Hq, Sq] in float32 (float64 for float64). Both are differentiable. A query that sees
    nothing gets out 0 and lse -inf.

    mask: see `paracore.parallel.masks`. query_positions, key_positions: where q and k lie in the sequence,
    as `Positions` or as int tensors [Sq], [Sk]; without, both begin at 0. Those of keys must increase.
    scale: 1/sqrt(D) if None. softcap: s becomes softcap * tanh(s / softcap) if it is not 0 (Gemma 2).
    sink: [Hq], the logit of one more key with value 0, with a gradient (Xiao et al. 2023; gpt-oss).
    alibi_slopes: [Hq] or [B, Hq], subtracts slope * |distance| (Press et al. 2022); constants.
    dropout_p, seed: each weight is kept, and divided by 1 - p, or dropped, by a random number that is a
    function of (seed, batch, head, query position, key position): give each layer and step a seed of its
    own. first_batch, first_head: the global indices of q's first batch and head, so that ranks draw as one
    device would.

    Kernels never hold anything of size Sq x Sk. The reference does, which float64, and float16 on a CPU,
    take. Backward keeps q, k, v, out and lse.
    Under autocast q, k and v are cast to its dtype, as with `scaled_dot_product_attention`.
    impl: "triton", "native", "reference" or None; see `paracore.ops.implementations`.
    Raises UsageError for other shapes, dtypes, devices or values, or when the implementation refuses.
    """
    q, k, v = autocast(q, k, v)
    require_qkv(q, k, v)
    check_sink(sink, q)
    terms = pack_terms(
        q,
        k.size(2),
        mask,
        query_positions,
        key_positions,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        seed=seed,
        first_batch=first_batch,
        first_head=first_head,
    )
    out, lse = forward_once(q, k, v, sink, *terms, impl)
    return (out, lse) if return_lse else out


def check_sink(sink: Tensor | None, q: Tensor) -> None:
    """Raise UsageError unless there is one sink per query head."""
    if sink is None:
        return
    if list(sink.shape) != [q.size(1)] or not sink.is_floating_point() or sink.device != q.device:
        raise UsageError(
            f"sink is {sink.dtype} {list(sink.shape)} on {sink.device}, must be float [{q.size(1)}], one per "
            f"query head, on {q.device}"
        )


@torch.library.custom_op("paracore::attention", mutates_args=())
@trace.operation("paracore.attention.forward")
def forward_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    first: Tensor,
    end: Tensor,
    alibi_slopes: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    floats: list[float],
    integers: list[int],
    impl: str | None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse. What follows sink are the fields of `PackedTerms`."""
    kernels = OPERATION.choose(impl, q, v)
    out = empty_in_order_of(q, v.size(-1))
    wide_sink = None if sink is None else sink.to(accumulation_dtype(q.dtype))
    q, k, v = last_dim_contiguous(q), last_dim_contiguous(k), last_dim_contiguous(v)
    terms = PackedTerms(first, end, alibi_slopes, query_positions, key_positions, floats, integers)
    return out, kernels.attention_forward(q, k, v, wide_sink, out, **terms.unpack())


@forward_once.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_in_order_of(q, v.size(-1)), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("paracore::attention_backward", mutates_args=())
@trace.operation("paracore.attention.backward")
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    end: Tensor,
    alibi_slopes: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    floats: list[float],
    integers: list[int],
    impl: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, and dsink, which is empty without a sink."""
    kernels = OPERATION.choose(impl, q, v)
    dout = last_dim_contiguous(dout)
    delta = kernels.attention_delta(out, dout)
    if dlse is not None:
        delta -= dlse
    dq, dk, dv = (empty_in_order_of(x, x.size(-1)) for x in (q, k, v))
    q, k, v = last_dim_contiguous(q), last_dim_contiguous(k), last_dim_contiguous(v)
    terms = PackedTerms(first, end, alibi_slopes, query_positions, key_positions, floats, integers)
    kernels.attention_backward(dout, q, k, v, lse, delta, dq, dk, dv, False, **terms.unpack())
    return dq, dk, dv, q.new_empty(0) if sink is None else sink_gradient(sink, lse, delta)


@_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_in_order_of(x, x.size(-1)) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sink is None else torch.empty_like(sink)


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return dsink [Hq] in its dtype: a sink is a key of value 0, so its logit's gradient is -delta * weight.

    lse, delta: [B, Hq, Sq].
    """
    weight = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
    return (weight * delta).sum((0, 2)).neg().to(sink.dtype)


class _Context(FunctionCtx):
    """What backward finds: the tensors saved, and these."""

    saved_tensors: tuple[Tensor, ...]
    floats: list[float]
    integers: list[int]
    impl: str | None


def _setup_context(ctx: _Context, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.floats, ctx.integers, ctx.impl = cast(tuple[Any, ...], inputs)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: _Context, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sink, *visible, out, lse = ctx.saved_tensors
    if dout is None:  # lse alone is differentiated
        dout = torch.zeros_like(out)
    dq, dk, dv, dsink = _backward(
        dout, dlse, q, k, v, sink, out, lse, *visible, ctx.floats, ctx.integers, ctx.impl
    )
    return dq, dk, dv, None if sink is None else dsink, *[None] * (len(visible) + 3)


forward_once.register_autograd(_differentiate, setup_context=_setup_context)
