"""What a rank knows of the way that keys take; the strategies of ring attention share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from paracore.ops.attention_terms import PackedTerms
from paracore.parallel.layout import Layout
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.positions import Positions
from paracore.parallel.ring_plan import Intervals, RingPlan, Step, count, select

TermsOf = Callable[[Positions], PackedTerms]
"""The terms of the logits of this rank's queries for keys at these positions."""


@dataclass(frozen=True)
class Route:
    """One rank's part in moving keys: round the ring, or from each rank to each that needs them."""

    plan: RingPlan
    layout: Layout
    axis: MeshAxis

    @property
    def steps(self) -> tuple[Step, ...]:
        """This rank's steps of the ring."""
        return self.plan.steps[self.axis.rank]

    @property
    def next(self) -> int:
        """The rank that keys travel to in the ring."""
        return (self.axis.rank + 1) % self.axis.size

    @property
    def previous(self) -> int:
        """The rank that keys come from in the ring."""
        return (self.axis.rank - 1) % self.axis.size

    @cached_property
    def others(self) -> list[int]:
        """The other ranks of the axis."""
        return [rank for rank in range(self.axis.size) if rank != self.axis.rank]

    def sent(self, rank: int) -> Intervals:
        """Which of this rank's keys `rank` needs: indices into what this rank holds."""
        return self.plan.needed[rank][self.axis.rank]

    def needed(self, rank: int) -> Intervals:
        """Which keys of `rank` this rank needs: indices into what that one holds."""
        return self.plan.needed[self.axis.rank][rank]

    def received(self, rank: int) -> slice:
        """Where the keys of `rank` lie among all that this rank receives, in the order of ranks."""
        begin = sum(count(self.needed(other)) for other in self.others if other < rank)
        return slice(begin, begin + count(self.needed(rank)))

    def given(self, rank: int) -> slice:
        """Where what `rank` received lies among all that this rank sent."""
        begin = sum(count(self.sent(other)) for other in self.others if other < rank)
        return slice(begin, begin + count(self.sent(rank)))

    @cached_property
    def own_positions(self) -> Positions:
        """The positions of the keys that this rank holds."""
        return self.layout.ranks[self.axis.rank]

    @cached_property
    def received_positions(self) -> Positions:
        """The positions of all that is received, in that order."""
        held = [select(self.layout.ranks[rank], self.needed(rank)) for rank in self.others]
        return Positions(tuple(run for positions in held for run in positions.runs))
