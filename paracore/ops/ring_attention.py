"""Attention over a sequence that is dealt out to the ranks of a cp axis, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from paracore.ops.attention import sink_gradient
from paracore.ops.attention_state import finish, row_delta, start_state
from paracore.ops.attention_terms import PackedTerms, pack_terms, require_qkv
from paracore.ops.ring import Ring, ring_backward_, ring_forward_
from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.positions import Positions
from paracore.parallel.ring_plan import RingPlan, plan_ring
from paracore.reference import accumulation_dtype


class Options(TypedDict, total=False):
    """The options of `paracore.attention` that ring attention has too, with the same defaults."""

    scale: float | None
    softcap: float
    sink: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    seed: int | None
    impl: str | None
    first_batch: int
    first_head: int


@dataclass(frozen=True)
class _Call:
    """What a call of ring attention is about, besides its tensors."""

    mask: Mask
    layout: Layout
    ring: Ring
    options: Options

    @property
    def impl(self) -> str | None:
        return self.options.get("impl")

    def terms(self, q: Tensor, k: Tensor, keys: Positions, alibi_slopes: Tensor | None) -> PackedTerms:
        options = self.options
        return pack_terms(
            q,
            k,
            self.mask,
            self.layout.ranks[self.ring.axis.rank],
            keys,
            scale=options.get("scale"),
            softcap=options.get("softcap", 0.0),
            alibi_slopes=alibi_slopes,
            dropout_p=options.get("dropout_p", 0.0),
            seed=options.get("seed"),
            first_batch=options.get("first_batch", 0),
            first_head=options.get("first_head", 0),
        )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        alibi_slopes: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        state = start_state(q, v.size(3), sink)
        ring_forward_(
            state, q, k, v, lambda keys, at: call.terms(q, keys, at, alibi_slopes), call.ring, call.impl
        )
        out, lse = finish(state, q, call.impl)
        ctx.save_for_backward(q, k, v, sink, alibi_slopes, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, alibi_slopes, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        delta = row_delta(out, dout, call.impl)
        if dlse is not None:
            delta -= dlse
        dq = q.new_zeros(q.shape, dtype=accumulation_dtype(q.dtype))
        dk, dv = ring_backward_(
            dout,
            q,
            k,
            v,
            lse,
            delta,
            dq,
            lambda keys, at: call.terms(q, keys, at, alibi_slopes),
            call.ring,
            call.impl,
        )
        dsink = None if sink is None else sink_gradient(sink, lse, delta)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None


@lru_cache(maxsize=16)
def _kept_plan(mask: Mask, versions: tuple[int, ...], layout: Layout) -> RingPlan:
    """Remember plans; `versions` grow when somebody writes to the mask's tensors."""
    return plan_ring(mask, layout)


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    layout: Layout,
    axis: MeshAxis,
    *,
    strategy: str = ...,
    heads_axis: MeshAxis | None = ...,
    check: bool = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    layout: Layout,
    axis: MeshAxis,
    *,
    strategy: str = ...,
    heads_axis: MeshAxis | None = ...,
    check: bool = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    layout: Layout,
    axis: MeshAxis,
    *,
    strategy: str = "ring",
    heads_axis: MeshAxis | None = None,
    check: bool = True,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """`paracore.attention` over a sequence that `layout` deals out to the ranks of `axis`.

    q: [B, Hq, S_local, D], k: [B, Hkv, S_local, D], v: [B, Hkv, S_local, Dv]: what this rank holds, as
    `layout.shard` cuts it. mask: over global positions, the same on every rank. Returns out
    [B, Hq, S_local, Dv], and lse with `return_lse`. Options are those of `attention`; its positions are the
    layout's. The gradient of `sink` is this rank's part: sum it over `axis`, as any parameter's.
    """
    versions = tuple(tensor._version for tensor in mask.tensors())
    ring = Ring(_kept_plan(mask, versions, layout), axis)
    require_qkv(q, k, v)
    out, lse = _RingAttention.apply(
        q, k, v, options.get("sink"), options.get("alibi_slopes"), _Call(mask, layout, ring, options)
    )
    return (out, lse) if return_lse else out
