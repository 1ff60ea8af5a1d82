"""Two ranks: which gradients count, what travels, what is kept where, and what an overflow leaves alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paracore.errors import UsageError
from paracore.optim import AdamW
from paracore.parallel.mesh import ShardingAxes
from paracore.reference_adamw import PIECE
from tests.adamw_cases import (
    Bag,
    Problem,
    adamw,
    data_axes,
    digest,
    dyadic,
    flat_of,
    launched,
    take_step,
    train,
)
from tests.numerics import randn

STAGES = (0, 1, 2)
SHAPES = ((90, 101), (64,), (5, 13), (3 * PIECE + 1,))
SCENARIOS: dict[str, Callable[[ShardingAxes, int], Any]] = {}

Scenario = Callable[[ShardingAxes, int], Any]


def scenario(function: Scenario) -> Scenario:
    """Let the function run on both ranks, in every stage."""
    SCENARIOS[function.__name__] = function
    return function


def run_scenarios() -> dict[tuple[str, int], Any]:
    axes = data_axes()
    return {(name, stage): run(axes, stage) for name, run in SCENARIOS.items() for stage in STAGES}


def results(function: Scenario, stage: int) -> list[Any]:
    return [found[function.__name__, stage] for found in launched(2, run_scenarios)]


stages = pytest.mark.parametrize("stage", STAGES)


def made(axes: ShardingAxes, stage: int, shapes: Any = SHAPES, **options: Any) -> tuple[Bag, AdamW]:
    model = Bag(shapes, options.pop("dtype", torch.float32))
    return model, adamw(model, mesh=axes, stage=stage, **({"lr": 0.1} | options))


def summed(optimizer: AdamW) -> list[Tensor]:
    return [gradient for _, gradient in sorted(optimizer.whole_gradients().items())]


def gradients(rank: int, seed: int = 0, shapes: Any = SHAPES) -> list[Tensor | None]:
    return [dyadic(*shape, seed=1000 * seed + 10 * rank + index) for index, shape in enumerate(shapes)]


def sums(*given: list[Tensor | None]) -> list[Tensor]:
    return [sum((g for g in of_one if g is not None), torch.zeros(())) for of_one in zip(*given, strict=True)]


@scenario
def worked_example(axes: ShardingAxes, stage: int) -> Any:
    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [3.0]])
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0]]))
    optimizer = adamw(model, mesh=axes, stage=stage)
    own = slice(axes.data.rank, axes.data.rank + 1)
    ((model(x[own]) - y[own]).square().sum() / (2 * len(x))).backward()
    return summed(optimizer)[0]


@stages
def test_the_parts_of_two_ranks_add_up_to_the_gradient_that_is_known(stage: int) -> None:
    for found in results(worked_example, stage):
        assert found.tolist() == [[-2.0, -3.0]]


@scenario
def present_somewhere(axes: ShardingAxes, stage: int) -> Any:
    model, optimizer = made(axes, stage)
    given = gradients(axes.data.rank)
    given[0] = None
    given[1] = given[1] if axes.data.rank == 1 else None
    for _ in range(2):
        model(given).backward()
        optimizer.step()
    optimizer.synchronize()
    return model.p0.detach(), {n: s["step"].item() for n, s in optimizer.state_dict()["state"].items()}


@stages
def test_a_parameter_counts_a_step_where_any_rank_has_a_gradient_and_none_where_no_rank_has(
    stage: int,
) -> None:
    for parameter, steps in results(present_somewhere, stage):
        assert steps == {"p1": 2.0, "p2": 2.0, "p3": 2.0}
        assert torch.equal(parameter, randn(*SHAPES[0], seed=0, dtype=torch.float32))


@scenario
def a_rank_without_backward(axes: ShardingAxes, stage: int) -> Any:
    model, optimizer = made(axes, stage)
    if axes.data.rank == 1:
        model(gradients(1)).backward()
    return summed(optimizer)


@stages
def test_a_rank_without_any_gradient_adds_zeros(stage: int) -> None:
    for found in results(a_rank_without_backward, stage):
        assert all(map(torch.equal, found, [g.float() for g in sums(gradients(1))]))


@scenario
def assigned_by_hand(axes: ShardingAxes, stage: int) -> Any:
    model, optimizer = made(axes, stage)
    for parameter, gradient in zip(model.parameters(), gradients(axes.data.rank), strict=True):
        assert gradient is not None
        parameter.grad = gradient.float()
    return summed(optimizer)


@stages
def test_gradients_assigned_by_hand_are_summed_like_others(stage: int) -> None:
    for found in results(assigned_by_hand, stage):
        assert all(map(torch.equal, found, [g.float() for g in sums(gradients(0), gradients(1))]))


@scenario
def discarded(axes: ShardingAxes, stage: int) -> Any:
    model, optimizer = made(axes, stage)
    with optimizer.no_sync():
        model(gradients(7)).backward()
    model(gradients(8)).backward()
    optimizer.zero_grad()
    model([None, *gradients(axes.data.rank)[1:]]).backward()
    return summed(optimizer)


@stages
def test_zero_grad_discards_what_came_before_sent_or_not(stage: int) -> None:
    expected = [g.float() for g in sums(gradients(0), gradients(1))]
    expected[0] = torch.zeros(SHAPES[0])
    for found in results(discarded, stage):
        assert all(map(torch.equal, found, expected))


@scenario
def model_zero_grad_between(axes: ShardingAxes, stage: int) -> Any:
    model, optimizer = made(axes, stage)
    for seed in range(2):
        model(gradients(axes.data.rank, seed)).backward()
        if seed == 0:
            model.zero_grad(set_to_none=True)
    return summed(optimizer)


@stages
def test_the_models_zero_grad_discards_what_lies_in_grad_and_in_stage_2_none_does(stage: int) -> None:
    given = [gradients(rank, seed) for rank in range(2) for seed in ((0, 1) if stage == 2 else (1,))]
    for found in results(model_zero_grad_between, stage):
        assert all(map(torch.equal, found, [g.float() for g in sums(*given)]))


def bits(model: Bag, optimizer: AdamW) -> str:
    optimizer.synchronize()
    flat = flat_of(optimizer)
    states = [x for s in flat.sections for x in (*s.states().values(), s.master) if x is not None]
    return digest([*model.parameters(), *states, optimizer._steps])


@scenario
def overflow(axes: ShardingAxes, stage: int) -> Any:
    found = []
    for value in (torch.inf, -torch.inf, torch.nan):
        problem = Problem(SHAPES, torch.bfloat16, stage=stage, options={"max_norm": 1.0}, overflow=(2, value))
        model, optimizer, _ = train(problem, axes, steps=2)
        before = bits(model, optimizer)
        take_step(problem, model, optimizer, axes.data.rank, axes.data.size, 2)
        skipped, after = optimizer.skipped, bits(model, optimizer)
        take_step(problem, model, optimizer, axes.data.rank, axes.data.size, 3)
        next_one = bits(model, optimizer)
        found.append((skipped, before == after, optimizer.skipped, next_one != after, next_one))
    return found


@stages
def test_an_overflow_on_one_rank_changes_no_bit_on_any_and_the_next_step_is_taken(stage: int) -> None:
    for found in results(overflow, stage):
        assert [row[:4] for row in found] == [(True, True, False, True)] * 3
        assert len({row[4] for row in found}) == 1


@scenario
def traffic(axes: ShardingAxes, stage: int) -> Any:
    found = {}
    for reduction in ("ordered", "backend"):
        options = {"reduction": reduction, "bucket_mib": 1e-6, "wire_dtype": torch.bfloat16}
        model, optimizer = made(axes, stage, dtype=torch.bfloat16, gradient_dtype=torch.float32, **options)
        axes.data.ledger.take()
        for micro in range(3):
            if micro == 0:
                with optimizer.no_sync():
                    model(gradients(0)).backward()
            else:
                model(gradients(0)).backward()
        optimizer.step()
        optimizer.synchronize()
        rows = {row.kind: (row.count, row.bytes) for row in axes.data.ledger.take()}
        lengths = [layout.length for layout in flat_of(optimizer).layouts]
        pieces = [
            len(layout.pieces(layout.shard(r))) for layout in flat_of(optimizer).layouts for r in range(2)
        ]
        found[reduction] = (rows, lengths, [sum(pieces[0::2]), sum(pieces[1::2])])
    return found


@stages
@pytest.mark.parametrize(
    ("reduction", "kind"), [("ordered", "all_to_all"), ("backend", "reduce_scatter")], ids=str
)
def test_the_bytes_on_the_wire_are_those_of_the_formula(stage: int, reduction: str, kind: str) -> None:
    for found in results(traffic, stage):
        rows, lengths, pieces = found[reduction]
        assert len(lengths) == len(SHAPES)
        synchronized = 2 if stage == 2 else 1
        gathered, itemsize = sum(lengths), 4 if stage == 0 else 2  # summed gradients, or parameters
        of_statistics = 8 * 2 * (len(SHAPES) + (max(pieces) if stage else 0))
        assert rows == {
            kind: (synchronized * len(lengths), synchronized * 2 * sum(lengths)),  # in bfloat16
            "all_gather": (len(lengths) + 1, gathered * itemsize + of_statistics),
        }


@scenario
def memory(axes: ShardingAxes, stage: int) -> Any:
    _, optimizer = made(axes, stage, dtype=torch.bfloat16, gradient_dtype=torch.float32)
    flat = flat_of(optimizer)
    states = [x for s in flat.sections for x in (*s.states().values(), s.master) if x is not None]
    totals = {b.total.untyped_storage().data_ptr(): b.total.untyped_storage() for b in flat.gradients.buckets}
    local = [b.local.numel() for b in flat.gradients.buckets if b.local is not None]
    return {
        "parameters": sum(f.numel() for f in flat._flats),
        "gradients": sum(storage.nbytes() for storage in totals.values()),
        "local": sum(local),
        "states": sum(x.nbytes for x in states),
    }


@stages
def test_each_stage_keeps_what_zero_says_of_it(stage: int) -> None:
    """Of N bfloat16 parameters; moments and master take 12 bytes, gradients in float32 4."""
    N, padding = sum(Bag(SHAPES).get_parameter(f"p{i}").numel() for i in range(4)), 2 * PIECE + 4 * 64
    for found in results(memory, stage):
        parts_of_states, parts_of_gradients = (1 if stage == 0 else 2), (2 if stage == 2 else 1)
        assert N <= found["parameters"] <= N + padding
        assert N <= found["states"] * parts_of_states / 12 <= N + padding
        assert N <= found["gradients"] * parts_of_gradients / 4 <= N + padding
        assert found["local"] == (0 if stage == 2 else found["parameters"])


@scenario
def padding(axes: ShardingAxes, stage: int) -> Any:
    """The bits of all padding, after backward passes through buckets of different sizes."""
    problem = Problem(SHAPES, torch.bfloat16, stage=stage, microbatches=2, missing=(0.2, 0.2))
    options = {"bucket_mib": 0.02, "amsgrad": True, "stochastic_rounding": True}
    model, optimizer = made(axes, stage, dtype=torch.bfloat16, **options)
    flat, worst = flat_of(optimizer), 0.0
    for step in range(3):
        take_step(problem, model, optimizer, axes.data.rank, 2, step)
        optimizer.synchronize()
        for layout, whole, section in zip(flat.layouts, flat._flats, flat.sections, strict=True):
            for begin, end in uncovered(layout.pieces(slice(0, layout.length)), layout.length):
                worst = max(worst, whole[begin:end].float().abs().max().item())
            for begin, end in uncovered(section.pieces.tolist(), section.parameter.numel()):
                for x in (section.gradient, *section.states().values(), section.master):
                    assert x is not None
                    worst = max(worst, x[begin:end].float().abs().max().item())
    return worst


def uncovered(pieces: Any, length: int) -> list[tuple[int, int]]:
    ends = [(0, 0), *sorted((begin, end) for begin, end, _ in pieces), (length, length)]
    return [(one[1], two[0]) for one, two in itertools.pairwise(ends) if one[1] < two[0]]


@stages
def test_padding_is_zero_for_ever(stage: int) -> None:
    assert results(padding, stage) == [0.0, 0.0]


@scenario
def deferred(axes: ShardingAxes, stage: int) -> Any:
    found = []
    for overlap in (True, False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(90, 70), nn.ReLU(), nn.Linear(70, 90), nn.Linear(90, 3))
        optimizer = adamw(model, lr=0.1, mesh=axes, stage=stage, overlap=overlap, bucket_mib=0.01)
        losses = []
        for step in range(4):
            loss = model(randn(8, 90, seed=step + 10 * axes.data.rank, dtype=torch.float32)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        pending = len(flat_of(optimizer)._gathers)
        if overlap:  # saving waits, as forward does
            model.state_dict()
        else:
            optimizer.synchronize()
        found.append((losses, digest(model.parameters()), pending, len(flat_of(optimizer)._gathers)))
    return found


@stages
def test_parameters_are_whole_in_the_next_forward_and_overlap_changes_no_bit(stage: int) -> None:
    for found in results(deferred, stage):
        overlapped, plain, again = found
        assert overlapped[:2] == plain[:2] == again[:2]
        assert (overlapped[2] > 0) == (stage > 0)
        assert plain[2] == overlapped[3] == 0
    assert len({found[0][1] for found in results(deferred, stage)}) == 1


@scenario
def by_hand_after_sending(axes: ShardingAxes, stage: int) -> Any:
    layer = nn.Linear(3, 2)
    optimizer = adamw(layer, mesh=axes, stage=stage)
    layer(torch.ones(1, 3)).sum().backward()
    layer.weight.grad = torch.ones(2, 3)
    try:
        optimizer.step()
    except UsageError:
        return "refused"
    return "taken"


@stages
def test_a_gradient_that_other_ranks_do_not_expect_is_refused_and_never_waited_for(stage: int) -> None:
    assert results(by_hand_after_sending, stage) == ["refused" if stage == 2 else "taken"] * 2


@scenario
def sixteen_bit_wires(axes: ShardingAxes, stage: int) -> Any:
    found = {}
    for reduction in ("ordered", "backend"):
        model, optimizer = made(axes, stage, wire_dtype=torch.bfloat16, reduction=reduction)
        given = [None, None, torch.full(SHAPES[2], 1.0 if axes.data.rank else 256.0), *gradients(0)[3:]]
        model(given).backward()
        found[reduction] = summed(optimizer)
    exact, optimizer = made(axes, stage, reduction="backend")
    exact(gradients(axes.data.rank)).backward()
    return found, summed(optimizer)


@stages
def test_sixteen_bit_parts_are_added_in_float32_and_reductions_agree(stage: int) -> None:
    """256 + 1 is no number of bfloat16."""
    for found, exact in results(sixteen_bit_wires, stage):
        assert torch.equal(found["ordered"][2], torch.full(SHAPES[2], 257.0))
        assert torch.equal(found["backend"][2], torch.full(SHAPES[2], 256.0))
        assert torch.equal(found["ordered"][3], found["backend"][3])
        assert all(map(torch.equal, exact, [g.float() for g in sums(gradients(0), gradients(1))]))


@scenario
def made_anew(axes: ShardingAxes, stage: int) -> Any:
    model, first = made(axes, stage)
    optimizer = adamw(model, lr=0.1, mesh=axes, stage=stage)
    for seed in range(2):
        model(gradients(axes.data.rank, seed)).backward()
    del first
    return summed(optimizer)


@stages
def test_gradients_go_to_the_last_optimizer_that_was_made_for_a_model(stage: int) -> None:
    given = [gradients(rank, seed) for rank in range(2) for seed in range(2)]
    for found in results(made_anew, stage):
        assert all(map(torch.equal, found, [g.float() for g in sums(*given)]))
