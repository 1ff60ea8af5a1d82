"""Attention over a sequence that is dealt out to the ranks of a cp axis, forward and backward.

| strategy | what moves | beside inputs and outputs in memory |
|---|---|---|
| ring | keys, round the ring, as far as they are needed | two blocks of keys; backward three of gradients |
| all_gather | keys, to each rank that needs them, by heads | one head of the whole sequence; its gradients |
| ulysses | q, k, v and out, from sequence to heads and back | whole sequences of a part of the heads |

Each may be combined with ulysses over a second axis, `heads_axis`: rank r of `axis` and rank u of
`heads_axis`, of size U, hold the positions of rank r * U + u of the layout.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from paracore import trace
from paracore.errors import UsageError
from paracore.ops.attention import OPERATION, attention, check_sink, sink_gradient
from paracore.ops.attention_state import row_delta
from paracore.ops.attention_terms import PackedTerms, last_dim_contiguous, pack_terms, require_qkv
from paracore.ops.autocast import autocast
from paracore.ops.gathered import gathered_backward_, gathered_forward
from paracore.ops.ring import ring_backward_, ring_forward
from paracore.ops.route import Route
from paracore.ops.ulysses import Members, Order, to_heads, to_sequence
from paracore.parallel.agreement import disagreement
from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.positions import Positions
from paracore.parallel.ring_plan import RingPlan, plan_ring
from paracore.reference import accumulation_dtype

_FORWARD = {"ring": ring_forward, "all_gather": gathered_forward}
_BACKWARD = {"ring": ring_backward_, "all_gather": gathered_backward_}
STRATEGIES = (*_FORWARD, "ulysses")


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
    """What a call is about, besides its tensors: for this rank's part of sequence and heads."""

    mask: Mask
    route: Route
    strategy: str
    options: Options

    @property
    def impl(self) -> str | None:
        return self.options.get("impl")

    def terms(self, q: Tensor, alibi_slopes: Tensor | None, keys: Positions) -> PackedTerms:
        """Return the terms of the logits of q and of keys at these positions."""
        options: Options = {**self.options, "alibi_slopes": alibi_slopes}
        return _terms(q, self.mask, self.route.own_positions, keys, options)


