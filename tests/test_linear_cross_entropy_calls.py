"""The fused LM head and loss over one rank: what is computed, what is alive, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paracore import chunks, cross_entropy, linear_cross_entropy
from paracore.errors import UsageError
from paracore.ops import product
from paracore.parallel import Ledger, MeshAxis
from tests.impl_cases import BF16, F32, F64, every_impl, fast_impls, mended_if_interpreted
from tests.loss_cases import random_labels
from tests.numerics import LiveMemory, assert_close, nan_in_fresh_memory, randn

pytestmark = pytest.mark.usefixtures("one_thread")

Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


def inputs(dtype: torch.dtype, V: int = 7) -> Inputs:
    """hidden [5, 3, 12], weight, labels of which every fourth is ignored."""
    hidden, weight = randn(5, 3, 12, seed=1, dtype=dtype), randn(V, 12, seed=2, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), random_labels(V, 5, 3)


class Products(TorchDispatchMode):
    """Counts the matrix products within."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm")
        return function(*args, **(kwargs or {}))


# ---------------------------------------------------------------- values


@every_impl
@pytest.mark.parametrize("chunk_tokens", [1, 4, 15, None])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 0.01, "reduction": "sum"}])
def test_equals_the_cross_entropy_of_the_product(
    impl: str, chunk_tokens: int | None, options: dict[str, Any]
) -> None:
    hidden, weight, labels = inputs(F32)
    with mended_if_interpreted(impl):
        fused = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens, impl=impl, **options)
        gradients = torch.autograd.grad(fused, (hidden, weight))
        apart = cross_entropy(hidden @ weight.T, labels, impl=impl, **options)
        expected = torch.autograd.grad(apart, (hidden, weight))
    assert_close(fused, apart, eps=1e-6)
    for gradient, other in zip(gradients, expected, strict=True):
        assert_close(gradient, other, eps=1e-6)


def test_gradients_are_multiplied_by_what_arrives() -> None:
    hidden, weight, labels = inputs(F64)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1}
    ours = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4, **options).square()
    theirs = cross_entropy(hidden @ weight.T, labels, **options).square()
    for gradient, other in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(theirs, (hidden, weight)),
        strict=True,
    ):
        assert_close(gradient, other)


def test_weight_gradients_of_many_chunks_are_added_up_in_float32() -> None:
    """In bfloat16 a sum of 300 ones stops at 256."""
    hidden = torch.ones(300, 8, dtype=BF16)
    weight = torch.zeros(2, 8, dtype=BF16, requires_grad=True)
    labels = torch.zeros(300, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_tokens=1).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.tensor([[-150.0], [150.0]], dtype=BF16).expand(2, 8))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_gradient_is_scaled_by_what_arrives_in_float32(dtype: torch.dtype) -> None:
    """1 + 2^-8 is 1 in bfloat16; 1.5 times it is not 1.5."""
    factor = 1 + 2.0**-8
    hidden, weight = (
        torch.zeros(1, 2, dtype=dtype, requires_grad=True),
        torch.tensor([[3.0, 0.0], [0.0, 0.0]]),
    )
    labels = torch.tensor([1])
    loss = linear_cross_entropy(hidden, weight.to(dtype), labels, reduction="sum")
    (dhidden,) = torch.autograd.grad(loss * factor, hidden)
    assert torch.equal(dhidden, torch.tensor([[1.5 * factor, 0.0]]).to(dtype))
    assert dhidden[0, 0] != 1.5


def test_a_weight_that_is_used_elsewhere_too() -> None:
    _, weight, labels = inputs(F64)
    tokens = labels.clamp(min=0)
    hidden = F.embedding(tokens, weight).sin()
    (tied,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_tokens=4), weight)
    logits = F.embedding(tokens, weight).sin() @ weight.T
    (expected,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), weight)
    assert_close(tied, expected)


