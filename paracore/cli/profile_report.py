"""The summary of a profile, and an account of memory, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paracore.cli.table import table
from paracore.profiling.memory import KINDS
from paracore.profiling.overlap import Communication, added
from paracore.profiling.summary import (
    RankSummary,
    Spread,
    range_spread,
    range_spreads,
    spread,
    total_communication,
)

_GAPS = 5


def report_lines(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """Yield the report, one line after the other."""
    yield f"{len(ranks)} ranks, {_steps(ranks)}"
    yield ""
    yield from _range_lines(ranks)
    yield ""
    yield from _rank_lines(ranks)
    yield ""
    yield from _collective_lines(ranks)
    yield ""
    yield from _gap_lines(ranks)
    yield ""
    share = total_communication(ranks).share_hidden
    yield f"share of communication hidden behind compute: {_percent(share)}"
    yield "  hidden: in flight while the rank computes; exposed: waited for, or alone on a device"


def _steps(ranks: Sequence[RankSummary]) -> str:
    counts = {rank.steps for rank in ranks}
    if counts == {0}:
        return "no training step among what is recorded; ms of all of it"
    if len(counts) == 1:
        return f"{counts.pop()} steps; ms per step"
    each = ", ".join(f"rank {rank.rank} {rank.steps}" for rank in ranks)
    everything = ", or of all that is recorded where there is none" if 0 in counts else ""
    return f"not as many steps on each ({each}); ms per step{everything}"


def _range_lines(ranks: Sequence[RankSummary]) -> Iterator[str]:
    has_device = any(found.device for rank in ranks for found in rank.ranges.values())
    titles = ["range", "calls", "mean", "least", "most rank", "imbalance", "own", *["device"] * has_device]
    rows = []
    for name, time in range_spreads(ranks):
        own, device, calls = (range_spread(ranks, name, key).mean for key in ("own", "device", "count"))
        row = [name, f"{calls:g}", *_spread(time), _ms(own), *[_ms(device)] * has_device]
        rows.append(row)
    yield from table(titles, rows)


def _spread(time: Spread) -> tuple[str, str, str, str]:
    return _ms(time.mean), _ms(time.least), _ms(time.most), f"{100 * time.imbalance:.0f} %"


def _rank_lines(ranks: Sequence[RankSummary]) -> Iterator[str]:
    titles = ("rank", "step", "computes", "exposed", "hidden", "neither", "share hidden")
    rows = []
    for rank in ranks:
        steps, total = max(1, rank.steps), rank.overlap.total
        idle = rank.time - rank.compute - total.exposed
        times = (rank.time, rank.compute, total.exposed, total.hidden, idle)
        rows.append((str(rank.rank), *(_ms(t / steps) for t in times), _percent(total.share_hidden)))
    yield from table(titles, rows)
    compute, step = spread(ranks, lambda r: r.compute), spread(ranks, lambda r: r.time)
    yield (
        f"  imbalance, most over mean: step {100 * step.imbalance:.1f} %, "
        f"compute {100 * compute.imbalance:.1f} %"
    )


def _collective_lines(ranks: Sequence[RankSummary]) -> Iterator[str]:
    found = sorted({which for rank in ranks for which in rank.overlap.collectives})
    if not found:
        yield "no communication"
        return
    rows = []
    for which in found:
        total = added(rank.overlap.collectives.get(which, Communication()) for rank in ranks)
        steps = sum(max(1, rank.steps) for rank in ranks)
        rows.append(
            (
                which.kind,
                which.axis,
                f"{total.count / steps:g}",
                f"{total.bytes / steps / 2**20:.3f}",
                _ms(total.exposed / steps),
                _ms(total.hidden / steps),
                _percent(total.share_hidden),
            )
        )
    yield from table(("collective", "axis", "calls", "MiB", "exposed", "hidden", "share hidden"), rows)
    unpaired = total_communication(ranks).unpaired
    if unpaired:
        yield f"  {unpaired} unpaired: posted before recording, or in the last step and not waited for in it"


def _gap_lines(ranks: Sequence[RankSummary]) -> Iterator[str]:
    gaps = [(gap, rank.rank) for rank in ranks for gap in rank.gaps]
    rows = [
        (_ms(gap.length), str(rank), _ms(gap.begin), gap.inside)
        for gap, rank in sorted(gaps, key=lambda pair: -pair[0].length)[:_GAPS]
    ]
    yield from table(("longest gaps", "rank", "from the first step's begin", "inside"), rows)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def memory_lines(ranks: Sequence[Mapping[str, Mapping[str, int]]]) -> Iterator[str]:
    """Yield a table of each range's peak, of the rank where it is highest. ranks: bytes by range and kind."""
    peaks: dict[str, tuple[int, int]] = {}  # bytes and rank
    for number, ranges in enumerate(ranks):
        for name, kinds in ranges.items():
            peaks[name] = max(peaks.get(name, (0, 0)), (sum(kinds.values()), number))
    rows = [
        (name, _mib(total), str(rank), *(_mib(ranks[rank][name][kind]) for kind in reversed(KINDS)))
        for name, (total, rank) in sorted(peaks.items(), key=lambda item: -item[1][0])
    ]
    yield f"{len(ranks)} ranks; MiB of tensors alive at the peak of each range"
    yield from table(("range", "peak", "rank", *reversed(KINDS)), rows)


def _mib(count: int) -> str:
    return f"{count / 2**20:.3f}"
