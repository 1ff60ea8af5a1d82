"""Who sends which keys to whom, and when: decided from mask and layout before anything moves.

Keys travel round the ring: at step s, rank r holds keys of rank r - s, its own at step 0. A rank passes on
only what the next or a later rank on the path needs, so what travels shrinks on its way, and steps without
work move nothing. Gradients of keys travel with them, as sums over the ranks so far: what is passed on goes
to the next rank, and what nobody needs any more goes home at once.

Every rank computes the plans of all ranks from the same mask and layout, so both sides of a message know of
it, and of its size, without asking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask
from paracore.parallel.positions import Positions

Array = npt.NDArray[np.int64]
Intervals = tuple[tuple[int, int], ...]  # of indices: half-open, increasing, with gaps between them


@dataclass(frozen=True)
class Step:
    """What a rank holds of one owner's keys at one step, and what becomes of it; indices count held keys."""

    owner: int
    positions: Positions  # of the keys held, in the order in which they lie in the buffer
    seen: bool  # whether this rank's queries see any of them
    passed_on: Intervals  # what travels on to the next rank
    sent_home: Intervals  # what no later rank needs; nothing at step 0, where the keys are at home


@dataclass(frozen=True)
class RingPlan:
    """The steps of all ranks, `steps[rank][step]`."""

    steps: tuple[tuple[Step, ...], ...]
    owned: tuple[tuple[Intervals, ...], ...]  # [owner][step]: which of the owner's keys are held at a step
    needed: tuple[
        tuple[Intervals, ...], ...
    ]  # [rank][owner]: which of the owner's keys the rank's queries see
    layout_digest: str  # ranks whose digests agree have the same plan
    mask_digest: str

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.steps)

    def home_rows(self, owner: int, step: int) -> Intervals:
        """Return which of the owner's keys are held at `step`, from 1 on, and by nobody after it."""
        if step == 0:
            return ()
        held = self.owned[owner][step]
        following = self.owned[owner][step + 1] if step + 1 < self.size else ()
        return _difference(held, following)

    def keys_sent(self, rank: int, strategy: str) -> tuple[int, int]:
        """Return how many keys with their values, and how many gradients of such, `rank` sends.

        Keys travel both in forward and in backward. strategy: "ring" or "all_gather".
        """
        if strategy == "ring":
            steps = self.steps[rank]
            keys = sum(count(step.passed_on) for step in steps)
            return keys, sum(count(step.passed_on) + count(step.sent_home) for step in steps[1:])
        others = [other for other in range(self.size) if other != rank]
        needed = self.needed
        return sum(count(needed[r][rank]) for r in others), sum(count(needed[rank][r]) for r in others)


def plan_ring(mask: Mask, layout: Layout) -> RingPlan:
    """Plan the ring for queries and keys that both lie as `layout` says.

    The mask is evaluated on the CPU: one on a GPU is waited for, so plan once and keep it.
    """
    intervals = [_interval(mask, held) for held in layout.ranks]
    needed = _needed(intervals, layout)
    size = layout.size
    owned = tuple(_carried(owner, needed, layout) for owner in range(size))
    return RingPlan(
        tuple(
            tuple(_step(rank, step, owned[(rank - step) % size], needed, layout) for step in range(size))
            for rank in range(size)
        ),
        owned,
        needed,
        _digest(repr(layout.ranks).encode()),
        _digest(*(border.tobytes() for interval in intervals for border in interval)),
    )


def count(intervals: Intervals) -> int:
    """Return the number of indices in all intervals."""
    return sum(end - begin for begin, end in intervals)


def _interval(mask: Mask, held: Positions) -> tuple[Array, Array]:
    """Return the first and the end of what each query sees, of all batches one behind another."""
    mask.require_covers(held.end)
    first, end = torch.broadcast_tensors(*mask.interval(held.tensor()))
    return first.cpu().numpy().ravel(), end.cpu().numpy().ravel()


def _needed(intervals: Sequence[tuple[Array, Array]], layout: Layout) -> tuple[tuple[Intervals, ...], ...]:
    """[rank][owner]: which of the owner's keys any query of the rank sees."""
    positions = [held.tensor().numpy() for held in layout.ranks]
    return tuple(
        tuple(_union(np.searchsorted(keys, first), np.searchsorted(keys, end)) for keys in positions)
        for first, end in intervals
    )


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def _carried(owner: int, needed: Sequence[Sequence[Intervals]], layout: Layout) -> tuple[Intervals, ...]:
    """For each step, which keys of `owner` are on their way: what the rank there or a later one needs."""
    size = layout.size
    carried: list[Intervals] = []
    later: Intervals = ()
    for step in range(size - 1, 0, -1):
        later = _union_of(later + needed[(owner + step) % size][owner])
        carried.append(later)
    own = layout.lengths[owner]
    return (((0, own),) if own else (), *reversed(carried))


def _step(
    rank: int,
    step: int,
    owned: Sequence[Intervals],
    needed: Sequence[Sequence[Intervals]],
    layout: Layout,
) -> Step:
    owner = (rank - step) % layout.size
    held = owned[step]
    following = owned[step + 1] if step + 1 < layout.size else ()
    passed_on = _relative(following, held)
    return Step(
        owner=owner,
        positions=select(layout.ranks[owner], held),
        seen=bool(needed[rank][owner]),
        passed_on=passed_on,
        sent_home=_relative(_difference(held, following), held) if step > 0 else (),
    )


def _union(begins: Array, ends: Array) -> Intervals:
    """Join the intervals from begins to ends, in any order, overlapping or empty."""
    some = begins < ends
    order = begins[some].argsort(kind="stable")
    begins, reach = begins[some][order], np.maximum.accumulate(ends[some][order])
    if len(begins) == 0:
        return ()
    gap = begins[1:] > reach[:-1]
    first = np.concatenate([begins[:1], begins[1:][gap]])
    last = np.concatenate([reach[:-1][gap], reach[-1:]])
    return tuple(zip(first.tolist(), last.tolist(), strict=True))


def _union_of(intervals: Intervals) -> Intervals:
    pairs = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    return _union(pairs[:, 0], pairs[:, 1])


def _relative(intervals: Intervals, held: Intervals) -> Intervals:
    """Count the indices in `intervals`, all of which are held, within what is held."""
    relative, before = [], 0
    remaining = list(intervals)
    for begin, end in held:
        while remaining and remaining[0][1] <= end:
            low, high = remaining.pop(0)
            relative.append((before + low - begin, before + high - begin))
        before += end - begin
    return _union_of(tuple(relative))


def _difference(intervals: Intervals, without: Intervals) -> Intervals:
    """Return what is in `intervals` but not in `without`, a part of them."""
    left = []
    for begin, end in intervals:
        for low, high in without:
            if begin <= low and high <= end:
                left.append((begin, low))
                begin = high
        left.append((begin, end))
    return tuple((begin, end) for begin, end in left if begin < end)


def select(positions: Positions, intervals: Intervals) -> Positions:
    """Return the positions at these indices."""
    held = positions.tensor()
    return Positions.from_tensor(torch.cat([held[:0], *(held[begin:end] for begin, end in intervals)]))