@every_impl
def test_every_token_ignored(impl: str) -> None:
    hidden, weight, labels = inputs(F32)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "impl": impl}
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), **options)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_inputs_of_any_strides() -> None:
    hidden, weight, labels = inputs(F64)
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    for x, w in (
        (hidden.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0), weight.detach().T.contiguous().T),
        (F.pad(hidden.detach(), (1, 1))[..., 1:-1], F.pad(weight.detach(), (1, 0))[:, 1:]),
        (hidden.detach().repeat_interleave(2, 0)[::2], weight.detach().repeat_interleave(2, 1)[:, ::2]),
    ):
        leaves = x.requires_grad_(), w.requires_grad_()
        assert not any(leaf.is_contiguous() for leaf in leaves)
        got = torch.autograd.grad(linear_cross_entropy(*leaves, labels.T.clone().T, chunk_tokens=4), leaves)
        for gradient, other in zip(got, expected, strict=True):
            assert_close(gradient, other)


def test_one_token_without_leading_dims() -> None:
    hidden, weight, labels = inputs(F64)
    one, label = hidden[2, 1], labels[2, 1]
    loss = linear_cross_entropy(one, weight, label)
    assert_close(loss, F.cross_entropy(weight @ one, label))
    assert torch.autograd.grad(loss, one)[0].shape == (12,)


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize(("needs_dx", "needs_dw"), [(True, True), (True, False), (False, True)])
def test_nothing_is_computed_for_what_is_frozen(needs_dx: bool, needs_dw: bool) -> None:
    hidden, weight, labels = inputs(F32)
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    hidden.requires_grad_(needs_dx)
    weight.requires_grad_(needs_dw)
    with Products() as products:
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=5)
        loss.backward()
    assert products.count == 3 * (1 + needs_dx + needs_dw)
    for leaf, needed, gradient in zip((hidden, weight), (needs_dx, needs_dw), expected, strict=True):
        assert (leaf.grad is not None) == needed
        if leaf.grad is not None:
            assert_close(leaf.grad, gradient, eps=1e-6)


def test_without_gradients_logits_are_all_that_is_computed() -> None:
    hidden, weight, labels = inputs(F32)
    with Products() as evaluation, torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=5)
    with Products() as frozen:
        linear_cross_entropy(hidden.detach(), weight.detach(), labels, chunk_tokens=5)
    assert evaluation.count == frozen.count == 3
    assert not loss.requires_grad


def test_backward_runs_once() -> None:
    hidden, weight, labels = inputs(F32)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran before, and its gradients were handed out"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, labels = inputs(F32)
    loss = linear_cross_entropy(hidden, weight, labels)
    (dhidden,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|backward ran before"):
        dhidden.sum().backward()


@fast_impls
def test_autocast_computes_in_its_dtype_and_gradients_keep_theirs(impl: str) -> None:
    hidden, weight, labels = inputs(F32)
    with torch.autocast("cpu", dtype=BF16):
        loss = linear_cross_entropy(hidden, weight, labels, impl=impl)
        exact = linear_cross_entropy(hidden.double(), weight.double(), labels)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    narrow = [leaf.detach().to(BF16).requires_grad_() for leaf in (hidden, weight)]
    expected = linear_cross_entropy(narrow[0], narrow[1], labels, impl=impl)
    assert torch.equal(loss, expected)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, narrow), strict=True):
        assert gradient.dtype == F32
        assert torch.equal(gradient, other.float())
    assert exact.dtype == F64  # which autocast leaves alone


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_fake_tensors(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        hidden = torch.empty(5, 3, 8, dtype=dtype, requires_grad=True)
        weight = torch.empty(11, 8, dtype=dtype, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, torch.zeros(5, 3, dtype=torch.int64), chunk_tokens=4)
        gradients = torch.autograd.grad(loss, (hidden, weight))
    assert (loss.shape, loss.dtype) == ((), F32)
    assert [(g.shape, g.dtype) for g in gradients] == [(hidden.shape, dtype), (weight.shape, dtype)]


@fast_impls
def test_over_one_rank_it_compiles_to_one_graph(impl: str) -> None:
    hidden, weight, labels = inputs(F32)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 2, weight, labels, chunk_tokens=8, impl=impl)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = function(hidden, weight)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert all(map(torch.equal, *results))


# ---------------------------------------------------------------- memory

TOKENS, VOCAB, SIZE, CHUNK = 2048, 4096, 64, 128


