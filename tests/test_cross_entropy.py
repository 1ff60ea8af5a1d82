"""Losses and gradients over a vocabulary cut over tp equal those over the whole one, at no more memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paracore import chunks, reference
from paracore.errors import UsageError
from paracore.ops.cross_entropy import token_losses
from paracore.parallel import Ledger, MeshAxis, Traffic, shard_range
from paracore.reference import accumulation_dtype
from tests.conftest import Launch, run_ranks, tp_axis
from tests.numerics import LiveMemory, all_equal, assert_as_exact_as, assert_close, nan_in_fresh_memory, randn

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
FLOOR = {F32: 2.0**-23, BF16: 2.0**-23, F64: 2.0**-50}
ALONE = MeshAxis.alone("tp")
INF, NAN = float("inf"), float("nan")
LEADING = (3, 5)
SMALL_CHUNK = 512  # bytes: of a small vocabulary several tokens at a time, of a large one each by itself

# Vocabulary, dtype, factor of the logits. Over four ranks those of 1, 3 and 5 leave ranks with nothing.
GRID = [
    (V, dtype, factor)
    for V in (1, 3, 5, 17, 6400)
    for dtype in (F32, BF16, F64)
    for factor in (1.0, 1e4, 1e30)
]

# One token each: logits over a vocabulary of 5, label, gradient of the loss.
NOTHING, FINITE = [-INF] * 5, [1.0, -2.0, 0.5, 3.0, 0.0]
SPECIAL = {
    "the label's logit is -inf": ([1.0, -INF, 2.0, 0.0, 1.0], 1, 1.0),
    "every logit is -inf": (NOTHING, 2, 1.0),
    "the first shard is -inf": ([-INF, -INF, -INF, 1.0, 2.0], 4, 1.0),
    "the last shards are -inf": ([1.0, 2.0, -INF, -INF, -INF], 0, 1.0),
    "two logits of 1e30": ([1e30, 0.0, -1e30, 0.0, 1e30], 4, 1.0),
    "all logits are far below zero": ([-1e30] * 5, 3, 1.0),
    "a loss that nobody uses": (FINITE, 3, 0.0),
    "ignored": (FINITE, -100, 1.0),
    "ignored, and every logit is -inf": (NOTHING, -100, 1.0),
    "ignored, and its gradient is NaN": (FINITE, -100, NAN),
}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


def inputs(vocab_size: int, dtype: torch.dtype = F64, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Whole logits, labels of which every fourth is ignored, and gradients of the losses."""
    logits = (factor * randn(*LEADING, vocab_size, seed=vocab_size)).to(dtype)
    labels = torch.randint(vocab_size, LEADING, generator=torch.Generator().manual_seed(vocab_size))
    labels.view(-1)[::4] = -100
    return logits, labels, randn(*LEADING, seed=1, dtype=accumulation_dtype(dtype))


def special_inputs() -> tuple[Tensor, Tensor, Tensor]:
    logits, labels, dlosses = zip(*SPECIAL.values(), strict=True)
    return torch.tensor(logits), torch.tensor(labels), torch.tensor(dlosses)


