"""A picture of `paracore bench memory` or `throughput`: a group of bars for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paracore.bench.modes import BASELINE, MODES
from paracore.bench.plot import COLORS
from paracore.bench.training_report import Fields
from paracore.figure import new_figure

_VARYING = {"layers": "layers", "seq_len": "sequence length", "vocab_size": "vocabulary"}


@dataclass(frozen=True)
class Quantity:
    """What the bars show: a field of the rows, and of what the percentages above them are."""

    field: str
    label: str


PEAK = Quantity("peak_mib", "peak memory of a rank, MiB")
THROUGHPUT = Quantity("thousand_tokens_per_s", "thousand tokens/s of all ranks")


def plot(path: Path, title: str, subtitle: str, rows: Sequence[Fields], quantity: Quantity) -> None:
    """Draw the rows, each mode's difference to the baseline in percent above its bar."""
    varying = [name for name in _VARYING if len({row[name] for row in rows}) > 1] or ["layers"]
    groups = list(dict.fromkeys(tuple(row[name] for name in varying) for row in rows))
    modes = [name for name in MODES if any(row["mode"] == name for row in rows)]
    figure = new_figure(figsize=(max(7.0, 1.0 + 0.6 * len(groups) * len(modes)), 5))
    figure.suptitle(f"{title}\n{subtitle}", fontsize=8)
    axes = figure.add_subplot()
    width = 0.84 / len(modes)
    baseline = {_group(row, varying): row for row in rows if row["mode"] == BASELINE}
    for index, mode in enumerate(modes):
        own = [row for row in rows if row["mode"] == mode]
        bars = axes.bar(
            [groups.index(_group(row, varying)) + width * (index - (len(modes) - 1) / 2) for row in own],
            [_number(row, quantity) for row in own],
            width,
            color=COLORS[index % len(COLORS)],
            label=mode,
        )
        texts = [_text(row, baseline.get(_group(row, varying)), quantity) for row in own]
        axes.bar_label(bars, texts, fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), ["\n".join(map(str, group)) for group in groups])
    axes.set_xlabel(", ".join(_VARYING[name] for name in varying))
    axes.set_ylabel(quantity.label)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=len(modes), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.savefig(path, dpi=120)


def _group(row: Fields, varying: Sequence[str]) -> tuple[str | int | float | None, ...]:
    return tuple(row[name] for name in varying)


def _number(row: Fields, quantity: Quantity) -> float:
    value = row[quantity.field]
    assert isinstance(value, int | float)  # noqa: S101 (for the type checker)
    return float(value)


def _text(row: Fields, baseline: Fields | None, quantity: Quantity) -> str:
    value = _number(row, quantity)
    figures = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if baseline is None or row is baseline:
        return figures
    return f"{figures}\n({100 * (value / _number(baseline, quantity) - 1):+.1f}%)"
