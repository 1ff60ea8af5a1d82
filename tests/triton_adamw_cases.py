"""Inputs for the optimizer's Triton kernels, and how their results are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from paracore import reference_adamw
from paracore.kernels import adamw
from paracore.reference_adamw import Column
from tests.numerics import randn

# Segments at odd and at aligned places, of odd and of aligned lengths, with padding between; 2 is inactive.
PIECES = ((0, 64, 0), (65, 128, 1), (128, 133, 1), (136, 168, 2), (171, 200, 2), (203, 232, 3))
LENGTH = 240
INACTIVE = 2


@dataclass(frozen=True)
class Step:
    """The arguments of `adamw_`, in order."""

    parameter: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor
    max_second_moment: Tensor | None
    master: Tensor | None
    pieces: Tensor
    coefficients: Tensor
    gradient_scale: Tensor
    draws: Tensor | None
    zero_gradient: bool

    def arguments(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]

    def copy(self, device: torch.device) -> Step:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: x.to(device, copy=True) for name, x in tensors.items() if isinstance(x, Tensor)
        }
        return replace(self, **moved)

    def by_kernel(self, device: torch.device) -> Step:
        """Copy, and let the kernel take the step there; the result is on the CPU."""
        moved = self.copy(device)
        adamw.adamw_(*moved.arguments())
        return moved.copy(torch.device("cpu"))

    def by_reference(self) -> Step:
        copy = self.copy(torch.device("cpu"))
        reference_adamw.adamw_(*copy.arguments())
        return copy

    def whole(self) -> Tensor:
        """The parameter as exactly as it is kept."""
        if self.master is None or self.master.dtype == torch.float32:
            return self.parameter if self.master is None else self.master
        return reference_adamw.join_remainder(self.parameter, self.master)

    def in_float64(self) -> Step:
        """Without masters and without random rounding: these are of no use there."""
        names = ("gradient", "first_moment", "second_moment", "max_second_moment")
        wide = {name: getattr(self, name).double() for name in names if getattr(self, name) is not None}
        return replace(self, parameter=self.whole().double(), master=None, draws=None, **wide)


def coefficients(segments: int = 4) -> Tensor:
    """[segments, 10]: rows of different numbers, each on."""
    rows = [
        [1, 1, 0, 1 - 1e-3, 0.1, 0.999, 0.001, 0.01, 0.0316, 1e-8],
        [1, -1, 0.01, 1, 0.2, 0.99, 0.01, 0.02, 0.1411, 1e-6],
        [1, 1, 0.1, 0.5, 0.3, 0.9, 0.1, 0.03, 0.3162, 1e-3],
        [1, 1, 0, 0.97, 0.05, 0.95, 0.05, 1e-3, 0.6, 1e-12],
    ]
    return torch.tensor([rows[segment % len(rows)] for segment in range(segments)], dtype=torch.float64)


def draws(segments: int = 4) -> Tensor:
    """[segments, 7]: keys and steps of all sizes, rows shorter and longer than a piece, far and near."""
    rows = [
        [0xFFFFFFFF, 0x9E3779B9, 2**33 + 7, 5, 7, 21, 3],
        [0x80000001, 3, 4, 2**34, 2**33 + 9, 2**35, 1],
        [5, 6, 7, 0, 1, 1, 0],
        [17, 0xDEADBEEF, 1, 11, 100, 100, 0],
    ]
    return torch.tensor([rows[segment % len(rows)] for segment in range(segments)])


def make_step(
    parameter: torch.dtype,
    gradient: torch.dtype,
    moment: torch.dtype,
    master: torch.dtype | None = None,
    *,
    amsgrad: bool = False,
    drawn: bool = False,
    zero_gradient: bool = False,
    pieces: Sequence[tuple[int, int, int]] = PIECES,
    length: int = LENGTH,
    seed: int = 0,
) -> Step:
    """Random numbers in the pieces, NaN in between; the segment INACTIVE is off, and its gradient NaN."""
    value, g, m, v, largest = (randn(length, seed=seed + i) for i in range(5))
    v, largest = v.square(), largest.square()
    covered = torch.zeros(length, dtype=torch.bool)
    table = coefficients()
    table[INACTIVE, Column.ACTIVE] = 0
    for begin, end, segment in pieces:
        covered[begin:end] = True
        if segment == INACTIVE:
            g[begin:end] = torch.nan
    value, g, m, v, largest = (x.masked_fill(~covered, torch.nan) for x in (value, g, m, v, largest))
    kept, narrow = value.float() if master is not None else None, value.to(parameter)
    if kept is not None and master == torch.int16:
        narrow, kept = reference_adamw.split_master(kept)
    elif kept is not None:
        narrow = kept.to(parameter)
    return Step(
        narrow,
        g.to(gradient),
        (0.1 * m).to(moment),
        v.to(moment),
        largest.to(moment) if amsgrad else None,
        kept,
        torch.tensor(pieces, dtype=torch.int64).reshape(-1, 3),
        table,
        torch.tensor([0.5], dtype=torch.float64),
        draws() if drawn else None,
        zero_gradient,
    )


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.dtype.itemsize])


def assert_same_bits(one: Step, other: Step, where: slice | Tensor = slice(None)) -> None:
    """All tensors of length [n] are the same, `where` alone."""
    for field, x, y in zip(fields(Step)[:6], one.arguments(), other.arguments(), strict=False):
        if x is not None:
            assert torch.equal(bits(x)[where], bits(y)[where]), field.name


def with_gradient(step: Step, seed: int) -> Step:
    """The same step with another gradient, NaN where it was."""
    fresh = randn(len(step.gradient), seed=seed).masked_fill(step.gradient.isnan(), torch.nan)
    return replace(step, gradient=fresh.to(step.gradient.dtype))
