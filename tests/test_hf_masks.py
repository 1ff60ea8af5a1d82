"""The mask function behind transformers' interface, against the dense masks that `sdpa` gets there."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as hf

from paracore.errors import UsageError
from paracore.hf import mask_function as ours
from paracore.hf.mask_function import interval_mask
from paracore.parallel.masks import sliding_window

MaskFunction = Callable[..., Tensor]
B = 2


def shown(seen: Tensor, keys: int) -> Tensor:
    """What kernels make of it: boolean [B, Sq, Sk]."""
    assert seen.dtype == torch.int32
    assert seen.size(1) == 1
    first, end = seen[:, 0].unbind(-1)
    index = torch.arange(keys)
    return (first.unsqueeze(-1) <= index) & (index < end.unsqueeze(-1))


def has_gap(visible: Tensor) -> Tensor:
    """By another way than the code's: more than one run of keys begins."""
    before = torch.nn.functional.pad(visible, (1, 0))[..., :-1]
    return (visible & ~before).sum(-1) > 1


@st.composite
def mask_functions(draw: st.DrawFn, length: int) -> tuple[MaskFunction, bool]:
    """One of those that transformers' models use, for positions below `length`; whether it needs vmap."""
    size = draw(st.integers(1, length))
    left = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=B, max_size=B)))
    blocks = draw(st.lists(st.integers(-1, 2), min_size=B * length, max_size=B * length))
    overlay = hf.blockwise_overlay(torch.tensor(blocks).view(B, length).sort(-1).values)
    base = draw(
        st.sampled_from(
            [
                hf.causal_mask_function,
                hf.bidirectional_mask_function,
                hf.sliding_window_causal_mask_function(size),
                hf.sliding_window_bidirectional_mask_function(size),
                hf.chunked_causal_mask_function(size, left),
                hf.or_masks(hf.causal_mask_function, overlay),
            ]
        )
    )
    if draw(st.booleans()):
        return base, False
    return hf.or_masks(base, lambda b, h, q, k: (q < size) & (k < size)), True


@settings(deadline=None)  # the first use of vmap takes long
@given(st.data(), st.integers(0, 6), st.integers(0, 8), st.integers(0, 4), st.integers(0, 4))
def test_every_mask_function_is_served_exactly_or_refused_with_the_query_that_has_a_gap(
    data: st.DataObject, queries: int, keys: int, q_offset: int, kv_offset: int
) -> None:
    """For any lengths and offsets, as caches have them, and any padding."""
    keys = max(keys, 1)
    length = max(queries + q_offset, keys + kv_offset, 1)
    function, use_vmap = data.draw(mask_functions(length))
    padding = None
    if data.draw(st.booleans()):
        width = data.draw(st.integers(1, length))  # of a static cache, the later keys are not in there
        padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=B * width, max_size=B * width)))
        padding = padding.view(B, width)
    given_to_both = (B, queries, keys, q_offset, kv_offset, function, padding)
    if queries == 0:
        assert interval_mask(*given_to_both, use_vmap=use_vmap).shape == (B, 1, 0, 2)
        return
    expected = hf.sdpa_mask(*given_to_both, allow_is_causal_skip=False, use_vmap=use_vmap)[:, 0]
    gaps = has_gap(expected)
    with patch.object(ours, "_BLOCK", data.draw(st.sampled_from([1, 3 * B * keys, 1 << 20]))):
        if not gaps.any():
            assert torch.equal(shown(interval_mask(*given_to_both, use_vmap=use_vmap), keys), expected)
            return
        row, query = gaps.nonzero()[0].tolist()
        with pytest.raises(UsageError, match=f"query {query} of batch row {row} sees: they must be one"):
            interval_mask(*given_to_both, use_vmap=use_vmap)


@settings(deadline=None)
@given(st.data(), st.integers(1, 30), st.integers(1, 30), st.sampled_from([1, 100, 1 << 20]))
def test_any_interval_per_query_is_found_by_evaluation(
    data: st.DataObject, queries: int, keys: int, block: int
) -> None:
    number = st.integers(0, keys)
    first, end = (
        torch.tensor(data.draw(st.lists(number, min_size=B * queries, max_size=B * queries))).view(B, queries)
        for _ in range(2)
    )

    def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[batch, query] <= key) & (key < end[batch, query])

    with patch.object(ours, "_BLOCK", block):
        seen = interval_mask(B, queries, keys, mask_function=function)
    index = torch.arange(keys)
    assert torch.equal(shown(seen, keys), (first.unsqueeze(-1) <= index) & (index < end.unsqueeze(-1)))


