"""What counts of a trace: its measured steps, or all of it where it shows none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paracore.profiling.events import RankTrace, Span
from paracore.profiling.intervals import Interval, union
from paracore.profiling.transfers import launch, pair, posts_around
from paracore.trace import MEASURED, STEP


@dataclass(frozen=True)
class Window:
    """The measured part of a rank's trace.

    steps: how many there are; 0 where all that is recorded counts. host: when the host took them; what it
    begins and waits for meanwhile belongs to them. time: when they were executed, by the device if there is
    one, which is late.
    """

    steps: int
    host: list[Interval]
    time: list[Interval]

    def holds(self, moment: int) -> bool:
        """Return whether what the host begins at a moment belongs to the steps."""
        return any(begin <= moment < end for begin, end in self.host)


def measured(trace: RankTrace) -> Window:
    """Return what counts of a trace: the steps within `paracore.measured`, or all where none lies in such.

    Communication is of the step that waits for it, though an earlier one may have posted it. With a device,
    the steps' time is from when it has done what was launched before until it has done what they launched.
    """
    steps = measured_steps(trace)
    spans = steps or [*trace.ranges, *trace.operations]
    if not spans:
        return Window(0, [], [])
    if steps:
        host = union(span.interval for span in steps)
    else:
        host = [(min(span.begin for span in spans), max(span.end for span in spans))]
    return Window(len(steps), host, _device_time(trace, host) if trace.device else host)


def measured_steps(trace: RankTrace) -> list[Span]:
    """Return the ranges of the steps that count."""
    steps = [span for span in trace.ranges if span.name == STEP]
    around = [span for span in trace.ranges if span.name == MEASURED]
    return [
        step
        for step in steps
        if not around or any(span.begin <= step.begin and step.end <= span.end for span in around)
    ]


def _device_time(trace: RankTrace, host: list[Interval]) -> list[Interval]:
    begin, end = host[0][0], host[-1][1]
    done = list(_done_by(trace))
    first = max([begin, *(until for at, until in done if at < begin)])
    last = max([end, *(until for at, until in done if begin <= at < end)])
    return [(first, last)] if first < last else []


def _done_by(trace: RankTrace) -> Iterator[tuple[int, int]]:
    """Yield by when the host needed each span of the device, and when it was done.

    What was posted is needed when it is waited for; left out is what is not waited for in this trace, and
    what it does not show the launch of.
    """
    posts = posts_around(trace)
    waits = {post: wait.begin for post, wait in pair(trace.ranges) if post is not None and wait is not None}
    for number, span in enumerate(trace.device):
        post = posts.get(number)
        if post is not None:
            if post in waits:
                yield waits[post], span.end
        elif span.launched is not None:
            yield launch(span), span.end
