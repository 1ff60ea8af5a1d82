"""Where parameters lie in flat memory, and which rank owns which part of it.

Parameters are laid out in reverse order of use, so that gradients fill one bucket after the other in
backward. A bucket's shards are whole grid cells of `PIECE` elements, as many for every rank; what the
parameters leave of it is padding, which no piece covers. Where a parameter lies does not depend on the
number of ranks, nor do the pieces, into which the grid cuts the parameters: sums over pieces have the same
bits however many ranks take part.

    bucket   | slot: lm_head.weight     | slot: norm.weight |pad| slot: ...        |  padding  |
    grid     |        |        |        |        |        |        |        |        |        |
    shards   |          rank 0          |          rank 1          |          rank 2          |
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paracore.reference_adamw import PIECE

ALIGNMENT = 64
"""Every parameter begins at a multiple of this many elements: whole cache lines and vectors."""


@dataclass(frozen=True)
class Entry:
    """A parameter to be laid out.

    index: which of all parameters it is. numel: its elements here. room: those that it is given, the same
    on every rank of tp, whose shards of a parameter may be uneven. key: parameters share a bucket only
    with those of the same key.
    """

    index: int
    numel: int
    room: int
    key: Hashable


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket: `numel` elements from `begin`."""

    index: int
    begin: int
    numel: int

    @property
    def end(self) -> int:
        """Behind the last element."""
        return self.begin + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """Parameters behind one another, and equal shards of the whole."""

    slots: tuple[Slot, ...]
    used: int
    ranks: int

    @property
    def shard_length(self) -> int:
        """Elements of each rank's shard, padding included."""
        return -(-self.used // (self.ranks * PIECE)) * PIECE

    @property
    def length(self) -> int:
        """Elements of all shards."""
        return self.ranks * self.shard_length

    def shard(self, rank: int) -> slice:
        """Return what `rank` owns of the bucket."""
        return slice(rank * self.shard_length, (rank + 1) * self.shard_length)

    def pieces(self, owned: slice) -> list[tuple[int, int, int]]:
        """Return (begin, end, parameter's index) of each piece in `owned`, counted from its beginning."""
        return [
            (begin - owned.start, end - owned.start, slot.index)
            for slot in self.slots
            for begin, end in cut_pieces(max(slot.begin, owned.start), min(slot.end, owned.stop))
        ]


def cut_pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """Cut a range at the lines of the grid, which are `PIECE` apart."""
    if begin >= end:
        return []
    inner = range((begin // PIECE + 1) * PIECE, end, PIECE)
    return list(itertools.pairwise([begin, *inner, end]))


def plan_buckets(entries: Sequence[Entry], ranks: int, bucket_elements: int) -> list[BucketLayout]:
    """Lay out `entries` in their order, a bucket for about `bucket_elements` elements of one key each.

    A parameter is not divided among buckets: a larger one has a bucket of its own.
    """
    open_buckets: dict[Hashable, list[Entry]] = {}
    closed: list[list[Entry]] = []
    for entry in entries:
        bucket = open_buckets.setdefault(entry.key, [])
        if bucket and sum(e.room for e in bucket) + entry.room > bucket_elements:
            closed.append(open_buckets.pop(entry.key))
            bucket = open_buckets.setdefault(entry.key, [])
        bucket.append(entry)
    return [_lay_out(bucket, ranks) for bucket in (*closed, *open_buckets.values())]


def _lay_out(entries: list[Entry], ranks: int) -> BucketLayout:
    begins = [0, *itertools.accumulate(-(-entry.room // ALIGNMENT) * ALIGNMENT for entry in entries)]
    slots = (Slot(e.index, begin, e.numel) for e, begin in zip(entries, begins, strict=False))
    return BucketLayout(tuple(slots), begins[-1], ranks)


def pieces_tensor(pieces: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return pieces as kernels take them, int64 [n, 3]."""
    return torch.tensor(pieces, dtype=torch.int64, device=device).reshape(-1, 3)
