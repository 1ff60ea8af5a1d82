"""Ring attention: keys travel round the ring, and each rank's running state continues with them.

Forward holds two buffers of keys and values besides the state, whatever the ring's length. Backward holds
two of keys and values and three of their gradients in float32: a sum that arrives, one that leaves, and what
this rank adds. The next transfer is always under way while the present block computes. Which keys travel
where is `paracore.parallel.ring_plan`'s to say; the mathematics is `paracore.reference_attention`'s.

A row of a buffer is a key and its value for all heads, [B, Hkv, D + Dv], so that any run of keys is one
message. Tensors below without another name are in the layout of `attention`, [B, H, S, D].

Sources: Liu et al. 2023, "Ring attention with blockwise transformers"; Brandon et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paracore.ops.attention_state import AttentionState, backward_, continue_
from paracore.ops.attention_terms import PackedTerms
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.messages import Exchange
from paracore.parallel.positions import Positions
from paracore.parallel.ring_plan import Intervals, RingPlan, Step, count
from paracore.reference import accumulation_dtype

TermsOf = Callable[[Tensor, Positions], PackedTerms]
"""The terms of the logits for keys k at these positions."""


@dataclass(frozen=True)
class Ring:
    """One rank's place in the ring."""

    plan: RingPlan
    axis: MeshAxis

    @property
    def steps(self) -> tuple[Step, ...]:
        """This rank's steps."""
        return self.plan.steps[self.axis.rank]

    @property
    def next(self) -> int:
        """The rank that keys travel to."""
        return (self.axis.rank + 1) % self.axis.size

    @property
    def previous(self) -> int:
        """The rank that keys come from."""
        return (self.axis.rank - 1) % self.axis.size


def ring_forward_(
    state: AttentionState, q: Tensor, k: Tensor, v: Tensor, terms_of: TermsOf, ring: Ring, impl: str | None
) -> None:
    """Let q see the keys of all ranks; updates `state`. k and v are what this rank holds."""
    travelling = _TravellingKeys(k, v, ring)
    for index, step in enumerate(ring.steps):
        exchange = Exchange(ring.axis)
        travelling.pass_on(index, exchange)
        exchange.start()
        if step.seen:
            keys, values = travelling.held(index)
            continue_(state, q, keys, values, terms_of(keys, step.positions), impl)
        exchange.wait()


def ring_backward_(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    terms_of: TermsOf,
    ring: Ring,
    impl: str | None,
) -> tuple[Tensor, Tensor]:
    """Add to dq; return dk and dv of this rank's keys, summed over all ranks in float32 (or float64).

    Each rank adds its part to the sum that travels with the keys, when that arrives; sums of keys that no
    later rank needs go home at once. So the order of additions is that of the ring.
    """
    travelling, sums = _TravellingKeys(k, v, ring), _TravellingSums(k, v, ring)
    for index, step in enumerate(ring.steps):
        exchange = Exchange(ring.axis)
        travelling.pass_on(index, exchange)
        sums.pass_on(index, exchange)
        exchange.start()
        keys, values = travelling.held(index)
        dk, dv = sums.contribution(index)
        if step.seen:
            backward_(dout, q, keys, values, lse, delta, dq, dk, dv, terms_of(keys, step.positions), impl)
        exchange.wait()
        sums.add(index)
    exchange = Exchange(ring.axis)
    sums.pass_on(len(ring.steps), exchange)
    exchange.start()
    exchange.wait()
    return sums.come_home()


