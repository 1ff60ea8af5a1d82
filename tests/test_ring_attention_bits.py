"""What ring attention owes to the last bit: for any number of ranks, twice, and where a token is hidden."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from paracore import masks
from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask
from tests.conftest import Launch
from tests.ring_cases import (
    BF16,
    F32,
    LAYOUTS,
    STRATEGIES,
    Given,
    all_masks,
    cp_axis,
    dense,
    joined,
    layout_named,
    ring,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# ---------------------------------------------------------------- any number of ranks

GATHERED = [
    case
    for case in itertools.product((F32, BF16), ("window", "documents", "full"), LAYOUTS)
    if case[2] in ("contiguous", "zigzag") or case[1] == "documents"
]


def gathered_mask(name: str) -> Mask:
    """Windows and documents that begin and end within tiles."""
    if name == "documents":
        return masks.causal() & masks.documents([0, 100, 333, 334, 700, 1000])
    return masks.causal() & masks.sliding_window(300, 0) if name == "window" else all_masks(1000)[name]


def gathered_tokens(dtype: torch.dtype) -> Given:
    return Given.random(1000, dtype, B=1, Hq=4, Hkv=2)


def run_gathered() -> list[list[Tensor]]:
    axis = cp_axis()
    return [
        ring(
            gathered_tokens(dtype),
            gathered_mask(mask),
            layout_named(layout, 1000, axis.size, gathered_mask(mask)),
            axis,
            strategy="all_gather",
            check=False,
        )[:2]
        for dtype, mask, layout in GATHERED
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gathered_keys_give_the_same_bits_for_every_number_of_ranks(launch: Launch, size: int) -> None:
    """Tiles agree, since a key lies at the index that is its position."""
    whole = {(dtype, mask): dense(gathered_tokens(dtype), gathered_mask(mask)) for dtype, mask, _ in GATHERED}
    for (dtype, mask, layout), *parts in zip(GATHERED, *launch(size, run_gathered), strict=True):
        out, dq = joined(parts, layout_named(layout, 1000, size, gathered_mask(mask)))
        assert torch.equal(out, whole[dtype, mask][0]), f"out of {dtype}, {mask}, {layout}"
        assert torch.equal(dq, whole[dtype, mask][1]), f"dq of {dtype}, {mask}, {layout}"


# ---------------------------------------------------------------- twice

REPEATED = list(itertools.product((F32, BF16), all_masks(200), STRATEGIES))


def run_twice() -> list[bool]:
    axis, same = cp_axis(), []
    for number, (dtype, mask, strategy) in enumerate(REPEATED):
        given = Given.random(200, dtype, Hq=6, Hkv=3)
        layout = layout_named(LAYOUTS[number % 4], 200, axis.size, all_masks(200)[mask])
        once, again = (
            ring(given, all_masks(200)[mask], layout, axis, strategy=strategy, check=False) for _ in range(2)
        )
        same.append(all(map(torch.equal, once, again)))
    return same


def test_two_runs_give_the_same_bits(launch: Launch) -> None:
    for same in launch(3, run_twice):
        assert [case for case, equal in zip(REPEATED, same, strict=True) if not equal] == []


# ---------------------------------------------------------------- one token

LENGTH = 60
CHANGED = [0, 17, 30, 59]
HIDING = [
    (mask, strategy, LAYOUTS[(m + s) % 4])
    for (m, mask), (s, strategy) in itertools.product(enumerate(all_masks(LENGTH)), enumerate(STRATEGIES))
]


def of_mask(name: str, layout: str, size: int) -> tuple[Mask, Layout]:
    mask = all_masks(LENGTH)[name]
    return mask, layout_named(layout, LENGTH, size, mask)


def run_with_tokens_changed() -> list[list[list[Tensor]]]:
    """out and dq of each of HIDING: of the tokens as they are, and with each of those in CHANGED changed."""
    axis, given = cp_axis(), Given.random(LENGTH, F32, Hq=6, Hkv=3)
    contenders = [given]
    for position in CHANGED:
        k, v = given.k.clone(), given.v.clone()
        k[:, :, position] += 1.0
        v[:, :, position] -= 1.0
        contenders.append(Given(given.q, k, v, given.dout))
    return [
        [
            ring(tokens, *of_mask(mask, layout, 3), axis, strategy=strategy, check=False)
            for tokens in contenders
        ]
        for mask, strategy, layout in HIDING
    ]


def test_a_token_changes_exactly_the_outputs_that_see_it(launch: Launch) -> None:
    """Kind of fault: tokens leaking across documents, windows or padding. Not by one bit; nor in gradients.

    A query that sees no changed key has the same output and the same gradient; all others another output.
    The gradients of a key change only if a query sees both it and the changed one.
    """
    results = launch(3, run_with_tokens_changed)
    for (name, strategy, layout_name), *parts in zip(HIDING, *results, strict=True):
        mask, layout = of_mask(name, layout_name, 3)
        before, *changed = (joined(list(ranks), layout) for ranks in zip(*parts, strict=True))
        first, end = torch.broadcast_tensors(*mask.interval(torch.arange(LENGTH)))
        keys = torch.arange(LENGTH)
        sees = (first.view(-1, LENGTH, 1) <= keys) & (keys < end.view(-1, LENGTH, 1))  # [B, queries, keys]
        for position, after in zip(CHANGED, changed, strict=True):
            label = f"{name}, {strategy}, {layout_name}, token {position}"
            out, dq, dk, dv = (
                (x != y).any(-1).any(1) for x, y in zip(before, after, strict=True)
            )  # [B, S]: what has changed for any head
            affected = sees[:, :, position]
            assert torch.equal(out, affected.expand_as(out)), label
            assert not (dq & ~affected).any(), label
            related = (affected.unsqueeze(-1) & sees).any(1)
            assert not ((dk | dv) & ~related).any(), label
            assert (before[0] != after[0]).any(-1).all(1).equal(out), f"every head of {label}"


def test_hidden_tokens_are_among_those_changed() -> None:
    """So that the test above has something to find for every mask but the full one."""
    for name, mask in all_masks(LENGTH).items():
        first, end = torch.broadcast_tensors(*mask.interval(torch.arange(LENGTH)))
        hides = any(bool(((first > position) | (end <= position)).any()) for position in CHANGED)
        assert hides == (name != "full")
