"""The layout of flat memory: every element once, aligned, in the same place for any number of ranks."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paracore.optim.flat import ALIGNMENT, BucketLayout, Entry, pieces_tensor, plan_buckets
from paracore.reference_adamw import PIECE

RANKS = st.integers(1, 6)
timeless = settings(deadline=None, max_examples=60)  # other processes may take the cores


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    """Parameters of three keys, in any order of numbers; some are smaller than their room, as over tp."""
    sizes = st.one_of(st.integers(0, 200), st.integers(PIECE - 2, 3 * PIECE))
    rooms = draw(st.lists(sizes, max_size=9))
    indices = draw(st.permutations(range(len(rooms))))
    return [
        Entry(index, room - draw(st.integers(0, min(room, 3))), room, draw(st.sampled_from("abc")))
        for index, room in zip(indices, rooms, strict=True)
    ]


BUCKET = st.integers(1, 4 * PIECE)


def everywhere(layout: BucketLayout) -> list[tuple[int, int, int]]:
    return layout.pieces(slice(0, layout.length))


@timeless
@given(entries=entries(), ranks=RANKS, bucket=BUCKET)
def test_every_parameter_has_one_slot_of_its_size_among_others_of_its_key(
    entries: list[Entry], ranks: int, bucket: int
) -> None:
    layouts = plan_buckets(entries, ranks, bucket)
    placed = {slot.index: slot.numel for layout in layouts for slot in layout.slots}
    assert placed == {entry.index: entry.numel for entry in entries}
    key_of = {entry.index: entry.key for entry in entries}
    assert all(len({key_of[slot.index] for slot in layout.slots}) == 1 for layout in layouts)
    assert sum(len(layout.slots) for layout in layouts) == len(entries)


@timeless
@given(entries=entries(), ranks=RANKS, bucket=BUCKET)
def test_slots_are_aligned_and_leave_each_other_their_room(
    entries: list[Entry], ranks: int, bucket: int
) -> None:
    room = {entry.index: entry.room for entry in entries}
    for layout in plan_buckets(entries, ranks, bucket):
        end = 0
        for slot in layout.slots:
            assert slot.begin % ALIGNMENT == 0
            assert slot.begin >= end
            end = slot.begin + room[slot.index]
        assert end <= layout.used <= layout.length


@timeless
@given(entries=entries(), ranks=RANKS, bucket=BUCKET)
def test_a_bucket_is_no_larger_than_asked_unless_one_parameter_is(
    entries: list[Entry], ranks: int, bucket: int
) -> None:
    room = {entry.index: entry.room for entry in entries}
    for layout in plan_buckets(entries, ranks, bucket):
        total = sum(room[slot.index] for slot in layout.slots)
        assert total <= bucket or len([s for s in layout.slots if room[s.index]]) == 1


@timeless
@given(entries=entries(), ranks=RANKS, bucket=BUCKET)
def test_shards_are_whole_grid_cells_and_partition_the_bucket(
    entries: list[Entry], ranks: int, bucket: int
) -> None:
    for layout in plan_buckets(entries, ranks, bucket):
        shards = [layout.shard(rank) for rank in range(ranks)]
        assert all(one.stop == other.start for one, other in itertools.pairwise(shards))
        assert (shards[0].start, shards[-1].stop) == (0, layout.length)
        assert {s.stop - s.start for s in shards} == {layout.shard_length}
        assert layout.shard_length % PIECE == 0
        assert layout.length - layout.used < ranks * PIECE


@timeless
@given(entries=entries(), ranks=RANKS, bucket=BUCKET)
def test_pieces_cover_each_element_of_each_parameter_once_and_nothing_else(
    entries: list[Entry], ranks: int, bucket: int
) -> None:
    for layout in plan_buckets(entries, ranks, bucket):
        covered = torch.full((layout.length,), -1)
        for begin, end, index in everywhere(layout):
            assert 0 < end - begin <= PIECE
            assert begin // PIECE == (end - 1) // PIECE, "a piece lies in one cell of the grid"
            assert (covered[begin:end] == -1).all()
            covered[begin:end] = index
        expected = torch.full((layout.length,), -1)
        for slot in layout.slots:
            expected[slot.begin : slot.end] = slot.index
        assert torch.equal(covered, expected)


@timeless
@given(entries=entries(), ranks=RANKS, bucket=BUCKET)
def test_neither_places_nor_pieces_depend_on_the_number_of_ranks(
    entries: list[Entry], ranks: int, bucket: int
) -> None:
    alone, shared = plan_buckets(entries, 1, bucket), plan_buckets(entries, ranks, bucket)
    assert [layout.slots for layout in shared] == [layout.slots for layout in alone]
    for one, many in zip(alone, shared, strict=True):
        owned = [many.shard(rank) for rank in range(ranks)]
        pieces = [(b + s.start, e + s.start, i) for s in owned for b, e, i in many.pieces(s)]
        assert sorted(pieces) == sorted(everywhere(one))


@timeless
@given(entries=entries(), bucket=BUCKET, numels=st.integers(0, 3))
def test_places_do_not_depend_on_what_a_rank_of_tp_holds_of_its_room(
    entries: list[Entry], bucket: int, numels: int
) -> None:
    others = [Entry(e.index, max(0, e.room - numels), e.room, e.key) for e in entries]
    for one, other in zip(plan_buckets(entries, 2, bucket), plan_buckets(others, 2, bucket), strict=True):
        assert [slot.begin for slot in one.slots] == [slot.begin for slot in other.slots]
        assert one.length == other.length


def test_no_pieces_make_an_empty_table_of_three_columns() -> None:
    assert pieces_tensor([], torch.device("cpu")).shape == (0, 3)
    assert plan_buckets([], 3, 1) == []
