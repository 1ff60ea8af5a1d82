"""A picture of a run: bars by shape and contender, a panel for each dtype, direction and variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from paracore.bench.case import Bound, format_shape
from paracore.bench.limits import CLONE, COPY, MATMUL
from paracore.bench.results import Result
from paracore.figure import new_figure

_PANELS_PER_ROW = 2
COLORS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
)  # told apart by all eyes


@dataclass(frozen=True)
class _Rate:
    """What to draw of a row: its work of one kind per time."""

    unit: str
    work: Callable[[Result], int]
    work_per_ms: float  # that make one unit
    limits: tuple[str, ...]

    def at(self, row: Result, ms: float) -> float:
        return self.work(row) / ms / self.work_per_ms

    def whiskers(self, row: Result) -> tuple[float, float]:
        """Return how far the rate falls at the slow and rises at the fast percentile."""
        median = self.at(row, row.median_ms)
        return max(0.0, median - self.at(row, row.p80_ms)), max(0.0, self.at(row, row.p20_ms) - median)


_RATES: dict[Bound, _Rate] = {
    "memory": _Rate("GB/s", lambda row: row.bytes, 1e6, (COPY, CLONE)),
    "compute": _Rate("TFLOP/s", lambda row: row.flops, 1e9, (MATMUL,)),
}


def plot(path: Path, title: str, subtitle: str, rows: Sequence[Result], bound: Bound) -> None:
    """Draw the rates: GB/s for a case bound by memory, TFLOP/s for one bound by compute.

    Whiskers reach to the 20th and 80th percentile.
    """
    rate = _RATES[bound]
    rows = [row for row in rows if row.contender in rate.limits or row.kind != "limit"]
    panels = {key: list(group) for key, group in groupby(sorted(rows, key=_panel), key=_panel)}
    names = list(dict.fromkeys(row.contender for row in rows))
    rows_of_panels = max(1, -(-len(panels) // _PANELS_PER_ROW))
    figure = new_figure(figsize=(7 * _PANELS_PER_ROW, 3.5 * rows_of_panels + 1))
    figure.suptitle(f"{title}\n{subtitle}", fontsize=9)
    axes = list(figure.subplots(rows_of_panels, _PANELS_PER_ROW, squeeze=False).flat)
    for panel, (key, members) in zip(axes, panels.items(), strict=False):
        panel.set_title(" ".join(key), fontsize=9)
        _draw_panel(panel, members, names, rate)
    handles = {
        label: handle
        for panel in figure.axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, len(names)), fontsize=8
    )
    for unused in axes[len(panels) :]:
        unused.set_axis_off()
    figure.savefig(path, dpi=120)


def _panel(row: Result) -> tuple[str, str, str]:
    return row.dtype, row.direction, row.variant


def _draw_panel(axes: Any, rows: Sequence[Result], names: Sequence[str], rate: _Rate) -> None:
    shapes = list(dict.fromkeys(row.shape for row in rows))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        own = [row for row in rows if row.contender == name]
        if not own:
            continue
        positions = [shapes.index(row.shape) + width * (index - (len(names) - 1) / 2) for row in own]
        axes.bar(
            positions,
            [rate.at(row, row.median_ms) for row in own],
            width,
            yerr=list(zip(*(rate.whiskers(row) for row in own), strict=True)),
            color=COLORS[index % len(COLORS)],
            hatch="//" if own[0].kind == "limit" else None,
            label=f"{name} ({own[0].kind})" if own[0].kind != "contender" else name,
        )
    axes.set_xticks(range(len(shapes)), [format_shape(shape) for shape in shapes])
    axes.set_ylabel(rate.unit)
