"""Ring attention over real processes equals one device's, over a grid of everything it depends on."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask
from tests.conftest import Launch
from tests.ring_cases import (
    BF16,
    F32,
    F64,
    LAYOUTS,
    MASKS,
    STRATEGIES,
    Given,
    all_masks,
    assert_right,
    cp_axis,
    dense,
    joined,
    layout_named,
    ring,
)

SIZES = (1, 2, 3, 4)
SHORT = (1, 2, 5, 7, 127)
LONG = 1000
HEADS = ("1 per key head", "2 per key head", "4 per key head", "one key head")
LONG_HEADS = {1: "one key head", 2: "2 per key head", 3: "1 per key head", 4: "1 per key head"}


class Case(NamedTuple):
    size: int
    S: int
    mask: str
    layout: str
    strategy: str
    heads: str
    dtype: torch.dtype

    @property
    def number_of_heads(self) -> tuple[int, int]:
        """Hq and Hkv; each rank of ulysses gets its share."""
        if self.heads == "one key head":
            return (3, 1)
        key_heads = max(self.size, 2)
        return int(self.heads[0]) * key_heads, key_heads

    def dealt(self) -> Layout:
        return layout_named(self.layout, self.S, self.size, all_masks(self.S)[self.mask])


class Problem(NamedTuple):
    """What a case computes, however it is dealt out."""

    S: int
    mask: str
    heads: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    def of(case: Case) -> Problem:
        return Problem(case.S, case.mask, case.number_of_heads, case.dtype)


def selection() -> list[Case]:
    """A part of the product of all factors, in which every pair of values occurs that can.

    Short lengths in float32: masks x layouts x strategies x sizes x lengths, and each with one of the
    numbers of heads. In bfloat16: masks x layouts x strategies x sizes, each with one of the lengths. The
    long one, for which one device takes long: masks x layouts x sizes, each with one of the strategies.
    """
    cases = []
    ways = itertools.product(SIZES, enumerate(MASKS), enumerate(LAYOUTS), enumerate(STRATEGIES))
    for size, (m, mask), (n, layout), (s, strategy) in ways:
        turn = m + n + s + size

        def heads_of(turn: int, strategy: str = strategy, size: int = size) -> str:
            return HEADS[turn % (3 if strategy == "ulysses" and size > 1 else 4)]

        for length, S in enumerate(SHORT):
            cases.append(Case(size, S, mask, layout, strategy, heads_of(turn // 2 + length), F32))
        heads = heads_of(turn // 4 + n)
        cases.append(Case(size, SHORT[(turn + 2 * n) % len(SHORT)], mask, layout, strategy, heads, BF16))
        if turn % len(STRATEGIES) == 0:
            heads = "4 per key head" if (size, mask) == (2, "chunked") else LONG_HEADS[size]
            cases.append(Case(size, LONG, mask, layout, strategy, heads, F32))
            if mask == "window":
                cases.append(Case(size, LONG, mask, layout, strategy, heads, BF16))
    return cases


CASES = selection()


def pairs(cases: list[Case]) -> set[tuple[int, object, int, object]]:
    return {
        (i, case[i], j, case[j])
        for case in cases
        for i, j in itertools.combinations(range(len(Case._fields)), 2)
    }


def test_every_pair_of_factors_is_tested() -> None:
    """And of those of masks, layouts, strategies and sizes also at the long length."""
    factors = [SIZES, (*SHORT, LONG), MASKS, LAYOUTS, STRATEGIES, HEADS, (F32, BF16)]
    wanted = {
        (i, x, j, y)
        for (i, one), (j, other) in itertools.combinations(enumerate(factors), 2)
        for x, y in itertools.product(one, other)
    }
    assert pairs(CASES) == wanted
    dealing = {Case._fields.index(name) for name in ("size", "mask", "layout", "strategy")}
    at_length = pairs([case for case in CASES if case.S == LONG])
    assert at_length >= {pair for pair in wanted if {pair[0], pair[2]} <= dealing}


def given_of(problem: Problem) -> Given:
    Hq, Hkv = problem.heads
    B = 1 if problem.S == LONG and problem.mask != "padded" else 2
    return Given.random(problem.S, problem.dtype, B=B, Hq=Hq, Hkv=Hkv)


@lru_cache(maxsize=1024)
def expected(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """What plain torch computes in the same dtype, and in float64."""
    given, mask = given_of(problem), all_masks(problem.S)[problem.mask]
    return by_key_head(given, mask, impl="reference"), by_key_head(given.to(F64), mask)


def by_key_head(given: Given, mask: Mask, impl: str | None = None) -> list[Tensor]:
    """As `dense`, in smaller tensors: memory for large ones is fetched from the system again and again."""
    Hkv = given.k.size(1)
    groups = (Given(*group) for group in zip(*(x.chunk(Hkv, 1) for x in given), strict=True))
    return [torch.cat(x, 1) for x in zip(*(dense(group, mask, impl) for group in groups), strict=True)]


def run_cases(cases: list[Case]) -> list[list[Tensor]]:
    axis = cp_axis()
    return [
        ring(
            given_of(Problem.of(case)),
            all_masks(case.S)[case.mask],
            case.dealt(),
            axis,
            strategy=case.strategy,
            check=number % 8 == 0,
        )
        for number, case in enumerate(cases)
    ]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", SIZES)
def test_equal_to_one_device(launch: Launch, size: int) -> None:
    """Kind of fault: lengths that are no multiple of cp or 2 * cp, ranks that hold nothing, repeated keys."""
    cases = [case for case in CASES if case.size == size]
    results = launch(size, run_cases, cases)
    for case, *parts in zip(cases, *results, strict=True):
        ours = joined(parts, case.dealt())
        assert ours[0].dtype == case.dtype
        assert_right(ours, *expected(Problem.of(case)), given_of(Problem.of(case)), str(case))
