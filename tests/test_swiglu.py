"""SwiGLU is as exact as the reference, keeps its inputs alone, and makes no float32 copy of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paracore import chunks, reference, reference_layers
from paracore.errors import UsageError
from paracore.ops import swiglu as op
from paracore.ops.swiglu import OPERATION, swiglu
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
from tests.numerics import LiveMemory, assert_as_exact_as, kept_for_backward, nan_in_fresh_memory, randn

pytestmark = pytest.mark.usefixtures("one_thread")

cases = impls_and_dtypes(OPERATION)
small_cases = impls_and_dtypes(OPERATION, interpreted=True)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Several chunks, and an incomplete one, of tensors of a few elements."""
    if "memory" not in request.node.name:
        monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)


def differentiate(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """The output, and the gradients of gate and up, under the gradient that comes last."""
    *given, dy = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def inputs(*shape: int, dtype: torch.dtype, factor: float = 1.0) -> list[Tensor]:
    return [(factor * randn(*shape, seed=seed)).to(dtype) for seed in (1, 2, 3)]


def assert_exact(gate: Tensor, up: Tensor, dy: Tensor, *, impl: str) -> None:
    with mended_if_interpreted(impl):
        results = differentiate(partial(swiglu, impl=impl), gate, up, dy)
    contenders = differentiate(reference.swiglu, gate, up, dy)
    exact = differentiate(reference.swiglu, gate.double(), up.double(), dy.to(gate.dtype).double())
    for name, result, contender, ref in zip(("y", "dgate", "dup"), results, contenders, exact, strict=True):
        assert (result.shape, result.dtype) == (contender.shape, contender.dtype)
        assert_as_exact_as(result, contender, ref, floor=FLOOR[gate.dtype], name=name)


class TestExactness:
    @small_cases
    @pytest.mark.parametrize("shape", [(1,), (17,), (3, 5), (2, 3, 33), (40, 1), ()], ids=str)
    @pytest.mark.parametrize("factor", [1.0, 1e4])
    def test_as_exact_as_the_reference(
        self, impl: str, dtype: torch.dtype, shape: tuple[int, ...], factor: float
    ) -> None:
        assert_exact(*inputs(*shape, dtype=dtype, factor=factor), impl=impl)

    @cases
    def test_as_exact_as_the_reference_in_rows_of_many_sizes(self, impl: str, dtype: torch.dtype) -> None:
        for size in (15, 16, 31, 64, 100, 1001):
            assert_exact(*inputs(7, size, dtype=dtype), impl=impl)

    @small_cases
    def test_strided_inputs_and_gradients(self, impl: str, dtype: torch.dtype) -> None:
        gate, up, dy = inputs(6, 6, 6, dtype=dtype)  # equal sizes, where a swapped dim would hide
        assert_exact(gate.transpose(0, 2), up, dy.transpose(1, 2), impl=impl)
        assert_exact(gate[:, ::2], up[:, 1::2], dy[..., :1, :1].expand(6, 3, 6), impl=impl)
        assert_exact(gate[:, :1].expand(6, 6, 6), up.mT, dy, impl=impl)
        assert_exact(gate.transpose(0, 1), up.transpose(0, 1), dy, impl=impl)

    @every_impl
    def test_halves_of_one_tensor(self, impl: str) -> None:
        gate, up = randn(5, 14, seed=1, dtype=BF16).chunk(2, -1)
        assert_exact(gate, up, randn(5, 7, seed=2), impl=impl)

    def test_gradients_by_finite_differences(self) -> None:
        gate, up, _ = inputs(3, 7, dtype=F64)
        function = partial(swiglu, impl="reference")
        assert torch.autograd.gradcheck(function, (gate.requires_grad_(), up.requires_grad_()))

    def test_a_second_derivative_is_refused(self) -> None:
        gate, up, _ = inputs(3, 7, dtype=F64)
        (dgate,) = torch.autograd.grad(
            swiglu(gate.requires_grad_(), up).square().sum(), gate, create_graph=True
        )
        with pytest.raises(RuntimeError, match="swiglu_backward"):
            dgate.sum().backward()

    @fast_impls
    @pytest.mark.parametrize("which", [0, 1])
    def test_one_input_alone_may_require_its_gradient(self, impl: str, which: int) -> None:
        *given, dy = inputs(3, 7, dtype=F32)
        _, *expected = differentiate(partial(swiglu, impl=impl), *given, dy)
        given[which].requires_grad_()
        swiglu(*given, impl=impl).backward(dy)
        gradient = given[which].grad
        assert gradient is not None
        assert torch.equal(gradient, expected[which])
        assert given[1 - which].grad is None

    @every_impl
    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
    def test_no_elements(self, impl: str, shape: tuple[int, ...]) -> None:
        results = differentiate(partial(swiglu, impl=impl), *inputs(*shape, dtype=BF16))
        assert [tuple(x.shape) for x in results] == [shape] * 3

    @cases
    def test_autocast_changes_nothing(self, impl: str, dtype: torch.dtype) -> None:
        given, function = inputs(3, 17, dtype=dtype), partial(swiglu, impl=impl)
        expected = differentiate(function, *given)
        with torch.autocast("cpu", dtype=BF16):
            got = differentiate(function, *given)
            assert reference.swiglu(*given[:2]).dtype == got[0].dtype
        assert all(map(torch.equal, got, expected))

    def test_fake_tensors(self) -> None:
        with FakeTensorMode():
            gate, up = (torch.empty(3, 17, dtype=BF16, requires_grad=True) for _ in range(2))
            swiglu(gate, up).sum().backward()
        for tensor in (gate, up):
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, BF16)

    @pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
    def test_op_is_registered_as_torch_demands(self, dtype: torch.dtype) -> None:
        gate, up, dy = inputs(3, 7, dtype=dtype)
        torch.library.opcheck(op._forward, (gate.requires_grad_(), up.requires_grad_(), "reference"))
        torch.library.opcheck(op._backward, (dy, gate.detach(), up.detach(), "reference"))


