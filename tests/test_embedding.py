"""The embedding: rows by number, and a gradient that is exact in 16 bits and the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paracore import chunks, reference_layers
from paracore.errors import UsageError
from paracore.ops.embedding import OPERATION, embedding
from tests.impl_cases import BF16, F32, F64, every_impl, fast_impls, impls_and_dtypes, mended_if_interpreted
from tests.numerics import (
    LiveMemory,
    assert_as_exact_as,
    kept_for_backward,
    nan_in_fresh_memory,
    randn,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# What the result alone costs when it is rounded: the sums are in float32, the gradient in dy's dtype.
FLOOR = {F32: 2.0**-23, BF16: 2.0**-9, F64: 2.0**-50}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Several chunks, and an incomplete one, of tensors of a few elements."""
    if "memory" not in request.node.name and "threads" not in request.node.name:
        monkeypatch.setattr(chunks, "CHUNK_BYTES", 2048)


def random_tokens(V: int, *shape: int, margin: int = 0) -> Tensor:
    """Tokens of which some repeat; with a margin some are outside the vocabulary, on both sides."""
    return torch.randint(-margin, V + margin, shape, generator=torch.Generator().manual_seed(V))


def gradient(tokens: Tensor, weight: Tensor, dy: Tensor, impl: str | None = None) -> Tensor:
    leaf = weight.detach().requires_grad_()
    (dweight,) = torch.autograd.grad(embedding(tokens, leaf, impl=impl), leaf, dy)
    return dweight


def sums(tokens: Tensor, dy: Tensor, V: int) -> Tensor:
    """The gradient in dy's dtype, by torch, of a weight of V rows; tokens outside add nothing."""
    outside = (tokens < 0) | (tokens >= V)
    order = tokens.masked_fill(outside, V).flatten()
    return dy.new_zeros(V + 1, dy.size(-1)).index_add_(0, order, dy.flatten(0, -2))[:V]


