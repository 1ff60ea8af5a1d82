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

from torch import Tensor

from paracore import trace
from paracore.ops.attention import forward_once
from paracore.ops.attention_state import backward_, continue_, finish, start_state
from paracore.ops.route import Route, TermsOf
from paracore.ops.rows import empty_rows, pack_, receive_rows, send_rows, unpack
from paracore.parallel.messages import Exchange
from paracore.parallel.ring_plan import Intervals, Step, count
from paracore.reference import accumulation_dtype


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, terms_of: TermsOf, route: Route, impl: str | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of this rank's queries over the keys of all ranks."""
    # Where one step shows all there is to see, as with documents, no state is kept: the bits are the same.
    in_one_step = sum(step.seen for step in route.steps) == 1
    state = None if in_one_step else start_state(q, v.size(3), sink)
    travelling = _TravellingKeys(k, v, route)
    for index, step in enumerate(route.steps):
        with trace.range("paracore.ring_attention.forward.step", index):
            exchange = Exchange(route.axis)
            travelling.pass_on(index, exchange)
            exchange.start()
            if step.seen and state is None:
                result = forward_once(q, *travelling.held(index), sink, *terms_of(step.positions), impl)
            elif step.seen and state is not None:
                continue_(state, q, *travelling.held(index), terms_of(step.positions), impl)
            exchange.wait()
    return result if state is None else finish(state, q, impl)


def ring_backward_(
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
    """Add to dq; return dk and dv of this rank's keys, summed over all ranks in float32 (or float64).

    Each rank adds its part to the sum that travels with the keys, when that arrives; sums of keys that no
    later rank needs go home at once. So the order of additions is that of the ring.
    """
    travelling, sums = _TravellingKeys(k, v, route), _TravellingSums(k, v, route)
    for index, step in enumerate(route.steps):
        with trace.range("paracore.ring_attention.backward.step", index):
            exchange = Exchange(route.axis)
            travelling.pass_on(index, exchange)
            sums.pass_on(index, exchange)
            exchange.start()
            keys, values = travelling.held(index)
            dk, dv = sums.contribution(index)
            if step.seen:
                backward_(dout, q, keys, values, lse, delta, dq, dk, dv, terms_of(step.positions), impl)
            exchange.wait()
            sums.add(index)
    with trace.range("paracore.ring_attention.backward.homecoming"):
        exchange = Exchange(route.axis)
        sums.pass_on(len(route.steps), exchange)
        exchange.start()
        exchange.wait()
        return sums.come_home()


class _TravellingKeys:
    """Two buffers of keys and values: what is held at a step lies in one, what arrives fills the other."""

    def __init__(self, k: Tensor, v: Tensor, route: Route) -> None:
        self._route, self._own = route, (k, v)
        first = route.steps[0].passed_on
        rows = max([count(first), *(len(step.positions) for step in route.steps[1:])])
        self._buffers = [empty_rows(k, v, rows, k.dtype) for _ in range(2)]
        pack_(self._buffers[0], k, v, first)

    def held(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of step `index`."""
        if index == 0:
            return self._own
        rows = self._buffers[index % 2][: len(self._route.steps[index].positions)]
        return unpack(rows, self._own[0].size(3))

    def pass_on(self, index: int, exchange: Exchange) -> None:
        """Send on what was held at step `index`, as far as it is needed, and receive the next."""
        leaving, arriving = self._buffers[index % 2], self._buffers[(index + 1) % 2]
        send_rows(exchange, leaving, _pieces(self._route.steps[index], index), self._route.next)
        sender = self._route.plan.steps[self._route.previous][index]
        receive_rows(exchange, arriving, _pieces(sender, index), self._route.previous)


def _pieces(step: Step, index: int) -> Intervals:
    """Return where what is passed on lies in the buffer: at the first step it was packed there alone."""
    return ((0, count(step.passed_on)),) if index == 0 else step.passed_on


class _TravellingSums:
    """Gradients of keys and values: three buffers for those of others' keys, and the own ones at home."""

    def __init__(self, k: Tensor, v: Tensor, route: Route) -> None:
        self._route, self._key_dim = route, k.size(3)
        dtype = accumulation_dtype(k.dtype)
        self._home = empty_rows(k, v, k.size(2), dtype).zero_()
        rows = max([0, *(self._held(i) + self._homecoming(i) for i in range(1, len(route.steps) + 1))])
        self._leaving, self._arriving, self._mine = (empty_rows(k, v, rows, dtype) for _ in range(3))

    def contribution(self, index: int) -> tuple[Tensor, Tensor]:
        """Return where this rank's part of the gradients of step `index` is to be added."""
        rows = self._home if index == 0 else self._mine[: self._held(index)].zero_()
        return unpack(rows, self._key_dim)

    def pass_on(self, index: int, exchange: Exchange) -> None:
        """Send the sums of the step before `index` on, or home, and receive those that travel with its keys.

        Sums that come home arrive behind those.
        """
        if index < 2:  # the sum for a rank's own keys begins elsewhere
            return
        route, before = self._route, index - 1
        step, sender = route.steps[before], route.plan.steps[route.previous][before]
        send_rows(exchange, self._leaving, step.passed_on, route.next)
        send_rows(exchange, self._leaving, step.sent_home, step.owner)
        receive_rows(exchange, self._arriving, sender.passed_on, route.previous)
        last = (route.axis.rank + before) % route.axis.size  # who held this rank's keys then
        homecoming = self._arriving[self._held(index) :]
        receive_rows(exchange, homecoming, route.plan.steps[last][before].sent_home, last)

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
        self._bring_home(len(self._route.steps))
        return unpack(self._home, self._key_dim)

    def _bring_home(self, index: int) -> None:
        if index < 2:
            return
        offset = self._held(index)
        for begin, end in self._route.plan.home_rows(self._route.axis.rank, index - 1):
            self._home[begin:end] += self._arriving[offset : offset + end - begin]
            offset += end - begin

    def _held(self, index: int) -> int:
        """Return the number of keys held at a step; none after the last."""
        return len(self._route.steps[index].positions) if index < len(self._route.steps) else 0

    def _homecoming(self, index: int) -> int:
        """Return the number of keys whose sums come home together with those of step `index`."""
        return count(self._route.plan.home_rows(self._route.axis.rank, index - 1))
