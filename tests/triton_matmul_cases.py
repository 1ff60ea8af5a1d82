"""Inputs for the Triton matrix product, small tiles for it, and a thread that plays the copy stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paracore.kernels import matmul as kernels
from paracore.kernels.matmul_configurations import Tile
from tests.numerics import randn
from tests.triton_layers_cases import apart

TILE = Tile(rows=32, columns=32, depth=16, warps=4, stages=1)
PATIENCE = 60.0  # seconds that any wait of a test may last


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: Tile = TILE) -> None:
    """Let small results cross several tiles."""
    monkeypatch.setattr(kernels, "choose_tile", lambda *_: tile)
    monkeypatch.setattr(kernels, "rows_per_tile", lambda *_: tile.rows)


def chunks_from(rows: Sequence[int], first: int) -> list[tuple[int, int]]:
    """Return chunks that lie behind each other, `rows` rows each, in cyclic order: (first row, rows)."""
    starts = [sum(rows[:chunk]) for chunk in range(len(rows))]
    return [(starts[chunk], rows[chunk]) for chunk in (*range(first, len(rows)), *range(first))]


def factors(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    transposed: bool = False,
    gap: int = 3,
) -> tuple[Tensor, Tensor]:
    """Return a [M, K] and b [N, K], rows of a and rows or columns of b `gap` apart and NaN between."""
    a, b = (randn(size, K, seed=seed).to(device, dtype) for seed, size in enumerate((M, N)))
    return apart(a, gap), apart(b.T, gap).T if transposed else apart(b, gap)


def eighths(*factors: Tensor) -> list[Tensor]:
    """Round to multiples of 1/8: sums of products are then exact, and have the same bits in any order.

    The interpreter's matrix products add in an order that depends on where in a tile a row lies.
    """
    return [factor.mul_(8).round_().div_(8) for factor in factors]


@dataclass(frozen=True)
class Copies:
    """What a copy stream does, each operation behind the one before; on a GPU on a stream of its own."""

    device: torch.device
    stream: torch.cuda.Stream | None

    def copy(self, source: Tensor, target: Tensor) -> None:
        with self._on_stream():
            target.copy_(source)

    def write(self, words: Tensor, index: int, value: int) -> None:
        with self._on_stream():
            words[index : index + 1].fill_(value)

    def read(self, words: Tensor, index: int) -> int:
        with self._on_stream():
            return int(words[index].item())

    def wait(self, words: Tensor, index: int, value: int) -> None:
        """Until words[index] has reached value, in 32 bits."""
        end = time.monotonic() + PATIENCE
        while not 0 <= (self.read(words, index) - value) % 2**32 < 2**31:
            if time.monotonic() > end:
                raise TimeoutError(f"word {index} is {self.read(words, index)}; expected {value}")
            time.sleep(0.001)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield


@contextlib.contextmanager
def playing(device: torch.device, script: Callable[[Copies], None]) -> Iterator[None]:
    """Play `script` in a thread while the body runs; raise what it raises."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    copies = Copies(device, stream)
    word, rows = words(1, device), torch.zeros(4, 4, dtype=torch.bfloat16, device=device)
    # Kernels that are loaded while another spins would wait for it: all are run once before.
    copies.write(word, 0, copies.read(word, 0))
    for source in (rows[:, :3], rows):
        copies.copy(source, source.clone(memory_format=torch.contiguous_format))
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))  # what the test has prepared
    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(script, copies)
        yield
        played.result(timeout=2 * PATIENCE)


def words(count: int, device: torch.device, value: int = 0) -> Tensor:
    """Flags or counters that all have `value`."""
    return torch.full((count,), value, dtype=torch.int32, device=device)
