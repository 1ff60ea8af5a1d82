"""The limits of the machine, measured like contenders and interleaved with them: a copy and a matmul.

A kernel that moves data can be no faster than `copy_` into an existing tensor, or than `clone` where
its output lies in fresh memory; one that computes, no faster than a matmul of the same dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paracore.bench.case import Contender, Inputs, Setting, Work, as_call, random_tensor
from paracore.bench.measure import WARM_UP_SAMPLES
from paracore.bench.timers import Timer

COPY, CLONE, MATMUL = "copy_", "clone", "matmul"

# A copy of so many caches runs at the speed of memory; a larger one would only take longer.
_CACHES_TO_COPY = 8
# A matmul of at least this many seconds runs at full speed, and of little more allows many samples.
# Its size is found on the machine: bfloat16 on a CPU without instructions for it is 1000 times slower.
_MATMUL_SECONDS = 5e-3
_MATMUL_SIDES = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Limit:
    """One limit, with its own inputs and its own count of work."""

    contender: Contender
    inputs: Callable[[Setting, torch.Generator], Inputs]
    work: Work


def limits(setting: Setting, bytes_of_case: int, cache_bytes: int, timer: Timer) -> dict[str, Limit]:
    """Return the limits for one setting of a case whose call moves `bytes_of_case`.

    The copies move as many bytes as the case does, so that what a call costs beyond its work weighs
    on both alike, up to several times the cache.
    """
    itemsize = setting.dtype.itemsize
    elements = max(1, min(bytes_of_case, _CACHES_TO_COPY * cache_bytes) // (2 * itemsize))
    copy_work = Work(bytes=2 * elements * itemsize, flops=0)
    side = _matmul_side(setting, timer)
    matmul_work = Work(bytes=3 * side * side * itemsize, flops=2 * side**3)

    def one_vector(setting: Setting, generator: torch.Generator) -> Inputs:
        return Inputs({"source": random_tensor((elements,), setting, generator)})

    def two_vectors(setting: Setting, generator: torch.Generator) -> Inputs:
        source, out = (random_tensor((elements,), setting, generator) for _ in range(2))
        return Inputs({"source": source}, out=out)

    return {
        COPY: Limit(Contender(lambda _: _copy, output="existing"), two_vectors, copy_work),
        CLONE: Limit(Contender(lambda _: _clone), one_vector, copy_work),
        MATMUL: Limit(
            Contender(lambda _: _matmul, output="existing"), functools.partial(_matrices, side), matmul_work
        ),
    }


def _copy(source: Tensor, out: Tensor) -> Tensor:
    return out.copy_(source)


def _clone(source: Tensor) -> Tensor:
    return source.clone()


def _matmul_side(setting: Setting, timer: Timer) -> int:
    """Return the smallest side that takes long enough, or the largest there is."""
    generator = torch.Generator(setting.device)
    call = as_call(_matmul, "forward", "existing")
    for side in _MATMUL_SIDES:
        batch = [_matrices(side, setting, generator)]
        # The shortest of several: the first may load libraries, another may be disturbed.
        taken = min(timer.sample(call, batch)[0] for _ in range(1 + WARM_UP_SAMPLES))
        if taken >= _MATMUL_SECONDS:
            break
    return side


def _matrices(side: int, setting: Setting, generator: torch.Generator) -> Inputs:
    a, b, out = (random_tensor((side, side), setting, generator) for _ in range(3))
    return Inputs({"a": a, "b": b}, out=out)


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b, out=out)
