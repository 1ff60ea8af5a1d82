"""What ranks bring to a product whose rows travel, and what it must give."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from paracore.ops.fused_linear import gather_matmul, matmul_scatter
from paracore.parallel import shard_range
from tests.interpreter import interpreting
from tests.numerics import assert_as_exact_as, randn
from tests.peer_doubles import LocalWorkspace

pytest.importorskip("triton")

from paracore.kernels import matmul as products

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FLOOR = {F32: 2e-7, BF16: 4e-3, F16: 5e-4}  # rounding of the result, whatever the formula
DEVICE = torch.device("cpu" if interpreting(os.environ) else "cuda")


def make(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (randn(*shape, seed=seed) * scale).to(DEVICE, dtype)


def part(x: Tensor, workspace: LocalWorkspace) -> Tensor:
    rows = shard_range(x.size(0), workspace.axis.size, workspace.axis.rank)
    return x[rows.start : rows.stop]


class Gather:
    """An x [S, B, in], and each rank's weights and biases."""

    def __init__(self, ranks, shape, widths, dtype, *, seed):
        features = shape[-1]
        self.x = make(*shape, seed=seed, dtype=dtype)
        self.weights = [
            [make(n, features, seed=seed + 10 * rank + n, dtype=dtype, scale=features**-0.5) for n in widths]
            for rank in range(ranks)
        ]
        self.biases = [
            [None if i % 2 else make(n, seed=seed + rank + 5, dtype=dtype) for i, n in enumerate(widths)]
            for rank in range(ranks)
        ]

    def run(self, workspace: LocalWorkspace) -> tuple[tuple[Tensor, ...], Tensor]:
        rank = workspace.axis.rank
        shard = part(self.x, workspace)
        return gather_matmul(
            shard, self.weights[rank], self.biases[rank], workspace.axis, self.x.size(0), workspace
        )

    def check(self, rank: int, result: tuple[tuple[Tensor, ...], Tensor], ranks: int) -> None:
        """X is X; the outputs have the bits of a product that starts when all of X is there."""
        outputs, whole = result
        assert torch.equal(whole, self.x)
        for y, weight, bias in zip(outputs, self.weights[rank], self.biases[rank], strict=True):
            assert y.dtype == self.x.dtype
            assert torch.equal(y, self._behind_a_gather(weight, bias, rank, ranks))
            exact = self._by_torch(weight, bias, torch.float64)
            plain = self._by_torch(weight, bias, self.x.dtype)
            assert_as_exact_as(y.cpu(), plain, exact, floor=FLOOR[y.dtype])

    def _behind_a_gather(self, weight: Tensor, bias: Tensor | None, rank: int, ranks: int) -> Tensor:
        S, B, _ = self.x.shape
        ring = [shard_range(S, ranks, (rank + step) % ranks) for step in range(ranks)]
        rows, out = self.x.flatten(0, 1), self.x.new_empty(S * B, weight.size(0))
        chunks = [(part.start * B, len(part) * B) for part in ring]
        order = None
        if weight.size(0) == max(other.size(0) for other in self.weights[rank]):  # the others need no chunks
            order = products.tile_order(chunks, DEVICE, products.block_rows(rows.dtype, DEVICE))
        products.matmul(rows, weight, out, bias=bias, order=order)
        return out.view(S, B, -1)

    def _by_torch(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x, weight = self.x.cpu().to(dtype), weight.cpu().to(dtype)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.cpu().to(dtype))


class Scatter:
    """Each rank's factors A [S, B, K_i] and B [K_i, out]."""

    def __init__(self, ranks, shape, inner, out, dtype, *, seed):
        self.shape, self.out, self.dtype = shape, out, dtype
        scale = (ranks * sum(inner)) ** -0.5
        self.factors = [
            [
                (
                    make(*shape, k, seed=seed + 100 * rank + i, dtype=dtype),
                    make(k, out, seed=seed + 100 * rank + i + 50, dtype=dtype, scale=scale),
                )
                for i, k in enumerate(inner)
            ]
            for rank in range(ranks)
        ]

    def run(self, workspace: LocalWorkspace, partial_dtype: torch.dtype | None = None) -> Tensor:
        factors = self.factors[workspace.axis.rank]
        return matmul_scatter(factors, workspace.axis, workspace, partial_dtype=partial_dtype)

    def check(self, results: list[Tensor], partial_dtype: torch.dtype | None = None) -> None:
        """The parts have the bits of a sum in the order of ranks, and are as exact as torch's."""
        total = torch.zeros(*self.shape, self.out, device=DEVICE)
        for rank in range(len(results)):
            total += self._product(rank, len(results), partial_dtype or self.dtype).float()
        whole = torch.cat(results)
        assert whole.dtype == self.dtype
        assert torch.equal(whole, total.to(self.dtype))
        assert_as_exact_as(
            whole.cpu(), self._by_torch(self.dtype), self._by_torch(torch.float64), floor=FLOOR[self.dtype]
        )

    def _product(self, rank: int, ranks: int, dtype: torch.dtype) -> Tensor:
        """This rank's sum, by the kernel alone."""
        S, B = self.shape
        a = torch.cat([a for a, _ in self.factors[rank]], -1).flatten(0, 1)
        b = torch.cat([b for _, b in self.factors[rank]])
        out = torch.empty(S * B, self.out, dtype=dtype, device=DEVICE)
        ring = [shard_range(S, ranks, (rank - step) % ranks) for step in range(1, ranks + 1)]
        chunks = [(part.start * B, len(part) * B) for part in ring]
        order = products.tile_order(chunks, DEVICE, products.block_rows(a.dtype, DEVICE))
        products.matmul(a, b.T, out, order=order)
        return out.view(S, B, -1)

    def _by_torch(self, dtype: torch.dtype) -> Tensor:
        return sum(  # type: ignore[return-value]
            a.cpu().to(dtype) @ b.cpu().to(dtype) for factors in self.factors for a, b in factors
        )
