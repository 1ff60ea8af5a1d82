"""How results are judged: errors against the float64 reference, and seeded random inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers that depend on nothing but shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||, in float64."""
    x, reference = x.detach().double(), reference.detach().double()
    return float((x - reference).norm() / reference.norm().clamp_min(1e-300))


def assert_close(x: Tensor, reference: Tensor, *, eps: float = 1e-13) -> None:
    """Equal in shape, and up to rounding in value."""
    assert x.shape == reference.shape
    assert relative_error(x, reference) <= eps, (x, reference)


def assert_as_exact_as(
    x: Tensor, contender: Tensor, reference: Tensor, *, floor: float, name: str = ""
) -> None:
    """The rule of the project: x's error to float64 is at most twice the contender's, plus a floor."""
    error, other = relative_error(x, reference), relative_error(contender, reference)
    assert error <= 2 * other + floor, f"{name}: error {error:.3e}, the other implementation's {other:.3e}"


def all_equal(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are bitwise the same."""
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)
