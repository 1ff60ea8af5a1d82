"""What all ranks must know of each other's gradients before a step: their norm, and which there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paracore.ops.adamw import sum_of_squares
from paracore.optim.section import Section
from paracore.parallel.collectives import gather_list
from paracore.parallel.mesh import ShardingAxes


class Statistics:
    """Sums over the gradients of all ranks, with the same bits on every rank, however many there are.

    counted: for each parameter, 1 if it counts in the norm and 0 if another tp rank's does.
    counts: how many pieces each rank of the data axis has, this one if it owns everything. order: where the
    pieces of all ranks, one rank behind the other, belong in the order in which they are added.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        counted: Tensor,
        axes: ShardingAxes,
        counts: Sequence[int],
        order: Tensor | None,
        impl: str | None,
    ) -> None:
        self._sections, self._axes = sections, axes
        self._weights = [counted[section.pieces[:, 2]] for section in sections]
        self._counts, self._order, self._impl = counts, order, impl

    def gather(self, present: Tensor, *, norm: bool) -> tuple[Tensor, Tensor]:
        """Return the sum of squares of the gradient, float64 [], and which parameters have one on any rank.

        present: float64 [parameters], 1 where this rank has one. Without `norm` the sum is 0. One all-gather
        over the data axis and one over tp.
        """
        data, tp = self._axes.data, self._axes.tp
        squares = self._squares() if norm else present.new_zeros(0)
        counts = self._counts if norm else [0] * len(self._counts)
        if len(counts) == 1:  # every rank owns everything
            everyone = squares
            flags = gather_list(present, data, [present.numel()] * data.size, 0)
        else:
            held = torch.cat([present, squares])
            gathered = gather_list(held, data, [present.numel() + count for count in counts], 0)
            flags = [x[: present.numel()] for x in gathered]
            everyone = torch.cat([x[present.numel() :] for x in gathered])
        if norm and self._order is not None:
            everyone = everyone[self._order]
        held = torch.cat([tree_sum(everyone).reshape(1), torch.stack(flags).amax(0)])
        of_tp = torch.stack(gather_list(held, tp, [held.numel()] * tp.size, 0))
        return tree_sum(of_tp[:, 0]), of_tp[:, 1:].amax(0)

    def _squares(self) -> Tensor:
        """Return the sum of squares of each of this rank's pieces, 0 where another tp rank counts it."""
        sums = [
            torch.where(weight > 0, sum_of_squares(section.gradient, section.pieces, self._impl), 0.0)
            for section, weight in zip(self._sections, self._weights, strict=True)
        ]
        return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)


def tree_sum(x: Tensor) -> Tensor:
    """Return the sum of x [n], added pairwise in an order that depends on n alone, on any device."""
    length = x.numel()
    if length == 0:
        return x.new_zeros(())
    while length > 1:
        half = (length + 1) // 2
        x = torch.cat([x[: length - half] + x[half:length], x[length - half : half]])
        length = half
    return x[0]
