"""Products by way of float32: as exact as torch's, rounded once, a block at a time; elsewhere torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paracore.errors import UsageError
from paracore.ops import product
from paracore.ops.linear import column_linear, linear, row_linear
from paracore.ops.product import add_product, multiply, slow_dtypes, sum_of_products
from paracore.parallel import MeshAxis
from tests.impl_cases import BF16, F32, F64
from tests.numerics import (
    LiveMemory,
    assert_as_exact_as,
    assert_close,
    kept_for_backward,
    nan_in_fresh_memory,
    randn,
    relative_error,
)
from tests.products import Products

F16 = torch.float16
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11}  # by how much of itself rounding changes a number, at most
both_dtypes = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without units for 16-bit numbers, whatever this one has."""
    monkeypatch.setattr(product, "SLOW_DTYPES", (BF16, F16))


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with units for all of them."""
    monkeypatch.setattr(product, "SLOW_DTYPES", ())


def assert_rounded_once(x: Tensor, reference: Tensor, name: str = "") -> None:
    """Each number is as near to the exact one as a sum in float32, rounded to x's dtype, is."""
    slack = 1e-5 * float(reference.abs().max()) if reference.numel() else 0.0  # where a sum cancels
    error = (x.detach().double() - reference).abs()
    assert (error <= ROUNDING[x.dtype] * reference.abs() + slack).all(), name


# ---------------------------------------------------------------- which CPUs


@pytest.mark.parametrize(
    ("capabilities", "slow"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False, "avx512_fp16": False}, (BF16, F16)),
        ({"avx512_f": True, "avx512_bf16": True, "avx512_fp16": False}, (F16,)),
        ({"avx512_bf16": False, "amx_bf16": True, "avx512_fp16": True}, ()),
        ({"avx512_bf16": False, "avx512_fp16": False, "avx_ne_convert": True}, ()),
        ({"neon": True, "bf16": False, "fp16_arith": True}, (BF16,)),
        ({"neon": True, "bf16": True, "fp16_arith": True}, ()),
        ({"architecture": "ppc64le"}, ()),
    ],
)
def test_what_is_slow_follows_from_the_units_of_the_cpu(
    capabilities: dict[str, Any], slow: tuple[torch.dtype, ...]
) -> None:
    assert slow_dtypes(capabilities) == slow


def test_this_cpu_is_described() -> None:
    assert set(product.SLOW_DTYPES) == set(slow_dtypes(torch.cpu.get_capabilities()))


@pytest.mark.usefixtures("widening")
def test_only_tensors_on_the_cpu_are_widened() -> None:
    assert product.is_widened(BF16, torch.device("cpu"))
    assert not product.is_widened(BF16, torch.device("cuda"))
    assert not product.is_widened(F32, torch.device("cpu"))


# ---------------------------------------------------------------- products

# Sizes n, k, m: one block, many blocks in each dim, thin ones, and nothing at all.
SIZES = [(5, 7, 3), (33, 65, 47), (1, 300, 9), (300, 1, 300), (0, 4, 3), (4, 3, 0), (4, 0, 3)]


def factor(rows: int, columns: int, dtype: torch.dtype, seed: int, layout: str) -> Tensor:
    """A random matrix: contiguous, transposed, or every other column of one."""
    if layout == "transposed":
        return randn(columns, rows, seed=seed, dtype=dtype).T
    if layout == "spread":
        return randn(rows, 2 * columns, seed=seed, dtype=dtype)[:, ::2]
    return randn(rows, columns, seed=seed, dtype=dtype)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_BLOCK_BYTES", 4096)