def _terms(q: Tensor, mask: Mask, queries: Positions, keys: Positions, options: Options) -> PackedTerms:
    return pack_terms(
        q,
        len(keys),
        mask,
        queries,
        keys,
        scale=options.get("scale"),
        softcap=options.get("softcap", 0.0),
        alibi_slopes=options.get("alibi_slopes"),
        dropout_p=options.get("dropout_p", 0.0),
        seed=options.get("seed"),
        first_batch=options.get("first_batch", 0),
        first_head=options.get("first_head", 0),
    )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    @trace.ranged("paracore.ring_attention.forward")
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        alibi_slopes: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        terms_of = functools.partial(call.terms, q, alibi_slopes)
        out, lse = _FORWARD[call.strategy](q, k, v, sink, terms_of, call.route, call.impl)
        ctx.save_for_backward(q, k, v, sink, alibi_slopes, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    @trace.ranged("paracore.ring_attention.backward")
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, alibi_slopes, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        dout = torch.zeros_like(out) if dout is None else last_dim_contiguous(dout)
        delta = row_delta(out, dout, call.impl)
        if dlse is not None:
            delta -= dlse
        dq = q.new_zeros(q.shape, dtype=accumulation_dtype(q.dtype))
        terms_of = functools.partial(call.terms, q, alibi_slopes)
        dk, dv = _BACKWARD[call.strategy](dout, q, k, v, lse, delta, dq, terms_of, call.route, call.impl)
        dsink = None if sink is None else sink_gradient(sink, lse, delta)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    layout: Layout,
    axis: MeshAxis | ProcessGroup,
    *,
    strategy: str = ...,
    heads_axis: MeshAxis | ProcessGroup | None = ...,
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
    axis: MeshAxis | ProcessGroup,
    *,
    strategy: str = ...,
    heads_axis: MeshAxis | ProcessGroup | None = ...,
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
    axis: MeshAxis | ProcessGroup,
    *,
    strategy: str = "ring",
    heads_axis: MeshAxis | ProcessGroup | None = None,
    check: bool = True,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """`paracore.attention` over a sequence that `layout` deals out to the ranks of `axis`, or process group.

    q: [B, Hq, S_local, D]; k: [B, Hkv, S_local, D]; v: [B, Hkv, S_local, Dv]: what this rank holds, as
    `layout.shard` cuts it. mask: over global positions, the same on every rank; it is evaluated on the CPU,
    once per layout as long as its tensors do not change. Returns out [B, Hq, S_local, Dv], and with
    `return_lse` also lse [B, Hq, S_local]. Options are those of `attention`; positions are the layout's.
    The gradients of q, k and v are whole; that of `sink` is this rank's part, to be summed over the ranks
    as any parameter's is.

    strategy: see the table above. heads_axis: a second axis, for ulysses beside the strategy over `axis`.
    check: compare shapes, dtypes, options, layout and mask over the ranks first, at the price of an
    all-gather of 8 bytes, for which a GPU is waited for; without it, ranks that disagree wait for each other
    until the timeout. All ranks must go backward if one does, also those that hold nothing.
    Raises UsageError on every rank, before any other communication, for what `attention` refuses, for
    tensors that do not fit the layout, and for heads that ulysses cannot divide.
    """
    q, k, v = autocast(q, k, v)
    heads = None if heads_axis is None else _axis("heads", heads_axis)
    ranks = _Ranks(layout, _axis("cp", axis), heads, strategy)
    if check:
        _require_agreement(q, k, v, mask, ranks, options)
    else:
        _require(q, k, v, mask, ranks, options)
    out, lse = _attend(q, k, v, mask, ranks, options)
    return (out, lse) if return_lse else out


def _axis(name: str, ranks: MeshAxis | ProcessGroup) -> MeshAxis:
    return ranks if isinstance(ranks, MeshAxis) else MeshAxis.around(ranks, name)


@dataclass(frozen=True)
class _Ranks:
    """How the ranks divide sequence and heads among them."""

    layout: Layout
    axis: MeshAxis
    heads_axis: MeshAxis | None
    strategy: str

    @property
    def size(self) -> int:
        return self.axis.size * (1 if self.heads_axis is None else self.heads_axis.size)

    @property
    def positions(self) -> Positions:
        """What this rank holds."""
        if self.heads_axis is None:
            return self.layout.ranks[self.axis.rank]
        return self.layout.ranks[self.axis.rank * self.heads_axis.size + self.heads_axis.rank]

    @property
    def members(self) -> Members | None:
        """Those among whom the heads are divided, if they are."""
        if self.strategy == "ulysses":
            return Members(self.axis, self.layout.ranks)
        if self.heads_axis is None:
            return None
        first = self.axis.rank * self.heads_axis.size
        return Members(self.heads_axis, self.layout.ranks[first : first + self.heads_axis.size])

    @property
    def merged(self) -> Layout:
        """The layout over `axis` once heads are divided over `heads_axis`."""
        return self.layout if self.heads_axis is None else _merge(self.layout, self.heads_axis.size)


@functools.lru_cache(maxsize=16)
def _merge(layout: Layout, size: int) -> Layout:
    """Let each `size` neighbouring ranks hold together what each of them holds."""
    groups = (layout.ranks[first : first + size] for first in range(0, layout.size, size))
    return Layout(tuple(Order.of(group).positions for group in groups))


# ---------------------------------------------------------------- before anything moves


def _require_agreement(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ranks: _Ranks, options: Options) -> None:
    """Raise on every rank what any rank refuses, or what ranks mean differently."""
    facts: dict[str, object] = {}
    error = None
    try:
        _require(q, k, v, mask, ranks, options)
        facts = _facts(q, k, v, mask, ranks, options)
    except UsageError as refusal:
        error = str(refusal)
    # Over both axes in any case: a rank that ended after the first would leave others waiting at the second.
    for axis in (ranks.axis, ranks.heads_axis):
        if axis is not None:
            error = disagreement("ring_attention", facts, error, axis, q.device) or error
    if error is not None:
        raise UsageError(error)


def _facts(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ranks: _Ranks, options: Options) -> dict[str, object]:
    """What must be the same on every rank."""
    given = {name: "a tensor" if isinstance(x, Tensor) else x for name, x in options.items()}
    plan = _plan(mask, ranks.layout)
    shapes = {name: [*x.shape[:2], "S", x.size(3)] for name, x in (("q", q), ("k", k), ("v", v))}
    return {
        **shapes,
        "dtype": q.dtype,
        "device": q.device.type,
        "strategy": ranks.strategy,
        "options": sorted((name, x) for name, x in given.items() if x is not None),
        "layout": (ranks.layout.lengths, plan.layout_digest),
        "mask": plan.mask_digest,
        "gradients": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    }


def _require(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ranks: _Ranks, options: Options) -> None:
    """Raise UsageError for what this rank can tell by itself."""
    if ranks.strategy not in STRATEGIES:
        raise UsageError(f"strategy={ranks.strategy!r}: must be one of {', '.join(STRATEGIES)}")
    unknown = set(options) - Options.__optional_keys__
    if unknown:
        raise UsageError(f"unknown options {sorted(unknown)}: must be of {sorted(Options.__optional_keys__)}")
    if ranks.strategy == "ulysses" and ranks.heads_axis is not None:
        raise UsageError('strategy="ulysses" divides the heads over `axis`, so heads_axis must be None')
    if ranks.layout.size != ranks.size:
        raise UsageError(f"the layout is for {ranks.layout.size} ranks, but there are {ranks.size}")
    require_qkv(q, k, v)
    held = len(ranks.positions)
    for name, x in (("q", q), ("k", k)):
        if x.size(2) != held:
            raise UsageError(
                f"{name} is {list(x.shape)}, must have the {held} positions of its rank in dim 2"
            )
    check_sink(options.get("sink"), q)
    _terms(q, mask, ranks.positions, Positions.contiguous(ranks.layout.length), options)
    OPERATION.choose(options.get("impl"), q, v)
    if ranks.members is not None:
        ranks.members.require_divisible(query=q.size(1), key=k.size(1))


@functools.lru_cache(maxsize=16)
def _kept_plan(mask: Mask, versions: tuple[int, ...], layout: Layout) -> RingPlan:
    return plan_ring(mask, layout)


def _plan(mask: Mask, layout: Layout) -> RingPlan:
    """Return the plan, kept from an earlier call unless somebody has written to the mask's tensors."""
    versions = mask.versions()
    return plan_ring(mask, layout) if versions is None else _kept_plan(mask, versions, layout)


# ---------------------------------------------------------------- the division of heads


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, ranks: _Ranks, options: Options
) -> tuple[Tensor, Tensor]:
    members = ranks.members
    if members is None:
        return _attend_route(q, k, v, mask, ranks.layout, ranks, options)
    heads = members.heads(q.size(1))
    q, k, v = (to_heads(x, members) for x in (q, k, v))
    options = _of_heads(options, heads)
    if ranks.strategy == "ulysses":
        out, lse = attention(q, k, v, mask, return_lse=True, **options)
    else:
        out, lse = _attend_route(q, k, v, mask, ranks.merged, ranks, options)
    return to_sequence(out, members), to_sequence(lse.unsqueeze(-1), members).squeeze(-1)


def _attend_route(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, layout: Layout, ranks: _Ranks, options: Options
) -> tuple[Tensor, Tensor]:
    route = Route(_plan(mask, layout), layout, ranks.axis)
    call = _Call(mask, route, ranks.strategy, options)
    out, lse = _RingAttention.apply(q, k, v, options.get("sink"), options.get("alibi_slopes"), call)
    return out, lse


def _of_heads(options: Options, heads: slice) -> Options:
    """Return the options for some of the heads."""
    chosen: Options = {**options, "first_head": options.get("first_head", 0) + heads.start}
    sink, slopes = options.get("sink"), options.get("alibi_slopes")
    if sink is not None:
        chosen["sink"] = sink[heads]
    if slopes is not None:
        chosen["alibi_slopes"] = slopes[..., heads]
    return chosen
