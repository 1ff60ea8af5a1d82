"""Losses and gradients over a vocabulary cut over tp equal those over the whole one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paracore import chunks, cross_entropy
from paracore.errors import UsageError
from paracore.ops.cross_entropy import OPERATION
from paracore.parallel import MeshAxis, Traffic, shard_range
from paracore.reference import accumulation_dtype
from tests.conftest import Launch, run_ranks, tp_axis, training_axes
from tests.impl_cases import DTYPES, FAST, FLOOR, served
from tests.loss_cases import (
    LEADING,
    SPECIAL,
    gradient_floor,
    random_tokens,
    special_tokens,
    torch_gradient,
    torch_losses,
)
from tests.numerics import all_equal, assert_as_exact_as, assert_close, nan_in_fresh_memory, randn

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL_CHUNK = 512  # bytes: of a small vocabulary several tokens at a time, of a large one each by itself

Options = dict[str, Any]
OBJECTIVES: list[Options] = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.3, "z_loss": 1e-2},
]


def objective(number: int, factor: float) -> Options:
    """One of OBJECTIVES; without z-loss where the square of the logits is more than float32 holds."""
    return {name: value for name, value in OBJECTIVES[number % 3].items() if name != "z_loss" or factor < 1e9}


# Vocabulary, dtype, factor of the logits, objective: each with each but for the last, which goes around.
# Over four ranks vocabularies of 1, 3 and 5 leave ranks with nothing or next to nothing.
GRID = [
    (V, dtype, factor, objective(v + d + f, factor))
    for v, V in enumerate((1, 3, 5, 17, 6400))
    for d, dtype in enumerate(DTYPES)
    for f, factor in enumerate((1.0, 1e4, 1e30))
]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


def cases_of(impl: str) -> list[tuple[int, torch.dtype, float, Options]]:
    dtypes = served(OPERATION, impl)
    return [case for case in GRID if case[1] in dtypes]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank saw of one call, and of its backward."""

    losses: Tensor
    dlogits: Tensor
    forward: list[Traffic]
    backward: list[Traffic]


def differentiate(logits: Tensor, labels: Tensor, dlosses: Tensor, tp: MeshAxis, **options: Any) -> Outcome:
    """Losses and gradient of this rank's shard of whole logits: a view, hence strided where tp > 1."""
    mine = shard_range(logits.size(-1), tp.size, tp.rank)
    leaf = logits[..., mine.start : mine.stop].detach().requires_grad_()
    before = leaf.detach().clone()
    losses = cross_entropy(leaf, labels, tp, vocab_size=logits.size(-1), reduction="none", **options)
    forward = tp.ledger.take()
    losses.backward(dlosses)
    assert torch.equal(leaf.detach(), before), "the caller's logits were modified"
    assert leaf.grad is not None
    return Outcome(losses.detach(), leaf.grad, forward, tp.ledger.take())


@dataclasses.dataclass(frozen=True)
class RankOutcomes:
    """What one rank saw of the grid, of the special tokens without and with smoothing, and of no tokens."""

    grid: list[Outcome]
    special: list[Outcome]
    nothing: Outcome


SPECIAL_OBJECTIVES: list[Options] = [{}, {"label_smoothing": 0.1}]


def differentiate_all(impl: str) -> RankOutcomes:
    """Inside a rank."""
    tp = tp_axis()
    no_tokens = torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    with nan_in_fresh_memory(), mock.patch.object(chunks, "CHUNK_BYTES", SMALL_CHUNK):
        return RankOutcomes(
            [
                differentiate(*random_tokens(V, dtype, factor), tp, impl=impl, **options)
                for V, dtype, factor, options in cases_of(impl)
            ],
            [
                differentiate(*special_tokens(), tp, impl=impl, **options)  # as in the grid
                for options in SPECIAL_OBJECTIVES
            ],
            differentiate(*no_tokens, tp, impl=impl),
        )


@pytest.fixture(scope="module", params=FAST)
def impl(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda size: f"tp{size}")
def of_ranks(request: pytest.FixtureRequest, impl: str) -> list[RankOutcomes]:
    return run_ranks(request.param, differentiate_all, impl)


