"""AdamW over ranks computes what torch.optim.AdamW computes in one process, in every stage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.adamw_cases import (
    MASTERLESS,
    Problem,
    data_axes,
    digest,
    launched,
    random_shapes,
    train,
    train_with_torch,
)

WORLDS = (1, 2, 3, 4, 5)
STAGES = (0, 1, 2)
GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 0.03, "betas": (0.8, 0.9), "amsgrad": True},
    {"lr": 0.2, "eps": 1e-3, "weight_decay": 0.0, "maximize": True},
    {"lr": 0.1, "betas": (0.0, 0.99), "weight_decay": 0.5, "decoupled_weight_decay": False},
)
TINY = {"bucket_mib": 1e-6}  # one bucket for each parameter
MISSING = (0.3, 0.3)

FEATURES: dict[str, dict[str, Any]] = {
    "one step after the other": {},
    "groups": {"groups": GROUPS, "missing": MISSING},
    "missing gradients": {"missing": MISSING, "steps": 6},
    "gradients on some ranks": {"missing": (0.0, 0.6), "options": TINY},
    "accumulation": {"microbatches": 3, "missing": MISSING},
    "accumulation without sync": {"microbatches": 3, "unsynchronized": (0, 1), "missing": MISSING},
    "sync, then none": {"microbatches": 3, "unsynchronized": (1, 2), "options": TINY},
    "overflow in the first step": {"overflow": (0, torch.inf)},
    "not a number in the third step": {"overflow": (2, torch.nan), "missing": MISSING},
    "clipped, loss scaled": {"options": {"max_norm": 0.5}, "loss_scale": 1024.0},
    "large lr and eps": {"groups": ({"lr": 30.0, "eps": 10.0, "weight_decay": 1e-4},), "options": TINY},
    "clipped groups in tiny buckets": {"groups": GROUPS, "options": {"max_norm": 3.0} | TINY},
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
PROBLEMS: dict[tuple[str, int, str], Problem] = {
    (feature, stage, name): Problem(random_shapes(number), dtype, stage=stage, seed=number, **arguments)
    for number, (feature, arguments) in enumerate(FEATURES.items())
    for stage in STAGES
    for name, dtype in DTYPES.items()
    if (number + stage) % 2 == (name == "float32") or feature == "groups"
}

# Parameters in 16 bits whose summed gradients are the same for any number of ranks.
SHAPES = ((80, 130), (), (5, 6), (9000,))  # two buckets of several cells, on several ranks
ALIKE = {
    "float32": Problem(SHAPES, torch.float32, steps=3, first_only=True, options={"max_norm": 2.0} | TINY),
    "stochastic": Problem(
        SHAPES, torch.bfloat16, steps=3, first_only=True, options={"stochastic_rounding": True, **MASTERLESS}
    ),
    "stochastic beside a master": Problem(
        SHAPES, torch.bfloat16, steps=3, first_only=True, options={"stochastic_rounding": True, "seed": 3}
    ),
    "remainder": Problem(
        SHAPES,
        torch.bfloat16,
        steps=3,
        first_only=True,
        options={"master": "remainder", "max_norm": 2.0} | TINY,
    ),
}


def solved(problem: Problem, axes: Any) -> dict[str, Any]:
    """Whole tensors from the first rank, a digest of their bits from all."""
    model, optimizer, history = train(problem, axes)
    state = list(optimizer.state_dict()["state"].items())
    parameters = list(model.parameters())
    tensors = [x for _, kinds in state for x in kinds.values()]
    result: dict[str, Any] = {"digest": digest([*parameters, *tensors]), "history": history}
    if axes.data.rank == 0 and problem.dtype != torch.bfloat16:
        result |= {"parameters": [p.detach() for p in parameters], "state": dict(state)}
    return result


def solve_all() -> dict[Any, Any]:
    axes = data_axes()
    found: dict[Any, Any] = {key: solved(problem, axes) for key, problem in PROBLEMS.items()}
    for name, problem in ALIKE.items():
        for stage in STAGES:
            found[name, stage] = solved(dataclasses.replace(problem, stage=stage), axes)
    return found


def results(world: int) -> list[dict[Any, Any]]:
    return launched(world, solve_all)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("feature", "stage", "dtype"), PROBLEMS)
def test_parameters_states_and_steps_are_those_of_torch(
    world: int, feature: str, stage: int, dtype: str
) -> None:
    problem = PROBLEMS[feature, stage, dtype]
    found = results(world)[0][feature, stage, dtype]
    model, optimizer = train_with_torch(problem, world)
    relative = 1e-12 if problem.dtype == torch.float64 else 3e-6

    def same(x: torch.Tensor, reference: torch.Tensor) -> None:
        largest = reference.detach().abs().max().item() if reference.numel() else 0.0
        torch.testing.assert_close(x, reference.detach(), rtol=relative, atol=relative * largest)

    for x, reference in zip(found["parameters"], model.parameters(), strict=True):
        same(x, reference)
    named = len(problem.groups) == 1
    names = {index: f"p{index}" if named else str(place) for place, index in enumerate(problem.order)}
    for index, parameter in enumerate(model.parameters()):
        expected, own = optimizer.state[parameter], found["state"].get(names[index], {})
        assert own.keys() == expected.keys()
        for kind in expected:
            same(own[kind], expected[kind])


@pytest.mark.parametrize("world", WORLDS[1:])
def test_all_ranks_end_with_the_same_bits(world: int) -> None:
    first, *others = results(world)
    for other in others:
        for key, result in first.items():
            assert other[key]["digest"] == result["digest"], key
            assert str(other[key]["history"]) == str(result["history"]), key  # as text: a norm may be NaN


@pytest.mark.parametrize("world", WORLDS)
def test_only_the_steps_with_an_overflow_are_skipped(world: int) -> None:
    for key, problem in PROBLEMS.items():
        for step, (_, skipped) in enumerate(results(world)[0][key]["history"]):
            assert skipped == (problem.overflow is not None and problem.overflow[0] == step), key


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ALIKE)
def test_equal_sums_give_equal_bits_for_any_number_of_ranks_in_any_stage(
    name: str, stage: int, world: int
) -> None:
    """The norm's too: where it is clipped, every bit of the parameters depends on it."""
    alone, found = results(1)[0][name, 0], results(world)[0][name, stage]
    assert found["history"] == alone["history"]
    assert found["digest"] == alone["digest"]