class TestMemory:
    SHAPE = 512, 12, 1024  # a float32 copy would take six chunks

    def given(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.SHAPE, dtype=BF16, requires_grad=True), torch.ones(
            self.SHAPE, dtype=BF16, requires_grad=True
        )

    @fast_impls
    def test_memory_kept_for_backward_is_gate_and_up(self, impl: str) -> None:
        gate, up = self.given()
        for first, second in ((gate, up), (gate.transpose(0, 1), up.transpose(0, 1))):
            with kept_for_backward() as kept:
                swiglu(first, second, impl=impl)
            assert [tensor.data_ptr() for tensor in kept] == [gate.data_ptr(), up.data_ptr()]

    def test_memory_of_the_reference_is_the_results_and_a_few_chunks(self) -> None:
        gate, up = (tensor.detach().flatten(0, 1) for tensor in self.given())
        with LiveMemory(gate, up) as forward:
            y = reference_layers.swiglu_forward(gate, up)
        dy = torch.ones_like(y)
        with LiveMemory(gate, up, dy) as backward:
            reference_layers.swiglu_backward(dy, gate, up)
        assert y.nbytes + chunks.CHUNK_BYTES <= forward.peak <= y.nbytes + 3 * chunks.CHUNK_BYTES
        results = gate.nbytes + up.nbytes
        assert results + chunks.CHUNK_BYTES <= backward.peak <= results + 7 * chunks.CHUNK_BYTES


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (
            torch.zeros(3, 5),
            torch.zeros(5),
            r"up is float32 \[5\] on cpu, must be as gate: float32 \[3, 5\] on cpu",
        ),
        (
            torch.zeros(3, 1),
            torch.zeros(3, 5),
            r"up is float32 \[3, 5\] on cpu, must be as gate: float32 \[3, 1\]",
        ),
        (
            torch.zeros(3),
            torch.zeros(3, device="meta"),
            r"up is float32 \[3\] on meta, must be as gate: float32 \[3\] on cpu",
        ),
        (torch.zeros(3).int(), torch.zeros(3), "gate is int32, must be a float tensor"),
        (torch.zeros(3), torch.zeros(3).int(), r"up is int32 \[3\] on cpu, must be as gate: float32"),
        (torch.zeros(3), torch.zeros(3).to(BF16), r"up is bfloat16 \[3\] on cpu, must be as gate: float32"),
    ],
)
def test_refusals(gate: Tensor, up: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        swiglu(gate, up)
