"""Inputs for the Triton kernels of `paracore.reference_layers`, and how their results are judged."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paracore import reference_layers as reference
from tests.interpreter import interpreting, mended
from tests.numerics import assert_as_exact_as, nan_in_fresh_memory, randn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error that is rounding whatever the formula: half a unit in the last place, per dtype.
FLOOR = {torch.float32: 2e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}
INFINITY, NAN = float("inf"), float("nan")


@contextmanager
def kernels_device() -> Iterator[torch.device]:
    """Within, kernels run on this device, and fresh memory holds NaN."""
    with nan_in_fresh_memory():
        if not interpreting(os.environ):
            yield torch.device("cuda")
            return
        with mended(), warnings.catch_warnings():
            # numpy's, of infinities that are subtracted: what is meant
            warnings.simplefilter("ignore", RuntimeWarning)
            yield torch.device("cpu")


def on_cpu(values: Sequence[Any]) -> list[Any]:
    return [x.cpu() if isinstance(x, Tensor) else x for x in values]


def wide(x: Any) -> Any:
    """x in float64, if it is a tensor of floats."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def judge(
    ours: Sequence[Tensor], reference: Callable[..., Any], arguments: Sequence[Any], floor: float
) -> None:
    """Hold what a kernel returned against the reference in float64, and in the arguments' dtypes.

    The reference computes on the CPU: some of what it uses is not deterministic on GPUs, and refuses.
    """
    given = on_cpu(arguments)
    plain, exact = (
        result if isinstance(result, tuple) else (result,)
        for result in (reference(*given), reference(*map(wide, given)))
    )
    for i, (x, y, z) in enumerate(zip(on_cpu(ours), plain, exact, strict=True)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert_as_exact_as(x, y, z, floor=floor, name=f"result {i}")


def strided(x: Tensor, dim: int = 0, gap: int = 3) -> Tensor:
    """The same numbers, with NaN between and around what lies along `dim`."""
    around = x.new_full([size + 2 * gap if d == dim else size for d, size in enumerate(x.shape)], NAN)
    inner = around.narrow(dim, gap, x.size(dim))
    inner.copy_(x)
    return inner


def apart(x: Tensor, gap: int) -> Tensor:
    """[N, M] with the same numbers, rows M + gap apart and NaN between."""
    return strided(x, 1, gap)


def logits_of(N: int, V: int, dtype: torch.dtype, device: torch.device, scale: float = 3.0) -> Tensor:
    return (randn(N, V, seed=V) * scale).to(device, dtype)


def labels_of(V: int, device: torch.device) -> Tensor:
    """[5]: the first column, the last, one in the middle, and one to each side of the shard."""
    return torch.tensor([0, V - 1, V // 2, -1, V], device=device)


def gradient_arguments(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments before dlogits: numbers of the logits' own softmax, and coefficients of all kinds."""
    statistics = reference.cross_entropy_statistics(logits.float(), labels)
    coefficients = randn(3, len(labels), seed=1, dtype=torch.float32).to(logits.device)
    coefficients[2] /= max(1, logits.size(1))
    return logits, labels, statistics[0], statistics[1].log(), coefficients
