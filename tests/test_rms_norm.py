"""RMSNorm: every implementation against float64, the op against torch's promises, the module."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paracore import _C, reference
from paracore.errors import UsageError
from paracore.nn import RMSNorm
from paracore.ops import rms_norm as op
from paracore.ops.rms_norm import RMSNormKernels, rms_norm
from tests.interpreter import mended
from tests.numerics import randn
from tests.rms_norm_cases import EPS, Inputs, Results, assert_exact, kernels, native, run, run_torch

KERNELS = kernels()
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = [(F32, F32), (BF16, BF16), (BF16, F32)]
every_kernel = pytest.mark.parametrize("name", KERNELS)
every_dtype = pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
with_and_without_residual = pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every fresh buffer starts as NaN, so what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def test_fresh_buffers_are_poisoned_in_these_tests() -> None:
    assert torch.empty(1000).isnan().all()


# ---------------------------------------------------------------- kernels


@every_kernel
@every_dtype
@with_and_without_residual
@pytest.mark.parametrize("D", [1, 3, 17, 64, 257, 1000, 4097, 16384, 20000])
def test_kernels_are_as_exact_as_torch(
    name: str, dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool, D: int
) -> None:
    if name == "triton" and D > 16384:
        with pytest.raises(UsageError, match="16384"):  # the kernel's documented limit
            run(KERNELS[name], Inputs.random(7, D, dtype, weight_dtype, residual=residual))
        return
    given = Inputs.random(7, D, dtype, weight_dtype, residual=residual)
    assert_exact(run(KERNELS[name], given), given)


@every_kernel
@pytest.mark.parametrize("rows", [1, 4, 5, 129, 515])
def test_kernels_take_any_number_of_rows(name: str, rows: int) -> None:
    given = Inputs.random(rows, 33, F32, F32, residual=True)
    assert_exact(run(KERNELS[name], given), given)


@every_kernel
@every_dtype
def test_kernels_read_rows_at_their_stride(name: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    given = Inputs.random(9, 100, dtype, weight_dtype, residual=True, padding=13)
    assert not given.x.is_contiguous()
    assert_exact(run(KERNELS[name], given), given)


@every_kernel
@every_dtype
@with_and_without_residual
def test_zero_rows_give_a_zero_weight_gradient(
    name: str, dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool
) -> None:
    results = run(KERNELS[name], Inputs.random(0, 40, dtype, weight_dtype, residual=residual))
    assert results["y"].shape == results["dx"].shape == (0, 40)
    assert torch.equal(results["dweight"], torch.zeros(40, dtype=weight_dtype))


@every_kernel
@every_dtype
@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1e6, 1e15])
def test_kernels_stay_exact_at_any_scale(
    name: str, dtype: torch.dtype, weight_dtype: torch.dtype, scale: float
) -> None:
    given = Inputs.random(6, 300, dtype, weight_dtype, residual=False, scale=scale)
    assert_exact(run(KERNELS[name], given), given)


@every_kernel
def test_statistics_are_taken_from_the_rounded_sum(name: str) -> None:
    """257 + 1 rounds to 258 in bfloat16 and 256 + 1 to 256: rstd must follow what the next layers read."""
    x, ones = torch.full((1, 64), 256.0, dtype=BF16), torch.ones(1, 64, dtype=BF16)
    with mended():
        _, h, rstd = KERNELS[name].rms_norm_forward(x, torch.ones(64), ones, 0.0)
    assert torch.equal(h, torch.full_like(x, 256.0))
    assert rstd.item() == 1 / 256


@every_kernel
def test_without_a_residual_h_is_x(name: str) -> None:
    x = randn(3, 8, seed=0, dtype=F32)
    _, h, _ = KERNELS[name].rms_norm_forward(x, torch.ones(8), None, EPS)
    assert h.data_ptr() == x.data_ptr()


# ---------------------------------------------------------------- proof that the comparison sees mistakes


def mean_in_place_of_mean_square(given: Inputs) -> Results:
    h = given.x if given.residual is None else given.x + given.residual
    y = h / (h.abs().mean(-1, keepdim=True) + EPS) * given.weight
    return run(cast(RMSNormKernels, reference), given) | {"y": y}


def residual_gradient_left_out(given: Inputs) -> Results:
    kernel = cast(RMSNormKernels, reference)
    _, h, rstd = kernel.rms_norm_forward(given.x, given.weight, given.residual, EPS)
    dx, _ = kernel.rms_norm_backward(given.dy, None, h, given.weight, rstd)
    return run(kernel, given) | {"dx": dx.to(given.x.dtype)}


def statistics_treated_as_constants(given: Inputs) -> Results:
    kernel = cast(RMSNormKernels, reference)
    _, _, rstd = kernel.rms_norm_forward(given.x, given.weight, given.residual, EPS)
    dx = given.dy * given.weight * rstd.unsqueeze(-1)
    dx = dx if given.dh is None else dx + given.dh
    return run(kernel, given) | {"dx": dx.to(given.x.dtype)}


def last_row_missing_from_the_weight_gradient(given: Inputs) -> Results:
    shorter = given.map(lambda t: t[:-1] if t.dim() == 2 else t)
    kernel = cast(RMSNormKernels, reference)
    return run(kernel, given) | {"dweight": run(kernel, shorter)["dweight"]}


@pytest.mark.parametrize(
    "wrong",
    [
        mean_in_place_of_mean_square,
        residual_gradient_left_out,
        statistics_treated_as_constants,
        last_row_missing_from_the_weight_gradient,
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_wrong_kernel_fails_the_comparison(wrong: Any, dtype: torch.dtype) -> None:
    given = Inputs.random(40, 257, dtype, dtype, residual=True)
    assert_exact(run(cast(RMSNormKernels, reference), given), given)
    with pytest.raises(AssertionError, match="error"):
        assert_exact(wrong(given), given)


# ---------------------------------------------------------------- determinism


@pytest.mark.parametrize("capability", _C.capabilities())
@every_dtype
def test_native_gives_the_same_bits_on_any_number_of_threads(
    capability: str, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    given = Inputs.random(1027, 260, dtype, weight_dtype, residual=True)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(native(capability), given))
    torch.set_num_threads(before)
    for name, expected in results[0].items():
        assert all(torch.equal(expected, other[name]) for other in results[1:]), name


# ---------------------------------------------------------------- the definition


@with_and_without_residual
def test_gradients_of_the_definition(residual: bool) -> None:
    tensors = [randn(2, 3, 5, seed=1), randn(5, seed=2), *([randn(2, 3, 5, seed=3)] if residual else [])]
    for tensor in tensors:
        tensor.requires_grad_()

    def definition(x: Tensor, weight: Tensor, *residual: Tensor) -> Any:
        return reference.rms_norm(x, weight, EPS, *residual)

    def public_op(x: Tensor, weight: Tensor, *residual: Tensor) -> Any:
        return rms_norm(x, weight, EPS, residual=residual[0]) if residual else rms_norm(x, weight, EPS)

    assert torch.autograd.gradcheck(definition, tensors)
    assert torch.autograd.gradcheck(public_op, tensors)


def test_the_definition_equals_torch_in_float64() -> None:
    given = Inputs.random(11, 37, F64, F64, residual=True)
    ours, theirs = run(cast(RMSNormKernels, reference), given), run_torch(given)
    for name, result in ours.items():
        torch.testing.assert_close(result, theirs[name], rtol=1e-13, atol=1e-13)


# ---------------------------------------------------------------- the op


def leaves(*shape: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x and residual of `shape`, and a weight, which require gradients."""
    x, residual = (randn(*shape, seed=seed, dtype=dtype).requires_grad_() for seed in (1, 2))
    return x, randn(shape[-1], seed=3, dtype=weight_dtype).requires_grad_(), residual


