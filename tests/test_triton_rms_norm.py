"""RMSNorm's Triton kernels against the float64 reference, on the GPU or under the interpreter."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

from paracore import reference
from paracore.errors import UsageError
from tests.interpreter import interpreting, mended

pytest.importorskip("triton")

from paracore.kernels import rms_norm as kernels
from paracore.kernels.configuration import target_of

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error that is rounding whatever the formula: half a unit in the last place, per dtype.
FLOOR = {torch.float32: 2e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Where the kernels run; fresh buffers hold NaN, so that what is not written shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x):
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *size, **options: poison(empty(*size, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: poison(empty_like(x, **options)))
    if not interpreting(os.environ):
        yield torch.device("cuda")
        return
    with mended():
        yield torch.device("cpu")


def make(shape, dtype, device, seed, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return values.to(device, dtype)


def by_autograd(inputs, dtype):
    """y, h and the gradients of x (the residual's is the same) and weight in `dtype`, by plain torch."""
    x, weight, dy = (inputs[i].detach().to(dtype).requires_grad_(i < 2) for i in (0, 1, 3))
    residual, dh = inputs[2], inputs[4]
    h = x if residual is None else x + residual.to(dtype)
    y = reference.rms_norm(h, weight, EPS)
    outputs, gradients = ([y], [dy]) if dh is None else ([y, h], [dy, dh.to(dtype)])
    dx, dweight = torch.autograd.grad(outputs, [x, weight], gradients)
    return {"y": y.detach(), "h": h.detach(), "dx": dx, "dweight": dweight}


def by_kernels(inputs):
    x, weight, residual, dy, dh = inputs
    y, h, rstd = kernels.rms_norm_forward(x, weight, residual, EPS)
    dx, dweight = kernels.rms_norm_backward(dy, dh, h, weight, rstd)
    return {"y": y, "h": h, "dx": dx, "dweight": dweight}


def assert_as_good_as_torch(inputs):
    """DESIGN's rule: at most twice the error of plain torch in the same dtype, or the dtype's rounding."""
    dtype = inputs[0].dtype
    exact, plain, ours = by_autograd(inputs, torch.float64), by_autograd(inputs, dtype), by_kernels(inputs)
    for name, expected in exact.items():
        assert ours[name].dtype == dtype
        assert ours[name].shape == expected.shape
        norm = expected.norm().clamp_min(1e-300)
        error, torch_error = ((out[name].double() - expected).norm() / norm for out in (ours, plain))
        assert error <= max(2 * torch_error, FLOOR[dtype]), name  # a NaN fails, too


def make_inputs(shape, dtype, device, *, residual, dh):
    D = shape[-1]
    weight = make(D, dtype, device, 1) + 1
    others = [make(shape, dtype, device, seed) for seed in (0, 2, 3, 4)]
    x, residual_value, dy, dh_value = others
    return x, weight, residual_value if residual else None, dy, dh_value if dh else None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("D", [1, 3, 17, 64, 257, 1000, 2048, 4097, 16384])
def test_outputs_and_gradients(D, residual, dtype, device):
    shape = (2, 3, D) if D < 2048 else (1, 2, D)
    assert_as_good_as_torch(make_inputs(shape, dtype, device, residual=residual, dh=residual))


@pytest.mark.gpu
@pytest.mark.parametrize(("residual", "dh"), [(True, False), (False, True)])
def test_each_optional_tensor_alone(residual, dh, device):
    assert_as_good_as_torch(make_inputs((5, 48), torch.float32, device, residual=residual, dh=dh))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [7, 256])
