"""Cross entropy over one rank: strides, objectives, memory, compilation, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paracore import chunks, cross_entropy, reference, reference_layers
from paracore.errors import UsageError
from paracore.ops.cross_entropy import OPERATION
from paracore.parallel import Ledger, MeshAxis
from paracore.reference import accumulation_dtype
from tests.conftest import Launch, tp_axis
from tests.impl_cases import (
    BF16,
    F32,
    F64,
    FLOOR,
    every_impl,
    fast_impls,
    impls_and_dtypes,
    mended_if_interpreted,
)
from tests.loss_cases import LEADING, gradient_floor, random_tokens, torch_gradient
from tests.numerics import (
    LiveMemory,
    assert_as_exact_as,
    assert_close,
    kept_for_backward,
    nan_in_fresh_memory,
    randn,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ALONE = MeshAxis.alone("tp")
SMALL_CHUNK = 512  # bytes: several tokens at a time, and an incomplete piece


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


def differentiate(logits: Tensor, labels: Tensor, dlosses: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    losses = cross_entropy(leaf, labels, reduction="none", **options)
    losses.backward(dlosses)
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


# ---------------------------------------------------------------- values


@impls_and_dtypes(OPERATION, interpreted=True)
@pytest.mark.parametrize("V", [1, 5, 130])
def test_as_exact_as_torch(impl: str, dtype: torch.dtype, V: int) -> None:
    given = random_tokens(V, dtype, 10.0)
    options: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 0.01}
    logits, labels, dlosses = given
    with mended_if_interpreted(impl):
        results = differentiate(*given, impl=impl, **options)
    contenders = torch_gradient(*given, **options)
    exact = torch_gradient(logits.double(), labels, dlosses.double(), **options)
    assert [x.dtype for x in results] == [accumulation_dtype(dtype), dtype]
    floors = FLOOR[dtype], gradient_floor(dlosses, exact[1], FLOOR[dtype])
    for x, contender, ref, floor in zip(results, contenders, exact, floors, strict=True):
        assert_as_exact_as(x, contender, ref, floor=floor)


def test_the_sum_is_that_of_the_definition() -> None:
    logits, labels, _ = random_tokens(17)
    total, count = reference.cross_entropy(logits, labels)
    assert_close(cross_entropy(logits, labels, reduction="sum"), total)
    assert_close(cross_entropy(logits, labels), total / count)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_every_reduction_is_torchs(reduction: str, smoothing: float) -> None:
    logits, labels, _ = random_tokens(5)
    ours = cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
    theirs = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction=reduction, label_smoothing=smoothing
    )
    assert_close(ours.flatten(), theirs.flatten())


def test_z_loss_is_that_of_the_whole_log_sum() -> None:
    logits, labels = torch.tensor([[700.0, 700.0, 700.0]]).double(), torch.tensor([1])
    log_z = 700 + torch.tensor(3.0).double().log()
    expected = log_z - 700 + 0.5 * log_z**2
    assert_close(cross_entropy(logits, labels, z_loss=0.5), expected)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"label_smoothing": 0.3, "z_loss": 0.5}])
def test_gradients_by_finite_differences(options: dict[str, Any]) -> None:
    logits, labels, _ = random_tokens(5)
    function = lambda x: cross_entropy(x, labels, reduction="none", impl="reference", **options)  # noqa: E731
    assert torch.autograd.gradcheck(function, (logits.requires_grad_(),))


@every_impl
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_token_ignored(impl: str, reduction: str) -> None:
    logits, labels, _ = random_tokens(5, F32)
    leaf = logits.requires_grad_()
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "impl": impl}
    loss = cross_entropy(leaf, torch.full_like(labels, -100), reduction=reduction, **options)
    loss.sum().backward()
    assert leaf.grad is not None
    assert not loss.any()
    assert not leaf.grad.any()


@fast_impls
def test_the_ignored_label_may_be_a_word(impl: str) -> None:
    logits, labels, dlosses = random_tokens(3, F32)
    labels[labels == -100] = 0
    got = differentiate(logits, labels, dlosses, ignore_index=0, impl=impl)
    expected = torch_gradient(logits, labels.masked_fill(labels == 0, -100), dlosses)
    assert_close(got[0], expected[0], eps=1e-6)
    assert_close(got[1], expected[1], eps=1e-6)


# ---------------------------------------------------------------- strides and shapes


@impls_and_dtypes(OPERATION, interpreted=True)
def test_strides_change_nothing(impl: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", SMALL_CHUNK)
    logits, labels, dlosses = random_tokens(17, dtype)
    strided = {
        "tokens transposed": (logits.mT.contiguous().mT, labels),
        "sequence and batch swapped": (
            logits.transpose(0, 1).contiguous().transpose(0, 1),
            labels.T.clone().T,
        ),
        "every second element": (logits.repeat_interleave(2, -1)[..., ::2], labels),
        "a slice of a wider tensor": (F.pad(logits, (3, 2), value=float("nan"))[..., 3:-2], labels),
    }
    with mended_if_interpreted(impl):
        expected = differentiate(logits, labels, dlosses, impl=impl)
        for name, (x, y) in strided.items():
            assert not x.is_contiguous()
            got = differentiate(x, y, dlosses.T.clone().T, impl=impl)
            if impl == "triton":  # numpy, which interprets, adds in an order that depends on a row's place
                torch.testing.assert_close(got, expected, msg=name)
            else:
                assert all(map(torch.equal, got, expected)), name


@fast_impls
def test_expanded_logits_and_an_expanded_gradient(impl: str) -> None:
    logits, labels, _ = random_tokens(5, F32)
    expanded = logits[:, :1].expand(-1, 5, -1)
    expected = torch_gradient(expanded, labels, torch.ones(LEADING))
    got = differentiate(expanded, labels, torch.ones(1, 1).expand(LEADING), impl=impl)
    assert_close(got[0], expected[0], eps=1e-6)
    assert_close(got[1], expected[1], eps=1e-6)


@fast_impls
def test_a_single_token_without_leading_dims(impl: str) -> None:
    logits, labels, dlosses = (tensor[1, 1] for tensor in random_tokens(5, F32))
    expected = torch_gradient(logits[None], labels[None], dlosses[None])
    got = differentiate(logits, labels, dlosses, impl=impl)
    assert_close(got[0], expected[0][0], eps=1e-6)
    assert_close(got[1], expected[1][0], eps=1e-6)


# ---------------------------------------------------------------- what torch does with the op


def test_a_second_derivative_is_refused() -> None:
    logits, labels, _ = random_tokens(5)
    losses = cross_entropy(logits.requires_grad_(), labels, reduction="none")
    (dlogits,) = torch.autograd.grad(losses.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dlogits.sum().backward()


@fast_impls
def test_autocast_changes_nothing(impl: str) -> None:
    given = random_tokens(17, F32)
    expected = differentiate(*given, impl=impl)
    with torch.autocast("cpu", dtype=BF16):
        got = differentiate(*given, impl=impl)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_fake_tensors(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        logits = torch.empty(30, 7, 50, dtype=dtype, requires_grad=True)
        losses = cross_entropy(logits, torch.zeros(30, 7, dtype=torch.int64), reduction="none")
        losses.sum().backward()
    assert (losses.shape, losses.dtype) == ((30, 7), F32)
    assert logits.grad is not None
    assert (logits.grad.shape, logits.grad.dtype) == (logits.shape, dtype)


@fast_impls
def test_over_one_rank_it_compiles_to_one_graph(impl: str) -> None:
    logits, labels, _ = random_tokens(5, F32)

    def step(x: Tensor) -> Tensor:
        return cross_entropy(x * 2, labels, label_smoothing=0.1, z_loss=0.01, impl=impl)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = logits.detach().requires_grad_()
        loss = function(leaf)
        results.append((loss, *torch.autograd.grad(loss, leaf)))
    assert all(map(torch.equal, *results))


# ---------------------------------------------------------------- memory

TOKENS, VOCAB = 512, 16384  # a float32 copy of the logits would take eight chunks


def large_inputs() -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] held as [S, B, V], in rows longer than V: two views that ask for no copy."""
    logits = torch.zeros(256, 2, VOCAB + 1, dtype=BF16)[..., 1:].transpose(0, 1).requires_grad_()
    return logits, torch.arange(TOKENS).view(2, 256)


