"""Masks of attention: each query sees one interval of global key positions.

Full, causal, sliding-window, packed, prefix and chunked attention and padding are all intervals, and
so is the intersection of any of them: `causal() & documents([0, 30, 100]) & sliding_window(left=7)`.
A mask knows nothing of tensors' shapes: it is asked about positions, so queries may sit anywhere among
the keys (decoding, chunked prefill, the shards of a sequence).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.parallel.positions import Positions

# Where an interval has no border: beyond every position, yet far from an overflow of int64.
UNBOUNDED = 1 << 40


class Mask(abc.ABC):
    """Which keys a query sees. Instances without tensors are equal and hash alike if they mean the same.

    Results are kept. That a mask's tensor was written to is noticed where torch counts it: not through numpy,
    DLPack, `.data`, or a kernel of one's own. Make a new mask after such a write; making one is cheap.
    """

    @abc.abstractmethod
    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return first and end: the query at a position sees the keys with first <= position < end.

        positions: [Sq] int64. Returns two int64 tensors, broadcastable to [B, Sq]; an interval may reach
        beyond the keys there are, and is empty if first >= end.
        """

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the mask reads, whose values may change."""
        return ()

    def versions(self) -> tuple[int, ...] | None:
        """Return numbers that grow when somebody writes to the tensors; None if nobody would notice."""
        tensors = self.tensors()
        if any(tensor.is_inference() for tensor in tensors):
            return None
        return tuple(tensor._version for tensor in tensors)

    def require_covers(self, end: int) -> None:  # noqa: B027 - most masks cover everything
        """Raise UsageError if the mask says nothing about some query position before `end`."""

    def __and__(self, other: Mask) -> Mask:
        return _Intersection((self, other))


# ---------------------------------------------------------------- constructors


def full() -> Mask:
    """Every query sees every key."""
    return _Window(None, None)


def causal() -> Mask:
    """A query sees the keys at its own position and before."""
    return _Window(None, 0)


def sliding_window(left: int | None = None, right: int | None = None) -> Mask:
    """A query sees `left` keys before its own position, that itself, and `right` keys after it.

    None means: all of them. `sliding_window(511, 0)` is causal attention over 512 keys.
    """
    for name, size in (("left", left), ("right", right)):
        if size is not None and size < 0:
            raise UsageError(f"{name}={size}: must be None or at least 0")
    return _Window(left, right)


def documents(boundaries: Sequence[int] | Tensor) -> Mask:
    """A query sees the keys of its own document; documents lie one behind another in the sequence.

    boundaries: [documents + 1] positions where documents begin and end, known as cu_seqlens: from 0 up
    to the length of the sequence, never falling; equal neighbours are an empty document. In a tensor
    they may change between calls. A GPU checks them itself: nobody waits, and the error comes from CUDA.
    Intersect with `causal()` or `sliding_window(...)` for attention within the documents.
    """
    if isinstance(boundaries, Tensor):
        if boundaries.dim() != 1 or boundaries.is_floating_point() or boundaries.is_complex():
            raise UsageError(
                f"boundaries is {boundaries.dtype} {list(boundaries.shape)}, must be integers [documents + 1]"
            )
        _require_boundaries(boundaries)
        return _TensorDocuments(boundaries)
    if not all(isinstance(boundary, int) for boundary in boundaries):
        raise UsageError(f"boundaries={list(boundaries)[:8]}: must be integers")
    _require_boundaries(torch.tensor(boundaries, dtype=torch.int64))
    return _Documents(tuple(boundaries))


def prefix_lm(prefix: int | Tensor) -> Mask:
    """Causal attention, except that everyone sees the first `prefix` keys.

    prefix: one number, or integers [B] (Raffel et al. 2020, figure 4).
    """
    if isinstance(prefix, Tensor):
        return _TensorPrefix(_per_batch("prefix", prefix))
    if prefix < 0:
        raise UsageError(f"prefix={prefix}: must be at least 0")
    return _Prefix(prefix)


def chunked(size: int) -> Mask:
    """A query sees the keys of its own chunk of `size` positions; Llama 4 intersects it with `causal()`."""
    if size < 1:
        raise UsageError(f"size={size}: must be at least 1")
    return _Chunked(size)


def key_range(first: int | Tensor, end: int | Tensor) -> Mask:
    """Every query sees the keys from position `first` up to, but without, `end`: numbers, or integers [B].

    Padding on the right is `key_range(0, lengths)`, on the left `key_range(total - lengths, total)`.
    """
    if isinstance(first, Tensor):
        end = end if isinstance(end, Tensor) else first.new_full((), end)
        if first.dim() == end.dim() == 1 and first.size(0) != end.size(0):
            raise UsageError(f"first is for a batch of {first.size(0)}, but end for one of {end.size(0)}")
        return _TensorKeyRange(_per_batch("first", first), _per_batch("end", end))
    if isinstance(end, Tensor):
        return _TensorKeyRange(end.new_full((), first), _per_batch("end", end))
    return _KeyRange(first, end)


def from_boolean(visible: Tensor) -> Mask:
    """A mask given densely, if what each query sees is an interval; queries and keys lie at 0, 1, 2, ...

    visible: boolean, [Sq, Sk] or [B, Sq, Sk], True where a query sees a key. Its values are looked at here,
    which on a GPU waits for it. Raises UsageError that names a query whose visible keys have a gap.
    """
    if visible.dtype != torch.bool or visible.dim() not in (2, 3):
        raise UsageError(
            f"visible is {visible.dtype} {list(visible.shape)}, must be bool [Sq, Sk] or [B, Sq, Sk]"
        )
    first, end, gaps = borders(visible)
    if gaps.any():
        where = gaps.nonzero()[0].tolist()
        raise UsageError(f"visible{where}: the keys that this query sees are not an interval")
    return _Table(first, end)


def intervals(first: Tensor, end: Tensor) -> Mask:
    """Query i sees the keys with first[..., i] <= position < end[..., i]; queries lie at 0, 1, 2, ...

    first, end: integers of one shape, [Sq] or [B, Sq].
    """
    for name, border in (("first", first), ("end", end)):
        if border.dim() not in (1, 2) or border.is_floating_point() or border.dtype == torch.bool:
            raise UsageError(
                f"{name} is {border.dtype} {list(border.shape)}, must be integers [Sq] or [B, Sq]"
            )
    if first.shape != end.shape:
        raise UsageError(f"first is {list(first.shape)}, but end is {list(end.shape)}")
    return _Table(first, end)


def borders(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first key that each query sees, the end of those seen, and whether some between are not.

    visible: boolean [..., Sq, Sk]. Returns int64, int64 and boolean [..., Sq]; end is 0 if nothing is seen.
    """
    keys = torch.arange(visible.size(-1), device=visible.device)
    first = torch.where(visible, keys, visible.size(-1)).amin(-1) if len(keys) else visible.sum(-1)
    end = torch.where(visible, keys + 1, 0).amax(-1) if len(keys) else visible.sum(-1)
    return first, end, visible.sum(-1) != (end - first).clamp_min(0)


