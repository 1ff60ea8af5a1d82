"""SwiGLU is as exact as the reference, keeps its inputs alone, and makes no float32 copy of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paracore import chunks, reference
from paracore.errors import UsageError
from paracore.ops.swiglu import swiglu
from tests.numerics import LiveMemory, assert_as_exact_as, nan_in_fresh_memory, randn

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
FLOOR = {F32: 2.0**-23, BF16: 2.0**-23, F64: 2.0**-50}
dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)


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


def assert_exact(gate: Tensor, up: Tensor, dy: Tensor) -> None:
    results = differentiate(swiglu, gate, up, dy)
    contenders = differentiate(reference.swiglu, gate, up, dy)
    exact = differentiate(reference.swiglu, gate.double(), up.double(), dy.to(gate.dtype).double())
    for name, result, contender, ref in zip(("y", "dgate", "dup"), results, contenders, exact, strict=True):
        assert (result.shape, result.dtype) == (contender.shape, contender.dtype)
        assert_as_exact_as(result, contender, ref, floor=FLOOR[gate.dtype], name=name)


class TestExactness:
    @dtypes
    @pytest.mark.parametrize("shape", [(1,), (17,), (3, 5), (2, 3, 33), (40, 1), ()], ids=str)
    @pytest.mark.parametrize("factor", [1.0, 1e4])
    def test_as_exact_as_the_reference(
        self, dtype: torch.dtype, shape: tuple[int, ...], factor: float
    ) -> None:
        assert_exact(*inputs(*shape, dtype=dtype, factor=factor))

    @dtypes
    def test_strided_inputs_and_gradients(self, dtype: torch.dtype) -> None:
        gate, up, dy = inputs(6, 6, 6, dtype=dtype)  # equal sizes, where a swapped dim would hide
        assert_exact(gate.transpose(0, 2), up, dy.transpose(1, 2))
        assert_exact(gate[:, ::2], up[:, 1::2], dy[..., :1, :1].expand(6, 3, 6))
        assert_exact(gate[:, :1].expand(6, 6, 6), up.mT, dy)

    def test_halves_of_one_tensor(self) -> None:
        gate, up = randn(5, 14, seed=1, dtype=BF16).chunk(2, -1)
        assert_exact(gate, up, randn(5, 7, seed=2))

    @pytest.mark.parametrize(("gate_dtype", "up_dtype"), [(BF16, F32), (F32, BF16)], ids=str)
    def test_each_gradient_has_its_inputs_dtype(self, gate_dtype: torch.dtype, up_dtype: torch.dtype) -> None:
        gate, up, dy = inputs(3, 17, dtype=F32)
        assert_exact(gate.to(gate_dtype), up.to(up_dtype), dy)

    def test_gradients_by_finite_differences(self) -> None:
        gate, up, _ = inputs(3, 7, dtype=F64)
        assert torch.autograd.gradcheck(swiglu, (gate.requires_grad_(), up.requires_grad_()))

    def test_a_second_derivative_is_refused(self) -> None:
        gate, up, _ = inputs(3, 7, dtype=F64)
        (dgate,) = torch.autograd.grad(
            swiglu(gate.requires_grad_(), up).square().sum(), gate, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dgate.sum().backward()

    @pytest.mark.parametrize("which", [0, 1])
    def test_one_input_alone_may_require_its_gradient(self, which: int) -> None:
        *given, dy = inputs(3, 7, dtype=F32)
        _, *expected = differentiate(swiglu, *given, dy)
        given[which].requires_grad_()
        swiglu(*given).backward(dy)
        gradient = given[which].grad
        assert gradient is not None
        assert torch.equal(gradient, expected[which])
        assert given[1 - which].grad is None

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
    def test_no_elements(self, shape: tuple[int, ...]) -> None:
        assert [tuple(x.shape) for x in differentiate(swiglu, *inputs(*shape, dtype=BF16))] == [shape] * 3

    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    def test_autocast_changes_nothing(self, dtype: torch.dtype) -> None:
        given = inputs(3, 17, dtype=dtype)
        expected = differentiate(swiglu, *given)
        with torch.autocast("cpu", dtype=BF16):
            got = differentiate(swiglu, *given)
            assert reference.swiglu(*given[:2]).dtype == got[0].dtype
        assert all(map(torch.equal, got, expected))

    def test_fake_tensors(self) -> None:
        with FakeTensorMode():
            gate, up = (torch.empty(3, 17, dtype=BF16, requires_grad=True) for _ in range(2))
            swiglu(gate, up).sum().backward()
        for tensor in (gate, up):
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, BF16)


class TestMemory:
    SHAPE = 512, 12, 1024  # a float32 copy would take six chunks

    def given(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.SHAPE, dtype=BF16, requires_grad=True), torch.ones(
            self.SHAPE, dtype=BF16, requires_grad=True
        )

    def test_memory_kept_for_backward_is_gate_and_up(self) -> None:
        gate, up = self.given()
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            swiglu(gate, up)
        assert [tensor.data_ptr() for tensor in saved] == [gate.data_ptr(), up.data_ptr()]

    def test_memory_needed_is_the_results_and_a_few_chunks(self) -> None:
        gate, up = self.given()
        with LiveMemory(gate, up) as forward:
            y = swiglu(gate, up)
        dy = torch.ones_like(y)
        with LiveMemory(gate, up, dy) as backward:
            y.backward(dy)
        assert y.nbytes + chunks.CHUNK_BYTES <= forward.peak <= y.nbytes + 3 * chunks.CHUNK_BYTES
        results = gate.nbytes + up.nbytes
        assert results + chunks.CHUNK_BYTES <= backward.peak <= results + 7 * chunks.CHUNK_BYTES


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (torch.zeros(3, 5), torch.zeros(5), r"up is \[5\] on cpu, must be as gate: \[3, 5\] on cpu"),
        (torch.zeros(3, 1), torch.zeros(3, 5), r"up is \[3, 5\] on cpu, must be as gate: \[3, 1\] on cpu"),
        (
            torch.zeros(3),
            torch.zeros(3, device="meta"),
            r"up is \[3\] on meta, must be as gate: \[3\] on cpu",
        ),
        (torch.zeros(3).int(), torch.zeros(3), "gate is int32, must be a float tensor"),
        (torch.zeros(3), torch.zeros(3).int(), "up is int32, must be a float tensor"),
    ],
)
def test_refusals(gate: Tensor, up: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        swiglu(gate, up)
