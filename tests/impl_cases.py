"""The implementations that can run here, and how tests ask for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paracore.ops.implementations import NAMES, Operation, missing
from tests.interpreter import mended

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
DTYPES = (F32, BF16, F64)
# In float64 both sides of a comparison are in float64, and sums over 6400 words are taken in two orders.
FLOOR = {F32: 2.0**-23, BF16: 2.0**-23, F64: 2.0**-44}

SERVING = [name for name in NAMES if missing(name, "cpu") is None]
FAST = [name for name in SERVING if name != "triton"]  # interpreted: for a few small cases

every_impl = pytest.mark.parametrize("impl", SERVING)
fast_impls = pytest.mark.parametrize("impl", FAST)


def served(operation: Operation[Any], impl: str) -> list[torch.dtype]:
    """The dtypes of DTYPES that the implementation takes."""
    implementation = operation.implementations[impl]
    return [dtype for dtype in DTYPES if implementation.dtype_refusal(dtype) is None]


def impls_and_dtypes(operation: Operation[Any], *, interpreted: bool = False) -> pytest.MarkDecorator:
    """Parametrise by each implementation and each dtype that it takes; by triton too if `interpreted`."""
    names = SERVING if interpreted else FAST
    pairs = [(impl, dtype) for impl in names for dtype in served(operation, impl)]
    return pytest.mark.parametrize(("impl", "dtype"), pairs, ids=str)


@contextmanager
def mended_if_interpreted(impl: str) -> Iterator[None]:
    """Within, the implementation computes what it would on its own hardware."""
    if impl == "triton":
        with mended():
            yield
    else:
        yield