def _require_boundaries(boundaries: Tensor) -> None:
    if boundaries.numel() == 0:
        raise UsageError("boundaries is empty, must be [documents + 1] integers that begin with 0")
    right = (boundaries[:1] == 0).all() & (boundaries[1:] >= boundaries[:-1]).all()
    require(right, "boundaries must begin with 0 and never fall")


def require(condition: Tensor, message: str) -> None:
    """Raise UsageError unless `condition` holds; on a GPU, or compiled, an assertion there raises instead."""
    if condition.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not condition:
        raise UsageError(message)


def _per_batch(name: str, numbers: Tensor) -> Tensor:
    if numbers.dim() > 1 or numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise UsageError(f"{name} is {numbers.dtype} {list(numbers.shape)}, must be integers [B]")
    return numbers


# ---------------------------------------------------------------- the masks
#
# Those that hold numbers are compared by value; those that hold tensors are compared by identity, since
# looking at the values would wait for a GPU (eq=False).


@dataclass(frozen=True)
class _Window(Mask):
    left: int | None
    right: int | None

    def __repr__(self) -> str:
        if self.left is None and self.right in (None, 0):
            return "full()" if self.right is None else "causal()"
        return f"sliding_window(left={self.left}, right={self.right})"

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        first = positions - (UNBOUNDED if self.left is None else self.left)
        return first, positions + (UNBOUNDED if self.right is None else self.right + 1)


@dataclass(frozen=True)
class _Documents(Mask):
    boundaries: tuple[int, ...]

    def __repr__(self) -> str:
        return f"documents({list(self.boundaries)})"

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return _document_interval(torch.tensor(self.boundaries, device=positions.device), positions)

    def require_covers(self, end: int) -> None:
        if end > self.boundaries[-1]:
            raise UsageError(
                f"boundaries end at {self.boundaries[-1]}, must end at {end} or beyond, where the queries end"
            )


@dataclass(frozen=True, eq=False)
class _TensorDocuments(Mask):
    boundaries: Tensor

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return _document_interval(self.boundaries.to(positions), positions)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.boundaries,)

    def require_covers(self, end: int) -> None:
        require(self.boundaries[-1] >= end, f"boundaries must end at {end} or beyond, where the queries end")


def _document_interval(boundaries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    # The first boundary behind a position ends its document. Behind the last one there is no document:
    # first and end are then both the last boundary, an empty interval.
    behind = torch.searchsorted(boundaries, positions, right=True)
    return boundaries[behind - 1], boundaries[behind.clamp_max(boundaries.size(0) - 1)]


@dataclass(frozen=True)
class _Prefix(Mask):
    prefix: int

    def __repr__(self) -> str:
        return f"prefix_lm({self.prefix})"

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(positions), (positions + 1).clamp_min(self.prefix)


@dataclass(frozen=True, eq=False)
class _TensorPrefix(Mask):
    prefix: Tensor

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.prefix.to(positions).unsqueeze(-1)  # [B, 1]
        return torch.zeros_like(positions), torch.maximum(positions + 1, prefix)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.prefix,)


