"""The sum of the ranks' parts, on the GPU or under the interpreter: its order, its rounding, its refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paracore.errors import UsageError
from tests.interpreter import interpreting, mended
from tests.numerics import randn

pytest.importorskip("triton")

from paracore.kernels.partial_sum import partial_sum

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DEVICE = torch.device("cpu" if interpreting(os.environ) else "cuda")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    if DEVICE.type == "cuda":
        yield
        return
    with mended():
        yield


def parts_of(elements: int, dtype: torch.dtype) -> Tensor:
    """Four parts, each ten times as large as the one before: another order gives other bits."""
    return torch.stack([randn(elements, seed=i) * 10.0**i for i in range(4)]).to(DEVICE, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("own_rank", [0, 2, 3])
@pytest.mark.parametrize(("given", "result"), [(F32, F32), (BF16, BF16), (F32, BF16), (F16, F16)], ids=str)
@pytest.mark.parametrize("elements", [0, 1, 1024, 2049])
def test_parts_are_added_in_the_order_of_ranks_and_rounded_once(elements, given, result, own_rank):
    parts = parts_of(elements, given)
    total = torch.zeros(elements, device=DEVICE)
    for part in parts:
        total += part.float()
    out = torch.full((elements,), float("nan"), dtype=result, device=DEVICE)
    others = torch.cat([parts[:own_rank], parts[own_rank + 1 :]])
    partial_sum(out, parts[own_rank].clone(), others, own_rank)
    assert torch.equal(out, total.to(result))


def test_refusals_name_the_argument_and_what_would_be_right():
    out, own, received = (torch.zeros(*shape, device=DEVICE) for shape in ((4, 6), (4, 6), (3, 4, 6)))
    with pytest.raises(UsageError, match=r"out is torch.float64 of shape \[4, 6\].*; expected torch.bf"):
        partial_sum(out.double(), own, received, 0)
    with pytest.raises(UsageError, match=r"own is .* \[3, 6\].*; expected .* \[4, 6\]"):
        partial_sum(out, own[:3], received, 0)
    with pytest.raises(UsageError, match=r"received is torch.bfloat16.*expected torch.float32.* \[n, 4, 6\]"):
        partial_sum(out, own, received.bfloat16(), 0)
    with pytest.raises(UsageError, match=r"received has strides .* a contiguous tensor"):
        partial_sum(out, own, torch.zeros(3, 6, 4, device=DEVICE).mT, 0)
    with pytest.raises(UsageError, match="own_rank is 4; expected 0 to 3"):
        partial_sum(out, own, received, 4)