def plain(logits: Tensor, labels: Tensor, dlosses: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient of the logits by torch over the whole vocabulary, in the dtype of `reference`."""
    leaf = logits.detach().requires_grad_()
    exact = leaf.to(accumulation_dtype(leaf.dtype)).flatten(0, -2)
    losses = F.cross_entropy(exact, labels.flatten(), reduction="none").view(labels.shape)
    losses.backward(dlosses)
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


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
    losses = token_losses(leaf, labels, tp, vocab_size=logits.size(-1), **options)
    forward = tp.ledger.take()
    losses.backward(dlosses)
    assert torch.equal(leaf.detach(), before), "the caller's logits were modified"
    assert leaf.grad is not None
    return Outcome(losses.detach(), leaf.grad, forward, tp.ledger.take())


def differentiate_all() -> tuple[list[Outcome], Outcome, Outcome]:
    """Inside a rank: the grid, the special tokens, and no tokens."""
    tp = tp_axis()
    no_tokens = torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    with nan_in_fresh_memory(), mock.patch.object(chunks, "CHUNK_BYTES", SMALL_CHUNK):
        grid = [differentiate(*inputs(*case), tp) for case in GRID]
        return grid, differentiate(*special_inputs(), tp), differentiate(*no_tokens, tp)


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda size: f"tp{size}")
def of_ranks(request: pytest.FixtureRequest) -> list[tuple[list[Outcome], Outcome, Outcome]]:
    return run_ranks(request.param, differentiate_all)


class TestOverRanks:
    def test_as_exact_as_torch_over_the_whole_vocabulary(self, of_ranks: Any) -> None:
        for i, (V, dtype, factor) in enumerate(GRID):
            given, name = inputs(V, dtype, factor), f"V={V} {dtype} times {factor}"
            logits, labels, dlosses = given
            losses, dlogits = plain(*given)
            exact, dexact = plain(logits.double(), labels, dlosses.double())
            outcomes = [grid[i] for grid, _, _ in of_ranks]
            gradient = torch.cat([outcome.dlogits for outcome in outcomes], -1)
            assert gradient.dtype == dtype
            assert_as_exact_as(gradient, dlogits, dexact, floor=FLOOR[dtype], name=f"{name}: gradient")
            for outcome in outcomes:
                assert outcome.losses.dtype == accumulation_dtype(dtype)
                assert_as_exact_as(outcome.losses, losses, exact, floor=FLOOR[dtype], name=f"{name}: losses")

    def test_every_rank_has_the_same_bits(self, of_ranks: Any) -> None:
        for outcomes in zip(*(grid for grid, _, _ in of_ranks), strict=True):
            assert all_equal([outcome.losses for outcome in outcomes])

    def test_one_collective_of_three_numbers_per_token_and_none_in_backward(self, of_ranks: Any) -> None:
        size, tokens = len(of_ranks), LEADING[0] * LEADING[1]
        for grid, _, _ in of_ranks:
            for (_, dtype, _), outcome in zip(GRID, grid, strict=True):
                gathered = size * 3 * tokens * accumulation_dtype(dtype).itemsize
                assert outcome.forward == ([Traffic("all_gather", "tp", 1, gathered)] if size > 1 else [])
                assert outcome.backward == []

    def test_special_tokens_are_as_in_torch_and_ignored_ones_zero(self, of_ranks: Any) -> None:
        losses, dlogits = plain(*special_inputs())
        ignored = special_inputs()[1] == -100
        losses[ignored], dlogits[ignored] = 0.0, 0.0
        got = torch.cat([special.dlogits for _, special, _ in of_ranks], -1)
        for i, name in enumerate(SPECIAL):
            torch.testing.assert_close(got[i], dlogits[i], equal_nan=True, msg=f"gradient: {name}")
            for _, special, _ in of_ranks:
                torch.testing.assert_close(special.losses[i], losses[i], equal_nan=True, msg=name)

    def test_no_tokens(self, of_ranks: Any) -> None:
        for rank, (_, _, nothing) in enumerate(of_ranks):
            assert nothing.losses.shape == (0,)
            assert nothing.dlogits.shape == (0, len(shard_range(7, len(of_ranks), rank)))


def refusals() -> list[str]:
    """Inside a rank: what whole logits, and labels out of range, are told; nobody communicates."""
    tp, messages = tp_axis(), []
    whole = torch.zeros(2, 6)
    with pytest.raises(UsageError) as refused:
        token_losses(whole, torch.tensor([0, 1]), tp, vocab_size=6)
    messages.append(str(refused.value))
    for label in (6, -1, -101):
        with pytest.raises(RuntimeError) as failed:
            token_losses(whole[:, :3], torch.tensor([0, label]), tp, vocab_size=6)
        messages.append(str(failed.value))
    assert tp.ledger.take() == []
    return messages


def test_whole_logits_and_labels_out_of_range_are_refused_by_every_rank(launch: Launch) -> None:
    for rank, messages in enumerate(launch(2, refusals)):
        assert messages == [
            f"logits has 6 in its last dim, must have 3, which rank {rank} of 2 holds of vocab_size=6: "
            "these are whole already",
            *["a label is outside [0, 6) and is not ignore_index=-100"] * 3,
        ]


TWO = MeshAxis("tp", 2, 1, None, Ledger())
LABELS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "labels", "tp", "vocab_size", "message"),
    [
        (torch.zeros(2, 5), LABELS, TWO, 7, "logits has 5 .* must have 3, which rank 1 of 2 .*vocab_size=7$"),
        (torch.zeros(2, 4), LABELS, ALONE, 5, "logits has 4 .* must have 5"),
        (torch.zeros(2, 3), LABELS, TWO, 7, "axis tp of 2 ranks has no process group"),
        (torch.zeros(2, 5), LABELS[:1], ALONE, 5, r"labels is int64 \[1\], must be int64 \[2\]"),
        (torch.zeros(2, 5), LABELS.int(), ALONE, 5, r"labels is int32 \[2\], must be int64 \[2\]"),
        (torch.zeros(2, 5), LABELS.to("meta"), ALONE, 5, "labels is on meta, must be on logits' device cpu"),
        (torch.zeros(2, 5).long(), LABELS, ALONE, 5, r"logits is int64 \[2, 5\], must be a float tensor"),
        (torch.zeros(()), LABELS, ALONE, 5, r"logits is float32 \[\], must be a float tensor \[..., V_t\]"),
        (torch.zeros(2, 0), LABELS, ALONE, 0, "vocab_size is 0, must be at least 1"),
    ],
)
def test_refusals(logits: Tensor, labels: Tensor, tp: MeshAxis, vocab_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        token_losses(logits, labels, tp, vocab_size=vocab_size)


class TestOverOneRank:
    def test_the_sum_is_that_of_the_reference(self) -> None:
        logits, labels, _ = inputs(17)
        total, _ = reference.cross_entropy(logits, labels)
        assert_close(token_losses(logits, labels, ALONE, vocab_size=17).sum(), total)

    def test_gradients_by_finite_differences(self) -> None:
        logits, labels, _ = inputs(5)
        function = lambda x: token_losses(x, labels, ALONE, vocab_size=5)  # noqa: E731
        assert torch.autograd.gradcheck(function, (logits.requires_grad_(),))

    def test_a_second_derivative_is_refused(self) -> None:
        logits, labels, _ = inputs(5)
        losses = token_losses(logits.requires_grad_(), labels, ALONE, vocab_size=5)
        (dlogits,) = torch.autograd.grad(losses.square().sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dlogits.sum().backward()

    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_strides_change_nothing(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "CHUNK_BYTES", SMALL_CHUNK)
        logits, labels, dlosses = inputs(17, dtype)
        expected = differentiate(logits, labels, dlosses, ALONE)
        strided = {
            "tokens transposed": (logits.mT.contiguous().mT, labels),
            "sequence and batch swapped": (
                logits.transpose(0, 1).contiguous().transpose(0, 1),
                labels.T.clone().T,
            ),
            "every second element": (logits.repeat_interleave(2, -1)[..., ::2], labels),
        }
        for name, (x, y) in strided.items():
            assert not x.is_contiguous()
            got = differentiate(x, y, dlosses.T.clone().T, ALONE)
            assert torch.equal(got.losses, expected.losses), name
            assert torch.equal(got.dlogits, expected.dlogits), name

    def test_expanded_logits_and_an_expanded_gradient(self) -> None:
        logits, labels, _ = inputs(5)
        expanded = logits[:, :1].expand(-1, 5, -1)
        losses, dlogits = plain(expanded, labels, torch.ones(LEADING).double())
        got = differentiate(expanded, labels, torch.ones(1, 1).double().expand(LEADING), ALONE)
        assert_close(got.losses, losses)
        assert_close(got.dlogits, dlogits)

    def test_a_single_token_without_leading_dims(self) -> None:
        logits, labels, dlosses = (tensor[1, 1] for tensor in inputs(5))
        losses, dlogits = plain(logits[None], labels[None], dlosses[None])
        got = differentiate(logits, labels, dlosses, ALONE)
        assert_close(got.losses, losses[0])
        assert_close(got.dlogits, dlogits[0])

    def test_every_token_ignored(self) -> None:
        logits, labels, dlosses = inputs(5, F32)
        got = differentiate(logits, torch.full_like(labels, -100), dlosses, ALONE)
        assert not got.losses.any()
        assert not got.dlogits.any()

    def test_the_ignored_label_may_be_a_word(self) -> None:
        logits, labels, dlosses = inputs(3)
        labels[labels == -100] = 0
        got = differentiate(logits, labels, dlosses, ALONE, ignore_index=0)
        expected = plain(logits, labels.masked_fill(labels == 0, -100), dlosses)
        assert_close(got.losses, expected[0])
        assert_close(got.dlogits, expected[1])

    def test_autocast_changes_nothing(self) -> None:
        given = inputs(17, F32)
        expected = differentiate(*given, ALONE)
        with torch.autocast("cpu", dtype=BF16):
            got = differentiate(*given, ALONE)
        assert torch.equal(got.losses, expected.losses)
        assert torch.equal(got.dlogits, expected.dlogits)

    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_fake_tensors(self, dtype: torch.dtype) -> None:
        with FakeTensorMode():
            logits = torch.empty(300, 7, 5000, dtype=dtype, requires_grad=True)  # several chunks
            losses = token_losses(logits, torch.zeros(300, 7, dtype=torch.int64), ALONE, vocab_size=5000)
            losses.sum().backward()
        assert losses.shape == (300, 7)
        assert losses.dtype == F32
        assert logits.grad is not None
        assert (logits.grad.shape, logits.grad.dtype) == (logits.shape, dtype)


class TestMemory:
    LEADING, TOKENS, VOCAB = (2, 256), 512, 16384

    def given(self) -> tuple[Tensor, Tensor]:
        """Logits whose float32 copy would take eight chunks, not contiguous as slices of a whole are."""
        logits = torch.zeros(*self.LEADING, self.VOCAB + 1, dtype=BF16)[..., 1:].requires_grad_()
        return logits, torch.arange(self.TOKENS).view(self.LEADING)

    def test_backward_keeps_the_logits_themselves_and_two_numbers_per_token(self) -> None:
        logits, labels = self.given()
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            token_losses(logits, labels, ALONE, vocab_size=self.VOCAB)
        assert [tensor.data_ptr() for tensor in saved[:2]] == [logits.data_ptr(), labels.data_ptr()]
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in saved[2:]] == [(self.LEADING, F32)] * 2

    def test_forward_needs_two_chunks_and_backward_the_gradient_too(self) -> None:
        logits, labels = self.given()
        few = 100 * self.TOKENS
        with LiveMemory(logits, labels) as forward:
            losses = token_losses(logits, labels, ALONE, vocab_size=self.VOCAB)
        with LiveMemory(logits, labels) as backward:
            losses.sum().backward()
        assert chunks.CHUNK_BYTES <= forward.peak <= 2 * chunks.CHUNK_BYTES + few
        gradient = self.TOKENS * self.VOCAB * 2
        assert gradient + chunks.CHUNK_BYTES <= backward.peak <= gradient + 2 * chunks.CHUNK_BYTES + few