@dataclass(frozen=True)
class _Chunked(Mask):
    size: int

    def __repr__(self) -> str:
        return f"chunked({self.size})"

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        first = positions - positions % self.size
        return first, first + self.size


@dataclass(frozen=True)
class _KeyRange(Mask):
    first: int
    end: int

    def __repr__(self) -> str:
        return f"key_range({self.first}, {self.end})"

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(positions, self.first), torch.full_like(positions, self.end)


@dataclass(frozen=True, eq=False)
class _TensorKeyRange(Mask):
    first: Tensor
    end: Tensor

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        first, end = (border.to(positions).unsqueeze(-1) for border in (self.first, self.end))  # [B, 1]
        return first.expand(*first.shape[:-1], len(positions)), end.expand(*end.shape[:-1], len(positions))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.first, self.end


@dataclass(frozen=True, eq=False)
class _Table(Mask):
    first: Tensor  # [Sq] or [B, Sq]
    end: Tensor

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.first.to(positions), self.end.to(positions)
        known = positions < first.size(-1)
        at = positions.clamp_max(first.size(-1) - 1)
        return first[..., at], torch.where(known, end[..., at], 0)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.first, self.end

    def require_covers(self, end: int) -> None:
        if end > self.first.size(-1):
            raise UsageError(f"mask has {self.first.size(-1)} queries, but there is one at {end - 1}")


@dataclass(frozen=True)
class _Intersection(Mask):
    parts: tuple[Mask, ...]

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))

    def interval(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.parts[0].interval(positions)
        for part in self.parts[1:]:
            later, earlier = part.interval(positions)
            first, end = torch.maximum(first, later), torch.minimum(end, earlier)
        return first, end

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    def require_covers(self, end: int) -> None:
        for part in self.parts:
            part.require_covers(end)


# ---------------------------------------------------------------- from positions to indices


def visible_keys(
    mask: Mask, queries: Positions | Tensor, keys: Positions | Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return first and end: query i sees the keys with first[i] <= index < end[i].

    queries, keys: the positions of q's and k's elements, those of keys increasing: then what lies in an
    interval of positions lies in an interval of indices. Positions, or int64 tensors on `device`.
    Returns two int32 tensors [B or 1, Sq]; a query that sees nothing has first = Sk and end = 0. They are
    kept for the next call with the same arguments, and are not to be written to.
    Raises UsageError for keys that do not increase, or a mask that does not cover `queries`; the positions
    of queries in a tensor are not looked at, and those beyond the mask see nothing.
    """
    if isinstance(queries, Tensor) or isinstance(keys, Tensor) or torch.compiler.is_compiling():
        return _visible_keys(mask, queries, keys, device)
    versions = mask.versions()
    if versions is None or _capturing(device):  # a graph's tensors are only computed when it is replayed
        return _visible_keys(mask, queries, keys, device)
    keep = _kept_changing if versions else _kept_constant
    return keep(mask, versions, queries, keys, device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _keep_visible_keys(
    mask: Mask, versions: tuple[int, ...], queries: Positions, keys: Positions, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Remember the results; `versions` grow when somebody writes to the mask's tensors."""
    with torch.inference_mode(False):  # a later call outside of inference mode may save them for backward
        return _visible_keys(mask, queries, keys, device)


_kept_constant = lru_cache(maxsize=256)(_keep_visible_keys)
_kept_changing = lru_cache(maxsize=32)(_keep_visible_keys)  # packed training makes a new mask in every step


def _visible_keys(
    mask: Mask, queries: Positions | Tensor, keys: Positions | Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    _require_increasing(keys)
    if isinstance(queries, Positions):
        mask.require_covers(queries.end)
        queries = queries.tensor(device)
    interval = torch.broadcast_tensors(*mask.interval(queries))
    first, end = (_index_of(border, keys) for border in interval)
    nothing = first >= end
    first, end = first.masked_fill(nothing, len(keys)).int(), end.masked_fill(nothing, 0).int()
    return (first, end) if first.dim() == 2 else (first.unsqueeze(0), end.unsqueeze(0))


def _index_of(position: Tensor, keys: Positions | Tensor) -> Tensor:
    """Return how many keys lie before each position."""
    if isinstance(keys, Tensor):
        return torch.searchsorted(keys, position.contiguous())
    if len(keys.runs) == 1:
        start, length = keys.runs[0]
        return (position - start).clamp(0, length)
    return torch.searchsorted(keys.tensor(position.device), position.contiguous())


def _require_increasing(keys: Positions | Tensor) -> None:
    if isinstance(keys, Positions):
        if not keys.increasing:
            raise UsageError(f"key positions {keys.runs[:8]} must increase: sort the keys by position")
        return
    require((keys[1:] > keys[:-1]).all(), "key positions must increase: sort the keys by position")