@every_dtype
@with_and_without_residual
@pytest.mark.parametrize("shape", [(19,), (4, 19), (2, 3, 4, 19), (3, 0, 19)])
def test_op_keeps_shapes_and_dtypes(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool
) -> None:
    x, weight, added = leaves(*shape, dtype=dtype, weight_dtype=weight_dtype)
    outputs = rms_norm(x, weight, residual=added) if residual else (rms_norm(x, weight),)
    assert all(output.shape == x.shape and output.dtype == dtype for output in outputs)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    for leaf in (x, weight, *([added] if residual else [])):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert leaf.grad.dtype == leaf.dtype


@every_dtype
@with_and_without_residual
def test_op_is_as_exact_as_torch(dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool) -> None:
    given = Inputs.random(31, 130, dtype, weight_dtype, residual=residual)
    x, weight = given.x.requires_grad_(), given.weight.requires_grad_()
    if given.residual is None:
        y = h = rms_norm(x, weight, EPS)
        y.backward(given.dy)
        h = x.detach()
    else:
        added = given.residual.requires_grad_()
        y, h = rms_norm(x, weight, EPS, residual=added)
        torch.autograd.backward((y, h), (given.dy, given.dh))
        assert added.grad is not None
        assert x.grad is not None
        assert torch.equal(added.grad, x.grad)
    assert x.grad is not None
    assert weight.grad is not None
    results = {"y": y.detach(), "h": h.detach(), "dx": x.grad, "dweight": weight.grad}
    assert_exact(results, given.map(Tensor.detach))


