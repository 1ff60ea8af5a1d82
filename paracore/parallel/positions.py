"""Global positions in a sequence, held as runs: what a rank holds of it is seldom one piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paracore.errors import UsageError


@dataclass(frozen=True)
class Positions:
    """The global positions of a tensor's elements along its sequence dim, as runs (start, length).

    The runs follow each other as the elements do, in any order. Kernels hold positions in 32 bits.
    Raises UsageError for negative numbers, or positions of 2^31 and more.
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for start, length in self.runs:
            if start < 0 or length < 0 or start + length > 1 << 31:
                raise UsageError(f"the run (start={start}, length={length}) must lie within 0 and 2^31")

    @staticmethod
    def contiguous(length: int, start: int = 0) -> Positions:
        """Return start, start + 1, ..., start + length - 1."""
        return Positions(((start, length),))

    @staticmethod
    def of(runs: Iterable[tuple[int, int]]) -> Positions:
        """Return the positions of `runs`, neighbours joined and empty ones left out."""
        joined: list[tuple[int, int]] = []
        for start, length in runs:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            elif length > 0:
                joined.append((start, length))
        return Positions(tuple(joined))

    @staticmethod
    def from_tensor(positions: Tensor) -> Positions:
        """Return the positions in an integer tensor on the CPU, as few runs as possible."""
        numbers = positions.numpy()  # small and many: torch would wake its threads for each step
        if len(numbers) == 0:
            return Positions(())
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        begins = np.concatenate([[0], breaks])
        lengths = np.diff(np.append(begins, len(numbers)))
        return Positions(tuple(zip(numbers[begins].tolist(), lengths.tolist(), strict=True)))

    def __len__(self) -> int:
        return sum(length for _, length in self.runs)

    @property
    def end(self) -> int:
        """One more than the largest position; 0 if there is none."""
        return max([0, *(start + length for start, length in self.runs if length)])

    @property
    def increasing(self) -> bool:
        """Whether each position is larger than the one before."""
        runs = [run for run in self.runs if run[1]]
        return all(sum(run) <= following[0] for run, following in itertools.pairwise(runs))

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return them as int64 [number of positions], the same tensor each time: do not write to it."""
        build = _build if torch.compiler.is_compiling() else _kept
        return build(self, torch.device(device))


def _build(positions: Positions, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # what is kept may be saved for a backward pass later
        pieces = [torch.arange(start, start + length) for start, length in positions.runs]
        # By way of the host: many short runs would be many launches on a GPU.
        return torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).to(device)


_kept = lru_cache(maxsize=256)(_build)
