"""A link of given bandwidth between ranks, emulated: what travels arrives no sooner than it would over one.

It needs no privileges and is the same everywhere. A transfer of n bytes takes n / bandwidth seconds from when
it was started or, if others are under way, from when these have arrived; whoever waits for it sleeps until
then, and leaves the processor to others, as with a network card. The real transfer goes on beside it,
between the processes of one machine: it has to be faster, and what it takes of the processors is taken from
the ranks.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Protocol

from torch import Tensor

from paracore.optim import flat_parameters, gradients
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.shards import ShardGather, ShardSum


class Work(Protocol):
    """What torch.distributed returns of a message under way."""

    def wait(self) -> object:
        """Wait until it has arrived."""


class Link:
    """One rank's link. blocked: seconds spent waiting for it; carried: bytes, both since `reset`."""

    def __init__(
        self,
        bandwidth: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bandwidth = bandwidth  # bytes per second
        self.blocked, self.carried = 0.0, 0
        self.clock, self.sleep = clock, sleep
        self._free_at = -math.inf

    def carry(self, work: Work, transferred: int) -> Transfer:
        """Start to carry so many bytes, which `work` really transfers."""
        self._free_at = max(self.clock(), self._free_at) + transferred / self.bandwidth
        self.carried += transferred
        return Transfer(self, work, self._free_at)

    def reset(self) -> float:
        """Return what was `blocked`, and count from 0 again."""
        blocked, self.blocked, self.carried = self.blocked, 0.0, 0
        return blocked


class Transfer:
    """A message under way, which arrives at a given time."""

    def __init__(self, link: Link, work: Work, arrival: float) -> None:
        self._link, self._work, self._arrival = link, work, arrival

    def wait(self) -> None:
        """Wait until both the real and the emulated transfer are done."""
        link = self._link
        start = link.clock()
        self._work.wait()
        left = self._arrival - link.clock()
        if left > 0:
            link.sleep(left)
        link.blocked += link.clock() - start


@contextlib.contextmanager
def optimizer_over(link: Link) -> Iterator[None]:
    """Let all shards of `paracore.optim.AdamW` in this process, stages 1 and 2, travel over `link`."""

    def summed(buffer: Tensor, received: Tensor | None, axis: MeshAxis) -> ShardSum:
        under_way = ShardSum(buffer, received, axis)
        under_way._work = link.carry(under_way._work, crossing(buffer, axis))
        return under_way

    def gathered(buffer: Tensor, axis: MeshAxis) -> ShardGather:
        under_way = ShardGather(buffer, axis)
        under_way._work = link.carry(under_way._work, crossing(buffer, axis))
        return under_way

    replacements: list[tuple[ModuleType, str, object]] = [
        (gradients, "ShardSum", summed),
        (gradients, "ShardGather", gathered),
        (flat_parameters, "ShardGather", gathered),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    for module, name, value in replacements:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def crossing(buffer: Tensor, axis: MeshAxis) -> int:
    """Return how many bytes of a buffer in shards a rank sends, and receives: all shards but its own."""
    return buffer.nbytes * (axis.size - 1) // axis.size