@settings(deadline=None)
@given(st.data(), st.integers(1, 12), st.sampled_from([None, 1, 3]))
def test_packed_sequences_are_read_off(data: st.DataObject, length: int, window: int | None) -> None:
    starts = data.draw(st.lists(st.booleans(), min_size=B * length, max_size=B * length))
    first = torch.tensor(data.draw(st.integers(0, 5)))  # positions may begin anywhere
    position_ids = torch.empty(B, length, dtype=torch.int64)
    for index, start in enumerate(starts):
        row, at = divmod(index, length)
        position_ids[row, at] = first if at == 0 or start else position_ids[row, at - 1] + 1
    sequences = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
    base = hf.causal_mask_function if window is None else hf.sliding_window_causal_mask_function(window)
    remapped = hf.remap_positions_for_packed_sequence(base, position_ids)
    function = hf.and_masks(remapped, hf.packed_sequence_mask_function(sequences))
    expected = hf.sdpa_mask(B, length, length, mask_function=function, allow_is_causal_skip=False)
    with patch.object(hf, "sdpa_mask", side_effect=AssertionError("evaluated")):
        seen = interval_mask(B, length, length, mask_function=function)
    assert torch.equal(shown(seen, length), expected[:, 0])


@pytest.mark.parametrize(
    "function",
    [
        hf.causal_mask_function,
        hf.bidirectional_mask_function,
        hf.sliding_window_causal_mask_function(1000),
        hf.sliding_window_bidirectional_mask_function(1000),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_long_sequences_need_no_evaluation(function: MaskFunction, padded: bool) -> None:
    length = 1 << 18  # 2^36 pairs of query and key
    padding = torch.arange(length).expand(B, -1) >= 17 if padded else None
    seen = interval_mask(B, length, length, mask_function=function, attention_mask=padding)
    assert seen.shape == (B, 1, length, 2)


def test_what_is_evaluated_is_evaluated_in_blocks() -> None:
    """Kind of fault: a mask of 2^24 pairs held whole, several times, for a sequence of 4096."""
    sizes: list[int] = []

    def record(*args: object, **kwargs: object) -> Tensor:
        made: Tensor = dense(*args, **kwargs)
        sizes.append(made.numel())
        return made

    dense, length = hf.sdpa_mask, 4096
    function = hf.chunked_causal_mask_function(1000, torch.zeros(1, dtype=torch.int64))
    with patch.object(hf, "sdpa_mask", record):
        seen = interval_mask(1, length, length, mask_function=function)
    assert sum(sizes) == length**2
    assert max(sizes) <= 1 << 22
    index = torch.arange(length)
    assert torch.equal(seen[0, 0], torch.stack((index // 1000 * 1000, index + 1), -1).int())


@pytest.mark.parametrize("offset", [7, torch.tensor(7)], ids=["number", "tensor"])
@pytest.mark.parametrize("window", [None, 4])
def test_offsets_of_queries_may_be_tensors(offset: int | Tensor, window: int | None) -> None:
    """A static cache counts in a tensor, so that no graph breaks."""
    base = hf.causal_mask_function if window is None else hf.sliding_window_causal_mask_function(window)
    for function in (base, hf.and_masks(base, hf.or_masks(base))):
        seen = interval_mask(B, 2, 16, offset, 0, function)
        first = [0, 0] if window is None else [4, 5]
        assert seen[:, 0].tolist() == [[[first[0], 8], [first[1], 9]]] * B


def test_a_changed_meaning_of_the_masks_that_are_read_off_is_noticed() -> None:
    ours.require_known_masks()
    wrong = {**ours._READINGS, ours._WINDOW: lambda over: sliding_window(left=over["sliding_window"])}
    with (
        patch.object(ours, "_READINGS", wrong),
        pytest.raises(UsageError, match=r"is not what it was in 5\.24"),
    ):
        ours.require_known_masks()


def test_padding_of_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match=r"attention_mask is \[2, 3, 4\], must be \[B, keys\]"):
        interval_mask(2, 4, 4, attention_mask=torch.ones(2, 3, 4))
