"""Which tiles of keys a tile of queries must walk, and the reverse, from each query's interval of keys.

A range is four tile indices (begin, whole_begin, whole_end, after): every pair in which a query sees a key
lies in the tiles begin..after; in those of whole_begin..whole_end every query sees every key, so that their
code needs no masks. The first and the last stretch are the edges. All of it is arithmetic on the device
that holds the tensors: nothing waits for it.

Results are kept as long as the tensors they come from: every layer and both directions ask for the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Pairs of tiles that are compared at once; a million tokens have 2^28 pairs of 64 by 64.
PAIRS_AT_ONCE = 1 << 20

_Entries = dict[tuple[object, ...], tuple[tuple[int, int], Tensor]]
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # first -> end -> _Entries


def ranges_of_queries(first: Tensor, end: Tensor, Sk: int, queries: int, keys: int) -> Tensor:
    """Return for each tile of `queries` queries its range of tiles of `keys` keys, [Bm, Tq, 4] int32.

    first, end: [Bm, Sq] int32; a query that sees nothing has (Sk, 0). The last tile of keys is never whole
    if it is not full; the last tile of queries may be.
    """
    return _remembered(_query_ranges, first, end, Sk, queries, keys)


def ranges_of_keys(first: Tensor, end: Tensor, Sk: int, queries: int, keys: int) -> Tensor:
    """Return for each tile of `keys` keys its range of tiles of `queries` queries, [Bm, Tk, 4] int32.

    Where the tiles that see the keys are not consecutive, begin..after is what covers them, and
    whole_begin..whole_end their longest whole run. Tiles that are not full are never whole.
    """
    return _remembered(_key_ranges, first, end, Sk, queries, keys)


# ---------------------------------------------------------------- arithmetic


def _tile_bounds(first: Tensor, end: Tensor, Sk: int, queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return min and max of first, min and max of end over each tile of queries, [Bm, Tq] each."""
    Sq = first.size(1)
    padded = -(-Sq // queries) * queries
    row = torch.arange(padded, device=first.device).clamp_(max=Sq - 1)  # repeats the last query
    first, end = (x[:, row].view(x.size(0), -1, queries) for x in (first.clamp(0, Sk), end.clamp(0, Sk)))
    return first.amin(-1), first.amax(-1), end.amin(-1), end.amax(-1)


def _query_ranges(first: Tensor, end: Tensor, Sk: int, queries: int, keys: int) -> Tensor:
    first_min, first_max, end_min, end_max = _tile_bounds(first, end, Sk, queries)
    after = (end_max + (keys - 1)) // keys
    begin = torch.minimum(first_min // keys, after)
    return _ranges(begin, (first_max + (keys - 1)) // keys, end_min // keys, after)


def _key_ranges(first: Tensor, end: Tensor, Sk: int, queries: int, keys: int) -> Tensor:
    bounds = _tile_bounds(first, end, Sk, queries)
    Bm, Tq = bounds[0].shape
    tiles_at_once = max(1, PAIRS_AT_ONCE // max(1, Bm * Tq))
    full = first.size(1) // queries  # tiles of queries that are full
    starts = torch.arange(0, Sk, keys, dtype=torch.int32, device=first.device)
    pieces = [_key_ranges_of(chunk, bounds, full, Sk, keys) for chunk in starts.split(tiles_at_once)]
    return torch.cat(pieces, 1) if pieces else starts.new_empty(Bm, 0, 4)


def _key_ranges_of(starts: Tensor, bounds: tuple[Tensor, ...], full: int, Sk: int, keys: int) -> Tensor:
    """Ranges of the tiles of keys that start at `starts`, [Bm, len(starts), 4]."""
    first_min, first_max, end_min, end_max = (bound.unsqueeze(1) for bound in bounds)  # [Bm, 1, Tq]
    start = starts.unsqueeze(-1)
    tile = torch.arange(first_min.size(-1), dtype=torch.int32, device=starts.device)
    seen = (first_min < (start + keys).clamp(max=Sk)) & (end_max > start)
    after = torch.where(seen, tile + 1, 0).amax(-1)
    begin = torch.minimum(torch.where(seen, tile, tile.numel()).amin(-1), after)
    whole = (first_max <= start) & (end_min >= start + keys) & (tile < full)
    length, last = (tile - torch.where(whole, -1, tile).cummax(-1).values).max(-1)  # the longest run
    whole_end = last.to(torch.int32) + 1
    return _ranges(begin, whole_end - length, whole_end, after)


def _ranges(begin: Tensor, whole_begin: Tensor, whole_end: Tensor, after: Tensor) -> Tensor:
    """Stack the four; where nothing is whole, all is left edge."""
    none = whole_begin >= whole_end
    whole_begin, whole_end = (torch.where(none, after, x) for x in (whole_begin, whole_end))
    return torch.stack([begin, whole_begin, whole_end, after], -1).to(torch.int32)


# ---------------------------------------------------------------- memory


def _remembered(
    compute: Callable[[Tensor, Tensor, int, int, int], Tensor],
    first: Tensor,
    end: Tensor,
    Sk: int,
    queries: int,
    keys: int,
) -> Tensor:
    """Compute, or take what was computed from the same tensors unless they have changed since."""
    if not _may_remember(first, end):
        return compute(first, end, Sk, queries, keys)
    entries: _Entries = _known.setdefault(first, WeakTensorKeyDictionary()).setdefault(end, {})
    # Work queued on one stream is not finished for another.
    stream = torch.cuda.current_stream(first.device) if first.is_cuda else None
    key = (compute, Sk, queries, keys, stream)
    versions = (first._version, end._version)
    if key not in entries or entries[key][0] != versions:
        entries[key] = versions, compute(first, end, Sk, queries, keys)
    return entries[key][1]


def _may_remember(first: Tensor, end: Tensor) -> bool:
    if torch.compiler.is_compiling() or first.is_inference() or end.is_inference():
        return False  # inference tensors do not count their changes
    # What a captured graph allocates is overwritten when the graph is replayed.
    return not (first.is_cuda and torch.cuda.is_current_stream_capturing())
