"""Reports: a table to read, JSON and CSV to process."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paracore.bench.case import Setting, format_shape
from paracore.bench.results import RESULT_FIELDS, Refusal, Result

LEGEND = """\
Times in ms per call: median, 20th and 80th percentile. GB/s (1e9 bytes) and TFLOP/s (1e12) of the least
work a call must do, at the median. peak: MiB (2**20 bytes) allocated at once by a call beyond its inputs.
ratio: the baseline's median by this one's, above 1 is faster. of copy_, of clone, of matmul: rate by that
of the limit in the same rounds (copy_ writes to an existing tensor, clone to fresh memory). of limit:
the one of these that binds, or the case's own."""

UNITS = {
    "median_ms, p20_ms, p80_ms": "1e-3 s per call",
    "gb_per_s": "1e9 bytes per s",
    "tflop_per_s": "1e12 floating-point operations per s",
    "peak_mib": "2**20 bytes",
    "ratio": "baseline median_ms / median_ms",
    "fraction_of_copy, fraction_of_clone, fraction_of_matmul": "rate / rate of the limit in the same rounds",
}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _significant(value: float) -> str:
    """Four significant digits, never in exponential notation: times span nanoseconds to minutes."""
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.7f}".rstrip("0").rstrip(".")


_COLUMNS: dict[str, Callable[[Result], str]] = {
    "": lambda row: f"{row.contender} ({row.kind})" if row.kind != "contender" else row.contender,
    "median ms": lambda row: _significant(row.median_ms),
    "p20": lambda row: _significant(row.p20_ms),
    "p80": lambda row: _significant(row.p80_ms),
    "GB/s": lambda row: _significant(row.gb_per_s),
    "TFLOP/s": lambda row: _significant(row.tflop_per_s),
    "peak MiB": lambda row: f"{row.peak_mib:.1f}",
    "ratio": lambda row: "-" if row.ratio is None else f"{row.ratio:.2f}",
    "of copy_": lambda row: _percent(row.fraction_of_copy),
    "of clone": lambda row: _percent(row.fraction_of_clone),
    "of matmul": lambda row: _percent(row.fraction_of_matmul),
    "of limit": lambda row: _percent(row.fraction_of_limit),
}


def format_table(case: str, setting: Setting, rows: Sequence[Result], refusals: Sequence[Refusal]) -> str:
    """Return the table of one setting; below it, who refused and who was timed with the host's launches."""
    cells = [list(_COLUMNS), *([cell(row) for cell in _COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"{case} {setting}: {rows[0].samples if rows else 0} samples each"]
    for first, *others in cells:
        padded = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        lines.append("  " + "  ".join((first.ljust(widths[0]), *padded)))
    lines += [f"  {refused.contender} refuses: {refused.reason}" for refused in refusals]
    lines += [
        f"  {row.contender}: launches may be part of its time (it could not be queued ahead)"
        for row in rows
        if row.host_bound
    ]
    return "\n".join(lines)


def write_json(
    path: Path,
    machine: dict[str, Any],
    case: str,
    options: dict[str, Any],
    rows: Sequence[Result],
    refusals: Sequence[Refusal],
) -> None:
    """Write everything there is to know about a run."""
    document = {
        "machine": machine,
        "case": case,
        "options": options,
        "units": UNITS,
        "results": [dataclasses.asdict(row) for row in rows],
        "refused": [dataclasses.asdict(row) for row in refusals],
    }
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Result], refusals: Sequence[Refusal]) -> None:
    """Write a line per result; a refused contender has its reason and no numbers."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*RESULT_FIELDS, "refused"])
        writer.writeheader()
        for row in rows:
            writer.writerow(dataclasses.asdict(row) | {"shape": format_shape(row.shape)})
        for refused in refusals:
            fields = dataclasses.asdict(refused) | {"shape": format_shape(refused.shape)}
            writer.writerow(fields | {"refused": fields.pop("reason")})
