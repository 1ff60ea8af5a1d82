"""What the tests of the attention op share: inputs, gradients, and how results are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from paracore import Positions, masks
from paracore.ops.attention_terms import PackedTerms, pack_terms
from paracore.parallel.masks import Mask, visible_keys
from tests.interpreter import mended
from tests.numerics import assert_as_exact_as, nan_in_fresh_memory, randn

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
IMPLEMENTATIONS = [("reference", F64), ("native", F32), ("native", BF16), ("triton", F32)]
every_implementation = pytest.mark.parametrize(("impl", "dtype"), IMPLEMENTATIONS)
FLOOR = {F64: 2.0**-50, F32: 2.0**-23, BF16: 2.0**-8}

Function = Callable[..., Tensor]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh buffers start as NaN, so what a kernel leaves unwritten shows, and bf16 is mended for Triton."""
    with nan_in_fresh_memory(), mended():
        yield


def qkv(
    B: int = 2,
    Hq: int = 4,
    Hkv: int = 2,
    Sq: int = 9,
    Sk: int = 9,
    D: int = 16,
    Dv: int = 16,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    q = randn(B, Hq, Sq, D, seed=1, dtype=dtype)
    return q, randn(B, Hkv, Sk, D, seed=2, dtype=dtype), randn(B, Hkv, Sk, Dv, seed=3, dtype=dtype)


def with_gradients(function: Function, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of all inputs under a random one."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, randn(*out.shape, seed=9, dtype=out.dtype))
    return [out.detach(), *gradients]


def assert_exact(function: Function, plain: Function, *inputs: Tensor) -> None:
    """`function` and its gradients are as exact as `plain` in the same dtype; `plain` in float64 judges."""
    ours, theirs = with_gradients(function, *inputs), with_gradients(plain, *inputs)
    exact = with_gradients(plain, *(tensor.double() for tensor in inputs))
    for number, (x, contender, truth) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert x.dtype == contender.dtype
        assert x.shape == contender.shape
        assert_as_exact_as(x, contender, truth, floor=FLOOR[x.dtype], name=f"result {number}")


def hidden(mask: Mask, Sq: int, Sk: int, query_start: int = 0) -> Tensor:
    """[B or 1, 1, Sq, Sk], True where a query does not see a key."""
    device = torch.device("cpu")
    first, end = visible_keys(mask, Positions.contiguous(Sq, query_start), Positions.contiguous(Sk), device)
    index = torch.arange(Sk)
    return ((index < first.unsqueeze(-1)) | (index >= end.unsqueeze(-1))).unsqueeze(1)


def packed(q: Tensor, k: Tensor, mask: Mask | None = None, **changes: Any) -> PackedTerms:
    numbers = {"scale": None, "softcap": 0.0, "alibi_slopes": None, "dropout_p": 0.0, "seed": None}
    numbers |= {"first_batch": 0, "first_head": 0, "query_positions": None, "key_positions": None}
    return pack_terms(q, k.size(2), mask or masks.causal(), **(numbers | changes))