class TestOverRanks:
    def test_as_exact_as_torch_over_the_whole_vocabulary(
        self, of_ranks: list[RankOutcomes], impl: str
    ) -> None:
        for i, (V, dtype, factor, options) in enumerate(cases_of(impl)):
            given, name = random_tokens(V, dtype, factor), f"V={V} {dtype} times {factor} {options}"
            logits, labels, dlosses = given
            losses, dlogits = torch_gradient(*given, **options)
            exact, dexact = torch_gradient(logits.double(), labels, dlosses.double(), **options)
            outcomes = [rank.grid[i] for rank in of_ranks]
            gradient = torch.cat([outcome.dlogits for outcome in outcomes], -1)
            assert gradient.dtype == dtype
            floor = gradient_floor(dlosses, dexact, FLOOR[dtype])
            assert_as_exact_as(gradient, dlogits, dexact, floor=floor, name=f"{name}: gradient")
            for outcome in outcomes:
                assert outcome.losses.dtype == accumulation_dtype(dtype)
                assert_as_exact_as(outcome.losses, losses, exact, floor=FLOOR[dtype], name=f"{name}: losses")

    def test_every_rank_has_the_same_bits(self, of_ranks: list[RankOutcomes]) -> None:
        for outcomes in zip(*(rank.grid for rank in of_ranks), strict=True):
            assert all_equal([outcome.losses for outcome in outcomes])

    def test_one_collective_of_four_numbers_per_token_and_none_in_backward(
        self, of_ranks: list[RankOutcomes], impl: str
    ) -> None:
        size, tokens = len(of_ranks), LEADING[0] * LEADING[1]
        for rank in of_ranks:
            for (_, dtype, _, _), outcome in zip(cases_of(impl), rank.grid, strict=True):
                gathered = size * 4 * tokens * accumulation_dtype(dtype).itemsize
                assert outcome.forward == ([Traffic("all_gather", "tp", 1, gathered)] if size > 1 else [])
                assert outcome.backward == []

    @pytest.mark.parametrize("number", range(len(SPECIAL_OBJECTIVES)), ids=["plain", "smoothed"])
    def test_special_tokens_are_as_in_torch_and_ignored_ones_zero(
        self, of_ranks: list[RankOutcomes], number: int
    ) -> None:
        losses, dlogits = torch_gradient(*special_tokens(), **SPECIAL_OBJECTIVES[number])
        ignored = special_tokens()[1] == -100
        losses[ignored], dlogits[ignored] = 0.0, 0.0
        got = torch.cat([rank.special[number].dlogits for rank in of_ranks], -1)
        for i, name in enumerate(SPECIAL):
            torch.testing.assert_close(
                got[i], dlogits[i], equal_nan=True, msg=f"gradient: {name}: {got[i]}, torch's {dlogits[i]}"
            )
            for rank in of_ranks:
                mine = rank.special[number].losses[i]
                torch.testing.assert_close(
                    mine, losses[i], equal_nan=True, msg=f"loss: {name}: {mine}, torch's {losses[i]}"
                )

    def test_no_tokens(self, of_ranks: list[RankOutcomes]) -> None:
        for rank, outcomes in enumerate(of_ranks):
            assert outcomes.nothing.losses.shape == (0,)
            assert outcomes.nothing.dlogits.shape == (0, len(shard_range(7, len(of_ranks), rank)))


# ---------------------------------------------------------------- sums and means over ranks

VOCAB = 7
# How many tokens each rank of dp has, and how many of these count.
COUNTS = {
    "unequal": [(8, 3), (5, 5)],
    "one rank's all ignored": [(4, 0), (6, 5)],
    "one rank has none": [(0, 0), (6, 2)],
    "all ignored": [(4, 0), (6, 0)],
}


def tokens_of(counts: list[tuple[int, int]], rank: int) -> tuple[Tensor, Tensor]:
    length, valid = counts[rank]
    labels = torch.arange(length).remainder(VOCAB)
    return randn(length, VOCAB, seed=rank), labels.masked_fill(torch.arange(length) >= valid, -100)


