"""What a trace of one rank says, whichever tool wrote it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from paracore.errors import UsageError
from paracore.profiling.intervals import Interval


@dataclass(frozen=True)
class Span:
    """Something that took from `begin` to `end`, in ns of the trace's clock, on a lane, thread or stream."""

    name: str
    begin: int
    end: int
    lane: str
    bytes: int | None = None

    @property
    def interval(self) -> Interval:
        """From when to when."""
        return self.begin, self.end


@dataclass(frozen=True)
class DeviceSpan(Span):
    """A kernel or copy on a device.

    communicates: whether it moves data between ranks. launched: when, and on which thread (a lane), or None.
    """

    communicates: bool = False
    launched: tuple[int, str] | None = None


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    ranges: those of `paracore.trace`. operations: what else of the host computes, as far as the tool records
    it, such as torch's operators. messages: the backend's own record of collectives and messages. world_size:
    of the run, where the trace has it.
    """

    rank: int
    ranges: list[Span] = field(default_factory=list)
    operations: list[Span] = field(default_factory=list)
    messages: list[Span] = field(default_factory=list)
    device: list[DeviceSpan] = field(default_factory=list)
    world_size: int | None = None


_COLLECTIVE = re.compile(r"paracore\.collectives\.(?P<kind>\w+)\.(?P<axis>.+)\.(?P<phase>post|wait)")


@dataclass(frozen=True, order=True)
class Collective:
    """Which collective, over which axis of the mesh; "-" for what no range of paracore's tells."""

    kind: str
    axis: str


def collective_of(name: str) -> tuple[Collective, str] | None:
    """Return what a range is of, and "post" or "wait"; None for ranges of other things."""
    found = _COLLECTIVE.fullmatch(name)
    return None if found is None else (Collective(found["kind"], found["axis"]), found["phase"])


def parents(spans: Sequence[Span]) -> list[int | None]:
    """Return for each span the number of the innermost one around it on its lane, or None.

    Raises UsageError where two spans of a lane overlap without one lying in the other.
    """
    found: list[int | None] = [None] * len(spans)
    open_spans: dict[str, list[int]] = {}
    for number in sorted(range(len(spans)), key=lambda n: (spans[n].begin, -spans[n].end)):
        span, stack = spans[number], open_spans.setdefault(spans[number].lane, [])
        while stack and spans[stack[-1]].end <= span.begin:
            stack.pop()
        if stack:
            outer = spans[stack[-1]]
            if outer.end < span.end:
                raise UsageError(
                    f"ranges do not nest on {span.lane}: {span.name} from {span.begin} to {span.end} ns and "
                    f"{outer.name} from {outer.begin} to {outer.end} ns"
                )
            found[number] = stack[-1]
        stack.append(number)
    return found


def communicates(name: str) -> bool:
    """Return whether a kernel or copy, by its name, moves data between ranks."""
    lowered = name.lower()
    return lowered.startswith("nccl") or "nccldevkernel" in lowered or "ptop" in lowered


_WAITS = re.compile(r"(.*::)?(wait_for_counter|barrier|wait_signal)_kernel(?!\w)")


def waits(name: str) -> bool:
    """Return whether a kernel, by its name, does nothing but wait for another, or for other ranks.

    These are csrc/cuda/stream_order.cu's, and those of barriers and signals of torch's symmetric memory.
    """
    return _WAITS.match(name.removeprefix("void ")) is not None
