"""Timers: wall clock for work on the CPU, CUDA events for work on a GPU.

Both time the work and never its launch, and what a call allocates it also frees within the sample:
memory that must be fetched anew for every call is part of what the call costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

# Idle threads of OpenMP look out for work for some milliseconds before they sleep.
REST = 0.02  # seconds

T = TypeVar("T")


class Timer(Protocol):
    """Times a batch of calls."""

    @property
    def shortest_sample(self) -> float:
        """Seconds below which a sample drowns in the resolution of the clock."""

    def sample(
        self, call: Callable[[T], object], batch: Sequence[T], prepare: Callable[[T], object] | None = None
    ) -> tuple[float, bool]:
        """Call `call` with each of `batch`; return the seconds taken and whether the host held it up.

        prepare: called with each of `batch` before that, not timed.
        """


class WallTimer:
    """`time.perf_counter` around the calls: right where a call returns only when its work is done."""

    shortest_sample = 1e-3  # the clock and the loop cost below 1 microsecond

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def sample(
        self, call: Callable[[T], object], batch: Sequence[T], prepare: Callable[[T], object] | None = None
    ) -> tuple[float, bool]:
        """See `Timer.sample`. The host does the work, so it never holds it up."""
        _prepare(batch, prepare)
        start = self._clock()
        for inputs in batch:
            call(inputs)
        return self._clock() - start, False


class CudaTimer:
    """CUDA events around the calls, all of which are queued before the device may start on the first.

    The device is kept busy (`torch.cuda._sleep`) while the host queues the sample; so the events
    enclose kernels back to back, with no gap in which the device waits for a launch. Whether that held
    is checked: a sample whose start event had passed before the host was done is taken again behind a
    longer sleep. Calls that synchronise by themselves can never be queued ahead; their samples are
    returned as held up by the host.
    """

    shortest_sample = 2e-4  # events resolve 0.5 microseconds; longer samples fill the launch queue
    _FIRST_SLEEP_CYCLES = 2**20  # about half a millisecond
    _LONGEST_SLEEP_CYCLES = 2**27  # about 70 milliseconds

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sleep_cycles = self._FIRST_SLEEP_CYCLES

    def sample(
        self, call: Callable[[T], object], batch: Sequence[T], prepare: Callable[[T], object] | None = None
    ) -> tuple[float, bool]:
        """See `Timer.sample`."""
        with torch.cuda.device(self._device):
            taken, host_bound = self._sample_once(call, batch, prepare)
            while host_bound and self._sleep_cycles < self._LONGEST_SLEEP_CYCLES:
                self._sleep_cycles *= 2
                taken, host_bound = self._sample_once(call, batch, prepare)
            if host_bound:  # no sleep is long enough for this call: do not make the others pay for it
                self._sleep_cycles = self._FIRST_SLEEP_CYCLES
            return taken, host_bound

    def _sample_once(
        self, call: Callable[[T], object], batch: Sequence[T], prepare: Callable[[T], object] | None
    ) -> tuple[float, bool]:
        _prepare(batch, prepare)  # again for a sample that is taken again: calls use up what it makes
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(self._sleep_cycles)
        start.record()
        for inputs in batch:
            call(inputs)
        end.record()
        host_bound = start.query()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host_bound


def _prepare(batch: Sequence[T], prepare: Callable[[T], object] | None) -> None:
    if prepare is not None:
        for inputs in batch:
            prepare(inputs)


def timer_for(device: torch.device) -> Timer:
    """Return the timer that is right for work on `device`."""
    return CudaTimer(device) if device.type == "cuda" else WallTimer()
