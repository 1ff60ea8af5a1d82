"""How much of the communication hid behind compute: the one number that people look for in a trace.

exposed: time in which a rank is blocked in waiting for a collective. On a device, time in which what
    communicates runs and nothing computes.
hidden: time in which a collective is in flight while the rank computes.
share hidden: hidden / (hidden + exposed).

In flight is a collective from its post until it arrives, as far as the trace shows that: by the backend's own
record (gloo's, in torch.profiler's traces), else until the wait for it ends. Neither exposed nor hidden is
time in which the rank does something else, such as to sleep, while a message travels.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from paracore.profiling.events import Collective, RankTrace, Span, collective_of, parents
from paracore.profiling.intervals import Interval, Intervals, difference, intersection, length, union
from paracore.trace import category

# How gloo's records call what paracore posts, where the names differ.
_GLOO = {"reduce_scatter": ("reduce_scatter", "all_reduce"), "exchange": ("send", "recv")}
_OF_GLOO = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "broadcast")
_UNKNOWN_AXIS = "-"


@dataclass
class Transfer:
    """One collective, or what was exchanged together.

    in_flight: when it was under way. waits: when the rank was blocked for it; None on a device, and where the
    trace does not tell, so that all of the flight that nothing computes in counts as exposed.
    """

    collective: Collective
    in_flight: list[Interval]
    waits: list[Interval] | None
    bytes: int = 0


@dataclass(frozen=True)
class Communication:
    """Time of some transfers, in ns, how many they are, and their bytes."""

    count: int = 0
    bytes: int = 0
    exposed: int = 0
    hidden: int = 0

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


def overlap_of(trace: RankTrace, window: Intervals) -> Overlap:
    """Return the overlap of a rank within `window`."""
    transfers = find_transfers(trace)
    waits = intersection(union(*(transfer.waits or () for transfer in transfers)), window)
    compute = intersection(compute_of(trace, waits), window)
    by_collective: dict[Collective, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        if intersection(union(transfer.in_flight, transfer.waits or ()), window):
            by_collective[transfer.collective].append(transfer)
    found = {which: _measure(some, compute, window) for which, some in sorted(by_collective.items())}
    everything = [transfer for some in by_collective.values() for transfer in some]
    return Overlap(compute, waits, _measure(everything, compute, window), found, everything)


def _measure(transfers: Iterable[Transfer], compute: Intervals, window: Intervals) -> Communication:
    """Return what transfers took together: moments count once, however many are in flight."""
    transfers = list(transfers)
    waited = [transfer for transfer in transfers if transfer.waits is not None]
    others = [transfer for transfer in transfers if transfer.waits is None]
    waits = intersection(union(*(transfer.waits or () for transfer in waited)), window)
    in_flight = intersection(union(*(transfer.in_flight for transfer in transfers)), window)
    unwatched = intersection(union(*(transfer.in_flight for transfer in others)), window)
    exposed = union(waits, difference(unwatched, compute))
    return Communication(
        len(transfers),
        sum(transfer.bytes for transfer in transfers),
        length(exposed),
        length(difference(intersection(in_flight, compute), waits)),
    )


# ---------------------------------------------------------------- compute


def compute_of(trace: RankTrace, waits: Intervals) -> list[Interval]:
    """Return when the rank computes: on its device if the trace shows one, else on its host.

    On the host these are the innermost ranges of operations, and torch's operations on the same threads:
    a backend's threads copy, too, but that is communication.
    """
    if trace.device:
        posts = _posts_around(trace)
        return union(
            span.interval
            for number, span in enumerate(trace.device)
            if not span.communicates and number not in posts
        )
    around = set(parents(trace.ranges)) - {None}
    innermost = (
        span.interval
        for number, span in enumerate(trace.ranges)
        if number not in around and category(span.name) in ("compute", "optimizer")
    )
    lanes = {span.lane for span in trace.ranges}
    operations = (span.interval for span in trace.operations if span.lane in lanes)
    return difference(union(innermost, operations), waits)


def _posts_around(trace: RankTrace) -> dict[int, Span]:
    """Return the post in which each span of the device, by its number, was launched, if in any."""
    by_lane: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(trace.ranges, key=lambda span: span.begin):
        if (collective_of(span.name) or ("", ""))[1] == "post":
            by_lane[span.lane].append(span)
    begins = {lane: [span.begin for span in posts] for lane, posts in by_lane.items()}
    found = {}
    for number, span in enumerate(trace.device):
        at, lane = span.launched or (0, "")
        place = bisect.bisect_right(begins.get(lane, []), at) - 1
        if place >= 0 and at < by_lane[lane][place].end:
            found[number] = by_lane[lane][place]
    return found


# ---------------------------------------------------------------- transfers


def find_transfers(trace: RankTrace) -> list[Transfer]:
    """Return all collectives of a trace: those with ranges, and those that only others have recorded."""
    launched, unknown = _device_transfers(trace)
    records = _Records(trace.messages)
    found = []
    for post, wait in _pair(trace.ranges):
        which, _ = collective_of((post or wait).name)  # type: ignore[union-attr, misc]
        bytes_ = (post.bytes or 0) if post is not None else 0
        if post is not None and post in launched:
            found.append(Transfer(which, union(launched[post]), None, bytes_))
        else:
            own = [] if post is None else records.take(which.kind, post, wait)
            found.append(Transfer(which, _flight(post, wait, own), _interval(wait), bytes_))
    return [*found, *unknown, *records.rest()]


def _device_transfers(trace: RankTrace) -> tuple[dict[Span, list[Interval]], list[Transfer]]:
    """Return when the device moved data, by the post that launched it, and what no post launched."""
    posts = _posts_around(trace)
    launched: dict[Span, list[Interval]] = defaultdict(list)
    unknown = []
    for number, span in enumerate(trace.device):
        if number in posts:
            launched[posts[number]].append(span.interval)
        elif span.communicates:
            unknown.append(Transfer(_unknown(span.name), [span.interval], None, span.bytes or 0))
    return launched, unknown


class _Records:
    """The backend's own records of collectives and messages, each to be taken once."""

    def __init__(self, messages: Iterable[Span]) -> None:
        self._by_name: dict[str, list[Span]] = defaultdict(list)
        for record in sorted(messages, key=lambda span: span.begin):
            self._by_name[record.name.partition(":")[2]].append(record)

    def take(self, kind: str, post: Span, wait: Span | None) -> list[Span]:
        """Return the records of what was posted.

        Messages are recorded from within the post. A collective is recorded by a thread of the backend, which
        takes one after the other, in the order of posts.
        """
        named = [record for name in _GLOO.get(kind, (kind,)) for record in self._by_name[name]]
        if kind == "exchange":
            found = [record for record in named if post.begin <= record.begin < post.end]
        else:
            later = sorted((r for r in named if post.begin <= r.begin), key=lambda record: record.begin)
            found = [record for record in later[:1] if wait is None or record.begin < wait.end]
        for record in found:
            self._by_name[record.name.partition(":")[2]].remove(record)
        return found

    def rest(self) -> list[Transfer]:
        """Return what nothing was posted for by paracore, but for what carries no data."""
        return [
            Transfer(_unknown(record.name), [record.interval], None)
            for name in _OF_GLOO
            for record in self._by_name[name]
        ]