@both_dtypes
@pytest.mark.parametrize("layouts", [("rows", "transposed"), ("transposed", "rows"), ("spread", "rows")])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.usefixtures("widening", "small_blocks")
def test_widened_products_are_rounded_once(
    sizes: tuple[int, int, int], layouts: tuple[str, str], dtype: torch.dtype
) -> None:
    n, k, m = sizes
    a, b = factor(n, k, dtype, 1, layouts[0]), factor(k, m, dtype, 2, layouts[1])
    c, d = factor(n, k + 2, dtype, 3, layouts[0]), factor(k + 2, m, dtype, 4, layouts[1])
    bias, total = randn(m, seed=5, dtype=dtype), randn(n, m, seed=6, dtype=F32)
    exact, other = a.double() @ b.double(), c.double() @ d.double()
    wider = torch.full((n, m + 1), torch.nan, dtype=dtype)  # a part of something else is to be written
    with nan_in_fresh_memory():
        got = {
            "product": (multiply(a, b), exact),
            "with bias": (multiply(a, b, bias=bias), exact + bias.double()),
            "to a part": (multiply(a, b, out=wider[:, :m]), exact),
            "sum": (sum_of_products([(a, b), (c, d)]), exact + other),
        }
    for name, (result, reference) in got.items():
        assert (result.shape, result.dtype) == ((n, m), dtype), name
        assert_rounded_once(result, reference, name)
    assert wider[:, m:].isnan().all()
    assert torch.equal(wider[:, :m], got["product"][0])
    before = total.clone()
    add_product(total, a, b)
    assert_close(total, before.double() + exact, eps=1e-6)


@both_dtypes
@pytest.mark.usefixtures("widening")
def test_no_less_exact_than_torch(dtype: torch.dtype) -> None:
    a, b = randn(64, 1024, seed=1, dtype=dtype), randn(1024, 64, seed=2, dtype=dtype)
    assert_as_exact_as(multiply(a, b), a @ b, a.double() @ b.double(), floor=0.0)
    # The sum of two is rounded once, where torch rounds each: closer, not just as close.
    c, d = randn(64, 512, seed=3, dtype=dtype), randn(512, 64, seed=4, dtype=dtype)
    exact = a.double() @ b.double() + c.double() @ d.double()
    by_torch = (a @ b).addmm_(c, d)
    assert relative_error(sum_of_products([(a, b), (c, d)]), exact) < 0.9 * relative_error(by_torch, exact)


@both_dtypes
@pytest.mark.usefixtures("widening")
def test_nothing_is_widened_that_exceeds_a_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_BLOCK_BYTES", 1 << 16)
    hidden, head = torch.ones(256, 64, dtype=dtype), torch.ones(4096, 64, dtype=dtype)
    with LiveMemory(hidden, head) as memory:
        logits = multiply(hidden, head.T)
    assert memory.peak <= logits.nbytes + (1 << 16)
    with LiveMemory(logits, head) as memory:
        dhidden = multiply(logits, head)
    assert memory.peak <= dhidden.nbytes + (1 << 16)
    total = torch.zeros(4096, 64)
    with LiveMemory(logits, hidden, total) as memory:
        add_product(total, logits.T, hidden)
    assert memory.peak <= 1 << 16
    assert torch.equal(total, torch.full_like(total, 256 * 64.0))


@pytest.mark.usefixtures("native")
def test_elsewhere_products_are_torchs_own() -> None:
    for dtype in (F32, BF16, F64):
        a, b = randn(5, 7, seed=1, dtype=dtype), randn(7, 3, seed=2, dtype=dtype)
        bias, out = randn(3, seed=3, dtype=dtype), torch.empty(5, 3, dtype=dtype)
        assert torch.equal(multiply(a, b), a @ b)
        assert torch.equal(multiply(a, b, bias=bias), torch.addmm(bias, a, b))
        assert multiply(a, b, out=out) is out
        assert torch.equal(out, a @ b)
        assert torch.equal(sum_of_products([(a, b), (a, b)]), (a @ b).addmm_(a, b))


# ---------------------------------------------------------------- linear


