"""What a call of a model says about its tokens: where they lie, and which of them see which.

transformers says it with an `attention_mask` (padding, or who sees whom), with `position_ids` that begin anew
(packed documents), with `cu_seq_lens_q`, and with a cache of earlier keys. Attention takes masks, and
positions of queries and keys. Here the one becomes the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.hf.attention_function import mask_of
from paracore.parallel.layout import document_ids
from paracore.parallel.masks import (
    Mask,
    causal,
    documents,
    intervals,
    key_range,
    require,
    sliding_window,
)
from paracore.parallel.positions import Positions

_CAUSAL = causal()


class Visible(NamedTuple):
    """Which keys the queries of one type of layer see. queries, keys: where they lie; None: 0, 1, 2, ..."""

    mask: Mask
    queries: Positions | Tensor | None = None
    keys: Positions | Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """What a caller says of S tokens of each of B sequences. Raises UsageError for shapes that do not fit.

    attention_mask: None; a `Mask` over the whole sequence; [B, keys], 0 for padding, which may be on either
    side; who sees whom, [B, 1, queries, keys], boolean or additive; or a dict of these by type of layer, as
    `generate` prepares it. position_ids: [S], [1, S] or [B, S]; where they do not go on, without an
    attention_mask and without earlier keys, a document begins. cu_seqlens: [documents + 1], where those of a
    single packed row begin and end. cache: of transformers, of which `continues` says whether it may hold
    earlier keys.
    """

    size: tuple[int, int]
    device: torch.device
    attention_mask: object
    position_ids: Tensor | None
    cu_seqlens: Tensor | None
    cache: Any
    continues: bool

    def __post_init__(self) -> None:
        B, S = self.size
        ids = self.position_ids
        if ids is not None and (ids.shape not in ((S,), (1, S), (B, S)) or ids.is_floating_point()):
            raise UsageError(
                f"position_ids is {ids.dtype} {list(ids.shape)}, must be integers [{B}, {S}] or [1, {S}]"
            )
        if self.cu_seqlens is not None and B != 1:
            raise UsageError(f"cu_seq_lens_q with a batch of {B}: documents are packed in one row, [1, S]")

    def rotary_positions(self) -> Tensor:
        """Return what rotary embedding turns by: [S] where all sequences have the same, else [B, S]."""
        if self.position_ids is not None:
            ids = self.position_ids.to(device=self.device, dtype=torch.int64)
            return ids[0] if ids.dim() == 2 and ids.size(0) == 1 else ids
        positions = torch.arange(self.size[1], device=self.device)
        if self.cu_seqlens is not None:
            boundaries = self.cu_seqlens.to(positions)
            return positions - boundaries[document_ids(boundaries, positions)]
        return positions if self.cache is None else positions + self.cache.get_seq_length()

    def visible(self, kind: str, window: int | None) -> Visible:
        """Return what a type of layer sees, through a sliding window of so many keys if there is one.

        Raises UsageError for padding within a row, for keys of a query that are not an interval, and for
        masks of other shapes.
        """
        B, S = self.size
        queries, keys, key_count = self._places(kind)
        given = self.attention_mask
        given = given.get(kind) if isinstance(given, Mapping) else given
        if isinstance(given, Tensor) and given.dim() == 4:
            # Complete, and about indices: nothing is added to it.
            return Visible(mask_of(given.to(self.device), B, S, key_count if keys is None else len(keys)))
        mask = _CAUSAL if window is None else _CAUSAL & sliding_window(left=window - 1)
        for further in (self._given(given, key_count), self._documents(given)):
            mask = mask if further is None else mask & further
        return Visible(mask, queries, keys)

    def _places(self, kind: str) -> tuple[Positions | Tensor | None, Positions | None, int]:
        """Return where queries and keys lie, and one more than the largest position of a key."""
        S, cache = self.size[1], self.cache
        if cache is None:
            return None, None, S
        slides = kind == "sliding_attention"
        layer = next((i for i, sliding in enumerate(cache.is_sliding) if sliding == slides), 0)
        offset, (key_length, first_key) = cache.get_query_offset(layer), cache.get_mask_sizes(S, layer)
        keys = Positions.contiguous(key_length, first_key)
        if isinstance(offset, Tensor):
            queries: Positions | Tensor = torch.arange(S, device=self.device) + offset.to(self.device)
        else:
            queries = Positions.contiguous(S, offset)
        return queries, keys, first_key + key_length

    def _given(self, attention_mask: object, key_count: int) -> Mask | None:
        """Return what a mask that is not of four dims hides; None if nothing."""
        if attention_mask is None or isinstance(attention_mask, Mask):
            return attention_mask
        if not isinstance(attention_mask, Tensor):
            raise UsageError(
                f"attention_mask is a {type(attention_mask).__name__}, must be a tensor or a Mask"
            )
        B, shape = self.size[0], attention_mask.shape
        if len(shape) != 2 or shape[0] != B or shape[1] > key_count:
            raise UsageError(
                f"attention_mask is {list(shape)}, must be [{B}, {key_count}], one number for each key, or "
                "4-dimensional"
            )
        return unpadded(attention_mask.to(self.device))

    def _documents(self, attention_mask: object) -> Mask | None:
        """Return the mask of packed documents; None if there are none."""
        if self.cu_seqlens is not None:
            length = self.size[1]
            if self.cu_seqlens.dim() == 1 and self.cu_seqlens.numel():
                require(
                    self.cu_seqlens[-1] == length,
                    f"cu_seq_lens_q must end at {length}, the length of the packed row",
                )
            return documents(self.cu_seqlens)
        if attention_mask is not None or self.position_ids is None or self.continues:
            return None
        return _packed(self.position_ids.to(self.device).view(-1, self.size[1]))


def unpadded(attention_mask: Tensor) -> Mask | None:
    """Return the mask that hides padding; None if it is sure that there is none. attention_mask: [B, keys].

    Raises UsageError where what is not padding is in several pieces; on a GPU an assertion raises instead.
    """
    real = attention_mask.bool()
    looks = real.device.type == "cpu" and not torch.compiler.is_compiling()  # elsewhere it would wait
    if looks and bool(real.all()):
        return None
    first, index = real.int().argmax(1), torch.arange(real.size(1), device=real.device)
    end = first + real.sum(1)
    whole = (real == ((index >= first[:, None]) & (index < end[:, None]))).all(1)
    where = f"row {int(whole.int().argmin())} " if looks else ""
    require(
        whole.all(),
        f"attention_mask: {where}has padding between its tokens, must have it at either end; packed "
        "sequences are given by position_ids or cu_seq_lens_q",
    )
    return key_range(first, end)


def _packed(position_ids: Tensor) -> Mask | None:
    """Return the mask of documents that begin where positions do not go on; None if it is sure that none do.

    position_ids: [B or 1, S]. A query sees no key before its document; later keys causal attention hides.
    """
    begins = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1
    if begins.device.type == "cpu" and not torch.compiler.is_compiling() and not begins.any():
        return None
    index = torch.arange(begins.size(1), device=begins.device)
    first = torch.where(begins, index, 0).cummax(1).values
    return intervals(first, torch.full_like(first, begins.size(1)))