def _unknown(name: str) -> Collective:
    return Collective(name.partition("(")[0], _UNKNOWN_AXIS)


def _interval(span: Span | None) -> list[Interval]:
    return [] if span is None or span.begin == span.end else [span.interval]


def _pair(ranges: Iterable[Span]) -> list[tuple[Span | None, Span | None]]:
    """Return each post with the wait for it; either may lie outside of what was recorded.

    The first wait is taken for that of the first post of its kind and axis. Where it is for another one that
    is in flight at the same time, together they are in flight at the same moments.
    """
    posts: dict[Collective, list[Span]] = defaultdict(list)
    pairs: list[tuple[Span | None, Span | None]] = []
    for span in sorted(ranges, key=lambda span: span.begin):
        found = collective_of(span.name)
        if found is None:
            continue
        which, phase = found
        if phase == "post":
            posts[which].append(span)
        else:
            pairs.append((posts[which].pop(0) if posts[which] else None, span))
    pairs += [(post, None) for waiting in posts.values() for post in waiting]
    return sorted(pairs, key=lambda pair: (pair[0] or pair[1]).begin)  # type: ignore[union-attr]


def _flight(post: Span | None, wait: Span | None, records: list[Span]) -> list[Interval]:
    if post is None or (wait is None and not records):
        return _interval(wait)
    if not records:
        return [(post.begin, wait.end)] if wait is not None else []
    begin = min(record.begin for record in records)
    end = max(record.end for record in records)
    if wait is not None:
        end = min(end, wait.end)
    return [(begin, end)] if begin < end else []
