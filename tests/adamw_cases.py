"""Flat tensors for the optimizer's kernels: every combination of dtypes, padding poisoned, in odd pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product

import torch
from torch import Tensor

from paracore.reference_adamw import Column, Draw
from tests.numerics import randn

FLOAT32, BFLOAT16, INT16 = torch.float32, torch.bfloat16, torch.int16


@dataclass(frozen=True)
class Dtypes:
    """Of parameter, gradient, moments and master."""

    parameter: torch.dtype
    gradient: torch.dtype
    moments: torch.dtype
    master: torch.dtype | None

    def __str__(self) -> str:
        names = (str(getattr(self, field.name)).removeprefix("torch.") for field in fields(self))
        return "-".join(names)

    @staticmethod
    def all() -> list[Dtypes]:
        kinds = [(FLOAT32, None), (BFLOAT16, None), (BFLOAT16, FLOAT32), (BFLOAT16, INT16)]
        others = product((FLOAT32, BFLOAT16), repeat=2)
        return [Dtypes(p, gradient, moments, master) for gradient, moments in others for p, master in kinds]


@dataclass(frozen=True)
class State:
    """All that a step reads and writes by elements."""

    parameter: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor
    max_second_moment: Tensor | None
    master: Tensor | None

    @staticmethod
    def random(size: int, dtypes: Dtypes, *, amsgrad: bool = False, seed: int = 0) -> State:
        numbers = [randn(size, seed=seed + i) for i in range(5)]
        master: Tensor | None = None
        if dtypes.master == FLOAT32:
            master = numbers[0].float()
        elif dtypes.master == INT16:
            master = torch.randint(
                -(2**15), 2**15, (size,), generator=torch.Generator().manual_seed(seed)
            ).to(INT16)
        return State(
            numbers[0].to(dtypes.parameter),
            numbers[1].to(dtypes.gradient),
            (numbers[2] / 10).to(dtypes.moments),
            (numbers[3] ** 2 / 10).to(dtypes.moments),
            (numbers[4] ** 2 / 10).to(dtypes.moments) if amsgrad else None,
            master,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        moments = self.first_moment, self.second_moment, self.max_second_moment
        return self.parameter, self.gradient, *moments, self.master

    def each(self, change: Callable[[Tensor], Tensor]) -> State:
        p, g, m, v, maximum, master = self.tensors()
        optional = (None if tensor is None else change(tensor) for tensor in (maximum, master))
        return State(change(p), change(g), change(m), change(v), *optional)

    def clone(self) -> State:
        return self.each(Tensor.clone)

    def at(self, part: slice | Tensor) -> State:
        return self.each(lambda tensor: tensor[part])

    def poisoned(self, pieces: Tensor) -> State:
        """With NaN, or an odd remainder, wherever no piece is."""
        padding = torch.ones(len(self.parameter), dtype=torch.bool)
        for begin, end, _ in pieces.tolist():
            padding[begin:end] = False
        state = self.clone()
        for tensor in state.tensors():
            if tensor is not None:
                tensor[padding] = float("nan") if tensor.is_floating_point() else 12345
        return state

    def with_gradient(self, gradient: Tensor) -> State:
        return replace(self, gradient=gradient.to(self.gradient.dtype))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INT16 if tensor.element_size() == 2 else torch.int32)


def assert_same_bits(state: State, expected: State) -> None:
    for field in fields(State):
        one, other = getattr(state, field.name), getattr(expected, field.name)
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(bits(one), bits(other)), field.name


def coefficients(**changes: float) -> list[float]:
    """A row of the table, as of the third step."""
    columns = {"ACTIVE": 1, "SIGN": 1, "L2": 0, "SHRINK": 0.999, "ONE_MINUS_BETA1": 0.1, "BETA2": 0.99}
    columns |= {"ONE_MINUS_BETA2": 0.01, "STEP_SIZE": 0.03, "ROOT_BIAS2": 0.17, "EPS": 1e-8} | changes
    return [columns[column.name] for column in Column]


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def draw(**changes: int) -> list[int]:
    """A row of random numbers for a parameter that is not cut."""
    columns = {"KEY0": 0x89ABCDEF, "KEY1": 0xFEDCBA98, "STEP": 3, "ORIGIN": 0, "FIRST": 0}
    columns |= {"INNER": 1 << 40, "WHOLE_INNER": 1 << 40} | changes
    return [columns[column.name] for column in Draw]


def scale(value: float = 0.7) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


# Every length modulo the width of a vector, at odd offsets, with padding between; two pieces adjoin.
LENGTHS = (1, 2, 5, 7, 127, 1000, 4096, 4096, 1)
PADDING = (3, 0, 1, 2, 5, 0, 3, 0, 6)
SEGMENTS = (0, 1, 2, 3, 0, 1, 2, 2, 3)


def odd_pieces() -> tuple[Tensor, int]:
    """The pieces, of four segments, and the size of the tensors."""
    rows, begin = [], 0
    for length, padding, segment in zip(LENGTHS, PADDING, SEGMENTS, strict=True):
        begin += padding
        rows.append([begin, begin + length, segment])
        begin += length
    return torch.tensor(rows), begin + 4
