"""Ring attention under stress, and what it says to arguments, ranks and processes that go wrong."""

from __future__ import annotations

import datetime
import itertools
import os
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paracore import masks
from paracore.errors import UsageError
from paracore.ops.ring_attention import Options, ring_attention
from paracore.parallel import MeshAxis
from paracore.parallel import layout as layouts
from paracore.parallel.messages import Exchange
from tests.conftest import Died, Launch, run_mortal_ranks
from tests.ring_cases import F32, F64, STRATEGIES, Given, cp_and_heads, cp_axis, dense, ring


def many_rounds(rounds: int) -> int:
    """Ranks that dawdle at random: nobody may overtake, nothing may mix."""
    axis = cp_axis()
    delays = random.Random(axis.rank)
    layout = layouts.zigzag(13, axis.size)
    for number in range(rounds):
        given = Given.random(13, F32, B=1, Hq=3, Hkv=3, D=4)
        given = Given(given.q, given.k, given.v + number % 10, given.dout)
        if delays.random() < 0.1:
            time.sleep(delays.random() * 0.01)
        strategy = STRATEGIES[number % 3]
        ours = ring(given, masks.causal(), layout, axis, strategy=strategy, check=number % 4 == 0)
        if number % 25 == 24:
            for x, whole in zip(ours, dense(given, masks.causal()), strict=True):
                torch.testing.assert_close(x, layout.shard(whole, axis.rank, 2), rtol=1e-4, atol=1e-4)
    return rounds


def test_a_thousand_rounds_with_random_delays(launch: Launch) -> None:
    """Kind of fault: point-to-point mismatches that hang after many iterations, on odd rank counts."""
    assert launch(3, many_rounds, 1000) == [1000] * 3


def refused(name: str, axis: MeshAxis) -> str:
    odd = axis.rank == 1
    given, mask, layout = Given.random(12, F32), masks.causal(), layouts.zigzag(12, 3)
    q, k, v, _ = (layout.shard(tensor, axis.rank, 2) for tensor in given)
    options: Options = {}
    if odd and name == "dtype":
        q, k, v = q.double(), k.double(), v.double()
    elif odd and name == "heads":
        q = q[:, :2]
    elif odd and name == "mask":
        mask = masks.full()
    elif odd and name == "layout":
        layout = layouts.striped(12, 3, block=1)
    elif odd and name == "scale":
        options = {"scale": 0.5}
    elif odd and name == "length":
        q = q[:, :, 1:]
    elif odd and name == "gradients":
        q.requires_grad_()
    elif odd and name == "dropout":
        options = {"dropout_p": 0.5}
    try:
        ring_attention(q, k, v, mask, layout, axis, **options)
    except UsageError as error:
        return str(error)
    return "nothing"


DISAGREEMENTS = [
    (
        "dtype",
        "ranks disagree on dtype: rank 0: torch.float32, rank 1: torch.float64, rank 2: torch.float32",
    ),
    ("heads", "ranks disagree on q: rank 0: [2, 4, 'S', 16], rank 1: [2, 2, 'S', 16], rank 2: [2, 4,"),
    ("mask", "ranks disagree on mask: rank 0: '"),
    ("layout", "ranks disagree on layout: rank 0: ([4, 4, 4], '"),
    ("gradients", "ranks disagree on gradients: rank 0: False, rank 1: True, rank 2: False"),
    ("scale", "ranks disagree on options: rank 0: [], rank 1: [('scale', 0.5)], rank 2: []"),
    ("length", "rank 1: q is [2, 4, 3, 16], must have the 4 positions of its rank in dim 2"),
    ("dropout", "rank 1: dropout_p=0.5 needs a seed"),
]


def refused_for_all() -> list[str]:
    axis = cp_axis()
    return [refused(name, axis) for name, _ in DISAGREEMENTS]


def test_ranks_that_disagree_are_named_on_every_rank(launch: Launch) -> None:
    for refusals in launch(3, refused_for_all):
        for (_, message), refusal in zip(DISAGREEMENTS, refusals, strict=True):
            assert message in refusal


def refused_on_two_axes() -> str:
    axis, heads_axis, rank = cp_and_heads(2, 2)
    layout = layouts.contiguous(12, 4)
    q, k, v, _ = (layout.shard(tensor, rank, 2) for tensor in Given.random(12, F32))
    if rank == 3:
        q = q[..., :8]
    try:
        ring_attention(q, k, v, masks.causal(), layout, axis, heads_axis=heads_axis)
    except UsageError as error:
        return str(error)
    return "nothing"


