"""What the traces of all ranks say together: time per range, overlap, gaps, imbalance."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paracore.profiling.events import RankTrace, Span, parents
from paracore.profiling.intervals import Interval, Intervals, difference, length, union
from paracore.profiling.overlap import Communication, Overlap, added, overlap_of
from paracore.profiling.window import Window, measured
from paracore.trace import MEASURED

_GAPS = 5  # of each rank


@dataclass(frozen=True)
class RangeTime:
    """Time of all ranges of one name on one rank, in ns.

    own: without the ranges within. device: during which the device was busy with what was launched within.
    """

    count: int = 0
    total: int = 0
    own: int = 0
    device: int = 0


@dataclass(frozen=True)
class Gap:
    """A stretch of `length` ns in which a rank neither computed nor waited nor communicated.

    begin: ns from the beginning of the first step. inside: the innermost range that was open in its middle.
    """

    begin: int
    length: int
    inside: str


@dataclass(frozen=True)
class RankSummary:
    """A rank's time in its measured steps, in ns, and what became of it.

    steps: how many; 0 where the trace shows none, and all is of everything recorded.
    """

    rank: int
    steps: int
    time: int
    compute: int
    ranges: Mapping[str, RangeTime]
    overlap: Overlap
    gaps: list[Gap]


def summarize(trace: RankTrace) -> RankSummary:
    """Return what one rank's trace says of its steps, or of all of it where it shows none."""
    window = measured(trace)
    overlap = overlap_of(trace, window)
    # Only on a device does a transfer keep something busy.
    in_flight = [transfer.in_flight for transfer in overlap.transfers] if trace.device else []
    busy = union(overlap.compute, overlap.waits, *in_flight)
    return RankSummary(
        rank=trace.rank,
        steps=window.steps,
        time=length(window.time),
        compute=length(overlap.compute),
        ranges=_range_times(trace, window),
        overlap=overlap,
        gaps=_gaps(trace, window.time, busy),
    )


def _range_times(trace: RankTrace, window: Window) -> dict[str, RangeTime]:
    within: dict[int, int] = defaultdict(int)  # time of the ranges directly within each
    for number, parent in enumerate(parents(trace.ranges)):
        if parent is not None:
            within[parent] += trace.ranges[number].end - trace.ranges[number].begin
    launched = _Launched(trace)
    found: dict[str, RangeTime] = {}
    for number, span in enumerate(trace.ranges):
        if not window.holds(span.begin) or span.name == MEASURED:
            continue
        before, total = found.get(span.name, RangeTime()), span.end - span.begin
        found[span.name] = RangeTime(
            before.count + 1,
            before.total + total,
            before.own + total - within[number],
            before.device + length(launched.within(span)),
        )
    return found


class _Launched:
    """What ran on the device, by when and on which thread it was launched."""

    def __init__(self, trace: RankTrace) -> None:
        by_lane: dict[str, list[tuple[int, Interval]]] = defaultdict(list)
        for span in trace.device:
            if span.launched is not None:
                by_lane[span.launched[1]].append((span.launched[0], span.interval))
        self._by_lane = {lane: sorted(launched) for lane, launched in by_lane.items()}

    def within(self, span: Span) -> list[Interval]:
        """Return when the device was busy with what was launched within a range."""
        launched = self._by_lane.get(span.lane, [])
        first = bisect.bisect_left(launched, (span.begin, (0, 0)))
        last = bisect.bisect_left(launched, (span.end, (0, 0)))
        return union(interval for _, interval in launched[first:last])


def _gaps(trace: RankTrace, window: Intervals, busy: Intervals) -> list[Gap]:
    """Return the longest gaps, the longest first."""
    longest = sorted(difference(window, busy), key=lambda interval: interval[0] - interval[1])[:_GAPS]
    return [
        Gap(begin - window[0][0], end - begin, _innermost(trace.ranges, (begin + end) // 2))
        for begin, end in longest
    ]


def _innermost(ranges: Iterable[Span], at: int) -> str:
    around = [span for span in ranges if span.begin <= at < span.end]
    return max(around, key=lambda span: (span.begin, -span.end)).name if around else "-"


# ---------------------------------------------------------------- all ranks


@dataclass(frozen=True)
class Spread:
    """A figure over the ranks. imbalance: by how much the largest is above the mean, as a share of it."""

    mean: float
    least: float
    most: float

    @property
    def imbalance(self) -> float:
        """most / mean - 1; 0 where there is nothing."""
        return self.most / self.mean - 1 if self.mean else 0.0


def spread(ranks: Sequence[RankSummary], figure: Callable[[RankSummary], float]) -> Spread:
    """Return a figure over the ranks, per step."""
    values = [figure(rank) / max(1, rank.steps) for rank in ranks]
    return Spread(statistics.fmean(values), min(values), max(values))


def total_communication(ranks: Sequence[RankSummary]) -> Communication:
    """Return the communication of all ranks added up."""
    return added(rank.overlap.total for rank in ranks)


def range_spread(ranks: Sequence[RankSummary], name: str, figure: str) -> Spread:
    """Return one of the figures of `RangeTime` over the ranks, per step; 0 on ranks without that range."""
    return spread(ranks, lambda rank: getattr(rank.ranges.get(name, RangeTime()), figure))


def range_spreads(ranks: Sequence[RankSummary]) -> Iterator[tuple[str, Spread]]:
    """Yield each range's time over the ranks, the longest first."""
    names = sorted({name for rank in ranks for name in rank.ranges})
    found = [(name, range_spread(ranks, name, "total")) for name in names]
    yield from sorted(found, key=lambda pair: -pair[1].mean)


def as_json(ranks: Sequence[RankSummary]) -> dict[str, Any]:
    """Return everything, for `json.dumps`: times in ns, of all measured steps together."""
    return {
        "units": {"times": "ns, of all steps", "bytes": "bytes", "shares and imbalance": "of 1"},
        "hidden": total_communication(ranks).share_hidden,
        "ranks": [_rank_json(rank) for rank in ranks],
        "imbalance": {
            "step": spread(ranks, lambda r: r.time).imbalance,
            "compute": spread(ranks, lambda r: r.compute).imbalance,
            "exposed": spread(ranks, lambda r: r.overlap.total.exposed).imbalance,
            "ranges": {name: found.imbalance for name, found in range_spreads(ranks)},
        },
    }


def _rank_json(rank: RankSummary) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "steps": rank.steps,
        "time": rank.time,
        "compute": rank.compute,
        "communication": _communication_json(rank.overlap.total),
        "collectives": [
            {"kind": which.kind, "axis": which.axis, **_communication_json(found)}
            for which, found in rank.overlap.collectives.items()
        ],
        "ranges": {name: asdict(found) for name, found in rank.ranges.items()},
        "gaps": [asdict(gap) for gap in rank.gaps],
    }


def _communication_json(found: Communication) -> dict[str, Any]:
    return asdict(found) | {"share_hidden": found.share_hidden}