def leaves(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [3, 4, 24], weight [17, 24], bias [17]."""
    shapes = (3, 4, 24), (17, 24), (17,)
    x, weight, bias = (randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def results(function: Any, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    y = function(*inputs)
    dy = randn(*y.shape, seed=9, dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@both_dtypes
@pytest.mark.usefixtures("widening")
def test_linear_and_its_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    inputs = leaves(dtype)
    for given in (inputs, inputs[:2]):
        wide = [leaf.detach().double().requires_grad_() for leaf in given]
        dy = randn(3, 4, 17, seed=9, dtype=dtype).double()
        exact = F.linear(*wide)
        expected = [exact.detach(), *torch.autograd.grad(exact, wide, dy)]
        for got, reference, like in zip(results(linear, *given), expected, [exact, *given], strict=True):
            assert got.shape == like.shape
            assert got.dtype == dtype
            assert_rounded_once(got, reference)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_linear_is_torchs_own_in_wider_dtypes(dtype: torch.dtype) -> None:
    inputs = leaves(dtype)
    assert all(map(torch.equal, results(linear, *inputs), results(F.linear, *inputs)))


@pytest.mark.usefixtures("native")
def test_linear_is_torchs_own_where_the_cpu_has_the_units() -> None:
    inputs = leaves(BF16)
    assert all(map(torch.equal, results(linear, *inputs), results(F.linear, *inputs)))
    assert torch.autograd.grad(linear(*inputs).float().square().sum(), inputs[0], create_graph=True)


@pytest.mark.usefixtures("widening")
def test_layers_that_are_not_cut_multiply_the_same_way() -> None:
    x, weight, bias = leaves(BF16)
    alone = MeshAxis.alone("tp")
    expected = results(linear, x, weight, bias)
    cut = results(lambda x, w, b: column_linear(x, [w], [b], alone)[0], x, weight, bias)
    assert all(map(torch.equal, cut, expected))
    rows = results(lambda x, w: row_linear(x, w, alone), x, weight)
    assert all(map(torch.equal, rows, results(linear, x, weight)))


@pytest.mark.usefixtures("widening")
def test_linear_keeps_what_it_was_given_and_no_more() -> None:
    x, weight, bias = leaves(BF16)
    for needs_dx, needs_dw in [(True, True), (True, False), (False, True)]:
        given = x.detach().requires_grad_(needs_dx), weight.detach().requires_grad_(needs_dw)
        with kept_for_backward() as kept:
            y = linear(*given, bias.detach())
        wanted = [tensor for tensor, other in zip(given, reversed(given), strict=True) if other.requires_grad]
        assert [tensor.data_ptr() for tensor in kept] == [tensor.data_ptr() for tensor in wanted]
        events: list[str] = []
        with Products(events, lambda result: str(result.dtype)):
            y.sum().backward()
        assert events == ["torch.float32"] * (needs_dx + needs_dw)


@pytest.mark.usefixtures("widening")
def test_linear_under_autocast_is_that_of_what_autocast_makes_of_its_inputs() -> None:
    inputs = leaves(F32)
    with torch.autocast("cpu", dtype=BF16):
        y = linear(*inputs)
        assert linear(*leaves(F64)).dtype == F64  # which autocast leaves alone
    dy = randn(3, 4, 17, seed=9, dtype=BF16)
    gradients = torch.autograd.grad(y, inputs, dy)
    expected = results(linear, *[leaf.detach().to(BF16).requires_grad_() for leaf in inputs])
    assert torch.equal(y, expected[0])
    for gradient, other in zip(gradients, expected[1:], strict=True):
        assert gradient.dtype == F32
        assert torch.equal(gradient, other.float())


@pytest.mark.parametrize("slow", [(), (BF16, F16)], ids=["native", "widening"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_linear_compiles_to_one_graph(
    dtype: torch.dtype, slow: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "SLOW_DTYPES", slow)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w, b: linear(x * 2, w, b), fullgraph=True, backend="aot_eager")
    inputs = leaves(dtype)
    expected = results(lambda x, w, b: linear(x * 2, w, b), *inputs)
    assert all(map(torch.equal, results(compiled, *inputs), expected))


@pytest.mark.usefixtures("widening")
def test_linear_of_one_vector_of_no_rows_and_of_fake_tensors() -> None:
    x, weight, bias = leaves(BF16)
    assert torch.equal(linear(x[1, 2], weight, bias), linear(x, weight, bias)[1, 2])
    nothing = results(linear, x[:0].detach().requires_grad_(), weight, bias)
    assert [list(result.shape) for result in nothing] == [[0, 4, 17], [0, 4, 24], [17, 24], [17]]
    assert not any(result.any() for result in nothing)
    with FakeTensorMode():
        y = linear(torch.empty(2, 3, 8, dtype=BF16), torch.empty(5, 8, dtype=BF16))
    assert (y.shape, y.dtype) == ((2, 3, 5), BF16)


@pytest.mark.usefixtures("widening")
def test_what_linear_refuses() -> None:
    x, weight, bias = leaves(BF16)
    with pytest.raises(UsageError, match=r"weight is \[24, 17\], must be \[out, in\] for x \[3, 4, 24\]"):
        linear(x, weight.T)
    with pytest.raises(UsageError, match=r"bias is \[16\], must be \[17\] for weight \[17, 24\]"):
        linear(x, weight, bias[:16])
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x, weight.float())
    y = linear(x, weight, bias)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
