"""In which order the matrix product computes the rows of its result, and which chunk each belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.kernels.matmul_configurations import GROUP

_LIMIT = 2**31  # of what an int32 holds


@dataclass(frozen=True)
class TileOrder:
    """Which rows of a and of the result each row of tiles covers, in the order in which they are computed.

    table: [row tiles, 3] int32: first row, number of rows, at most block_rows, and chunk.
    groups: [row tiles, 2] int32: the group that each belongs to, as its first row tile and its number of
        them. All columns of a group's tiles are computed before the next group's. Groups, and so tiles, never
        straddle chunks: a chunk's tiles are all computed before the next chunk is waited for.
    late: [1] int32, 0; what a product whose chunks do not arrive writes there makes it fail.
    tiles_per_chunk: row tiles of each chunk.
    end: the row behind the last.
    """

    table: Tensor
    groups: Tensor
    late: Tensor
    tiles_per_chunk: tuple[int, ...]
    block_rows: int
    end: int


def tile_order(chunks: Sequence[tuple[int, int]], device: torch.device, block_rows: int) -> TileOrder:
    """Cut chunks of rows into tiles.

    chunks: first row and number of rows of each, in the order in which they are computed; the place in this
    sequence is the chunk's number, by which flags and counters are indexed. A chunk may have no rows. Rows in
    no chunk are not computed. block_rows: at most `matmul.block_rows`.
    Raises UsageError if chunks overlap, or numbers are negative or too large for int32.
    """
    if block_rows < 1:
        raise UsageError(f"block_rows is {block_rows}; expected at least 1")
    _check_chunks(chunks)
    table: list[tuple[int, int, int]] = []
    groups: list[tuple[int, int]] = []
    tiles_per_chunk = []
    for chunk, (first, rows) in enumerate(chunks):
        tiles = [
            (row, min(block_rows, first + rows - row), chunk)
            for row in range(first, first + rows, block_rows)
        ]
        for size in _even_parts(len(tiles), GROUP):
            groups += [(len(groups), size)] * size
        table += tiles
        tiles_per_chunk.append(len(tiles))
    return TileOrder(
        table=torch.tensor(table, dtype=torch.int32).view(-1, 3).to(device),
        groups=torch.tensor(groups, dtype=torch.int32).view(-1, 2).to(device),
        late=torch.zeros(1, dtype=torch.int32, device=device),
        tiles_per_chunk=tuple(tiles_per_chunk),
        block_rows=block_rows,
        end=max((first + rows for first, rows in chunks), default=0),
    )


def _even_parts(total: int, limit: int) -> Iterator[int]:
    """Cut `total` into as few parts as can be, of at most `limit`, that differ by at most 1."""
    parts = -(-total // limit)
    for part in range(parts):
        yield (part + 1) * total // parts - part * total // parts


def _check_chunks(chunks: Sequence[tuple[int, int]]) -> None:
    end, before = 0, None
    for first, rows in sorted(chunk for chunk in chunks if chunk[1] != 0):
        if first < 0 or rows < 0 or first + rows >= _LIMIT:
            raise UsageError(
                f"chunks has ({first}, {rows}); expected a first row and a number of rows below 2^31"
            )
        if first < end:
            raise UsageError(
                f"chunks has {before} and {(first, rows)}, which overlap; expected each row once"
            )
        end, before = first + rows, (first, rows)