def test_op_takes_any_strides() -> None:
    """A transposed last dim, a broadcast gradient, a strided weight: all give what contiguous ones give."""
    x = randn(6, 4, 5, seed=1, dtype=F32).permute(2, 1, 0).requires_grad_()  # [5, 4, 6], last dim strided
    weight = randn(12, seed=2, dtype=F32)[::2].requires_grad_()
    copies = [t.detach().contiguous().requires_grad_() for t in (x, weight)]
    strided = rms_norm(x, weight)
    contiguous = rms_norm(copies[0], copies[1])
    assert torch.equal(strided, contiguous)
    gradients = torch.autograd.grad(strided.sum(), (x, weight))  # dy: a single one, expanded
    expected = torch.autograd.grad(contiguous, copies, torch.ones_like(contiguous))
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("used", ["y", "h"])
def test_one_output_may_go_unused(used: str) -> None:
    x, weight, residual = leaves(3, 16, dtype=F64, weight_dtype=F64)
    ours = dict(zip("yh", rms_norm(x, weight, EPS, residual=residual), strict=True))
    theirs = dict(zip("yh", reference.rms_norm(x, weight, EPS, residual), strict=True))
    gradients = [
        torch.autograd.grad(outputs[used].sin().sum(), (x, residual, weight), materialize_grads=True)
        for outputs in (ours, theirs)
    ]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


@with_and_without_residual
def test_backward_keeps_h_weight_and_one_number_per_row(residual: bool) -> None:
    x, weight, added = leaves(50, 64, dtype=BF16, weight_dtype=F32)
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = rms_norm(x, weight, residual=added) if residual else (rms_norm(x, weight),)
    h = outputs[-1] if residual else x
    assert {t.data_ptr() for t in saved} >= {h.data_ptr(), weight.data_ptr()}
    assert sorted(t.nbytes for t in saved) == sorted([50 * 64 * 2, 64 * 4, 50 * 4])


@every_dtype
@with_and_without_residual
def test_op_compiles_without_graph_breaks(
    dtype: torch.dtype, weight_dtype: torch.dtype, residual: bool
) -> None:
    x, weight, added = leaves(4, 6, 32, dtype=dtype, weight_dtype=weight_dtype)

    def step(x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
        if not residual:
            return rms_norm(x * 2, weight).sin()
        y, h = rms_norm(x * 2, weight, residual=added)
        return y.sin() + h.cos()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        y = function(x, weight, added)
        y.backward(torch.ones_like(y))
        gradients = [leaf.grad for leaf in (x, weight, added)]
        results.append([y, *(g for g in gradients if g is not None)])
        x.grad = weight.grad = added.grad = None
    assert len(results[0]) == (4 if residual else 3)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@with_and_without_residual
def test_op_is_registered_as_torch_demands(dtype: torch.dtype, residual: bool) -> None:
    x, weight, added = leaves(3, 10, dtype=dtype, weight_dtype=dtype)
    torch.library.opcheck(op._forward, (x, weight, added if residual else None, EPS, None))
    rstd = torch.ones(3, dtype=torch.promote_types(dtype, F32))
    h, dy, dh = (t.detach() for t in (x, x, added))
    torch.library.opcheck(op._backward, (dy, dh if residual else None, h, weight.detach(), rstd, None))


@every_dtype
def test_autocast_changes_nothing_as_with_torch(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight, _ = leaves(3, 16, dtype=dtype, weight_dtype=weight_dtype)
    with torch.autocast("cpu", dtype=BF16):
        ours, theirs = rms_norm(x, weight), F.rms_norm(x, (16,), weight, EPS)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, rms_norm(x, weight))


def test_a_second_derivative_is_refused() -> None:
    x, weight, _ = leaves(3, 16, dtype=F32, weight_dtype=F32)
    (dx,) = torch.autograd.grad(rms_norm(x, weight).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm_backward"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(())}, r"x is float32 \[\], must be"),
        ({"x": torch.ones(2, 0)}, r"x is float32 \[2, 0\], must be"),
        ({"x": torch.ones(2, 8, dtype=torch.int64)}, r"x is int64 \[2, 8\], must be a float"),
        ({"weight": torch.ones(7)}, r"weight has shape \[7\], must be \[8\]"),
        ({"weight": torch.ones(2, 8)}, r"weight has shape \[2, 8\], must be \[8\]"),
        ({"weight": torch.ones(8, dtype=BF16)}, "weight is bfloat16, must be float32 or x's dtype float32"),
        ({"weight": torch.ones(8, device="meta")}, "weight is on meta, must be on x's device cpu"),
        ({"residual": torch.ones(8)}, r"residual is float32 \[8\] on cpu, must be as x: float32 \[2, 8\]"),
        ({"residual": torch.ones(2, 8, dtype=BF16)}, r"residual is bfloat16 \[2, 8\] on cpu, must be as x"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.ones(2, 8), "weight": torch.ones(8)} | change
    with pytest.raises(UsageError, match=message):
        rms_norm(**arguments)


# ---------------------------------------------------------------- the module


def test_module_equals_torch_module() -> None:
    ours, theirs = RMSNorm(48, eps=1e-5), torch.nn.RMSNorm(48, eps=1e-5)
    weight = randn(48, seed=1, dtype=F32)
    x = randn(2, 5, 48, seed=2, dtype=F32)
    for module in (ours, theirs):
        module.load_state_dict({"weight": weight})
    torch.testing.assert_close(ours(x), theirs(x))


def test_module_calls_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = SimpleNamespace(count=0)
    forward = _C.rms_norm_forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(_C, "rms_norm_forward", counting)
    RMSNorm(8)(torch.ones(2, 8))
    assert calls.count == 1