def test_on_two_axes_a_refusal_reaches_the_rank_that_shares_none(launch: Launch) -> None:
    """Kind of fault: those who meet the bad rank end, and others wait for them."""
    for refusal in launch(4, refused_on_two_axes):
        assert "must be [2, Hkv, Sk, 8]" in refusal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "star"}, "strategy='star': must be one of ring, all_gather, ulysses"),
        ({"layout": layouts.contiguous(12, 2)}, "the layout is for 2 ranks, but there are 1"),
        ({"layout": layouts.contiguous(11, 1)}, r"q is \[2, 4, 12, 16\], must have the 11 positions"),
        ({"softcap": -1.0}, "softcap=-1.0: must be 0"),
        ({"impl": "native", "dtype": F64}, "implementation 'native' .*float64"),
        ({"heads_axis": MeshAxis.alone("tp"), "strategy": "ulysses"}, "heads_axis must be None"),
        ({"query_positions": None}, r"unknown options \['query_positions'\]"),
        ({"mask": masks.documents([0, 5])}, "boundaries end at 5, must end at 12"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str, check: bool) -> None:
    arguments: dict[str, Any] = {"mask": masks.causal(), "layout": layouts.contiguous(12, 1), "dtype": F32}
    arguments |= {"axis": MeshAxis.alone("cp"), "check": check} | changes
    q, k, v, _ = Given.random(12, arguments.pop("dtype"))
    with pytest.raises(UsageError, match=message):
        ring_attention(q, k, v, **arguments)


SECONDS = 20.0  # the longest that a rank may wait for another


def axis_that_waits(seconds: float) -> MeshAxis:
    """Inside a rank: the axis over all ranks, in a group with a timeout of its own."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    assert group is not None
    return MeshAxis.around(group, "cp")


def one_rank_dies(strategy: str) -> tuple[str, float]:
    """Rank 1 dies in backward, when it has sent something already and the others wait for more."""
    axis, given = axis_that_waits(SECONDS), Given.random(12, F32, Hq=6, Hkv=3)
    q, k, v, dout = given.of_rank(layouts.zigzag(12, 3), axis.rank)
    out = ring_attention(q, k, v, masks.full(), layouts.zigzag(12, 3), axis, strategy=strategy)
    exchanges = itertools.count()

    def start(exchange: Exchange) -> None:
        if next(exchanges) == 1:
            os._exit(13)
        started(exchange)

    started = Exchange.start
    begin = time.monotonic()
    with mock.patch.object(Exchange, "start", start if axis.rank == 1 else started):
        try:
            torch.autograd.grad(out, (q, k, v), dout)
        except RuntimeError as error:
            return type(error).__name__, time.monotonic() - begin
    return "nothing noticed", 0.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_when_a_rank_dies_in_backward_the_others_end_with_an_error(strategy: str) -> None:
    first, second, third = run_mortal_ranks(3, one_rank_dies, strategy)
    assert second == Died(13)
    for name, seconds in (first, third):
        assert name != "nothing noticed"
        assert seconds < SECONDS


def one_rank_stays_away(seconds: float) -> str:
    """Rank 1 lives, but never comes; it stays until the others have ended."""
    axis = axis_that_waits(seconds)
    q, k, v, _ = Given.random(12, F32, Hq=6, Hkv=3).of_rank(layouts.zigzag(12, 3), axis.rank)
    noticed = "stayed away"
    if axis.rank != 1:
        try:
            ring_attention(q, k, v, masks.full(), layouts.zigzag(12, 3), axis, check=False)
        except RuntimeError as error:
            noticed = str(error)
    dist.barrier()  # in the group of all, which waits longer
    return noticed


def test_a_rank_that_stays_away_is_waited_for_no_longer_than_the_timeout(launch: Launch) -> None:
    first, second, third = launch(3, one_rank_stays_away, 1.0)
    assert second == "stayed away"
    for noticed in (first, third):
        assert "Timed out waiting 1000ms" in noticed


def refused_by_ulysses() -> str:
    axis = cp_axis()
    layout = layouts.contiguous(12, axis.size)
    q, k, v, _ = (layout.shard(tensor, axis.rank, 2) for tensor in Given.random(12, F32))
    with pytest.raises(UsageError) as error:
        ring_attention(q, k, v, masks.causal(), layout, axis, strategy="ulysses")
    return str(error.value)


def test_ulysses_refuses_heads_that_cannot_be_divided(launch: Launch) -> None:
    for message in launch(3, refused_by_ulysses):
        assert "query=4 heads cannot be divided over axis cp of 3 ranks" in message