@impls_and_dtypes(OPERATION, interpreted=True)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1, 3)], ids=str)
def test_rows_of_tokens_and_zeros_for_those_outside(
    impl: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight, tokens = randn(6, 9, seed=1, dtype=dtype), random_tokens(6, *shape, margin=3)
    outside = (tokens < 0) | (tokens >= 6)
    assert outside.any()
    got = embedding(tokens, weight, impl=impl)
    assert torch.equal(got, weight[tokens.clamp(0, 5)].masked_fill(outside.unsqueeze(-1), 0.0))


@impls_and_dtypes(OPERATION, interpreted=True)
@pytest.mark.parametrize(("V", "H"), [(1, 1), (3, 17), (40, 64)])
def test_the_gradient_is_as_exact_as_torch(impl: str, dtype: torch.dtype, V: int, H: int) -> None:
    tokens, dy = random_tokens(V, 4, 30, margin=2), randn(4, 30, H, seed=2, dtype=dtype)
    with mended_if_interpreted(impl):
        got = gradient(tokens, torch.zeros(V, H, dtype=dtype), dy, impl)
    assert got.dtype == dtype
    exact = sums(tokens, dy.double(), V)
    assert_as_exact_as(got, sums(tokens, dy.float(), V).to(dtype), exact, floor=FLOOR[dtype])


@fast_impls
def test_two_thousand_repeats_of_one_token_in_bfloat16(impl: str) -> None:
    """In 16 bits a sum of ones stops at 256, and torch's does."""
    tokens = torch.full((2000,), 3).index_fill_(0, torch.tensor([5, 1000]), 1)
    dy = (1 + 0.1 * randn(2000, 40, seed=3)).to(BF16)
    weight = torch.zeros(5, 40, dtype=BF16, requires_grad=True)
    exact = sums(tokens, dy.double(), 5)
    assert relative_error(gradient(tokens, weight, dy, impl), exact) <= 2.0**-9
    (theirs,) = torch.autograd.grad(F.embedding(tokens, weight), weight, dy)
    assert relative_error(theirs, exact) > 0.5


@impls_and_dtypes(OPERATION)
def test_the_gradient_has_the_same_bits_in_every_run_and_on_any_number_of_threads(
    impl: str, dtype: torch.dtype
) -> None:
    tokens, dy = random_tokens(50, 3000), randn(3000, 130, seed=4, dtype=dtype)
    weight, threads, results = torch.zeros(50, 130, dtype=dtype), torch.get_num_threads(), []
    try:
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            results.append(gradient(tokens, weight, dy, impl))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@every_impl
@pytest.mark.parametrize(("V", "tokens"), [(0, 4), (3, 0), (0, 0)])
def test_no_rows_or_no_tokens(impl: str, V: int, tokens: int) -> None:
    weight, numbers = torch.ones(V, 6), torch.arange(tokens)
    with mended_if_interpreted(impl):
        dweight = gradient(numbers, weight, torch.ones(tokens, 6), impl)
    assert torch.equal(embedding(numbers, weight, impl=impl), weight.new_zeros(tokens, 6))
    assert torch.equal(dweight, torch.zeros(V, 6))


@fast_impls
def test_gradients_and_tokens_of_any_strides(impl: str) -> None:
    tokens, dy = random_tokens(6, 4, 5), randn(4, 5, 8, seed=2, dtype=F32)
    weight = torch.zeros(6, 8)
    expected = gradient(tokens, weight, dy, impl)
    transposed = dy.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(gradient(tokens.T.clone().T, weight, transposed, impl), expected)
    assert torch.equal(gradient(tokens, torch.zeros(8, 6).T, dy, impl), expected)
    row = dy[:1, :1]
    expanded = gradient(tokens, weight, row.expand(4, 5, 8), impl)
    assert torch.equal(expanded, gradient(tokens, weight, row.repeat(4, 5, 1), impl))


def test_gradients_by_finite_differences() -> None:
    tokens = random_tokens(4, 3, 5, margin=1)
    function = lambda weight: embedding(tokens, weight, impl="reference")  # noqa: E731
    assert torch.autograd.gradcheck(function, (randn(4, 3, seed=1).requires_grad_(),))


@fast_impls
def test_backward_keeps_the_tokens_alone(impl: str) -> None:
    weight, tokens = torch.zeros(100, 64, requires_grad=True), random_tokens(100, 3, 5)
    with kept_for_backward() as kept:
        embedding(tokens, weight, impl=impl)
    assert [(tensor.data_ptr(), tensor.dtype) for tensor in kept] == [(tokens.data_ptr(), torch.int64)]


def test_memory_of_the_reference_is_the_float32_sum_and_a_few_chunks() -> None:
    dy, tokens = torch.zeros(40_000, 128, dtype=BF16), torch.zeros(40_000, dtype=torch.int64)
    with LiveMemory(dy, tokens) as memory:
        dweight = reference_layers.embedding_gradient(dy, tokens, 5000)
    total = 5001 * 128 * 4
    few = 4 * tokens.nbytes
    assert total + chunks.CHUNK_BYTES <= memory.peak <= total + 2 * chunks.CHUNK_BYTES + dweight.nbytes + few


@fast_impls
def test_it_compiles_to_one_graph(impl: str) -> None:
    weight, tokens = randn(6, 4, seed=1, dtype=F32).requires_grad_(), random_tokens(6, 3, 5, margin=1)

    def step(weight: Tensor) -> Tensor:
        return embedding(tokens, weight * 2, impl=impl).sin().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(function(weight), weight)[0] for function in (step, compiled)]
    assert torch.equal(*results)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        weight = torch.empty(6, 4, dtype=BF16, requires_grad=True)
        rows = embedding(torch.empty(3, 5, dtype=torch.int64), weight)
        (dweight,) = torch.autograd.grad(rows.sum(), weight)
    assert (rows.shape, rows.dtype) == ((3, 5, 4), BF16)
    assert (dweight.shape, dweight.dtype) == ((6, 4), BF16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(6)}, r"weight is float32 \[6\], must be a float tensor \[V, H\]"),
        ({"weight": torch.zeros(6, 4).long()}, r"weight is int64 \[6, 4\], must be a float tensor"),
        ({"tokens": torch.zeros(3).int()}, "tokens are int32 on cpu, must be int64 on cpu"),
        ({"tokens": torch.zeros(3).long().to("meta")}, "tokens are int64 on meta, must be int64 on cpu"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tokens": torch.zeros(3).long(), "weight": torch.zeros(6, 4)} | change
    with pytest.raises(UsageError, match=message):
        embedding(**arguments)
