"""The measuring core: many contenders, timed in turn in one process, on inputs that no cache holds.

Three things make times lie, and each has its place here. The machine drifts (clocks, neighbours):
contenders take turns, in an order shuffled anew every round, so that drift hits all alike. Caches
flatter: `Rotation` deals copies of the inputs, the one longest unused first. One number hides the
spread: every sample is kept, and the median stands between the 20th and the 80th percentile.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from paracore.bench.timers import Timer
from paracore.errors import UsageError

MIN_ROUNDS = 5  # fewer leave nothing between the percentiles
MAX_ROUNDS = 1000  # more do not change the median
WARM_UP_SAMPLES = 3
MIB = 2**20

T = TypeVar("T")


class Rotation(Generic[T]):
    """Deals copies of the same inputs in turn, so that the next one is always the one longest unused."""

    def __init__(self, copies: Sequence[T]) -> None:
        self._cycle, self.copies = itertools.cycle(copies), len(copies)

    def take(self, count: int) -> list[T]:
        """Return the next `count` copies."""
        return list(itertools.islice(self._cycle, count))


def copies_beyond_cache(bytes_per_copy: int, cache_bytes: int, limit_bytes: int) -> int:
    """Return how many copies of the inputs are needed for each to have left the cache before its next turn.

    Together they take more than twice the cache, as caches only approximate "longest unused goes
    first". Raises UsageError when that needs more than `limit_bytes`.
    """
    copies = max(2, 2 * cache_bytes // bytes_per_copy + 1)
    if copies * bytes_per_copy > limit_bytes:
        raise UsageError(
            f"memory limit {limit_bytes / MIB:.1f} MiB: {copies} copies of inputs of "
            f"{bytes_per_copy / MIB:.3f} MiB are needed for a cache of {cache_bytes / MIB:.1f} MiB not to "
            f"hold them; raise the limit or choose a smaller shape"
        )
    return copies


@dataclass(frozen=True)
class Task:
    """One contender: `call` does the work on one copy of the inputs, `inputs` deals the copies.

    Contenders that do the same work share one rotation. rest: seconds to wait before each sample. prepare:
    makes a copy ready for one call, outside the time; then no sample takes a copy twice.
    """

    name: str
    call: Callable[[Any], object]
    inputs: Rotation[Any]
    rest: float = 0.0
    prepare: Callable[[Any], object] | None = None

    @property
    def most_calls(self) -> float:
        """How many calls a sample may have."""
        return math.inf if self.prepare is None else self.inputs.copies


@dataclass
class Samples:
    """Times of one contender, in seconds per call; each is the mean over `calls_per_sample` calls.

    host_bound: in some sample the device may have waited for the host's launches; see `CudaTimer`.
    """

    calls_per_sample: int
    seconds: list[float] = field(default_factory=list)
    host_bound: bool = False

    def percentile(self, q: float) -> float:
        """Return the time that `q` percent of the samples do not exceed, interpolated linearly."""
        return float(np.percentile(self.seconds, q))


def measure(
    tasks: Sequence[Task],
    timer: Timer,
    *,
    seconds: float,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Samples]:
    """Time `tasks` in turn for about `seconds` of `clock`, warm-up not counted, and return their samples.

    A round takes one sample of every task. Rounds go on while another one fits the time, but at
    least MIN_ROUNDS and at most MAX_ROUNDS of them.
    """
    samples = {task.name: Samples(_warm_up(task, timer)) for task in tasks}
    order = random.Random(seed)
    with _garbage_collector_off():
        for task in tasks:  # the last warm-up: each contender right after the others, as in every round
            _sample(task, timer, samples[task.name].calls_per_sample)
        for _ in _rounds(seconds, clock):
            for task in order.sample(tasks, len(tasks)):
                _record(task, timer, samples[task.name])
    return samples


def _rounds(seconds: float, clock: Callable[[], float]) -> Iterator[int]:
    """Count rounds while one more, as long as those before, ends within `seconds`."""
    start, done = clock(), 0
    while done < MIN_ROUNDS or (done < MAX_ROUNDS and (clock() - start) * (done + 1) <= seconds * done):
        yield done
        done += 1


def _warm_up(task: Task, timer: Timer) -> int:
    """Call `task` until it is warm; return how many calls make a sample long enough for the timer."""
    calls = 1
    while True:
        # The shortest of several: one disturbance must not pass a single short call off as a long one.
        taken = min(_sample(task, timer, calls)[0] for _ in range(WARM_UP_SAMPLES))
        if taken >= timer.shortest_sample or calls == task.most_calls:
            return calls
        # An estimate from very few calls may be far off, hence at most tenfold per step.
        calls = math.ceil(calls * min(1.2 * timer.shortest_sample / max(taken, 1e-9), 10.0))
        calls = int(min(calls, task.most_calls))


def _record(task: Task, timer: Timer, samples: Samples) -> None:
    taken, host_bound = _sample(task, timer, samples.calls_per_sample)
    samples.seconds.append(taken / samples.calls_per_sample)
    samples.host_bound |= host_bound


def _sample(task: Task, timer: Timer, calls: int) -> tuple[float, bool]:
    time.sleep(task.rest)
    return timer.sample(task.call, task.inputs.take(calls), task.prepare)


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """Keep Python's cycle collector out of the samples, as `timeit` does."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
