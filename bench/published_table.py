"""`python -m paracore.bench.published_table FILE...`: CSVs of `paracore bench memory` as a Markdown table.

A row for each published configuration, a column for each mode: MiB, and in percent of what is published.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paracore.bench.modes import MODES

_SIZES = ("layers", "seq_len", "vocab_size", "batch_size")


def markdown(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of the table. rows: those of the CSVs, of which the published are taken.

    Where sequence parallelism that gathers again in backward is published as well, it is that one.
    """
    yield f"| {' | '.join(('layers', 'S', 'V', 'batch', *MODES))} |"
    yield "|---" * (len(_SIZES) + len(MODES)) + "|"
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        share = row["of_published_recompute"] or row["of_published"]
        if share:
            text = f"{float(row['peak_mib']):.0f} ({100 * float(share):.1f} %)"
            found.setdefault(tuple(row[name] for name in _SIZES), {})[row["mode"]] = text
    for sizes, cells in found.items():
        yield f"| {' | '.join((*sizes, *(cells.get(mode, '') for mode in MODES)))} |"


def main(paths: Sequence[str]) -> int:
    """Print the table of these files."""
    rows: list[dict[str, str]] = []
    for path in paths:
        with Path(path).open(newline="") as file:
            rows += csv.DictReader(file)
    print("\n".join(markdown(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
