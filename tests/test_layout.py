"""Layouts deal out every position once, whatever the length, and everything finds its way back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paracore.errors import UsageError
from paracore.parallel import Ledger, MeshAxis
from paracore.parallel import layout as layout_module
from paracore.parallel.layout import (
    Layout,
    balanced,
    contiguous,
    document_ids,
    parse_layout,
    striped,
    zigzag,
)
from paracore.parallel.masks import Mask, causal, documents, full, prefix_lm, sliding_window
from paracore.parallel.positions import Positions
from paracore.parallel.ring_plan import plan_ring
from tests.conftest import Launch, axis_over_all

NAMES = ["contiguous", "zigzag", "striped", "striped:3", "balanced:1", "balanced:4", "balanced"]
MASKS: list[Callable[[int], Mask]] = [
    lambda length: causal(),
    lambda length: full(),
    lambda length: sliding_window(5, 0),
    lambda length: prefix_lm(7),
    lambda length: causal() & documents([0, length // 7, length // 7, length // 2, length]),
]

lengths, sizes = st.integers(0, 40), st.integers(1, 6)
names, masks = st.sampled_from(NAMES), st.sampled_from(MASKS)


def deal(name: str, length: int, size: int, mask_of: Callable[[int], Mask] = MASKS[0]) -> Layout:
    return parse_layout(name)(mask_of(length), length, size)


# ---------------------------------------------------------------- every position once


@given(names, lengths, sizes, masks)
def test_every_position_is_held_once_in_increasing_order(
    name: str, length: int, size: int, mask_of: Callable[[int], Mask]
) -> None:
    layout = deal(name, length, size, mask_of)
    held = [positions.tensor().tolist() for positions in layout.ranks]
    assert all(positions == sorted(positions) for positions in held)
    assert sorted(itertools.chain(*held)) == list(range(length))
    assert (layout.size, layout.length, layout.lengths) == (size, length, [len(p) for p in held])


@given(names, lengths, sizes, masks, st.sampled_from([-2, -1, 0, 1]))
def test_joining_what_the_ranks_hold_gives_the_sequence_back(
    name: str, length: int, size: int, mask_of: Callable[[int], Mask], dim: int
) -> None:
    layout = deal(name, length, size, mask_of)
    x = torch.randn(2, length) if dim % 2 else torch.randn(length, 2)
    shards = [layout.shard(x, rank, dim) for rank in range(size)]
    assert [shard.size(dim) for shard in shards] == layout.lengths
    assert torch.equal(layout.join(shards, dim), x)


@pytest.mark.parametrize(
    ("name", "length", "size", "expected"),
    [
        ("contiguous", 7, 3, [[0, 1], [2, 3], [4, 5, 6]]),
        ("zigzag", 8, 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("zigzag", 5, 2, [[0, 3, 4], [1, 2]]),
        ("zigzag", 1, 3, [[0], [], []]),
        ("striped:1", 5, 2, [[0, 2, 4], [1, 3]]),
        ("striped:2", 7, 2, [[0, 1, 4, 5], [2, 3, 6]]),
        ("balanced:1", 4, 2, [[0, 3], [1, 2]]),  # 1 + 4 keys seen, and 2 + 3
        ("contiguous", 0, 2, [[], []]),
    ],
)
def test_what_each_way_deals(name: str, length: int, size: int, expected: list[list[int]]) -> None:
    assert [positions.tensor().tolist() for positions in deal(name, length, size).ranks] == expected


@given(lengths, sizes)
def test_lengths_differ_by_one_piece_at_most(length: int, size: int) -> None:
    for name, most in (
        ("contiguous", 1),
        ("zigzag", 2),
        ("striped:1", 1),
        ("striped:3", 3),
        ("balanced:1", 2),
    ):
        held = deal(name, length, size).lengths
        assert max(held) - min(held) <= most


# ---------------------------------------------------------------- equal work


def shares_of_work(layout: Layout, mask: Mask) -> list[float]:
    """What each rank computes, the number of pairs of a query and a key it sees, over the mean."""
    work = []
    for positions in layout.ranks:
        first, end = mask.interval(positions.tensor())
        seen = end.clamp_max(layout.length) - first.clamp_min(0)
        work.append(float(seen.clamp_min(0).sum()))
    return [each * layout.size / sum(work) for each in work]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "mask",
    [
        causal(),
        sliding_window(700, 0),
        causal() & documents([0, 100, 3000, 3050, 3900, 6900, 8192]),
        causal() & documents([0, 5000, 5300, 8192]),
        prefix_lm(2000),
    ],
    ids=["causal", "window", "packed", "one long document", "prefix"],
)
def test_balanced_gives_every_rank_the_same_work(mask: Mask, size: int) -> None:
    shares = shares_of_work(balanced(mask, 8192, size, block=64), mask)
    assert max(shares) < 1.05
    assert min(shares) > 0.95


def test_zigzag_balances_causal_attention_and_contiguous_does_not() -> None:
    assert max(shares_of_work(zigzag(4096, 4), causal())) < 1.01
    assert max(shares_of_work(contiguous(4096, 4), causal())) > 1.7
    packed = causal() & documents([0, 3000, 4096])
    assert max(shares_of_work(zigzag(4096, 4), packed)) > max(
        shares_of_work(balanced(packed, 4096, 4, 64), packed)
    )


def test_balanced_cuts_between_documents_where_they_end_nearby() -> None:
    mask = causal() & documents([0, 519, 1030, 1540, 2056, 2570, 3080, 3590, 4096])
    layout = balanced(mask, 4096, 4, block=128)
    assert layout.lengths == [1030, 1026, 1024, 1016]  # at 1024, 2048, 3072 they would share documents
    assert all(plan_ring(mask, layout).keys_sent(rank, "ring") == (0, 0) for rank in range(4))
    both_ways = documents([0, 1030, 2048, 3072, 4096])  # keys are seen across from either side
    assert balanced(both_ways & sliding_window(100, 100), 4096, 4, block=128).lengths[0] == 1030


def test_balanced_looks_at_masks_that_differ_over_the_batch() -> None:
    mask = prefix_lm(torch.tensor([0, 3000]))
    layout = balanced(mask, 4096, 4, block=32)
    first, end = mask.interval(torch.arange(4096))
    work = (end - first).sum(0)
    loads = [int(work[positions.tensor()].sum()) for positions in layout.ranks]
    assert max(loads) < 1.05 * sum(loads) / 4


# ---------------------------------------------------------------- labels and documents


def on_every_rank(size: int, function: Callable[[MeshAxis], Tensor]) -> list[Tensor]:
    """Call function(axis) for every rank of an axis, each in a thread, whose gather needs no processes."""
    held: list[Tensor] = [torch.empty(0)] * size
    everyone = threading.Barrier(size)

    def gather(x: Tensor, axis: MeshAxis, lengths: list[int], dim: int) -> list[Tensor]:
        assert x.size(dim) == lengths[axis.rank]
        held[axis.rank] = x
        everyone.wait(timeout=10)
        return list(held)

    axes = [MeshAxis("cp", size, rank, None, Ledger()) for rank in range(size)]
    with mock.patch.object(layout_module, "gather_list", gather), ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(function, axes))


@pytest.mark.parametrize("boundaries", [[0, 5, 20], [0, 5]])
def test_the_last_token_has_no_label_wherever_documents_end(boundaries: list[int]) -> None:
    tokens, axis = torch.arange(12) + 100, MeshAxis.alone("cp")
    labels = zigzag(12, 1).next_token_labels(tokens, axis, 0, boundaries=boundaries)
    expected = tokens + 1
    expected[[4, 11]] = -100
    assert torch.equal(labels, expected)


def dense_labels(tokens: Tensor, boundaries: Sequence[int]) -> Tensor:
    """The next token of each [B, S], none at the ends of documents."""
    labels = tokens.roll(-1, 1).clone()
    labels[:, [end - 1 for end in boundaries if end]] = -100
    return labels


@given(names, lengths, sizes, masks, st.lists(st.integers(0, 40), max_size=4), st.booleans())
def test_labels_come_from_whichever_rank_holds_the_next_token(
    name: str,
    length: int,
    size: int,
    mask_of: Callable[[int], Mask],
    cuts: list[int],
    in_documents: bool,
) -> None:
    layout = deal(name, length, size, mask_of)
    tokens = torch.arange(2 * length).view(2, length) + 1000
    boundaries = [0, *sorted(min(cut, length) for cut in cuts), length]
    labels = on_every_rank(
        size,
        lambda axis: layout.next_token_labels(
            layout.shard(tokens, axis.rank, 1), axis, 1, boundaries=boundaries if in_documents else None
        ),
    )
    expected = dense_labels(tokens, boundaries if in_documents else [0, length])
    assert torch.equal(layout.join(labels, 1), expected)
    assert all(held.dtype == torch.int64 for held in labels)


@pytest.mark.parametrize("dim", [0, -2])
def test_labels_along_any_dim_and_with_any_ignored_index(dim: int) -> None:
    layout, tokens, boundaries = zigzag(11, 3), torch.arange(22).view(11, 2), torch.tensor([0, 4, 11])

    def labels_of(axis: MeshAxis) -> Tensor:
        mine = layout.shard(tokens, axis.rank, dim)
        return layout.next_token_labels(mine, axis, dim, boundaries=boundaries, ignore_index=-1)

    expected = tokens.roll(-1, 0).clone()
    expected[[3, 10]] = -1
    assert torch.equal(layout.join(on_every_rank(3, labels_of), dim), expected)


@given(lengths, st.lists(st.integers(0, 40), max_size=4))
def test_document_ids_count_documents(length: int, cuts: list[int]) -> None:
    boundaries = [0, *sorted(min(cut, length) for cut in cuts), length]
    expected = [
        next(i for i, (begin, end) in enumerate(itertools.pairwise(boundaries)) if begin <= position < end)
        for position in range(length)
    ]
    positions = torch.arange(length)
    assert document_ids(boundaries, positions).tolist() == expected
    assert document_ids(torch.tensor(boundaries), positions.flip(0)).tolist() == expected[::-1]


# ---------------------------------------------------------------- real ranks


def through_real_ranks() -> list[tuple[str, int, bool]]:
    """Gathers and labels of every layout over real ranks; returns those that are wrong."""
    cp = axis_over_all("cp")
    wrong = []
    for name in NAMES:
        for length in (0, 1, 2, 5, 17):
            layout = deal(name, length, cp.size)
            tokens = torch.arange(2 * length).view(2, length)
            mine = layout.shard(tokens, cp.rank, 1)
            labels = layout.next_token_labels(mine, cp, 1)
            right = torch.equal(layout.unshard(mine, cp, 1), tokens) and torch.equal(
                layout.unshard(labels, cp, 1), dense_labels(tokens, [length])
            )
            part = mine.double().requires_grad_()
            (layout.unshard(part, cp, 1) * tokens).sum().backward()
            assert part.grad is not None
            if not right or not torch.equal(part.grad, mine.double()):
                wrong.append((name, length, right))
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_real_ranks_gather_sequences_labels_and_gradients(launch: Launch, size: int) -> None:
    assert launch(size, through_real_ranks) == [[]] * size


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([[(0, 2)], [(3, 2)]], "position 2 must be held by exactly one rank"),
        ([[(0, 3)], [(2, 2)]], "position 2 must be held by exactly one rank"),
        ([[(1, 3)]], "position 0 must be held by exactly one rank"),
        ([[(2, 2), (0, 2)]], "its positions must increase"),
    ],
)
def test_layouts_that_are_not_a_deal_are_refused(runs: list[list[tuple[int, int]]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout(tuple(Positions(tuple(held)) for held in runs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zig", "layout 'zig': must be contiguous, zigzag, striped"),
        ("zigzag:2", "layout 'zigzag:2': must be"),
        ("", "layout '': must be"),
        ("striped:", "layout 'striped:': a block is a number of positions, at least 1, as in striped:16"),
        ("striped:0", "layout 'striped:0': a block is"),
        ("balanced:-1", "layout 'balanced:-1': a block is"),
        ("striped:1.5", "layout 'striped:1.5': a block is"),
    ],
)
def test_unknown_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_layout(text)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="length=-1, size=2: must be at least 0 and at least 1"):
        contiguous(-1, 2)
    with pytest.raises(UsageError, match="length=4, size=0"):
        striped(4, 0)
    with pytest.raises(UsageError, match="block=0: must be at least 1"):
        striped(4, 2, block=0)
    with pytest.raises(UsageError, match=r"x is \[2, 5\], must have the layout's length 4 along dim 1"):
        contiguous(4, 2).shard(torch.ones(2, 5), 0, 1)
    with pytest.raises(UsageError, match="the layout is for 2 ranks, but axis cp has 1"):
        contiguous(4, 2).unshard(torch.ones(2), MeshAxis.alone("cp"), 0)
