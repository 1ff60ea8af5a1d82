"""Text tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: columns as wide as their widest cell, indented by two spaces."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
