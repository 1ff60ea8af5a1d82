"""What messages cost the rank that sends and receives them, seen from outside the code that does.

Every message of the package starts in one of few functions of torch.distributed and ends in `Work.wait`. A
`Watch` puts itself between: it counts for how long this rank is held up in both, and can record the
messages, to send them again with nothing computed in between, or leave them out, to compute alone.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paracore.parallel import collectives

_STARTS: tuple[tuple[ModuleType, str], ...] = (
    (dist, "all_reduce"),
    (dist, "all_to_all_single"),
    (dist, "batch_isend_irecv"),
    (collectives, "all_gather_single"),
    (collectives, "reduce_scatter_single"),
)
"""Where messages start: each returns a work, or a list of them."""

Step = Callable[[], object]


class Clock(Protocol):
    """Marks points in a rank's work, and tells afterwards how far apart they were."""

    def mark(self) -> Any:
        """Return this point."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two points."""


class HostClock:
    """For work that a call has done when it returns."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """Return the time."""
        return self._now()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start


class StreamClock:
    """For work queued on a GPU: `Work.wait` holds up the current stream there, and not the host."""

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Wait for both events; return the seconds between them."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_for(device: torch.device) -> Clock:
    """Return the clock that is right for work on `device`."""
    return StreamClock() if device.type == "cuda" else HostClock()


class Watch:
    """Watches the messages of this process within `watching`, `recording` and `leaving_out`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held_up: list[tuple[Any, Any]] = []
        self._record: list[Step] | None = None

    def take(self) -> float:
        """Return for how many seconds messages have held this rank up since the last call."""
        marks, self._held_up = self._held_up, []
        return sum(self._clock.seconds(*pair) for pair in marks)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count what starting messages, and waiting for them, takes."""
        with _replaced([functools.partial(self._start, getattr(*place)) for place in _STARTS]):
            yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Step]]:
        """Watch, and fill the list with what starts messages or waits for them, to be called in its order.

        The steps use the tensors of the messages, and so keep them alive.
        """
        self._record = []
        try:
            with self.watching():
                yield self._record
        finally:
            self._record = None

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Let messages be done at once, with nothing sent: what arrives is whatever the memory held."""
        with _replaced([_no_messages if name == "batch_isend_irecv" else _no_message for _, name in _STARTS]):
            yield

    def _start(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        works: list[Any] = []
        step = functools.partial(self._started, function, arguments, options, works)
        several = step()
        if self._record is not None:
            self._record.append(step)
        watched = [_Watched(self, works, index) for index in range(len(works))]
        return watched if several else watched[0]

    def _started(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: dict[str, Any],
        works: list[Any],
    ) -> bool:
        """Start messages, and leave the works in `works`; return whether the function gave a list."""
        with self._counted():
            started = function(*arguments, **options)
        several = isinstance(started, list)
        works[:] = started if several else [started]
        return several

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._held_up.append((start, self._clock.mark()))

    def wait_for(self, works: Sequence[Any], index: int) -> None:
        """Wait for one of the works, and count it."""
        with self._counted():
            works[index].wait()
        if self._record is not None:
            self._record.append(functools.partial(self.wait_for, works, index))


class _Watched:
    """A work whose `wait` is counted."""

    def __init__(self, watch: Watch, works: Sequence[Any], index: int) -> None:
        self._watch, self._works, self._index = watch, works, index

    def wait(self) -> None:
        """Wait until the message has arrived."""
        self._watch.wait_for(self._works, self._index)


class _Nothing:
    """The work of a message that is not sent."""

    def wait(self) -> None:
        """Return at once."""


def _no_message(*_: Any, **__: Any) -> _Nothing:
    return _Nothing()


def _no_messages(*_: Any, **__: Any) -> list[_Nothing]:
    return []


@contextlib.contextmanager
def _replaced(functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Put these in the places of `_STARTS`."""
    before = [getattr(*place) for place in _STARTS]
    try:
        for place, function in zip(_STARTS, functions, strict=True):
            setattr(*place, function)
        yield
    finally:
        for place, function in zip(_STARTS, before, strict=True):
            setattr(*place, function)
