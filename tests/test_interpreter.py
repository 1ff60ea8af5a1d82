"""The shim makes the interpreter right, and is still needed."""

from __future__ import annotations

import os

import pytest
import torch

from tests.interpreter import interpreting, mended

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not interpreting(os.environ), reason="kernels run on a GPU here")


@triton.jit
def dot_kernel(out, a, b, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def add_kernel(out, a, b, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(a + at) + tl.load(b + at))


@triton.jit
def cast_kernel(out, x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def positive_kernel(x, BLOCK: tl.constexpr):
    tl.device_assert(tl.load(x + tl.arange(0, BLOCK)) > 0, "not positive")


@triton.jit
def offset_kernel(out, rows, stride):
    tl.store(out, rows * stride)


def dot_is_right() -> bool:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(16, 16)
    dot_kernel[(1,)](out, a, b, BLOCK=16)
    return torch.allclose(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def sums_are_right() -> bool:
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty_like(a)
    add_kernel[(1,)](out, a, b, BLOCK=64)
    return torch.equal(out, a + b)


def casts_are_right() -> bool:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(2))
    x[:4] = torch.tensor([0.0, -0.0, float("inf"), 1e-40])
    out = torch.empty(1024, dtype=torch.bfloat16)
    cast_kernel[(1,)](out, x, BLOCK=1024)
    half = torch.empty(1024, dtype=torch.float16)
    cast_kernel[(1,)](half, x.bfloat16(), BLOCK=1024)
    return torch.equal(out, x.bfloat16()) and torch.equal(half, x.bfloat16().half())


def asserts_are_right() -> bool:
    positive_kernel[(1,)](torch.ones(16), BLOCK=16)
    return _raises(lambda: positive_kernel[(1,)](torch.zeros(16), BLOCK=16))


def overflow_is_found() -> bool:
    """Needed by the tests of 64-bit offsets: an offset computed in 32 bits must not pass for right."""
    return _raises(lambda: offset_kernel[(1,)](torch.empty(1, dtype=torch.int64), 2**20, 2**12))


def _raises(launch) -> bool:
    try:
        launch()
    except triton.runtime.errors.InterpreterError:
        return True
    return False


CHECKS = [dot_is_right, sums_are_right, casts_are_right, asserts_are_right, overflow_is_found]


@pytest.mark.parametrize("check", CHECKS)
def test_the_mended_interpreter_is_right(check):
    with mended():
        assert check()


@pytest.mark.parametrize("check", CHECKS)
def test_the_interpreter_still_needs_mending(check):
    """If this fails, Triton has mended it: drop that part of tests/interpreter.py."""
    assert not check()


def test_nan_stays_nan_in_bf16():
    x = torch.full((16,), float("nan"))
    out = torch.empty(16, dtype=torch.bfloat16)
    with mended():
        cast_kernel[(1,)](out, x, BLOCK=16)
    assert out.isnan().all()
