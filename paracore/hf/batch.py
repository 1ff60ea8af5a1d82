"""What a call of a model says about its tokens: where they lie, and which of them see which.

transformers says it with an `attention_mask` (padding, or who sees whom), with `position_ids` that begin anew
(packed documents), with `cu_seq_lens_q`, and with a cache of earlier keys. Attention takes masks, and
positions of queries and keys. Here the one becomes the other.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def rotary_positions(
    position_ids: Tensor | None, cu_seqlens: Tensor | None, batch: int, length: int, cache: Any, device: Any
) -> Tensor:
    """Return what rotary embedding turns by: [S] where all sequences have the same, else [B, S]."""
    if position_ids is None:
        positions = torch.arange(length, device=device)
        if cu_seqlens is not None:
            boundaries = cu_seqlens.to(positions)
            return positions - boundaries[document_ids(boundaries, positions)]
        return positions if cache is None else positions + cache.get_seq_length()
    fits = position_ids.shape in ((length,), (1, length), (batch, length))
    if not fits or position_ids.is_floating_point():
        raise UsageError(
            f"position_ids is {position_ids.dtype} {list(position_ids.shape)}, must be integers "
            f"[{batch}, {length}] or [1, {length}]"
        )
    position_ids = position_ids.to(device=device, dtype=torch.int64)
    return position_ids[0] if position_ids.dim() == 2 and position_ids.size(0) == 1 else position_ids


def boundaries_of_both(queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """Return where packed documents begin and end, said of queries and maybe of keys: the same of both."""
    if queries is None and keys is not None:
        raise UsageError("cu_seq_lens_k is given without cu_seq_lens_q")
    if queries is not None and keys is not None and keys is not queries:
        if queries.shape != keys.shape:
            raise UsageError(
                f"cu_seq_lens_q is {list(queries.shape)}, but cu_seq_lens_k {list(keys.shape)}: must be the "
                "same"
            )
        require((queries == keys).all(), "cu_seq_lens_q and cu_seq_lens_k must be the same")
    return queries


def visible_by_type(
    windows: Mapping[str, int | None],
    attention_mask: object,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    batch: int,
    length: int,
    cache: Any,
    device: torch.device,
) -> dict[str, Visible]:
    """Return what each type of layer sees.

    windows: for each type the keys in its sliding window, or None. attention_mask: None; a `Mask` over the
    whole sequence; booleans [B, keys], False for padding, which may be on either side; who sees whom, [B, 1,
    queries, keys], boolean or additive; or a dict of these by type, as `generate` prepares it. Raises
    UsageError for padding within a row, for keys of a query that are not an interval, and for
    other shapes.
    """
    if isinstance(attention_mask, Mapping):
        return {
            kind: _one_type(window, attention_mask.get(kind), None, None, batch, length, cache, device, kind)
            for kind, window in windows.items()
        }
    return {
        kind: _one_type(window, attention_mask, position_ids, cu_seqlens, batch, length, cache, device, kind)
        for kind, window in windows.items()
    }


def _one_type(
    window: int | None,
    attention_mask: object,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    batch: int,
    length: int,
    cache: Any,
    device: torch.device,
    kind: str,
) -> Visible:
    queries, keys, key_count = _places(cache, kind, length, device)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        # Complete, and about indices: nothing is added to it.
        key_length = key_count if keys is None else len(keys)
        return Visible(mask_of(attention_mask.to(device), batch, length, key_length))
    mask = _CAUSAL if window is None else _CAUSAL & sliding_window(left=window - 1)
    if isinstance(attention_mask, Mask):
        mask &= attention_mask
    elif isinstance(attention_mask, Tensor):
        if attention_mask.dim() != 2 or attention_mask.size(0) != batch or attention_mask.size(1) > key_count:
            raise UsageError(
                f"attention_mask is {list(attention_mask.shape)}, must be [{batch}, {key_count}], one number "
                "for each key, or 4-dimensional"
            )
        padding = unpadded(attention_mask.to(device))
        mask = mask if padding is None else mask & padding
    elif attention_mask is not None:
        raise UsageError(f"attention_mask is a {type(attention_mask).__name__}, must be a tensor or a Mask")
    if cu_seqlens is not None:
        mask &= _documents(cu_seqlens, batch, length)
    elif attention_mask is None and position_ids is not None:
        packed = _packed(position_ids.to(device).view(-1, length))
        mask = mask if packed is None else mask & packed
    return Visible(mask, queries, keys)


def _places(
    cache: Any, kind: str, length: int, device: torch.device
) -> tuple[Positions | Tensor | None, Positions | None, int]:
    """Return where queries and keys lie, and one more than the largest position of a key."""
    if cache is None:
        return None, None, length
    slides = kind == "sliding_attention"
    layer = next((i for i, sliding in enumerate(cache.is_sliding) if sliding == slides), 0)
    offset, (key_length, first_key) = cache.get_query_offset(layer), cache.get_mask_sizes(length, layer)
    keys = Positions.contiguous(key_length, first_key)
    if isinstance(offset, Tensor):
        return torch.arange(length, device=device) + offset.to(device), keys, first_key + key_length
    return Positions.contiguous(length, offset), keys, first_key + key_length


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


def _documents(cu_seqlens: Tensor, batch: int, length: int) -> Mask:
    if batch != 1:
        raise UsageError(f"cu_seq_lens_q with a batch of {batch}: documents are packed in one row, [1, S]")
    if cu_seqlens.dim() == 1 and cu_seqlens.numel():
        require(cu_seqlens[-1] == length, f"cu_seq_lens_q must end at {length}, the length of the packed row")
    return documents(cu_seqlens)


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