def test_logits_are_kept_as_they_came_with_four_numbers_per_token_at_most() -> None:
    logits, labels = large_inputs()
    with kept_for_backward() as kept:
        cross_entropy(logits, labels)
    assert kept[0].data_ptr() == logits.data_ptr()
    assert kept[0].dtype == BF16
    numbers = sum(tensor.nbytes for tensor in kept[1:] if tensor.dtype == F32)
    assert 2 * 4 * TOKENS <= numbers <= 4 * 4 * TOKENS
    assert {tensor.dtype for tensor in kept[1:]} <= {F32, torch.int64, torch.float64}


@fast_impls
def test_transposed_views_are_not_copied_and_the_gradient_is_all_that_is_added(impl: str) -> None:
    logits, labels = large_inputs()
    few, gradient = 300 * TOKENS, TOKENS * VOCAB * 2
    with LiveMemory(logits, labels) as forward:
        loss = cross_entropy(logits, labels, impl=impl)
    with LiveMemory(logits, labels) as backward:
        torch.autograd.grad(loss, logits)
    assert 0 < forward.peak <= few
    assert gradient <= backward.peak <= gradient + few


def test_the_reference_holds_a_few_chunks() -> None:
    logits, labels = torch.zeros(TOKENS, VOCAB, dtype=BF16), torch.arange(TOKENS)
    few = 100 * TOKENS
    with LiveMemory(logits, labels) as forward:
        statistics = reference_layers.cross_entropy_statistics(logits, labels)
    coefficients, dlogits = torch.ones(3, TOKENS), torch.empty_like(logits)
    with LiveMemory(logits, labels, statistics, coefficients, dlogits) as backward:
        reference_layers.cross_entropy_gradient(
            logits, labels, statistics[0], statistics[1], coefficients, dlogits
        )
    for peak in (forward.peak, backward.peak):
        assert chunks.CHUNK_BYTES <= peak <= 2 * chunks.CHUNK_BYTES + few


