"""Collectives and messages of a trace: when each was in flight, and when its rank waited for it."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paracore.profiling.events import Collective, DeviceSpan, RankTrace, Span, collective_of
from paracore.profiling.intervals import Interval, union

# How gloo's records call what paracore posts, where the names differ.
_GLOO = {"reduce_scatter": ("reduce_scatter", "all_reduce"), "exchange": ("send", "recv")}
_OF_GLOO = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "broadcast")
_UNKNOWN_AXIS = "-"

Pair: TypeAlias = tuple[Span | None, Span | None]
"""A post, and the wait for it. Either, not both, may lie outside of what was recorded."""


@dataclass
class Transfer:
    """One collective, or what was exchanged together.

    in_flight: when it was under way. waits: when the rank was blocked for it; None on a device, and where the
    trace does not tell, so that all of the flight that nothing computes in counts as exposed. at: when the
    wait for it began, or the post where there is no wait. missing: which of the two was not recorded.
    """

    collective: Collective
    in_flight: list[Interval]
    waits: list[Interval] | None
    at: int
    bytes: int = 0
    missing: Literal["post", "wait"] | None = None


def find_transfers(trace: RankTrace) -> list[Transfer]:
    """Return all collectives of a trace: those with ranges, and those that only others have recorded."""
    pairs = pair(trace.ranges)
    launched, unknown = _device_transfers(trace)
    recorded = _recorded(trace)
    records = _Records(trace.messages, pairs, recorded)
    found = []
    for post, wait in pairs:
        which, bytes_ = _which(post, wait), (post.bytes or 0) if post is not None else 0
        at = (wait or post).begin  # type: ignore[union-attr]
        missing: Literal["post", "wait"] | None = "post" if post is None else "wait" if wait is None else None
        waits = [] if wait is None or wait.begin == wait.end else [wait.interval]
        if post is not None and post in launched:
            transfer = Transfer(which, union(launched[post]), None, at, bytes_, missing)
        elif trace.device and missing:  # its flight is the device's to tell
            transfer = Transfer(which, waits, waits, at, bytes_, missing)
        else:
            flight = _flight(post, wait, records.take(which, post, wait), recorded)
            transfer = Transfer(which, flight, waits, at, bytes_, missing)
        found.append(transfer)
    return [*found, *unknown, *records.rest()]


def pair(ranges: Iterable[Span]) -> list[Pair]:
    """Return each post with the wait for it, in the order in which they begin.

    The first wait is taken for that of the first post of its kind and axis. Where it is for another one that
    is in flight at the same time, together they are in flight at the same moments all the same.
    """
    posts: dict[Collective, list[Span]] = defaultdict(list)
    pairs: list[Pair] = []
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
    return sorted(pairs, key=lambda each: (each[0] or each[1]).begin)  # type: ignore[union-attr]


def posts_around(trace: RankTrace) -> dict[int, Span]:
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


def _which(post: Span | None, wait: Span | None) -> Collective:
    which, _ = collective_of((post or wait).name)  # type: ignore[union-attr, misc]
    return which


def _recorded(trace: RankTrace) -> Interval:
    spans = [*trace.ranges, *trace.operations, *trace.messages]
    return min((span.begin for span in spans), default=0), max((span.end for span in spans), default=0)


def _flight(
    post: Span | None, wait: Span | None, records: Sequence[Span], recorded: Interval
) -> list[Interval]:
    """Return when something was in flight: as its records say, else from post to wait.

    The record's own end holds, whatever the wait's: that wait may be another one's, see `pair`.
    """
    begin = recorded[0] if post is None else post.begin
    end = recorded[1] if wait is None else wait.end
    if records:
        begin, end = min(record.begin for record in records), max(record.end for record in records)
    return [(begin, end)] if begin < end else []


def _device_transfers(trace: RankTrace) -> tuple[dict[Span, list[Interval]], list[Transfer]]:
    """Return when the device moved data, by the post that launched it, and what no post launched."""
    posts = posts_around(trace)
    launched: dict[Span, list[Interval]] = defaultdict(list)
    unknown = []
    for number, span in enumerate(trace.device):
        if number in posts:
            launched[posts[number]].append(span.interval)
        elif span.communicates:
            unknown.append(
                Transfer(_unknown(span.name), [span.interval], None, launch(span), span.bytes or 0)
            )
    return launched, unknown


def launch(span: DeviceSpan) -> int:
    """Return when something was launched on a device; when it began where the trace does not tell."""
    return span.begin if span.launched is None else span.launched[0]


def _unknown(name: str) -> Collective:
    return Collective(name.partition("(")[0], _UNKNOWN_AXIS)


# ---------------------------------------------------------------- the backend's own records


class _Records:
    """The backend's own records of collectives and messages, each to be taken once."""

    def __init__(self, messages: Sequence[Span], pairs: Sequence[Pair], recorded: Interval) -> None:
        self._by_name: dict[str, list[Span]] = defaultdict(list)
        for record in sorted(messages, key=lambda span: span.begin):
            self._by_name[_name(record)].append(record)
        self._axes = _axes_of_lanes(messages, pairs, recorded)

    def take(self, which: Collective, post: Span | None, wait: Span | None) -> list[Span]:
        """Return the records of what was posted.

        Messages are recorded from within the post. A collective is recorded by a thread of its own group's,
        which takes one after the other, in the order of posts.
        """
        named = [record for name in _GLOO.get(which.kind, (which.kind,)) for record in self._by_name[name]]
        if which.kind == "exchange":
            found = [r for r in named if post is not None and post.begin <= r.begin < post.end]
        else:
            found = sorted(
                (
                    record
                    for record in named
                    if self._axes[record.lane] == which.axis
                    and (post is None or post.begin <= record.begin)
                    and (wait is None or record.begin < wait.end)
                ),
                key=lambda record: record.begin,
            )[:1]
        for record in found:
            self._by_name[_name(record)].remove(record)
        return found

    def rest(self) -> list[Transfer]:
        """Return what nothing was posted for by paracore, but for what carries no data."""
        return [
            Transfer(_unknown(record.name), [record.interval], None, record.begin)
            for name in _OF_GLOO
            for record in self._by_name[name]
        ]


def _name(record: Span) -> str:
    return record.name.partition(":")[2]


def _axes_of_lanes(messages: Iterable[Span], pairs: Iterable[Pair], recorded: Interval) -> dict[str, str]:
    """Return over which axis each of the backend's threads communicates.

    Every group has threads of its own, and what they record lies between post and wait. So a thread's axis is
    the one between whose posts and waits most of its records lie; of several, where they fit most tightly.
    """
    flights: dict[str, list[tuple[str, int, int]]] = defaultdict(list)  # axis, begin and end by gloo's name
    for post, wait in pairs:
        which = _which(post, wait)
        begin = recorded[0] if post is None else post.begin
        end = recorded[1] if wait is None else wait.end
        for name in _GLOO.get(which.kind, (which.kind,)):
            flights[name].append((which.axis, begin, end))
    scores: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for record in messages:
        tightest: dict[str, int] = {}
        for axis, begin, end in flights[_name(record)]:
            if begin <= record.begin and record.end <= end:
                tightest[axis] = min(tightest.get(axis, end - begin), end - begin)
        for axis, length in tightest.items():
            fitting, slack = scores[record.lane].get(axis, (0, 0))
            scores[record.lane][axis] = fitting + 1, slack - length
    best = {lane: max(by_axis, key=lambda axis: by_axis[axis]) for lane, by_axis in scores.items()}
    return defaultdict(lambda: _UNKNOWN_AXIS, best)
