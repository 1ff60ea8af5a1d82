"""Plans of the ring: every pair of query and key that sees each other meets once, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paracore import Positions, masks
from paracore.errors import UsageError
from paracore.parallel import layout as layouts
from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask, visible_keys
from paracore.parallel.ring_plan import Intervals, RingPlan, count, plan_ring

LENGTHS, SIZES = st.integers(0, 40), st.integers(1, 6)


@st.composite
def some_masks(draw: st.DrawFn) -> Mask:
    a, b = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    borders = sorted(draw(st.lists(st.integers(0, 40), max_size=4)))
    kinds = [
        masks.full(),
        masks.causal(),
        masks.sliding_window(a, b),
        masks.documents([0, *borders, 40]),
        masks.prefix_lm(a),
        masks.chunked(a + 1),
        masks.key_range(torch.tensor([a, 0]), torch.tensor([40, b])),
    ]
    return draw(st.sampled_from(kinds)) & draw(st.sampled_from(kinds))


@st.composite
def some_layouts(draw: st.DrawFn, mask: Mask) -> Layout:
    length, size, block = draw(LENGTHS), draw(SIZES), draw(st.integers(1, 9))
    kinds = [
        lambda: layouts.contiguous(length, size),
        lambda: layouts.zigzag(length, size),
        lambda: layouts.striped(length, size, block),
        lambda: layouts.balanced(mask, length, size, block),
    ]
    return draw(st.sampled_from(kinds))()


@st.composite
def situations(draw: st.DrawFn) -> tuple[Mask, Layout]:
    mask = draw(some_masks())
    return mask, draw(some_layouts(mask))


def seen(mask: Mask, queries: Positions, keys: Positions) -> Tensor:
    """[Sq, Sk]: whether a query sees a key, in any batch."""
    first, end = visible_keys(mask, queries, keys, torch.device("cpu"))
    index = torch.arange(len(keys))
    return ((first.unsqueeze(-1) <= index) & (index < end.unsqueeze(-1))).any(0)


@given(situations())
def test_every_pair_meets_exactly_once(situation: tuple[Mask, Layout]) -> None:
    mask, layout = situation
    plan = plan_ring(mask, layout)
    everywhere = Positions.contiguous(layout.length)
    for rank, queries in enumerate(layout.ranks):
        met = torch.zeros(len(queries), layout.length, dtype=torch.int64)
        for step in plan.steps[rank]:
            pairs = seen(mask, queries, step.positions)
            met[:, step.positions.tensor()] += pairs
            assert bool(pairs.any()) == step.seen
        assert torch.equal(met, seen(mask, queries, everywhere).long())


@given(situations())
def test_what_is_sent_is_what_is_received_and_somebody_on_the_path_needs_it(
    situation: tuple[Mask, Layout],
) -> None:
    mask, layout = situation
    plan, size = plan_ring(mask, layout), layout.size
    for rank in range(size):
        for index, step in enumerate(plan.steps[rank]):
            held = step.positions.tensor()
            passed_on = held[indices(step.passed_on)]
            if index + 1 == size:
                assert len(passed_on) == 0
                continue
            following = plan.steps[(rank + 1) % size][index + 1]
            assert following.owner == step.owner
            assert torch.equal(passed_on, following.positions.tensor())
            still_to_come = [(step.owner + later) % size for later in range(index + 1, size)]
            needed = torch.zeros(len(passed_on), dtype=torch.bool)
            for later in still_to_come:
                needed |= seen(mask, layout.ranks[later], following.positions).any(0)
            assert needed.all()


@given(situations())
def test_every_gradient_comes_home_once(situation: tuple[Mask, Layout]) -> None:
    """From the last rank that held the key; the rows that arrive are those that the owner waits for."""
    mask, layout = situation
    plan = plan_ring(mask, layout)
    for owner in range(layout.size):
        own, home = layout.ranks[owner].tensor(), []
        for index in range(1, layout.size):
            step = plan.steps[(owner + index) % layout.size][index]
            sent = step.positions.tensor()[indices(step.sent_home)]
            assert torch.equal(sent, own[indices(plan.home_rows(owner, index))])
            home += sent.tolist()
        travelled = plan.steps[(owner + 1) % layout.size][1].positions if layout.size > 1 else Positions(())
        assert sorted(home) == travelled.tensor().tolist()


def indices(intervals: Intervals) -> Tensor:
    pieces = [torch.arange(begin, end) for begin, end in intervals]
    return torch.cat([torch.empty(0, dtype=torch.int64), *pieces])


@given(situations())
def test_what_a_rank_needs_of_another_is_what_its_queries_see(situation: tuple[Mask, Layout]) -> None:
    mask, layout = situation
    plan = plan_ring(mask, layout)
    for rank, queries in enumerate(layout.ranks):
        for owner, keys in enumerate(layout.ranks):
            expected = seen(mask, queries, keys).any(0).nonzero().flatten()
            # A union of intervals: keys between two that are seen may be in it only if some query sees them.
            assert torch.equal(indices(plan.needed[rank][owner]), expected)


def sent(plan: RingPlan) -> list[list[int]]:
    """[rank][step]: how many keys travel on."""
    return [[count(step.passed_on) for step in steps] for steps in plan.steps]


def test_a_window_exchanges_only_its_halo() -> None:
    plan = plan_ring(masks.sliding_window(10, 0), layouts.contiguous(400, 4))
    assert sent(plan) == [[10, 0, 0, 0]] * 3 + [[0, 0, 0, 0]]


def test_documents_of_one_rank_exchange_nothing() -> None:
    mask = masks.causal() & masks.documents([0, 50, 100, 150, 200])
    assert sent(plan_ring(mask, layouts.contiguous(200, 4))) == [[0] * 4] * 4
    shared = masks.causal() & masks.documents([0, 50, 110, 150, 200])  # 10 tokens beyond the second rank's
    assert sent(plan_ring(shared, layouts.contiguous(200, 4))) == [[0] * 4, [50, 0, 0, 0], [0] * 4, [0] * 4]


def test_causal_keys_stop_at_the_last_rank() -> None:
    plan = plan_ring(masks.causal(), layouts.contiguous(40, 4))
    assert sent(plan) == [[10, 0, 0, 0], [10, 10, 0, 0], [10, 10, 10, 0], [0, 0, 0, 0]]


def test_the_second_half_of_a_zigzag_is_sent_to_nobody_who_sees_none_of_it() -> None:
    plan = plan_ring(masks.causal(), layouts.zigzag(80, 4))
    assert sent(plan)[0][0] == 10  # only the last rank's own queries see its last piece
    assert sum(map(sum, sent(plan))) < 3 * 80


def test_plans_have_the_same_digests_exactly_if_mask_and_layout_are_the_same() -> None:
    zigzag, contiguous = layouts.zigzag(40, 2), layouts.contiguous(40, 2)
    same = [plan_ring(mask, zigzag) for mask in (masks.causal(), masks.sliding_window(right=0))]
    others = [plan_ring(mask, zigzag) for mask in (masks.full(), masks.sliding_window(38, 0))]
    assert same[0].layout_digest != plan_ring(masks.causal(), contiguous).layout_digest
    assert len({plan.layout_digest for plan in same + others}) == 1
    assert same[0].mask_digest == same[1].mask_digest
    assert len({plan.mask_digest for plan in same + others}) == 3


def test_a_mask_that_does_not_cover_the_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="boundaries end at 30, must end at 40 or beyond"):
        plan_ring(masks.documents([0, 30]), layouts.contiguous(40, 2))
