"""Attention over gathered keys: each rank collects the keys that its queries see, one key head at a time.

A gathered key lies at the index that is its position, so every rank walks the same tiles in the same order
as one device would: out and dq have the same bits for every number of ranks. Memory holds the whole
sequence, for one key head at a time; while one head is computed, the keys of the next are on their way.

Rows of buffers are as `paracore.ops.rows` has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paracore import trace
from paracore.ops.attention_state import backward_, continue_, finish, start_state
from paracore.ops.attention_terms import empty_in_order_of
from paracore.ops.route import Route, TermsOf
from paracore.ops.rows import empty_rows, pack_, receive_rows, send_rows, unpack
from paracore.parallel.messages import Exchange
from paracore.parallel.positions import Positions
from paracore.parallel.ring_plan import count
from paracore.reference import accumulation_dtype


def gathered_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    terms_of: TermsOf,
    route: Route,
    impl: str | None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of this rank's queries over the keys of all ranks."""
    out = empty_in_order_of(q, v.size(3))
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    keys, terms = _GatheredKeys(k, v, route), terms_of(Positions.contiguous(route.layout.length))
    for head in range(k.size(1)):
        with trace.range("paracore.ring_attention.forward.head", head):
            heads = _query_heads(q, k, head)
            state = start_state(q[:, heads], v.size(3), None if sink is None else sink[heads])
            continue_(state, q[:, heads], *keys.of(head), terms.of_heads(heads), impl)
            out[:, heads], lse[:, heads] = finish(state, q[:, heads], impl)
    return out, lse


def gathered_backward_(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    terms_of: TermsOf,
    route: Route,
    impl: str | None,
) -> tuple[Tensor, Tensor]:
    """Add to dq, and return dk and dv of this rank's keys in float32 (or float64).

    This rank's own part comes first, then those of the others in the order of ranks.
    """
    keys, sums = _GatheredKeys(k, v, route), _ScatteredSums(k, v, route)
    terms = terms_of(Positions.contiguous(route.layout.length))
    for head in range(k.size(1)):
        with trace.range("paracore.ring_attention.backward.head", head):
            heads = _query_heads(q, k, head)
            rows = (dout[:, heads], q[:, heads], *keys.of(head), lse[:, heads], delta[:, heads], dq[:, heads])
            backward_(*rows, *sums.contribution(), terms.of_heads(heads), impl)
            sums.send(head)
    return sums.come_home()


def _query_heads(q: Tensor, k: Tensor, head: int) -> slice:
    group = q.size(1) // k.size(1)
    return slice(head * group, (head + 1) * group)


class _GatheredKeys:
    """The keys and values of one head of the whole sequence, while those of the next head arrive."""

    def __init__(self, k: Tensor, v: Tensor, route: Route) -> None:
        self._k, self._v, self._route = k, v, route
        one_k, one_v = k[:, :1], v[:, :1]
        # Keys that nobody sees stay zero: a masked weight is 0, but 0 times what memory held may be NaN.
        self._whole = empty_rows(one_k, one_v, route.layout.length, k.dtype).zero_()
        self._leaving = empty_rows(one_k, one_v, k.size(2), k.dtype)
        received = len(route.received_positions)
        self._arriving = empty_rows(one_k, one_v, received, k.dtype)
        self._start(0)

    def of(self, head: int) -> tuple[Tensor, Tensor]:
        """Return k and v, [B, 1, S, D] and [B, 1, S, Dv], and send for the next head's."""
        self._exchange.wait()
        own, received = self._route.own_positions, self._route.received_positions
        self._whole.index_copy_(0, own.tensor(self._k.device), self._leaving)
        self._whole.index_copy_(0, received.tensor(self._k.device), self._arriving)
        if head + 1 < self._k.size(1):
            self._start(head + 1)
        return unpack(self._whole, self._k.size(3))

    def _start(self, head: int) -> None:
        k, v = self._k[:, head : head + 1], self._v[:, head : head + 1]
        pack_(self._leaving, k, v, ((0, k.size(2)),))
        self._exchange = Exchange(self._route.axis)
        for rank in self._route.others:
            send_rows(self._exchange, self._leaving, self._route.sent(rank), rank)
            arriving = self._arriving[self._route.received(rank).start :]
            receive_rows(self._exchange, arriving, self._route.needed(rank), rank)
        self._exchange.start()


class _ScatteredSums:
    """Gradients of the keys of one head of the whole sequence; they go to whom the keys belong."""

    def __init__(self, k: Tensor, v: Tensor, route: Route) -> None:
        self._route, self._key_dim = route, k.size(3)
        dtype, one_k, one_v = accumulation_dtype(k.dtype), k[:, :1], v[:, :1]
        self._home = empty_rows(k, v, k.size(2), dtype)
        self._whole = empty_rows(one_k, one_v, route.layout.length, dtype)
        self._leaving = empty_rows(one_k, one_v, len(route.received_positions), dtype)
        given = sum(count(route.sent(rank)) for rank in route.others)
        self._arriving = empty_rows(one_k, one_v, given, dtype)
        self._sent: tuple[int, Exchange] | None = None

    def contribution(self) -> tuple[Tensor, Tensor]:
        """Return where this rank's part of dk and dv of the present head is to be added."""
        return unpack(self._whole.zero_(), self._key_dim)

    def send(self, head: int) -> None:
        """Send the others their parts of the head that was just computed, and keep one's own."""
        self._arrive()
        route, device = self._route, self._home.device
        self._home[:, :, head] = self._whole.index_select(0, route.own_positions.tensor(device))[:, :, 0]
        torch.index_select(self._whole, 0, route.received_positions.tensor(device), out=self._leaving)
        exchange = Exchange(route.axis)
        for rank in route.others:
            exchange.send(self._leaving[route.received(rank)], rank)
            exchange.receive(self._arriving[route.given(rank)], rank)
        exchange.start()
        self._sent = head, exchange

    def come_home(self) -> tuple[Tensor, Tensor]:
        """Return dk and dv of the keys that this rank holds."""
        self._arrive()
        return unpack(self._home, self._key_dim)

    def _arrive(self) -> None:
        if self._sent is None:
            return
        head, exchange = self._sent
        exchange.wait()
        for rank in self._route.others:
            offset = self._route.given(rank).start
            for begin, end in self._route.sent(rank):
                self._home[begin:end, :, head] += self._arriving[offset : offset + end - begin, :, 0]
                offset += end - begin
