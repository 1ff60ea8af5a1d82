"""How a sequence is dealt out to the ranks of a cp axis: each holds runs of global positions.

Everything that depends on where a token lies follows from the layout: a rank's part of a tensor, the
positions that RoPE and masks use, labels whose token another rank holds, and the way back to one
sequence. Any length goes over any number of ranks, and some may hold nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.parallel.collectives import gather_list
from paracore.parallel.masks import Mask, visible_keys
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.positions import Positions


@dataclass(frozen=True)
class Layout:
    """Which positions each rank holds, in increasing order; together 0, 1, ..., length - 1, each once.

    Raises UsageError if a position is missing, held twice, or out of order.
    """

    ranks: tuple[Positions, ...]

    def __post_init__(self) -> None:
        for rank, positions in enumerate(self.ranks):
            if not positions.increasing:
                raise UsageError(f"rank {rank} holds {positions.runs[:8]}: its positions must increase")
        reached = 0
        for start, length in sorted(run for positions in self.ranks for run in positions.runs if run[1]):
            if start != reached:
                raise UsageError(f"position {min(start, reached)} must be held by exactly one rank")
            reached += length

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # layouts are looked up in every call, and may have thousands of runs
        return hash(self.ranks)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def length(self) -> int:
        """The length of the whole sequence."""
        return sum(self.lengths)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of positions that each rank holds."""
        return [len(positions) for positions in self.ranks]

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return what `rank` holds of `x`, whose size along `dim` is `length`; a copy, differentiable."""
        if x.size(dim) != self.length:
            raise UsageError(
                f"x is {list(x.shape)}, must have the layout's length {self.length} along dim {dim}"
            )
        return x.index_select(dim, self.ranks[rank].tensor(x.device))

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Put the shards of all ranks together again: the inverse of `shard`."""
        return torch.cat(list(shards), dim).index_select(dim, self._order(shards[0].device))

    def unshard(self, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        """All-gather what the ranks of `axis` hold, in order of position, for a use that is the same on all.

        x: this rank's shard along `dim`. Differentiable: backward takes this rank's shard.
        """
        if self.size != axis.size:
            raise UsageError(f"the layout is for {self.size} ranks, but axis {axis.name} has {axis.size}")
        whole: Tensor = _Unshard.apply(x, self, axis, dim)
        return whole

    def next_token_labels(
        self,
        tokens: Tensor,
        axis: MeshAxis,
        dim: int,
        *,
        boundaries: Sequence[int] | Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        """Return the token that follows each of this rank's tokens, though another rank may hold it.

        tokens: int64, this rank's shard along `dim`. The last token of the sequence, and with `boundaries`
        [documents + 1] of each document, has the label `ignore_index`. Ranks exchange only the tokens at
        the beginnings of their runs: one all-gather.
        """
        positions = self.ranks[axis.rank].tensor(tokens.device)
        begins = [
            torch.tensor([start for start, length in held.runs if length], dtype=torch.int64).to(positions)
            for held in self.ranks
        ]
        mine = torch.searchsorted(positions, begins[axis.rank])
        borders = gather_list(tokens.index_select(dim, mine), axis, [len(b) for b in begins], dim)
        known = torch.cat([tokens, *borders], dim)
        where = torch.cat([positions, *begins])
        where, order = where.sort(stable=True)
        found = torch.searchsorted(where, positions + 1).clamp_max(max(len(where) - 1, 0))
        labels = known.index_select(dim, order[found])
        ends = positions + 1 == self.length
        if boundaries is not None:
            ends |= torch.isin(positions + 1, torch.as_tensor(boundaries).to(positions))
        return labels.masked_fill(ends.view(-1, *[1] * (labels.dim() - 1 - dim % labels.dim())), ignore_index)

    def _order(self, device: torch.device) -> Tensor:
        """Where each position is found in the concatenation of all ranks."""
        return torch.cat([positions.tensor(device) for positions in self.ranks]).argsort()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, axis: MeshAxis, dim: int) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, axis.rank, dim
        return layout.join(gather_list(x, axis, layout.lengths, dim), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.layout.shard(grad, ctx.rank, ctx.dim), None, None, None


def document_ids(boundaries: Sequence[int] | Tensor, positions: Tensor) -> Tensor:
    """Return the document, counted from 0, in which each position lies. positions: [S] int64.

    boundaries: [documents + 1], as for `masks.documents`.
    """
    return torch.searchsorted(torch.as_tensor(boundaries).to(positions), positions, right=True) - 1


# ---------------------------------------------------------------- ways to deal


def parse_layout(text: str) -> Callable[[Mask, int, int], Layout]:
    """Return what deals by the name in `text`: called with a mask, a length and a size, it returns a layout.

    text: "contiguous", "zigzag", "striped", "balanced"; the last two with ":BLOCK" where blocks are not to
    have their usual length. Only "balanced" looks at the mask. Raises UsageError for anything else.
    """
    name, colon, number = text.partition(":")
    by_blocks = name in ("striped", "balanced")
    if not by_blocks and text not in ("contiguous", "zigzag"):
        raise UsageError(f"layout {text!r}: must be contiguous, zigzag, striped[:BLOCK] or balanced[:BLOCK]")
    if colon and not (number.isdecimal() and int(number) > 0):
        raise UsageError(f"layout {text!r}: a block is a number of positions, at least 1, as in {name}:16")
    block = {"block": int(number)} if colon else {}
    match name:
        case "contiguous":
            return lambda mask, length, size: contiguous(length, size)
        case "zigzag":
            return lambda mask, length, size: zigzag(length, size)
        case "striped":
            return lambda mask, length, size: striped(length, size, **block)
        case _:
            return lambda mask, length, size: balanced(mask, length, size, **block)


def contiguous(length: int, size: int) -> Layout:
    """One piece per rank, of equal lengths up to one position. Causal attention loads the last rank most."""
    return Layout(tuple(Positions.of([piece]) for piece in _cut(length, size)))


def zigzag(length: int, size: int) -> Layout:
    """2 * size pieces; rank r holds the r-th from either end, so causal attention loads all ranks alike."""
    pieces = _cut(length, 2 * size)
    return Layout(tuple(Positions.of([pieces[r], pieces[-1 - r]]) for r in range(size)))


def striped(length: int, size: int, block: int = 128) -> Layout:
    """Blocks of `block` positions, dealt to the ranks in turn (Brandon et al. 2023: blocks of 1).

    Blocks smaller than a kernel's tile cost more than they gain, and many runs take long to plan.
    """
    blocks = _blocks(length, size, block)
    return Layout(tuple(Positions.of(blocks[rank::size]) for rank in range(size)))


def balanced(mask: Mask, length: int, size: int, block: int = 128) -> Layout:
    """Equal attention work for every rank, within 5 % where blocks of `block` positions allow.

    The work of a query is the number of keys that it sees; it is looked at here, on the CPU. Of the layouts
    that balance it, the one that keeps most neighbours together, so that fewest keys travel: contiguous
    pieces, cut where fewest keys are seen across (packed documents, windows), else `zigzag` (causal
    attention), else blocks dealt one by one. Ranks hold equally many positions, up to a block. Blocks
    smaller than a kernel's tile cost more than they gain.
    """
    blocks = _blocks(length, size, block)
    first, end = _seen(mask, length)
    work = (end - first).clamp_min(0).sum(0)
    for layout in (_cut_at_borders(first, end, size, block), zigzag(length, size)):
        loads = [int(work[held.tensor()].sum()) for held in layout.ranks]
        if 0.95 * sum(loads) <= size * min(loads) and size * max(loads) <= 1.05 * sum(loads):
            return layout
    return _deal(blocks, work, size)


def _cut_at_borders(first: Tensor, end: Tensor, size: int, block: int) -> Layout:
    """One piece per rank, each cut where fewest keys are seen across it, near that of equal lengths.

    first, end: [B, S], the keys that each query sees. No cut moves by more than half a block.
    """
    length = first.size(1)
    positions = torch.arange(length)
    sees = first < end
    # Keys before a cut that queries behind it see, and keys behind it that queries before it see.
    lowest = torch.where(sees, first, positions).amin(0).flip(0).cummin(0).values.flip(0)
    highest = torch.where(sees, end, positions).amax(0).cummax(0).values
    across = torch.zeros(length + 1, dtype=torch.int64)
    across[:-1] += (positions - lowest).clamp_min(0)
    across[1:] += (highest - positions - 1).clamp_min(0)
    cuts = [0]
    for rank in range(1, size):
        equal = length * rank // size
        near = range(max(cuts[-1], equal - block // 2), min(length, equal + block // 2) + 1)
        cuts.append(min(near, key=lambda cut: (int(across[cut]), abs(cut - equal))))
    return Layout(tuple(Positions.of([(a, b - a)]) for a, b in itertools.pairwise([*cuts, length])))


def _deal(blocks: list[tuple[int, int]], work: Tensor, size: int) -> Layout:
    """Deal blocks so that ranks have equal work; they hold equally many, up to one."""
    work_before = torch.cat([work.new_zeros(1), work.cumsum(0)]).tolist()
    by_work = sorted(blocks, key=lambda run: work_before[sum(run)] - work_before[run[0]], reverse=True)
    held: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    load = [0] * size
    for turn in range(0, len(by_work), size):
        # Each rank gets one block per turn, the least loaded the one with most work.
        ranks = sorted(range(size), key=load.__getitem__)
        for rank, run in zip(ranks, by_work[turn : turn + size], strict=False):
            held[rank].append(run)
            load[rank] += work_before[sum(run)] - work_before[run[0]]
    return Layout(tuple(Positions.of(sorted(runs)) for runs in held))


def _seen(mask: Mask, length: int) -> tuple[Tensor, Tensor]:
    """Return the first and the end of the keys that each query sees, [B, S] each; B is 1 or the mask's."""
    positions = Positions.contiguous(length)
    first, end = visible_keys(mask, positions, positions, torch.device("cpu"))
    return first.long(), end.long()


def _blocks(length: int, size: int, block: int) -> list[tuple[int, int]]:
    _require_size(length, size)
    if block < 1:
        raise UsageError(f"block={block}: must be at least 1")
    return [(start, min(block, length - start)) for start in range(0, length, block)]


def _cut(length: int, count: int) -> list[tuple[int, int]]:
    """Cut 0..length into `count` runs (start, length) whose lengths differ by at most one."""
    _require_size(length, count)
    borders = [length * piece // count for piece in range(count + 1)]
    return [(begin, end - begin) for begin, end in itertools.pairwise(borders)]


def _require_size(length: int, size: int) -> None:
    if length < 0 or size < 1:
        raise UsageError(f"length={length}, size={size}: must be at least 0 and at least 1")