def test_more_rows_than_one_pass_of_the_programs(D, device, monkeypatch):
    """Each program then walks over several tiles, the last one beyond the end."""
    tile = kernels.UNALIGNED_TILES[64] if D == 7 else kernels.ALIGNED_TILES[256]
    small = replace(target_of(device), multiprocessors=1)
    monkeypatch.setattr(kernels, "target_of", lambda device: small)
    programs = kernels.BACKWARD_THREADS_PER_MULTIPROCESSOR // tile.threads
    rows = 2 * programs * tile.rows + tile.rows // 2 + 1
    assert_as_good_as_torch(make_inputs((rows, D), torch.float32, device, residual=True, dh=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_may_lie_anywhere(dtype, device):
    """Views with their own strides give the bits that contiguous copies give."""
    B, S, D = 4, 4, 48  # B equals S: a swapped dim would keep the shape
    wide = make((B, S, 3 * D), dtype, device, 0)
    inputs = [
        wide[..., D : 2 * D],  # rows 3 D apart
        make(D, dtype, device, 1),
        make((S, B, D), dtype, device, 2).transpose(0, 1),  # no single distance between rows
        make((B, D, S), dtype, device, 3).mT,  # last dim not contiguous
        make((1, 1, D), dtype, device, 4).expand(B, S, D),  # every row the same memory
    ]
    strided = by_kernels(inputs)
    contiguous = by_kernels([value.contiguous() for value in inputs])
    assert all(torch.equal(strided[name], contiguous[name]) for name in strided)
    assert_as_good_as_torch(inputs)


@pytest.mark.gpu
def test_h_as_the_caller_strided_it_serves_backward(device):
    """Without a residual h is x, strides included."""
    x = make((6, 2, 32), torch.float32, device, 0)[:, 1]
    weight, dy = make(32, torch.float32, device, 1), make((6, 32), torch.float32, device, 2)
    _, h, _ = kernels.rms_norm_forward(x, weight, None, EPS)
    assert h is x
    assert_as_good_as_torch((x, weight, None, dy, None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_weight_keeps_its_dtype(dtype, device):
    x, _, _, dy, _ = make_inputs((9, 33), dtype, device, residual=False, dh=False)
    weight = make(33, torch.float32, device, 1)
    y, h, rstd = kernels.rms_norm_forward(x, weight, None, EPS)
    _, dweight = kernels.rms_norm_backward(dy, None, h, weight, rstd)
    normalised = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    assert y.dtype == dtype
    assert dweight.dtype == torch.float32
    torch.testing.assert_close(dweight.double(), (dy.double() * normalised).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_the_sum_is_rounded_before_it_is_normalised(device):
    """The statistics are those of the h that later layers read, not of an unrounded sum."""
    x = make((4, 96), torch.bfloat16, device, 0)
    residual = make((4, 96), torch.bfloat16, device, 1, scale=100)
    weight = torch.ones(96, device=device)
    y, h, rstd = kernels.rms_norm_forward(x, weight, residual, EPS)
    assert torch.equal(h, x + residual)
    again, _, rstd_again = kernels.rms_norm_forward(h, weight, None, EPS)
    assert torch.equal(y, again)
    assert torch.equal(rstd, rstd_again)
    expected = (h.double().square().mean(-1) + EPS).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 5)])
@pytest.mark.parametrize("residual", [False, True])
def test_no_rows(shape, residual, device):
    inputs = make_inputs(shape, torch.float32, device, residual=residual, dh=residual)
    ours = by_kernels(inputs)
    assert ours["y"].shape == ours["h"].shape == ours["dx"].shape == shape
    assert torch.equal(ours["dweight"], torch.zeros(shape[-1], device=device))


@pytest.mark.gpu
def test_rows_of_zeros_and_of_large_values(device):
    x = make((3, 40), torch.float16, device, 0)
    x[0] = 0
    x[1] = 6e4  # its square overflows fp16, not fp32
    dy = make((3, 40), torch.float16, device, 1)
    weight = torch.ones(40, dtype=torch.float16, device=device)
    y, h, rstd = kernels.rms_norm_forward(x, weight, None, EPS)
    assert torch.equal(y[0], torch.zeros(40, dtype=torch.float16, device=device))
    assert torch.equal(y[1], torch.ones(40, dtype=torch.float16, device=device))
    assert rstd[0].item() == pytest.approx(1 / math.sqrt(EPS))
    dx, dweight = kernels.rms_norm_backward(dy, None, h, weight, rstd)
    assert dx[1:].isfinite().all()
    assert dweight.isfinite().all()


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits(device):
    inputs = make_inputs((150, 96), torch.bfloat16, device, residual=True, dh=True)
    first, second = by_kernels(inputs), by_kernels(inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31(device):
    """Row 2 starts at element 2^31, though neither 2 nor the distance of rows needs 64 bits."""
    D = 16
    # Reserved, for the most part never touched.
    storage = torch.UntypedStorage(2 * (2**31 + D), device=device)
    x = torch.tensor([], dtype=torch.bfloat16, device=device).set_(storage, 0, (3, D), (2**30, 1))
    x.copy_(make((3, D), torch.bfloat16, device, 0))
    _, weight, _, dy, _ = make_inputs((3, D), torch.bfloat16, device, residual=False, dh=False)
    far, near = by_kernels((x, weight, None, dy, None)), by_kernels((x.clone(), weight, None, dy, None))
    assert all(torch.equal(far[name], near[name]) for name in far)


def test_refusals_name_the_argument_and_what_would_be_right(device):
    x, weight = make((2, 8), torch.float32, device, 0), make(8, torch.float32, device, 1)
    y, h, rstd = kernels.rms_norm_forward(x, weight, None, EPS)
    forward, backward = kernels.rms_norm_forward, kernels.rms_norm_backward
    with pytest.raises(UsageError, match=r"x is torch\.float64; expected one of torch\.bfloat16"):
        forward(x.double(), weight.double(), None, EPS)
    with pytest.raises(UsageError, match=r"x has shape \[1, 16385\]; .* D from 1 to 16384"):
        forward(torch.zeros(1, 16385, device=device), weight, None, EPS)
    with pytest.raises(UsageError, match=r"weight is torch\.float32 of shape \[7\].*; expected shape \[8\]"):
        forward(x, weight[:7], None, EPS)
    with pytest.raises(UsageError, match=r"weight is torch\.float16"):
        forward(x, weight.half(), None, EPS)
    with pytest.raises(UsageError, match=r"residual is .*\[1, 8\].*; expected .*\[2, 8\]"):
        forward(x, weight, x[:1], EPS)
    with pytest.raises(UsageError, match=r"dy is torch\.bfloat16 .*; expected torch\.float32"):
        backward(y.bfloat16(), None, h, weight, rstd)
    with pytest.raises(UsageError, match=r"dh is .*\[8, 2\]"):
        backward(y, y.mT, h, weight, rstd)
    with pytest.raises(UsageError, match=r"rstd is .*\[1\].*; expected .* shape \[2\]"):
        backward(y, None, h, weight, rstd[:1])
