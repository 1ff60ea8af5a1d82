"""Sums of gradients that the replicas of a parameter over tp hold in parts: norms, shared key/value heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from paracore.optim.section import Part, Section
from paracore.parallel.collectives import sum_over
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import ParameterPlacement
from paracore.reference import accumulation_dtype


class PartialGradients:
    """The parts of `sections` whose placements say that replicas over `tp` hold summands of the gradient.

    Creates process groups: every rank of the mesh must construct it, with the same placements.
    """

    def __init__(
        self, sections: Sequence[Section], placements: Sequence[ParameterPlacement], tp: MeshAxis
    ) -> None:
        partial = sorted({p.replicas for p in placements if p.partial_gradient})
        self._axes = {replicas: tp.neighbours(replicas) for replicas in partial}
        self._places: dict[int, list[tuple[Section, Part]]] = defaultdict(list)
        for section in sections:
            for part in section.parts:
                if placements[part.index].partial_gradient:
                    self._places[placements[part.index].replicas].append((section, part))

    def sum_(self) -> None:
        """Replace partial gradients by their sums: one all-reduce for each number of replicas."""
        for replicas, places in sorted(self._places.items()):
            gradients = [section.gradient[part.place] for section, part in places]
            flat = torch.cat([g.to(accumulation_dtype(g.dtype)) for g in gradients])
            total = sum_over(flat, self._axes[replicas])
            pieces = total.split([gradient.numel() for gradient in gradients])
            for gradient, summed in zip(gradients, pieces, strict=True):
                gradient.copy_(summed)
