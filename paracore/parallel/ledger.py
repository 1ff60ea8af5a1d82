"""The ledger: what one rank communicated, by kind and axis.

Every collective of the package is entered here by `paracore.parallel.collectives`, so tests can
assert how often a layer communicates, and `paracore validate` can show it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over one mesh axis.

    `bytes` counts whole tensors, as nccl-tests does: the reduced tensor of an all-reduce, the
    gathered result of an all-gather, the unreduced input of a reduce-scatter. What travels over a
    link follows from it: an all-reduce over n ranks moves 2 (n - 1) / n times as much per rank.
    """

    kind: str
    axis: str
    count: int
    bytes: int


class Ledger:
    """Counts collectives and their bytes since the last `take`."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}

    def enter(self, kind: str, axis: str, num_bytes: int) -> None:
        """Count one collective of `num_bytes` bytes over the mesh axis called `axis`."""
        count, total = self._totals.get((kind, axis), (0, 0))
        self._totals[kind, axis] = (count + 1, total + num_bytes)

    def take(self) -> list[Traffic]:
        """Return the traffic since the last call, sorted by kind and axis, and start anew.

        Called once per step it gives the traffic per step; called between forward and backward it
        tells the two apart.
        """
        rows = [Traffic(*key, *totals) for key, totals in sorted(self._totals.items())]
        self._totals.clear()
        return rows