@fast_impls
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_alive_are_gradients_accumulators_and_one_chunk(
    impl: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((chunks, "CHUNK_BYTES"), (product, "_BLOCK_BYTES")):
        monkeypatch.setattr(module, name, 1 << 16)  # their few MiB would be more than all else here
    hidden = torch.zeros(TOKENS, SIZE, dtype=dtype, requires_grad=True)
    weight = torch.zeros(VOCAB, SIZE, dtype=dtype, requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    accumulator, chunk = VOCAB * SIZE * 4, CHUNK * VOCAB * dtype.itemsize
    gradients = hidden.nbytes + (0 if dtype == F32 else weight.nbytes)  # float32 adds up in the gradient
    with LiveMemory(hidden, weight, labels) as memory:
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=CHUNK, impl=impl)
        forward = memory.peak
        torch.autograd.grad(loss, (hidden, weight))
    assert hidden.nbytes + accumulator + chunk <= forward
    assert memory.peak <= 1.2 * (gradients + accumulator + chunk)
    assert memory.peak < TOKENS * VOCAB * dtype.itemsize / 3  # whole logits never were


@fast_impls
def test_evaluation_needs_one_chunk(impl: str) -> None:
    hidden, weight = torch.zeros(TOKENS, SIZE), torch.zeros(VOCAB, SIZE, requires_grad=True)
    labels, chunk = torch.zeros(TOKENS, dtype=torch.int64), CHUNK * VOCAB * 4
    with LiveMemory(hidden, weight, labels) as memory, torch.no_grad():
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=CHUNK, impl=impl)
    assert chunk <= memory.peak <= 1.1 * chunk


# ---------------------------------------------------------------- refusals

TWO = MeshAxis("tp", 2, 1, None, Ledger())
HIDDEN, WEIGHT, LABELS = torch.zeros(5, 4), torch.zeros(6, 4), torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(6, 3)}, r"weight is float32 \[6, 3\] .* must be float32 \[6, 4\]"),
        ({"weight": WEIGHT.to(BF16)}, r"weight is bfloat16 \[6, 4\] .* must be float32 \[6, 4\]"),
        ({"weight": WEIGHT.to("meta")}, r"weight is float32 \[6, 4\] on meta, must be .* on cpu"),
        ({"vocab_size": 7}, r"weight is float32 \[6, 4\] on cpu, must be float32 \[7, 4\]"),
        (
            {"tp": TWO, "vocab_size": 6},
            r"weight is float32 \[6, 4\] .* \[3, 4\] .* rank 1 of 2 .*vocab_size=6",
        ),
        ({"tp": TWO}, "vocab_size=None: must be given over 2 ranks"),
        ({"tp": TWO, "vocab_size": 12}, "axis tp of 2 ranks has no process group"),
        ({"over": TWO}, "axis tp of 2 ranks has no process group"),
        ({"length": 6}, r"hidden is \[5, 4\], must have 6 in dim 0: .*length=6"),
        ({"labels": LABELS[:4]}, r"labels is int64 \[4\] on cpu, must be int64 \[5\]"),
        ({"labels": LABELS.int()}, r"labels is int32 \[5\] on cpu, must be int64 \[5\]"),
        ({"hidden": HIDDEN.long()}, r"hidden is int64 \[5, 4\], must be a float tensor"),
        ({"hidden": torch.zeros(())}, r"hidden is float32 \[\], must be a float tensor"),
        ({"chunk_tokens": 0}, "chunk_tokens=0: must be at least 1"),
        ({"reduction": "none"}, 'reduction="none": the gradients are computed before'),
        ({"reduction": "average"}, "reduction='average': must be one of"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0: must be from 0 to 1"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS} | change
    with pytest.raises(UsageError, match=message):
        linear_cross_entropy(**arguments)


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"a label is outside \[0, 6\)"):
        linear_cross_entropy(HIDDEN, WEIGHT, torch.full_like(LABELS, 6))


def test_in_float16_sums_of_a_chunk_do_not_overflow() -> None:
    hidden = torch.full((4096, 8), 40.0, dtype=torch.float16)
    weight = torch.zeros(6, 8, dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64)).backward()
    assert weight.grad is not None
    assert weight.grad[0, 0].item() == pytest.approx(-40 * 5 / 6, rel=1e-3)