def test_the_gradient_may_replace_the_logits() -> None:
    logits, labels = randn(6, 9, seed=1, dtype=F32), torch.arange(6)
    maximum, log_sum = logits.amax(-1), (logits - logits.amax(-1, keepdim=True)).logsumexp(-1)
    apart, coefficients = torch.empty_like(logits), randn(3, 6, seed=2, dtype=F32)
    for out in (apart, logits):
        reference_layers.cross_entropy_gradient(logits, labels, maximum, log_sum, coefficients, out)
    assert torch.equal(apart, logits)


# ---------------------------------------------------------------- refusals

TWO = MeshAxis("tp", 2, 1, None, Ledger())
LABELS = torch.zeros(2, dtype=torch.int64)
LOGITS = torch.zeros(2, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": TWO, "vocab_size": 7}, "logits has 5 .* must have 3, which rank 1 of 2 .*vocab_size=7$"),
        ({"tp": TWO, "vocab_size": 5}, "logits has 5 .* must have 2, .* whole already"),
        ({"tp": TWO}, "vocab_size=None: must be given over 2 ranks of axis tp; rank 1 holds 5"),
        ({"tp": TWO, "vocab_size": 10}, "axis tp of 2 ranks has no process group"),
        ({"over": TWO}, "axis tp of 2 ranks has no process group"),
        ({"vocab_size": 6}, "logits has 5 .* must have 6"),
        ({"vocab_size": 0}, "vocab_size=0: must be at least 1"),
        ({"logits": torch.zeros(2, 0)}, "vocab_size=0: must be at least 1"),
        ({"labels": LABELS[:1]}, r"labels is int64 \[1\] on cpu, must be int64 \[2\] on cpu"),
        ({"labels": LABELS.int()}, r"labels is int32 \[2\] on cpu, must be int64 \[2\] on cpu"),
        ({"labels": LABELS.to("meta")}, r"labels is int64 \[2\] on meta, must be int64 \[2\] on cpu"),
        ({"logits": LOGITS.long()}, r"logits is int64 \[2, 5\], must be a float tensor"),
        ({"logits": torch.zeros(())}, r"logits is float32 \[\], must be a float tensor \[..., V\]"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: must be from 0 to 1"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1: must be from 0 to 1"),
        ({"label_smoothing": float("nan")}, "label_smoothing=nan: must be from 0 to 1"),
        ({"z_loss": -1.0}, "z_loss=-1.0: must be finite and not negative"),
        ({"z_loss": float("inf")}, "z_loss=inf: must be finite and not negative"),
        ({"reduction": "average"}, "reduction='average': must be one of mean, sum, none"),
        ({"reduction": "none", "over": ALONE}, 'reduction="none": nothing is summed over the axis tp'),
        ({"impl": "fast"}, "argument impl is 'fast', must be one of"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": LOGITS, "labels": LABELS} | change
    with pytest.raises(UsageError, match=message):
        cross_entropy(**arguments)


def test_a_dtype_that_an_implementation_was_not_written_for_is_refused_only_if_asked_for() -> None:
    logits = LOGITS.double()
    assert cross_entropy(logits, LABELS).dtype == F64
    with pytest.raises(UsageError, match=r"'native' .* it is not written for float64"):
        cross_entropy(logits, LABELS, impl="native")


def losses_in_two_orders() -> list[Tensor]:
    """Rank 1 holds its shard of the same logits with sequence and batch swapped in memory."""
    tp = tp_axis()
    logits = randn(3, 4, 6, seed=0)[..., tp.rank * 3 : tp.rank * 3 + 3].contiguous()
    logits = logits.transpose(0, 1).contiguous().transpose(0, 1) if tp.rank else logits
    labels = torch.arange(12).remainder(6).view(3, 4)
    logits.requires_grad_()
    losses = cross_entropy(logits, labels, tp, vocab_size=6, reduction="none")
    losses.sum().backward()
    assert logits.grad is not None
    return [losses.detach(), logits.grad]


def test_ranks_may_hold_logits_in_different_orders(launch: Launch) -> None:
    whole = randn(3, 4, 6, seed=0).requires_grad_()
    expected = cross_entropy(whole, torch.arange(12).remainder(6).view(3, 4), reduction="none")
    expected.sum().backward()
    assert whole.grad is not None
    for rank, (losses, gradient) in enumerate(launch(2, losses_in_two_orders)):
        torch.testing.assert_close(losses, expected.detach())
        torch.testing.assert_close(gradient, whole.grad[..., rank * 3 : rank * 3 + 3])


def test_other_sizes_compile_to_one_graph_too() -> None:
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        logits, labels = randn(5, batch, 8, seed=0), torch.arange(5 * batch).remainder(8).view(5, batch)
        torch.testing.assert_close(compiled(logits, labels), cross_entropy(logits, labels))
