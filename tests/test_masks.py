"""A mask is one interval of key positions per query: every kind against a brute-force definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paracore import masks
from paracore.errors import UsageError
from paracore.parallel.masks import Mask, visible_keys
from paracore.parallel.positions import Positions

CPU = torch.device("cpu")
LENGTH = 24


@dataclass(frozen=True)
class Kind:
    """A mask, and the definition: sees(batch, query position, key position)."""

    mask: Mask
    sees: Callable[[int, int, int], bool]


def document_of(boundaries: list[int], position: int) -> int:
    return sum(boundary <= position for boundary in boundaries)


numbers = st.integers(0, LENGTH)


@st.composite
def kinds(draw: st.DrawFn, batch: int) -> Kind:
    a, b = draw(numbers), draw(numbers)
    boundaries = [0, *sorted(draw(st.lists(numbers, max_size=5))), LENGTH]
    first, end = (draw(st.lists(numbers, min_size=batch, max_size=batch)) for _ in range(2))
    return draw(
        st.sampled_from(
            [
                Kind(masks.full(), lambda _, q, k: True),
                Kind(masks.causal(), lambda _, q, k: k <= q),
                Kind(masks.sliding_window(a, b), lambda _, q, k: q - a <= k <= q + b),
                Kind(masks.sliding_window(left=a), lambda _, q, k: q - a <= k),
                Kind(masks.sliding_window(right=b), lambda _, q, k: k <= q + b),
                *(
                    Kind(
                        masks.documents(given_as),
                        lambda _, q, k: document_of(boundaries, q) == document_of(boundaries, k),
                    )
                    for given_as in (boundaries, torch.tensor(boundaries), torch.tensor(boundaries).int())
                ),
                Kind(masks.prefix_lm(a), lambda _, q, k: k < a or k <= q),
                Kind(masks.prefix_lm(torch.tensor(end)), lambda i, q, k: k < end[i] or k <= q),
                Kind(masks.chunked(a + 1), lambda _, q, k: q // (a + 1) == k // (a + 1)),
                Kind(masks.key_range(a, b), lambda _, q, k: a <= k < b),
                Kind(masks.key_range(0, torch.tensor(end)), lambda i, q, k: k < end[i]),
                Kind(masks.key_range(torch.tensor(first), LENGTH), lambda i, q, k: first[i] <= k),
                Kind(
                    masks.key_range(torch.tensor(first), torch.tensor(end)),
                    lambda i, q, k: first[i] <= k < end[i],
                ),
            ]
        )
    )


@st.composite
def runs(draw: st.DrawFn, *, increasing: bool) -> Positions:
    """Some of the positions below LENGTH, in runs."""
    chosen = draw(st.lists(st.integers(0, LENGTH - 1), unique=True, max_size=LENGTH))
    return Positions.of((position, 1) for position in (sorted(chosen) if increasing else chosen))


def brute_force(kind: Kind, batch: int, queries: Tensor, keys: Tensor) -> Tensor:
    return torch.tensor(
        [[[kind.sees(i, q, k) for k in keys.tolist()] for q in queries.tolist()] for i in range(batch)],
        dtype=torch.bool,
    ).view(batch, len(queries), len(keys))


def dense(first: Tensor, end: Tensor, keys: int) -> Tensor:
    """What kernels make of first and end."""
    index = torch.arange(keys)
    return (first.unsqueeze(-1) <= index) & (index < end.unsqueeze(-1))


@given(
    st.data(), runs(increasing=False), st.one_of(runs(increasing=True), st.just(Positions.contiguous(LENGTH)))
)
def test_every_mask_shows_what_its_definition_says(
    data: st.DataObject, queries: Positions, keys: Positions
) -> None:
    """For queries in any order and keys with gaps, as ranks of a context-parallel mesh hold them."""
    batch = 3
    kind = data.draw(kinds(batch))
    first, end = visible_keys(kind.mask, queries, keys, CPU)
    assert first.dtype == end.dtype == torch.int32
    assert first.shape == end.shape
    assert first.shape in ((1, len(queries)), (batch, len(queries)))
    expected = brute_force(kind, batch, queries.tensor(), keys.tensor())
    assert torch.equal(dense(first, end, len(keys)).expand_as(expected), expected)
    nothing = ~expected.any(-1)
    assert (first.expand_as(nothing)[nothing] == len(keys)).all()
    assert (end.expand_as(nothing)[nothing] == 0).all()


@given(st.data(), st.integers(0, LENGTH), st.integers(0, 5))
def test_positions_may_come_as_tensors(data: st.DataObject, length: int, start: int) -> None:
    mask = data.draw(kinds(batch=2)).mask
    queries = torch.arange(LENGTH)[start:]
    keys = Positions.of([(0, length // 2), (length // 2 + 1, LENGTH - length)])
    known = visible_keys(mask, Positions.contiguous(len(queries), start), keys, CPU)
    assert all(map(torch.equal, known, visible_keys(mask, queries, keys.tensor(), CPU)))


@given(st.data())
def test_the_intersection_of_two_masks_shows_what_both_show(data: st.DataObject) -> None:
    one, other = data.draw(kinds(batch=2)), data.draw(kinds(batch=2))
    both = Kind(one.mask & other.mask, lambda i, q, k: one.sees(i, q, k) and other.sees(i, q, k))
    everywhere = Positions.contiguous(LENGTH)
    shown = dense(*visible_keys(both.mask, everywhere, everywhere, CPU), LENGTH)
    expected = brute_force(both, 2, everywhere.tensor(), everywhere.tensor())
    assert torch.equal(shown.expand_as(expected), expected)


@given(st.data(), st.booleans())
def test_a_dense_mask_is_taken_if_each_query_sees_an_interval(data: st.DataObject, batched: bool) -> None:
    kind = data.draw(kinds(batch=2))
    everywhere = Positions.contiguous(LENGTH)
    visible = brute_force(kind, 2, everywhere.tensor(), everywhere.tensor())
    visible = visible if batched else visible[0]
    shown = dense(*visible_keys(masks.from_boolean(visible), everywhere, everywhere, CPU), LENGTH)
    assert torch.equal(shown, visible if batched else visible.unsqueeze(0))


def test_a_dense_mask_with_a_gap_is_refused_with_the_query_that_has_it() -> None:
    visible = torch.ones(2, 4, 4, dtype=torch.bool)
    visible[1, 2, 1] = False
    with pytest.raises(
        UsageError, match=r"visible\[1, 2\]: the keys that this query sees are not an interval"
    ):
        masks.from_boolean(visible)


@given(st.data(), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_intervals_are_given_for_each_query(data: st.DataObject, batched: bool, dtype: torch.dtype) -> None:
    numbers = st.lists(st.integers(0, LENGTH), min_size=2 * LENGTH, max_size=2 * LENGTH)
    first, end = (torch.tensor(data.draw(numbers), dtype=dtype).view(2, LENGTH) for _ in range(2))
    mask = masks.intervals(first, end) if batched else masks.intervals(first[0], end[0])
    starts, ends = first.tolist(), end.tolist()
    kind = Kind(mask, lambda i, q, k: starts[i][q] <= k < ends[i][q])
    queries, keys = Positions(((5, 9), (0, 3))), Positions(((2, 4), (9, 8)))
    expected = brute_force(kind, 2 if batched else 1, queries.tensor(), keys.tensor())
    assert torch.equal(dense(*visible_keys(mask, queries, keys, CPU), len(keys)), expected)
    with pytest.raises(UsageError, match=f"mask has {LENGTH} queries, but there is one at {LENGTH}"):
        visible_keys(mask, Positions.contiguous(LENGTH + 1), keys, CPU)


def test_results_are_kept_until_a_tensor_of_the_mask_changes() -> None:
    """Kind of fault: stale lengths, when a buffer is written to between steps."""
    boundaries = torch.tensor([0, 3, 8])
    mask, everywhere = masks.causal() & masks.documents(boundaries), Positions.contiguous(8)
    first, _ = visible_keys(mask, everywhere, everywhere, CPU)
    assert visible_keys(mask, everywhere, everywhere, CPU)[0] is first
    boundaries[1] = 5
    changed, _ = visible_keys(mask, everywhere, everywhere, CPU)
    assert changed[0].tolist() == [0] * 5 + [5] * 3
    assert first[0].tolist() == [0] * 3 + [3] * 5


def test_what_inference_mode_computed_first_may_be_saved_for_backward() -> None:
    """Kind of fault: what is kept from an evaluation makes training fail later."""
    queries, keys = Positions(((1, 3), (7, 2))), Positions.contiguous(11)
    with torch.inference_mode():
        kept = (*visible_keys(masks.sliding_window(5, 1), queries, keys, CPU), queries.tensor())
    assert not any(tensor.is_inference() for tensor in kept)


def test_queries_beyond_a_dense_mask_see_nothing() -> None:
    mask = masks.from_boolean(torch.ones(4, 6, dtype=torch.bool))
    first, end = visible_keys(mask, torch.tensor([3, 4, 900]), Positions.contiguous(6), CPU)
    assert (first.tolist(), end.tolist()) == ([[0, 6, 6]], [[6, 0, 0]])


def test_masks_of_numbers_are_equal_if_they_mean_the_same() -> None:
    assert masks.causal() & masks.documents([0, 4]) == masks.causal() & masks.documents([0, 4])
    assert masks.causal() == masks.sliding_window(right=0)
    assert masks.causal() != masks.full()
    everywhere = Positions.contiguous(5)
    kept = visible_keys(masks.prefix_lm(3), everywhere, everywhere, CPU)
    assert visible_keys(masks.prefix_lm(3), everywhere, everywhere, CPU)[0] is kept[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.sliding_window(-1, 0), "left=-1: must be None or at least 0"),
        (lambda: masks.sliding_window(0, -2), "right=-2: must be None or at least 0"),
        (lambda: masks.documents([1, 4]), "boundaries must begin with 0"),
        (lambda: masks.documents([0, 4, 3]), "never fall"),
        (lambda: masks.documents(torch.tensor([0, 4, 3])), "never fall"),
        (lambda: masks.documents([]), "boundaries is empty"),
        (lambda: masks.documents([0.0, 4.0]), r"boundaries=\[0.0, 4.0\]: must be integers"),  # type: ignore[list-item]
        (
            lambda: masks.key_range(torch.tensor([0, 1]), torch.tensor([1, 2, 3])),
            "batch of 2, but end for one of 3",
        ),
        (
            lambda: masks.documents(torch.tensor([0.0, 4.0])),
            r"boundaries is torch.float32 \[2\], must be int",
        ),
        (lambda: masks.prefix_lm(-1), "prefix=-1: must be at least 0"),
        (lambda: masks.prefix_lm(torch.tensor([[1]])), r"prefix is .* \[1, 1\], must be integers \[B\]"),
        (lambda: masks.chunked(0), "size=0: must be at least 1"),
        (lambda: masks.key_range(0, torch.tensor([1.5])), r"end is torch.float32 \[1\], must be integers"),
        (
            lambda: masks.intervals(torch.zeros(3, 2), torch.ones(3, 2)),
            r"first is torch.float32 \[3, 2\], must",
        ),
        (
            lambda: masks.intervals(torch.tensor(0), torch.tensor(1)),
            r"first is torch.int64 \[\], must be int",
        ),
        (
            lambda: masks.intervals(torch.tensor([0, 1]), torch.tensor([1])),
            r"first is \[2\], but end is \[1\]",
        ),
        (lambda: masks.from_boolean(torch.ones(3, 3)), r"visible is torch.float32 \[3, 3\], must be bool"),
        (lambda: Positions(((3, -1),)), r"start=3, length=-1\) must lie within 0 and 2\^31"),
        (lambda: Positions.contiguous(5, start=2**31 - 4), r"must lie within 0 and 2\^31"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("boundaries", [[0, 3, 7], torch.tensor([0, 3, 7])], ids=["numbers", "tensor"])
def test_documents_must_cover_every_query(boundaries: list[int] | Tensor) -> None:
    """Kind of fault: tokens behind the last boundary, dropped without a word."""
    with pytest.raises(UsageError, match="must end at 8 or beyond, where the queries end"):
        visible_keys(masks.documents(boundaries), Positions.contiguous(8), Positions.contiguous(8), CPU)


@pytest.mark.parametrize("keys", [Positions(((4, 2), (0, 3))), torch.tensor([4, 5, 0]), torch.tensor([1, 1])])
def test_key_positions_must_increase(keys: Positions | Tensor) -> None:
    with pytest.raises(UsageError, match=r"must increase: sort the keys by position"):
        visible_keys(masks.causal(), Positions.contiguous(2), keys, CPU)


class TestPositions:
    def test_runs_are_joined_and_empty_ones_left_out(self) -> None:
        positions = Positions.of([(0, 2), (2, 3), (9, 0), (7, 1)])
        assert positions.runs == ((0, 5), (7, 1))
        assert positions.tensor().tolist() == [0, 1, 2, 3, 4, 7]
        assert len(positions) == 6
        assert positions.end == 8

    def test_no_positions(self) -> None:
        assert Positions(()).tensor().tolist() == []
        assert Positions(()).end == Positions.contiguous(0, start=4).end == 0
        assert Positions(()).increasing

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=4))
    def test_increasing_means_that_each_is_larger_than_the_one_before(
        self, runs: list[tuple[int, int]]
    ) -> None:
        numbers = Positions(tuple(runs)).tensor()
        assert Positions(tuple(runs)).increasing == bool((numbers[1:] > numbers[:-1]).all())


@pytest.mark.parametrize(
    "written",
    [
        "full()",
        "causal()",
        "sliding_window(left=3, right=None)",
        "sliding_window(left=3, right=0)",
        "sliding_window(left=None, right=2)",
        "documents([0, 3, 9])",
        "prefix_lm(4)",
        "chunked(5)",
        "key_range(1, 7)",
        "causal() & documents([0, 3, 9])",
    ],
)
def test_a_mask_without_tensors_shows_as_it_is_written(written: str) -> None:
    assert repr(eval(written, vars(masks).copy())) == written
