"""How much of the communication hid behind compute: the one number that people look for in a trace.

exposed: time in which a rank is blocked in waiting for a collective, and none of its threads computes. On a
    device, time in which what communicates runs and nothing computes.
hidden: time in which a collective is in flight while the rank computes.
share hidden: hidden / (hidden + exposed).

In flight is a collective from its post until it arrives, as far as the trace shows that: by the backend's own
record (gloo's, in torch.profiler's traces), else until the wait for it ends. Neither exposed nor hidden is
time in which the rank does something else, such as to sleep, while a message travels.

Collectives are paired over all that is recorded, times are cut to the measured steps, and a collective counts
in the step that waits for it. Recording ends somewhere: what is posted in the last step and waited for in the
next is in flight until its record ends, or to the end; what was posted before recording, from its beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from paracore.profiling.events import Collective, RankTrace, Span, collective_of, parents
from paracore.profiling.intervals import Interval, difference, intersection, length, union
from paracore.profiling.transfers import Transfer, find_transfers, posts_around
from paracore.profiling.window import Window
from paracore.trace import category


@dataclass(frozen=True)
class Communication:
    """Time of some transfers, in ns, how many were waited for, and their bytes.

    unpaired: those of which the trace lacks the post, whose bytes are not known, or the wait, which do not
        count.
    """

    count: int = 0
    bytes: int = 0
    exposed: int = 0
    hidden: int = 0
    unpaired: int = 0

    @property
    def share_hidden(self) -> float | None:
        """hidden / (hidden + exposed), or None where there was nothing of either."""
        total = self.hidden + self.exposed
        return self.hidden / total if total else None


def added(parts: Iterable[Communication]) -> Communication:
    """Return the sum of what several ranks or steps communicated."""
    parts = list(parts)
    return Communication(*(sum(getattr(part, each.name) for part in parts) for each in fields(Communication)))


@dataclass(frozen=True)
class Overlap:
    """What a rank computed, when, and what it communicated meanwhile: in all, and by collective."""

    compute: list[Interval]
    waits: list[Interval]
    total: Communication
    collectives: Mapping[Collective, Communication] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)


def overlap_of(trace: RankTrace, window: Window) -> Overlap:
    """Return the overlap of a rank within `window`."""
    compute = intersection(compute_of(trace), window.time)
    by_collective: dict[Collective, list[Transfer]] = defaultdict(list)
    for transfer in find_transfers(trace):
        moments = union(transfer.in_flight, transfer.waits or ())
        if window.holds(transfer.at) or intersection(moments, window.time):
            by_collective[transfer.collective].append(transfer)
    found = {which: _measure(some, compute, window) for which, some in sorted(by_collective.items())}
    everything = [transfer for some in by_collective.values() for transfer in some]
    waits = intersection(union(*(transfer.waits or () for transfer in everything)), window.time)
    return Overlap(compute, waits, _measure(everything, compute, window), found, everything)


def _measure(transfers: Iterable[Transfer], compute: list[Interval], window: Window) -> Communication:
    """Return what transfers took together: moments count once, however many are in flight."""
    transfers = list(transfers)
    own = [transfer for transfer in transfers if window.holds(transfer.at)]
    counted = [transfer for transfer in own if transfer.missing != "wait"]
    in_flight = union(*(transfer.in_flight for transfer in transfers))
    # Of those that nobody is seen to wait for, all the flight might be waited for.
    waits = union(*(t.in_flight if t.waits is None else t.waits for t in transfers))
    return Communication(
        count=len(counted),
        bytes=sum(transfer.bytes for transfer in counted),
        exposed=length(difference(intersection(waits, window.time), compute)),
        hidden=length(intersection(in_flight, compute)),
        unpaired=sum(transfer.missing is not None for transfer in own),
    )


# ---------------------------------------------------------------- compute


def compute_of(trace: RankTrace) -> list[Interval]:
    """Return when the rank computes: on its device if the trace shows one, else on its host.

    On the host these are the innermost ranges of operations, and torch's operations on the same threads, but
    for the time in which that thread waits. A backend's threads copy, too, but that is communication.
    """
    if trace.device:
        posts = posts_around(trace)
        return union(
            span.interval
            for number, span in enumerate(trace.device)
            if not span.communicates and number not in posts
        )
    around = set(parents(trace.ranges)) - {None}
    computing: dict[str, list[Interval]] = {span.lane: [] for span in trace.ranges}
    for number, span in enumerate(trace.ranges):
        if number not in around and category(span.name) in ("compute", "optimizer"):
            computing[span.lane].append(span.interval)
    for span in trace.operations:
        if span.lane in computing:
            computing[span.lane].append(span.interval)
    waits = waits_of(trace.ranges)
    return union(*(difference(union(found), waits.get(lane, [])) for lane, found in computing.items()))


def waits_of(ranges: Iterable[Span]) -> dict[str, list[Interval]]:
    """Return when each thread, by its lane, waits for communication."""
    found: dict[str, list[Interval]] = defaultdict(list)
    for span in ranges:
        if (collective_of(span.name) or ("", ""))[1] == "wait":
            found[span.lane].append(span.interval)
    return {lane: union(intervals) for lane, intervals in found.items()}