class _TravellingKeys:
    """Two buffers of keys and values: what is held at a step lies in one, what arrives fills the other."""

    def __init__(self, k: Tensor, v: Tensor, ring: Ring) -> None:
        self._ring, self._own = ring, (k, v)
        first = ring.steps[0].passed_on
        rows = max([count(first), *(len(step.positions) for step in ring.steps[1:])])
        self._buffers = [_empty_rows(k, v, rows, k.dtype) for _ in range(2)]
        _pack_(self._buffers[0], k, v, first)

    def held(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of step `index`."""
        if index == 0:
            return self._own
        rows = self._buffers[index % 2][: len(self._ring.steps[index].positions)]
        return _unpack(rows, self._own[0].size(3))

    def pass_on(self, index: int, exchange: Exchange) -> None:
        """Send on what was held at step `index`, as far as it is needed, and receive the next."""
        leaving, arriving = self._buffers[index % 2], self._buffers[(index + 1) % 2]
        for begin, end in _pieces(self._ring.steps[index], index):
            exchange.send(leaving[begin:end], self._ring.next)
        sender = self._ring.plan.steps[self._ring.previous][index]
        _receive(exchange, arriving, _pieces(sender, index), self._ring.previous)


def _pieces(step: Step, index: int) -> Intervals:
    """Return where what is passed on lies in the buffer: at the first step it was packed there alone."""
    return ((0, count(step.passed_on)),) if index == 0 else step.passed_on


class _TravellingSums:
    """Gradients of keys and values: three buffers for those of others' keys, and the own ones at home."""

    def __init__(self, k: Tensor, v: Tensor, ring: Ring) -> None:
        self._ring, self._key_dim = ring, k.size(3)
        dtype = accumulation_dtype(k.dtype)
        self._home = _empty_rows(k, v, k.size(2), dtype).zero_()
        rows = max([0, *(self._held(i) + self._homecoming(i) for i in range(1, len(ring.steps) + 1))])
        self._leaving, self._arriving, self._mine = (_empty_rows(k, v, rows, dtype) for _ in range(3))

    def contribution(self, index: int) -> tuple[Tensor, Tensor]:
        """Return where this rank's part of the gradients of step `index` is to be added."""
        rows = self._home if index == 0 else self._mine[: self._held(index)].zero_()
        return _unpack(rows, self._key_dim)

    def pass_on(self, index: int, exchange: Exchange) -> None:
        """Send the sums of the step before `index` on, or home, and receive those that travel with its keys.

        Sums that come home arrive behind those.
        """
        if index < 2:  # the sum for a rank's own keys begins elsewhere
            return
        ring, before = self._ring, self._ring.steps[index - 1]
        for begin, end in before.passed_on:
            exchange.send(self._leaving[begin:end], ring.next)
        for begin, end in before.sent_home:
            exchange.send(self._leaving[begin:end], before.owner)
        _receive(exchange, self._arriving, ring.plan.steps[ring.previous][index - 1].passed_on, ring.previous)
        last = self._last_holder(index)
        _receive(
            exchange, self._arriving[self._held(index) :], ring.plan.steps[last][index - 1].sent_home, last
        )

    def add(self, index: int) -> None:
        """Add this rank's part of step `index` to the sum that has arrived, and what came home to the own."""
        if index >= 2:
            self._bring_home(index)
            self._arriving[: self._held(index)] += self._mine[: self._held(index)]
            self._leaving, self._arriving = self._arriving, self._leaving
        elif index == 1:  # nobody was there before: the sum begins here
            self._leaving, self._mine = self._mine, self._leaving

    def come_home(self) -> tuple[Tensor, Tensor]:
        """Return dk and dv, once everything has arrived."""
        self._bring_home(len(self._ring.steps))
        return _unpack(self._home, self._key_dim)

    def _bring_home(self, index: int) -> None:
        if index < 2:
            return
        offset = self._held(index)
        for begin, end in self._ring.plan.home_rows(self._ring.axis.rank, index - 1):
            self._home[begin:end] += self._arriving[offset : offset + end - begin]
            offset += end - begin

    def _held(self, index: int) -> int:
        """Return the number of keys held at a step; none after the last."""
        return len(self._ring.steps[index].positions) if index < len(self._ring.steps) else 0

    def _homecoming(self, index: int) -> int:
        """Return the number of keys whose sums come home together with those of step `index`."""
        return count(self._ring.plan.home_rows(self._ring.axis.rank, index - 1))

    def _last_holder(self, index: int) -> int:
        """Return the rank that held this rank's keys at the step before `index`."""
        return (self._ring.axis.rank + index - 1) % self._ring.axis.size


# ---------------------------------------------------------------- rows of buffers


def _empty_rows(k: Tensor, v: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """[rows, B, Hkv, D + Dv]"""
    return k.new_empty(rows, k.size(0), k.size(1), k.size(3) + v.size(3), dtype=dtype)


def _unpack(rows: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """View rows as k [B, Hkv, rows, D] and v [B, Hkv, rows, Dv]."""
    heads_first = rows.permute(1, 2, 0, 3)
    return heads_first[..., :key_dim], heads_first[..., key_dim:]


def _pack_(buffer: Tensor, k: Tensor, v: Tensor, pieces: Intervals) -> None:
    """Copy the keys and values at these indices into the first rows of `buffer`, one piece behind another."""
    offset = 0
    for begin, end in pieces:
        keys, values = _unpack(buffer[offset : offset + end - begin], k.size(3))
        keys.copy_(k[:, :, begin:end])
        values.copy_(v[:, :, begin:end])
        offset += end - begin


def _receive(exchange: Exchange, buffer: Tensor, pieces: Intervals, sender: int) -> None:
    """Receive what the sender cuts out at `pieces`, one behind another."""
    offset = 0
    for begin, end in pieces:
        exchange.receive(buffer[offset : offset + end - begin], sender)
        offset += end - begin
