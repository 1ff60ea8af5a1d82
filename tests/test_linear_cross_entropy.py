"""The fused LM head and loss over tp: those of the whole vocabulary, in few collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paracore import linear_cross_entropy
from paracore.errors import UsageError
from paracore.ops import linear_cross_entropy as module
from paracore.ops.cross_entropy import OPERATION
from paracore.parallel import MeshAxis, Traffic, shard_range
from paracore.reference import accumulation_dtype
from tests.conftest import Launch, run_ranks, tp_axis, training_axes
from tests.impl_cases import BF16, F32, F64, FAST, served
from tests.loss_cases import random_labels, torch_losses
from tests.numerics import all_equal, assert_as_exact_as, assert_close, nan_in_fresh_memory, randn

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN = 12
# What the result alone costs when it is rounded: gradients are in the inputs' dtype.
FLOOR = {F32: 2.0**-23, BF16: 2.0**-9, F64: 2.0**-50}
SMALL_CHUNK = 48  # bytes of logits: what the default of chunk_tokens goes by in these tests


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """leading: S and B. cut: hidden is cut along the sequence. chunk_tokens: None is the default.

    transposed: every rank but the first holds hidden in another order of dims.
    """

    vocab_size: int
    dtype: torch.dtype
    leading: tuple[int, int] = (5, 3)
    cut: bool = False
    chunk_tokens: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    transposed: bool = False

    @property
    def tokens(self) -> int:
        return self.leading[0] * self.leading[1]

    @property
    def objective(self) -> dict[str, Any]:
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Whole hidden states, weight and labels."""
        S, B = self.leading
        hidden = randn(S, B, HIDDEN, seed=1, dtype=self.dtype)
        weight = randn(self.vocab_size, HIDDEN, seed=2, dtype=self.dtype)
        return hidden, weight, random_labels(self.vocab_size, S, B)

    def chunks(self, tp_size: int) -> int:
        """How many all-gathers of statistics there must be, on every rank alike."""
        row = -(-self.vocab_size // tp_size) * self.dtype.itemsize
        most = self.chunk_tokens or max(1, SMALL_CHUNK // row)
        return -(-self.tokens // most)


# Two rows of the sequence leave ranks with none where tp is 3 or 4, five are uneven over 2, 3 and 4.
GRID = [
    *(
        Case(V, dtype, cut=cut, chunk_tokens=chunk_tokens, label_smoothing=0.1 * cut, z_loss=0.01 * (V == 5))
        for V in (3, 5, 17)
        for dtype in (F32, BF16, F64)
        for cut in (False, True)
        for chunk_tokens in (1, 3, 1000, None)
    ),
    *(Case(5, dtype, (2, 3), cut=True, chunk_tokens=4) for dtype in (F32, BF16)),
    *(Case(5, F32, (0, 3), cut=cut) for cut in (False, True)),
    *(Case(17, F32, cut=cut, transposed=True) for cut in (False, True)),
    Case(6400, F32, chunk_tokens=7, label_smoothing=0.1, z_loss=0.01),
    Case(6400, BF16, cut=True, chunk_tokens=7),
]


def cases_of(impl: str) -> list[Case]:
    dtypes = served(OPERATION, impl)
    return [case for case in GRID if case.dtype in dtypes]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank saw of one call, and of its backward."""

    loss: Tensor
    dhidden: Tensor
    dweight: Tensor
    forward: list[Traffic]
    backward: list[Traffic]


def differentiate(case: Case, tp: MeshAxis, impl: str) -> Outcome:
    hidden, weight, labels = case.inputs()
    if case.transposed and tp.rank > 0:
        hidden = hidden.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    rows = shard_range(case.vocab_size, tp.size, tp.rank)
    own = shard_range(case.leading[0], tp.size, tp.rank) if case.cut else range(case.leading[0])
    x = hidden[own.start : own.stop].detach().requires_grad_()
    w = weight[rows.start : rows.stop].detach().requires_grad_()
    loss = linear_cross_entropy(
        x,
        w,
        labels,
        tp,
        vocab_size=case.vocab_size,
        length=case.leading[0] if case.cut else None,
        chunk_tokens=case.chunk_tokens,
        impl=impl,
        **case.objective,
    )
    forward = tp.ledger.take()
    loss.backward()
    assert x.grad is not None
    assert w.grad is not None
    assert (x.grad.dtype, w.grad.dtype) == (case.dtype, case.dtype)
    return Outcome(loss.detach(), x.grad, w.grad, forward, tp.ledger.take())


def differentiate_all(impl: str) -> list[Outcome]:
    """Inside a rank."""
    tp = tp_axis()
    with (
        nan_in_fresh_memory(),
        mock.patch.object(module, "_CHUNK_BYTES", SMALL_CHUNK),
        mock.patch.object(module, "_LEAST_TOKENS", 1),
    ):
        return [differentiate(case, tp, impl) for case in cases_of(impl)]


def plain(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the gradients of hidden and weight by torch, over whole logits in `dtype`."""
    hidden, weight, labels = case.inputs()
    x, w = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight))
    losses = torch_losses(x @ w.T, labels, **case.objective)
    loss = losses.sum() / (labels != -100).sum().clamp(min=1)
    dx, dw = torch.autograd.grad(loss, (x, w))
    return loss.detach(), dx, dw


@pytest.fixture(scope="module", params=FAST)
def impl(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda size: f"tp{size}")
def of_ranks(request: pytest.FixtureRequest, impl: str) -> list[list[Outcome]]:
    return run_ranks(request.param, differentiate_all, impl)


class TestOverRanks:
    def test_as_exact_as_torch_over_whole_logits(self, of_ranks: list[list[Outcome]], impl: str) -> None:
        for i, case in enumerate(cases_of(impl)):
            outcomes = [rank[i] for rank in of_ranks]
            dhidden = torch.cat([o.dhidden for o in outcomes]) if case.cut else outcomes[0].dhidden
            results = outcomes[0].loss, dhidden, torch.cat([o.dweight for o in outcomes])
            assert results[0].dtype == accumulation_dtype(case.dtype)
            floors = FLOOR[F32] if case.dtype == BF16 else FLOOR[case.dtype], *[FLOOR[case.dtype]] * 2
            names = "loss", "dhidden", "dweight"
            contenders, exact = plain(case, case.dtype), plain(case, F64)
            for name, x, contender, ref, floor in zip(names, results, contenders, exact, floors, strict=True):
                assert x.shape == ref.shape
                assert_as_exact_as(x, contender, ref, floor=floor, name=f"{case}: {name}")

    def test_every_rank_has_the_same_bits(self, of_ranks: list[list[Outcome]], impl: str) -> None:
        for case, outcomes in zip(cases_of(impl), zip(*of_ranks, strict=True), strict=True):
            assert all_equal([outcome.loss for outcome in outcomes])
            if not case.cut:
                assert all_equal([outcome.dhidden for outcome in outcomes])

    def test_hidden_travels_once_each_way_and_four_numbers_per_token(
        self, of_ranks: list[list[Outcome]], impl: str
    ) -> None:
        size = len(of_ranks)
        for rank in of_ranks:
            for case, outcome in zip(cases_of(impl), rank, strict=True):
                assert (outcome.forward, outcome.backward) == traffic(case, size), case


def traffic(case: Case, size: int) -> tuple[list[Traffic], list[Traffic]]:
    """What forward and backward must communicate over `size` ranks."""
    if size == 1:
        return [], []
    S, B = case.leading
    padded = size * -(-S // size) if case.cut else S
    hidden = padded * B * HIDDEN * case.dtype.itemsize
    statistics = size * 4 * case.tokens * accumulation_dtype(case.dtype).itemsize
    gathers = case.chunks(size) + case.cut
    forward = [Traffic("all_gather", "tp", gathers, statistics + case.cut * hidden)] if gathers else []
    return forward, [Traffic("reduce_scatter" if case.cut else "all_reduce", "tp", 1, hidden)]


def test_ranks_with_uneven_shards_take_the_same_chunks() -> None:
    """Five words over two ranks: by its own three the one would take 4 tokens at a time, the other 6."""
    case = Case(5, F32)
    assert [SMALL_CHUNK // (4 * len(shard_range(5, 2, rank))) for rank in (0, 1)] == [4, 6]
    assert case in GRID or dataclasses.replace(case, z_loss=0.01) in GRID
    assert case.chunks(2) == 4


# ---------------------------------------------------------------- means over ranks

# How many tokens each rank of dp has, and how many of these count.
COUNTS = {
    "unequal": [(8, 3), (5, 5)],
    "all ignored on one": [(4, 0), (6, 5)],
    "all ignored": [(4, 0), (6, 0)],
}


def tokens_of(counts: list[tuple[int, int]], rank: int) -> tuple[Tensor, Tensor]:
    length, valid = counts[rank]
    labels = torch.arange(length).remainder(7)
    return randn(length, HIDDEN, seed=rank), labels.masked_fill(torch.arange(length) >= valid, -100)


def reduced() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Inside a rank of dp=2, tp=2: the mean loss over dp, and this rank's gradients."""
    axes = training_axes(dp=2, tp=2)
    rows = shard_range(7, 2, axes.tp.rank)
    results = {}
    for name, counts in COUNTS.items():
        hidden, labels = tokens_of(counts, axes.data.rank)
        x, w = hidden.requires_grad_(), randn(7, HIDDEN, seed=9)[rows.start : rows.stop].requires_grad_()
        loss = linear_cross_entropy(x, w, labels, axes.tp, vocab_size=7, over=axes.data, chunk_tokens=2)
        dx, dw = torch.autograd.grad(loss, (x, w))
        results[name] = loss.detach(), dx, dw
    return results


def test_the_mean_counts_the_valid_tokens_of_all_ranks(launch: Launch) -> None:
    of_ranks = launch(4, reduced)  # [0, 1] and [2, 3] are the groups of tp
    for name, counts in COUNTS.items():
        hidden, labels = (
            torch.cat(parts) for parts in zip(*(tokens_of(counts, r) for r in (0, 1)), strict=True)
        )
        x, w = hidden.requires_grad_(), randn(7, HIDDEN, seed=9).requires_grad_()
        loss = torch_losses(x @ w.T, labels).sum() / max(1, sum(valid for _, valid in counts))
        dx, dw = torch.autograd.grad(loss, (x, w))
        (losses, dxs, dws) = zip(*(rank[name] for rank in of_ranks), strict=True)
        assert all_equal(losses)
        assert_close(losses[0], loss.detach())
        assert_close(torch.cat([dxs[0], dxs[2]]), dx)
        assert_close(torch.cat([dws[0] + dws[2], dws[1] + dws[3]]), dw)  # parts: to be added up over dp
        if name == "all ignored":
            assert not any(tensor.any() for tensor in (losses[0], *dxs, *dws))


# ---------------------------------------------------------------- refusals by every rank


def refusals() -> list[str]:
    """Inside a rank of two: what a whole weight and a whole sequence are told; nobody communicates."""
    tp, messages = tp_axis(), []
    hidden, weight, labels = torch.zeros(5, 4), torch.zeros(6, 4), torch.zeros(5, dtype=torch.int64)
    wrong: list[dict[str, Any]] = [{"vocab_size": 6}, {}, {"vocab_size": 12, "length": 5}]
    for options in wrong:
        with pytest.raises(UsageError) as refused:
            linear_cross_entropy(hidden, weight, labels, tp, **options)
        messages.append(str(refused.value))
    assert tp.ledger.take() == []
    return messages


def test_a_whole_weight_and_a_whole_sequence_are_refused_by_every_rank(launch: Launch) -> None:
    for rank, messages in enumerate(launch(2, refusals)):
        assert messages == [
            f"weight is float32 [6, 4] on cpu, must be float32 [3, 4] on cpu: what rank {rank} of 2 holds of "
            "vocab_size=6 for hidden [5, 4]",
            f"vocab_size=None: must be given over 2 ranks of axis tp; rank {rank} holds 6",
            f"hidden is [5, 4], must have {3 - rank} in dim 0: what rank {rank} of 2 holds of length=5",
        ]
