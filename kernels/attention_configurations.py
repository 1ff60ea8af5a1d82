"""Sizes of attention's tiles, and how many warps and stages work on them, per architecture and head dim."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paracore.kernels.configuration import Configuration, Target


@dataclass(frozen=True)
class Blocks:
    """A tile's size in queries and keys, and the warps and pipeline stages that work on it."""

    queries: int
    keys: int
    warps: int
    stages: int


ROW_TILE = 4096  # elements that a program of finish and delta holds
ROW_WARPS = 4


def choose_blocks(kernel: str, target: Target, q: Tensor, DV: int) -> Blocks:
    return Blocks(128, 64, 8, 3) if q.element_size() == 2 else Blocks(64, 32, 4, 2)


def head_dim_constants(D: int, DV: int) -> dict[str, int]:
    """Return the kernels' compile-time sizes of head dims: see `attention_tiles`."""
    D0, D1 = head_dim_parts(D)
    V0, V1 = head_dim_parts(DV)
    return {"D": D, "DV": DV, "D0": D0, "D1": D1, "V0": V0, "V1": V1}


def head_dim_parts(D: int) -> tuple[int, int]:
    """Cut D into two powers of two, the smaller at least 16, that add up to at least D; (size, 0) if one does."""
    large = max(16, 1 << (D.bit_length() - 1))
    if large >= D:
        return large, 0
    small = max(16, 1 << (D - large - 1).bit_length())
    return (2 * large, 0) if small == large else (large, small)


def configurations(target: Target) -> Iterator[Configuration]:
    yield from ()
