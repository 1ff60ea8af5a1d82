"""A picture of one step: threads and streams as lanes, by rank; what computes and what communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paracore.figure import new_figure
from paracore.profiling.events import RankTrace, Span
from paracore.profiling.intervals import Interval, Intervals, difference, intersection, union
from paracore.profiling.overlap import compute_of, waits_of
from paracore.profiling.transfers import find_transfers
from paracore.profiling.window import measured, measured_steps
from paracore.trace import COLORS

_COMPUTE, _COMMUNICATION = (f"#{COLORS[kind] & 0xFFFFFF:06x}" for kind in ("compute", "communication"))

Lane = tuple[str, list[Interval], str]
"""Its name, when something is in it, and the colour of that."""


def draw_timeline(traces: Sequence[RankTrace], path: Path) -> None:
    """Draw the last step of every rank, each from its own beginning on, as a picture at `path`."""
    lanes = [lane for trace in traces for lane in _lanes(trace, _last_step(trace))]
    names = list(dict.fromkeys(name for name, _, _ in lanes))
    figure = new_figure(figsize=(12, 1.2 + 0.32 * max(1, len(names))), dpi=120)
    axes = figure.add_subplot()
    for name, intervals, color in lanes:
        bars = [(begin / 1e6, (end - begin) / 1e6) for begin, end in intervals]
        axes.broken_barh(bars, (names.index(name) - 0.4, 0.8), facecolors=color)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(xlabel="ms from the step's beginning", title="one step", ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="x", alpha=0.3)
    from matplotlib.patches import Patch  # here, as in new_figure

    figure.legend(
        handles=[Patch(color=_COMPUTE, label="compute"), Patch(color=_COMMUNICATION, label="communication")],
        loc="outside upper right",
        ncols=2,
        fontsize=8,
    )
    figure.savefig(path)


def _last_step(trace: RankTrace) -> Interval:
    window = measured(trace)
    if not window.time:
        return 0, 0
    steps = [span.begin for span in measured_steps(trace)]
    return max([window.time[0][0], *steps]), window.time[-1][1]


def _lanes(trace: RankTrace, step: Interval) -> Iterator[Lane]:
    """Yield what to draw of a rank: on the host waits are communication, and messages have a lane besides."""

    def lane(name: str, intervals: Intervals, color: str) -> Lane:
        inside = intersection(intervals, [step])
        return f"rank {trace.rank} {name}", [(b - step[0], e - step[0]) for b, e in inside], color

    waits = waits_of(trace.ranges)
    for thread in _lanes_of(trace.ranges):
        own = RankTrace(
            trace.rank,
            [span for span in trace.ranges if span.lane == thread],
            [span for span in trace.operations if span.lane == thread],
        )
        yield lane(thread, compute_of(own), _COMPUTE)
        yield lane(thread, waits.get(thread, []), _COMMUNICATION)
    for stream in _lanes_of(trace.device):
        spans = [span for span in trace.device if span.lane == stream]
        computing = compute_of(RankTrace(trace.rank, trace.ranges, device=spans))
        yield lane(stream, computing, _COMPUTE)
        yield lane(stream, difference(union(s.interval for s in spans), computing), _COMMUNICATION)
    transfers = find_transfers(trace)
    for axis in sorted({transfer.collective.axis for transfer in transfers}):
        of_axis = union(*(t.in_flight for t in transfers if t.collective.axis == axis))
        yield lane(f"in flight, {axis}", of_axis, _COMMUNICATION)


def _lanes_of(spans: Sequence[Span]) -> list[str]:
    return sorted({span.lane for span in spans})
