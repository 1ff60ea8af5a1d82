"""The mask function behind transformers' interface: what each query sees, as an interval of keys.

transformers describes a mask by a function of (batch, head, query position, key position), and hands models
on what a mask function makes of it. Ours makes a tensor of two numbers per query. It is a tensor, and has
four dims, because such go through transformers as they are: made in advance for a static cache, moved
between devices, recomputed under checkpointing, traced by torch.compile.

This module imports transformers, which is optional: only `register` imports it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils as hf

from paracore.errors import UsageError
from paracore.parallel.masks import Mask, borders, causal, full, intervals, require, sliding_window

MaskFunction = Callable[..., Tensor]

# Elements [B, queries, Sk] of a mask that are evaluated at a time: some tens of MB.
_BLOCK = 1 << 22


def interval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Return what each query sees: int32 [B, 1, Sq, 2], the index of its first key and the end of its keys.

    Called by transformers; see `transformers.masking_utils.sdpa_mask` for the arguments. attention_mask:
    [B, keys], where it is not zero the keys may be seen. Masks that transformers itself makes of causal,
    full and sliding-window attention and of packed sequences are read off; others are evaluated in blocks of
    queries. Neither needs memory for a mask as a whole. Arguments not named here only choose between forms
    that other attention functions need.
    Raises UsageError that names batch row and query if what a query sees has a gap. On a GPU nobody waits,
    and the error comes from an assertion there, as it does from a compiled model.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UsageError(
            f"attention_mask is {list(attention_mask.shape)}, must be [B, keys] or [B, 1, Sq, Sk]"
        )
    padding = hf.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    known = _known(mask_function)
    if known is None:
        first, end, gaps = _evaluate(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, padding, use_vmap, device
        )
        _require_no_gap(gaps)
    else:
        first, end = known.interval(torch.arange(q_length, device=device) + q_offset)
        first, end = ((border - kv_offset).clamp(0, kv_length) for border in (first, end))
        first, end = (border.expand(batch_size, q_length) for border in (first, end))
        if padding is not None:
            shown = padding[:, kv_offset : kv_offset + kv_length].bool()
            first, end, gaps = _shown_within(first, end, shown)
            _require_no_gap(gaps)
    return torch.stack((first, end), -1).int().unsqueeze(1)


def _evaluate(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction,
    padding: Tensor | None,
    use_vmap: bool,
    device: torch.device | str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `borders` [B, Sq] of the mask that `sdpa` would get, made in blocks of queries."""
    # The compiler fuses the evaluation into the reductions over keys: it holds no mask in any case.
    compiling = torch.compiler.is_compiling()
    block = q_length if compiling else max(1, _BLOCK // max(1, batch_size * kv_length))
    found = [torch.empty(3, batch_size, 0, dtype=torch.int64, device=device)]
    for start in range(0, q_length, max(block, 1)):
        visible = hf.sdpa_mask(
            batch_size,
            min(block, q_length - start),
            kv_length,
            q_offset + start,
            kv_offset,
            mask_function,
            padding,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        found.append(torch.stack(borders(visible[:, 0])))
    first, end, gaps = torch.cat(found, -1)
    return first, end, gaps.bool()


def _shown_within(first: Tensor, end: Tensor, shown: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `borders` of the keys from `first` to `end` that are shown.

    first, end: [B, Sq], within 0 and Sk. shown: boolean [B, Sk], the same for all queries.
    """
    keys = torch.arange(shown.size(-1), device=shown.device)
    nowhere = shown.new_zeros(shown.size(0), 1, dtype=torch.int64)
    following = torch.where(shown, keys, len(keys)).flip(-1).cummin(-1).values.flip(-1)
    following = torch.cat((following, nowhere + len(keys)), -1)  # the first shown key at or behind a key
    end_before = torch.cat((nowhere, torch.where(shown, keys + 1, 0).cummax(-1).values), -1)
    count = torch.cat((nowhere, shown.cumsum(-1)), -1)  # of shown keys before a key
    seen = (count.gather(-1, end) - count.gather(-1, first)).clamp_min(0)
    first, end = following.gather(-1, first), end_before.gather(-1, end)
    return first, end, seen != (end - first).clamp_min(0)


def _require_no_gap(gaps: Tensor) -> None:
    if gaps.device.type == "cpu" and not torch.compiler.is_compiling() and gaps.any():
        row, query = gaps.nonzero()[0].tolist()
        raise UsageError(
            f"attention_mask, or the model's mask function, hides keys between those that query {query} of "
            f"batch row {row} sees: they must be one interval. Pad on one side only, or use another "
            'attn_implementation, such as "sdpa"'
        )
    require(
        ~gaps.any(),
        "attention_mask, or the model's mask function, hides keys between those that a query sees",
    )


# ---------------------------------------------------------------- masks whose intervals are known
#
# transformers builds its masks from few functions, most of them closures. A function is known by its very
# code, and what it closes over is read. Whatever is not known is evaluated.


def _code(function: MaskFunction) -> CodeType:
    return function.__code__


_NUMBERS = torch.empty(0)
_BOTH = _code(hf.and_masks())
_WINDOW = _code(hf.sliding_window_overlay(1))
_WINDOW_BOTH_WAYS = _code(hf.sliding_window_bidirectional_overlay(1))
_REMAPPED = _code(hf.remap_positions_for_packed_sequence(hf.causal_mask_function, _NUMBERS))
_SAME_SEQUENCE = _code(hf.packed_sequence_mask_function(_NUMBERS))


def _known(function: MaskFunction) -> Mask | None:
    """Return the mask over positions that `function` describes, if it is one of those known."""
    if function is hf.causal_mask_function:
        return causal()
    if function is hf.bidirectional_mask_function:
        return full()
    if torch.compiler.is_compiling() or not hasattr(function, "__code__"):
        return None  # evaluation is fused there, and closures cannot be looked into
    read = _READINGS.get(function.__code__)
    return None if read is None else read(_closed_over(function))


def _closed_over(function: MaskFunction) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _read_both(closed_over: dict[str, Any]) -> Mask | None:
    functions = closed_over["mask_functions"]
    if len(functions) == 2 and [getattr(f, "__code__", None) for f in functions] == [
        _REMAPPED,
        _SAME_SEQUENCE,
    ]:
        return _read_packed(*map(_closed_over, functions))
    parts = [_known(function) for function in functions]
    known = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, known, full()) if len(known) == len(parts) else None


def _read_packed(remapped: dict[str, Any], same_sequence: dict[str, Any]) -> Mask | None:
    """Within a sequence positions follow each other as indices do: the same distances, the same mask."""
    inner = remapped["mask_function"]
    known = _known(inner) if inner is hf.causal_mask_function or _is_causal_window(inner) else None
    if known is None:
        return None
    sequences = same_sequence["packed_sequence_mask"].contiguous()  # [B, S], counted upwards
    first = torch.searchsorted(sequences, sequences)
    return known & intervals(first, torch.searchsorted(sequences, sequences, right=True))


def _is_causal_window(function: MaskFunction) -> bool:
    if getattr(function, "__code__", None) is not _BOTH:
        return False
    parts = _closed_over(function)["mask_functions"]
    return all(
        part is hf.causal_mask_function or getattr(part, "__code__", None) is _WINDOW for part in parts
    )


_READINGS: dict[CodeType, Callable[[dict[str, Any]], Mask | None]] = {
    _BOTH: _read_both,
    _WINDOW: lambda closed_over: sliding_window(left=closed_over["sliding_window"] - 1),
    _WINDOW_BOTH_WAYS: lambda closed_over: sliding_window(*[closed_over["sliding_window"]] * 2),
}


def require_known_masks() -> None:
    """Raise UsageError if the masks that are read off mean something else in the transformers installed."""
    length = 7
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    sequences = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    window = hf.sliding_window_causal_mask_function(3)
    both_ways = hf.sliding_window_bidirectional_mask_function(2)
    remapped = hf.remap_positions_for_packed_sequence(window, positions)
    packed = hf.and_masks(remapped, hf.packed_sequence_mask_function(sequences))
    for function in (hf.causal_mask_function, hf.bidirectional_mask_function, window, both_ways, packed):
        seen = interval_mask(1, length, length, mask_function=function)
        visible = hf.sdpa_mask(1, length, length, mask_function=function, allow_is_causal_skip=False)
        first, end, _ = borders(visible)
        if not torch.equal(seen, torch.stack((first, end), -1).int()):
            raise UsageError(
                f"the mask {function.__qualname__} of transformers {transformers.__version__} is not what "
                "it was in 5.24"
            )