def reduced(impl: str) -> dict[str, dict[str, Outcome]]:
    """Inside a rank of dp=2, tp=2: sum and mean over dp, of each of COUNTS."""
    axes = training_axes(dp=2, tp=2)
    dtype = served(OPERATION, impl)[-1]
    mine = shard_range(VOCAB, 2, axes.tp.rank)
    outcomes: dict[str, dict[str, Outcome]] = {}
    for name, counts in COUNTS.items():
        logits, labels = tokens_of(counts, axes.data.rank)
        outcomes[name] = {}
        for reduction in ("sum", "mean"):
            leaf = logits[:, mine.start : mine.stop].to(dtype).requires_grad_()
            options: dict[str, Any] = {"reduction": reduction, "over": axes.data, "impl": impl}
            loss = cross_entropy(leaf, labels, axes.tp, vocab_size=VOCAB, **options)
            forward = axes.tp.ledger.take()
            loss.backward()
            assert leaf.grad is not None
            outcomes[name][reduction] = Outcome(loss.detach(), leaf.grad, forward, axes.tp.ledger.take())
    return outcomes


def test_sums_and_means_count_the_valid_tokens_of_all_ranks(launch: Launch, impl: str) -> None:
    of_ranks = launch(4, reduced, impl)  # [0, 1] and [2, 3] are the groups of tp
    dtype = served(OPERATION, impl)[-1]
    eps = 1e-12 if dtype == torch.float64 else 1e-2  # of bfloat16 gradients
    for name, counts in COUNTS.items():
        logits, labels = (
            torch.cat(parts) for parts in zip(*(tokens_of(counts, r) for r in (0, 1)), strict=True)
        )
        logits = logits.to(dtype).double().requires_grad_()
        valid = sum(count for _, count in counts)
        for reduction, divisor in (("sum", 1), ("mean", max(1, valid))):
            expected = torch_losses(logits, labels).sum() / divisor
            (gradient,) = torch.autograd.grad(expected, logits)
            outcomes = [rank[name][reduction] for rank in of_ranks]
            assert all_equal([outcome.losses for outcome in outcomes])
            assert_close(outcomes[0].losses.double(), expected.detach(), eps=max(eps * 1e-4, 1e-13))
            got = torch.cat([torch.cat([outcomes[r].dlogits, outcomes[r + 1].dlogits], -1) for r in (0, 2)])
            assert_close(got.double(), gradient, eps=eps)
            if valid == 0:
                assert outcomes[0].losses == 0
                assert not got.any()


def test_a_loss_costs_one_collective_over_tp_and_one_over_the_data_ranks(launch: Launch, impl: str) -> None:
    dtype = accumulation_dtype(served(OPERATION, impl)[-1])
    for rank, outcomes in enumerate(launch(4, reduced, impl)):
        for name, counts in COUNTS.items():
            tokens = counts[rank // 2][0]
            for outcome in outcomes[name].values():
                assert outcome.forward == [
                    Traffic("all_gather", "tp", 1, 2 * 4 * tokens * dtype.itemsize),
                    Traffic("all_reduce", "dp", 1, 2 * 8),  # total and count
                ]
                assert outcome.backward == []


# ---------------------------------------------------------------- refusals by every rank


def refusals() -> list[str]:
    """Inside a rank: what whole logits, and labels out of range, are told; nobody communicates."""
    tp, messages = tp_axis(), []
    whole = torch.zeros(2, 6)
    for logits, vocab_size in ((whole, 6), (whole, None), (whole[:, :3], None)):
        with pytest.raises(UsageError) as refused:
            cross_entropy(logits, torch.tensor([0, 1]), tp, vocab_size=vocab_size)
        messages.append(str(refused.value))
    for label in (6, -1, -101):
        with pytest.raises(RuntimeError) as failed:
            cross_entropy(whole[:, :3], torch.tensor([0, label]), tp, vocab_size=6)
        messages.append(str(failed.value))
    assert tp.ledger.take() == []
    return messages


def test_whole_logits_and_labels_out_of_range_are_refused_by_every_rank(launch: Launch) -> None:
    for rank, messages in enumerate(launch(2, refusals)):
        assert messages == [
            f"logits has 6 in its last dim, must have 3, which rank {rank} of 2 holds of vocab_size=6: "
            "these are whole already",
            f"vocab_size=None: must be given over 2 ranks of axis tp; rank {rank} holds 6",
            f"vocab_size=None: must be given over 2 ranks of axis tp; rank {rank} holds 3",
            *["a label is outside [0, 6) and is not ignore_index=-100"] * 3,
        ]
