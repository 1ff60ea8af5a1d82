"""The tiles that attention's programs walk, against a comparison of every query with every key."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from paracore.kernels import attention_ranges
from paracore.kernels.attention_ranges import ranges_of_keys, ranges_of_queries
from tests.triton_attention_cases import intervals, normalised


@st.composite
def masks(draw):
    """first, end [Bm, Sq] and Sk: arbitrary intervals, with many that are long or empty."""
    Bm, Sq, Sk = draw(st.integers(1, 2)), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    bounds = st.sampled_from([0, Sk]) | st.integers(0, Sk)
    rows = st.lists(st.tuples(bounds, bounds), min_size=Bm * Sq, max_size=Bm * Sq)
    pairs = torch.tensor(draw(rows)).view(Bm, Sq, 2)
    first, end = normalised(pairs[..., 0], pairs[..., 1], Sk)
    return first, end, Sk


def seen_tiles(first, end, Sk, queries, keys):
    """Per batch and pair of tiles: whether any query sees any key, and whether all see all."""
    index = torch.arange(Sk)
    seen = (first.unsqueeze(-1) <= index) & (index < end.unsqueeze(-1))  # [Bm, Sq, Sk]
    rows = seen.split(queries, 1)
    any_, all_ = (
        torch.stack(
            [torch.stack([test(tile) for tile in row.split(keys, 2)], -1) for row in rows], 1
        )  # [Bm, Tq, Tk]
        for test in (lambda tile: tile.any(-1).any(-1), lambda tile: tile.all(-1).all(-1))
    )
    return any_, all_


def inside(ranges, low, high, tiles):
    """Which of `tiles` tiles lie in low..high of each range, [Bm, ranges, tiles]."""
    tile = torch.arange(tiles)
    return (tile >= ranges[..., low, None]) & (tile < ranges[..., high, None])


def check_order(ranges, tiles):
    assert ranges.dtype == torch.int32
    assert ranges.is_contiguous()
    assert (ranges.diff(dim=-1) >= 0).all()
    assert (ranges >= 0).all()
    assert (ranges <= tiles).all()


def full(size, tile):
    """Which tiles hold as many rows as fit."""
    return torch.arange(-(-size // tile)) < size // tile


SIZES = st.sampled_from([1, 4, 16])


@settings(deadline=None, max_examples=150)
@given(masks(), SIZES, SIZES)
def test_ranges_of_queries(mask, queries, keys):
    first, end, Sk = mask
    ranges = ranges_of_queries(first, end, Sk, queries, keys)
    any_, all_ = seen_tiles(first, end, Sk, queries, keys)
    tiles = any_.size(-1)
    check_order(ranges, tiles)
    walked = inside(ranges, 0, 3, tiles)
    assert not (any_ & ~walked).any()
    # No more than from the first tile that is seen to the last.
    assert torch.equal(walked, any_.cummax(-1).values & any_.flip(-1).cummax(-1).values.flip(-1))
    # One query's interval is cut by no other's, so the whole tiles are consecutive: all of them are found.
    assert torch.equal(inside(ranges, 1, 2, tiles), all_ & full(Sk, keys))


@settings(deadline=None, max_examples=150)
@given(masks(), SIZES, SIZES, st.sampled_from([1, 7, 1 << 20]))
def test_ranges_of_keys(mask, queries, keys, pairs_at_once):
    first, end, Sk = mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_ranges, "PAIRS_AT_ONCE", pairs_at_once)
        ranges = ranges_of_keys(first, end, Sk, queries, keys)
    any_, all_ = (x.mT for x in seen_tiles(first, end, Sk, queries, keys))
    tiles = any_.size(-1)
    check_order(ranges, tiles)
    assert not (any_ & ~inside(ranges, 0, 3, tiles)).any()
    whole = all_ & full(first.size(1), queries) & full(Sk, keys).unsqueeze(-1)
    found = inside(ranges, 1, 2, tiles)
    assert not (found & ~whole).any()
    assert (found.sum(-1) >= longest_run(whole)).all()


def longest_run(x):
    """Length of the longest run of True along the last dim, one element after the other."""
    longest = run = torch.zeros(x.shape[:-1], dtype=torch.int64)
    for column in x.unbind(-1):
        run = torch.where(column, run + 1, 0)
        longest = torch.maximum(longest, run)
    return longest


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
def test_ordered_masks_leave_nothing_out_and_walk_nothing_twice(mask):
    """Where starts and ends only grow, a tile of keys walks exactly the tiles that see it."""
    first, end = intervals(mask, 1, 300, 280)
    any_, all_ = (x.mT for x in seen_tiles(first, end, 280, 16, 32))
    ranges = ranges_of_keys(first, end, 280, 16, 32)
    assert torch.equal(inside(ranges, 0, 3, any_.size(-1)), any_)
    whole = all_ & full(300, 16) & full(280, 32).unsqueeze(-1)
    assert torch.equal(inside(ranges, 1, 2, any_.size(-1)), whole)
    assert all_.any() == (mask != "window")


def test_without_queries_or_keys_there_is_nothing_to_walk():
    first, end = torch.full((1, 5), 0, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int32)
    assert ranges_of_queries(first, end, 0, 4, 4).tolist() == [[[0] * 4] * 2]
    assert ranges_of_keys(first, end, 0, 4, 4).shape == (1, 0, 4)


# ---------------------------------------------------------------- memory


@pytest.fixture
def mask():
    return intervals("causal", 1, 50, 50)


@pytest.mark.parametrize("ranges_of", [ranges_of_queries, ranges_of_keys])
def test_the_same_question_is_answered_once(mask, ranges_of):
    first, end = mask
    ranges = ranges_of(first, end, 50, 4, 8)
    assert ranges_of(first, end, 50, 4, 8) is ranges
    assert not torch.equal(ranges_of(first, end, 50, 8, 8), ranges)
    assert not torch.equal(ranges_of(first, end - 20, 50, 4, 8), ranges)
    assert ranges_of_queries(first, end, 50, 4, 8) is not ranges_of_keys(first, end, 50, 4, 8)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_mask_that_has_changed_is_asked_anew(mask, changed):
    first, end = mask
    before = ranges_of_queries(first, end, 50, 4, 8)
    mask[changed].fill_(25)
    after = ranges_of_queries(first, end, 50, 4, 8)
    assert not torch.equal(after, before)
    assert torch.equal(after, ranges_of_queries(first.clone(), end.clone(), 50, 4, 8))


def test_a_mask_that_does_not_count_its_changes_is_always_asked_anew():
    with torch.inference_mode():
        first, end = intervals("causal", 1, 50, 50)
        before = ranges_of_queries(first, end, 50, 4, 8)
        end.fill_(3)
        assert not torch.equal(ranges_of_queries(first, end, 50, 4, 8), before)


@pytest.mark.parametrize("freed", [0, 1])
def test_answers_die_with_their_mask(freed):
    mask = list(intervals("full", 1, 20, 20))
    ranges_of_queries(mask[0], mask[1], 20, 4, 8)
    known = attention_ranges._known
    gc.collect()
    before = len(known)
    assert len(known[mask[0]]) == 1
    if freed == 1:
        del mask[1]
        gc.collect()
        assert len(known[mask[0]]) == 0
        return
    del mask[0]
    gc.collect()
    assert len(known) == before - 1


def test_nothing_is_remembered_while_a_graph_is_traced(mask, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    first, end = mask
    assert ranges_of_queries(first, end, 50, 4, 8) is not ranges_of_queries(first, end, 50, 4, 8)


def test_a_million_tokens_are_compared_in_pieces(monkeypatch):
    """All pairs of their tiles at once would be 2^28; the largest tensor holds no more than PAIRS_AT_ONCE."""
    S, tile = 1 << 16, 16
    first, end = intervals("causal", 1, S, S)
    sizes = []
    ranges_of_chunk = attention_ranges._key_ranges_of

    def watched(starts, *arguments):
        sizes.append(starts.numel() * (S // tile))
        return ranges_of_chunk(starts, *arguments)

    monkeypatch.setattr(attention_ranges, "_key_ranges_of", watched)
    ranges = ranges_of_keys(first, end, S, tile, tile)
    assert max(sizes) <= attention_ranges.PAIRS_AT_ONCE
    assert len(sizes) == (S // tile) ** 2 // attention_ranges.PAIRS_AT_ONCE
    tiles = torch.arange(S // tile, dtype=torch.int32)
    assert torch.equal(ranges[0, :, 0], tiles)
    assert torch.equal(ranges[0, :, 1], (tiles + 1).clamp(max=S // tile))
    assert (ranges[0, :, 2:] == S // tile).all()
