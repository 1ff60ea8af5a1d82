"""The optimizer's state: over any number of ranks, in any stage, to torch.optim.AdamW and back."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paracore.errors import UsageError
from paracore.nn import Decoder, DecoderConfig
from paracore.optim import AdamW, gradient_norm
from paracore.parallel import MeshAxis
from paracore.parallel.mesh import ShardingAxes
from tests.adamw_cases import MASTERLESS, Bag, Problem, adamw, data_axes, launched, random_shapes, take_step
from tests.conftest import Launch
from tests.numerics import assert_close

SHAPES = random_shapes(7)
# As many ranks take two steps each; their gradients add up to the same bits.
CHAIN = ((3, 1), (2, 2), (5, 0), (1, 0))
KINDS: dict[str, dict[str, Any]] = {
    "float32 master": {"amsgrad": True},
    "remainder": {"master": "remainder", "max_norm": 1.0},
    "no master, 16-bit moments, stochastic": {"stochastic_rounding": True, **MASTERLESS},
    "float32 master, stochastic": {"stochastic_rounding": True},
}
Saved = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def problem_of(kind: str, stage: int) -> Problem:
    missing = (0.3, 0.0)
    return Problem(
        SHAPES, torch.bfloat16, stage=stage, options=KINDS[kind], first_only=True, missing=missing, seed=5
    )


def continued(saved: Saved, first: int, steps: int, stage: int) -> tuple[Saved, bool]:
    """Load model and optimizer, take `steps` steps, save them; also, whether what is loaded is what was."""
    axes, found, same = data_axes(), {}, True
    for kind in KINDS:
        problem = problem_of(kind, stage)
        model = Bag(problem.shapes, problem.dtype, seed=0 if not saved else 77)
        optimizer = adamw(model, mesh=axes, stage=stage, **problem.group(0), **problem.options)
        if saved:
            model.load_state_dict(saved[kind][0])
            optimizer.load_state_dict(saved[kind][1])
            same = same and list(leaves(optimizer.state_dict())) == list(leaves(saved[kind][1]))
        for step in range(first, first + steps):
            take_step(problem, model, optimizer, axes.data.rank, axes.data.size, step)
        optimizer.synchronize()
        found[kind] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return found, same


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Everything in a state with its place, tensors by dtype and bits."""
    if isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, (*path, key))
    elif isinstance(state, torch.Tensor):
        yield path, state.dtype, state.shape, state.contiguous().view(-1).view(torch.uint8).tolist()
    else:
        yield path, state


def test_three_two_five_and_one_ranks_in_other_stages_continue_bit_by_bit(launch: Launch) -> None:
    saved: Saved = {}
    for place, (world, stage) in enumerate(CHAIN):
        arguments = (saved, 2 * place, 2, stage)
        ranks = launch(world, continued, *arguments) if world > 1 else [continued(*arguments)]
        for other, same in ranks:
            assert same
            assert list(leaves(other["remainder"])) == list(leaves(ranks[0][0]["remainder"]))
        saved = ranks[0][0]
    whole, _ = continued({}, 0, 2 * len(CHAIN), 0)
    for kind in KINDS:
        assert list(leaves(saved[kind])) == list(leaves(whole[kind])), kind


def optimizers(dtype: torch.dtype, **options: Any) -> tuple[Bag, AdamW, Bag, torch.optim.AdamW]:
    own, other = Bag(SHAPES, dtype), Bag(SHAPES, dtype)
    return own, adamw(own, lr=0.1, **options), other, torch.optim.AdamW(other.parameters(), lr=0.1, **options)


def both_step(own: Any, other: Any, step: int) -> None:
    problem = Problem(SHAPES, missing=(0.4, 0.0))
    for model, optimizer in (own, other):
        model([problem.gradient(0, step, 0, index) for index in range(len(SHAPES))]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("to_torch", [False, True], ids=["from torch", "to torch"])
def test_torch_loads_the_state_and_is_loaded_and_goes_on(to_torch: bool, amsgrad: bool) -> None:
    own, optimizer, other, of_torch = optimizers(torch.float64, amsgrad=amsgrad)
    for step in range(3):
        both_step((own, optimizer), (other, of_torch), step)
    file = io.BytesIO()
    torch.save((optimizer if to_torch else of_torch).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    if to_torch:
        of_torch = torch.optim.AdamW(other.parameters(), lr=7.0, amsgrad=amsgrad)
        of_torch.load_state_dict(state)
    else:
        optimizer = adamw(own, lr=7.0, amsgrad=amsgrad)
        optimizer.load_state_dict(state)
    for step in range(3, 6):
        both_step((own, optimizer), (other, of_torch), step)
    for x, reference in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-12, atol=1e-13)


def test_states_keep_their_dtype_and_are_whole_contiguous_copies() -> None:
    model = Bag(SHAPES, torch.bfloat16)
    optimizer = adamw(model, moment_dtype=torch.bfloat16)
    model([torch.ones(shape) for shape in SHAPES]).backward()
    optimizer.step()
    for (_, state), parameter in zip(
        sorted(optimizer.state_dict()["state"].items()), model.parameters(), strict=True
    ):
        assert {kind: x.dtype for kind, x in state.items()} == {
            "step": torch.float32,
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.bfloat16,
            "master": torch.float32,
        }
        assert all(x.shape == parameter.shape for kind, x in state.items() if kind != "step")


def saved_state(**options: Any) -> dict[str, Any]:
    model = Bag([(3,), (2,)], options.pop("dtype", torch.float32))
    optimizer = adamw(model, **options)
    model([torch.ones(3), torch.ones(2)]).backward()
    optimizer.step()
    return optimizer.state_dict()


def edited(**kinds: torch.Tensor) -> dict[str, Any]:
    state = saved_state()
    state["state"]["p1"].update(kinds)
    return state


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "narrowing": (
        saved_state(dtype=torch.float64),
        {},
        r"exp_avg of p[01] is float64: float32 would lose precision; use moment_dtype=torch\.float64",
    ),
    "narrowing to moments in 16 bits": (
        saved_state(),
        {"moment_dtype": torch.bfloat16},
        r"exp_avg of p[01] is float32: bfloat16 would lose precision; use moment_dtype=torch\.float32",
    ),
    "shape": (
        edited(exp_avg_sq=torch.ones(3)),
        {},
        r"exp_avg_sq of p1 is \[3\], must be \[2\] like the parameter",
    ),
    "groups": (
        {"state": {}, "param_groups": [{"params": [0, 1, 2]}]},
        {},
        r"the state has groups of \[3\] parameters, must have groups of \[2\]",
    ),
    "without maxima": (
        saved_state(),
        {"amsgrad": True},
        "saved with amsgrad=False: .* with amsgrad=True",
    ),
    "with maxima": (saved_state(amsgrad=True), {}, "saved with amsgrad=True: .* made with amsgrad=False"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_states_that_do_not_fit_are_refused_and_change_nothing(fault: str) -> None:
    state, options, message = REFUSED[fault]
    model = Bag([(3,), (2,)])
    optimizer = adamw(model, lr=0.5, **options)
    model([torch.ones(3), torch.ones(2)]).backward()
    optimizer.step()
    before = list(leaves(optimizer.state_dict()))
    with pytest.raises(UsageError, match=message):
        optimizer.load_state_dict(state)
    assert list(leaves(optimizer.state_dict())) == before


def test_wider_moments_take_over_narrower_ones() -> None:
    state = saved_state(moment_dtype=torch.bfloat16)
    optimizer = adamw(Bag([(3,), (2,)]))
    optimizer.load_state_dict(state)
    for name, kinds in optimizer.state_dict()["state"].items():
        assert kinds["exp_avg"].dtype == torch.float32
        assert torch.equal(kinds["exp_avg"], state["state"][name]["exp_avg"].float())


def test_a_loaded_state_is_a_copy_its_learning_rate_too() -> None:
    model = Bag([(3,), (2,)])
    optimizer = adamw(model, lr=torch.tensor(0.1))
    state = optimizer.state_dict()
    other = adamw(Bag([(3,), (2,)]), lr=torch.tensor(0.2))
    other.load_state_dict(state)
    other.param_groups[0]["lr"].fill_(9.0)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)


def test_a_scheduler_continues_from_a_loaded_state() -> None:
    first = adamw(Bag([(3,)]), lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
    first.step()
    scheduler.step()
    second = adamw(Bag([(3,)]), lr=7.0)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.4
    torch.optim.lr_scheduler.LambdaLR(second, lambda epoch: 0.5**epoch, last_epoch=1)
    assert second.param_groups[0]["lr"] == pytest.approx(0.2)


# ---------------------------------------------------------------- over tp and data at once

CONFIG = DecoderConfig(
    vocab_size=13, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=1, intermediate_size=19
)


def tokens(rank: int, size: int) -> torch.Tensor:
    every = torch.arange(4 * 6).remainder(13).view(4, 6)
    return every[rank * 4 // size : (rank + 1) * 4 // size]


def decode(axes: ShardingAxes, tp: MeshAxis, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Decoder(CONFIG, tp, dtype=torch.float64)
    optimizer = adamw(model, lr=0.01, mesh=axes, stage=stage, max_norm=0.3)
    norms = []
    for _ in range(3):
        own = tokens(axes.data.rank, axes.data.size)
        (model.loss(own, own.roll(1, dims=1)) / axes.data.size).backward()
        optimizer.step()
        norms.append(optimizer.gradient_norm.item())
    own = tokens(axes.data.rank, axes.data.size)
    (model.loss(own, own.roll(1, dims=1)) / axes.data.size).backward()
    whole = optimizer.whole_gradients()
    optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.grad = whole[name]
    norms.append(gradient_norm(model, tp).item())
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def decode_in_all_stages() -> Any:
    axes = data_axes(dp=2, tp=2)
    return {stage: decode(axes, axes.tp, stage) for stage in (0, 1, 2)}


@functools.cache
def dense() -> tuple[list[float], dict[str, torch.Tensor]]:
    return decode(ShardingAxes.alone(), MeshAxis.alone("tp"), 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_decoder_cut_over_tp_and_data_has_the_dense_models_norms_and_parameters(stage: int) -> None:
    """One key/value head is shared by both ranks of tp, and norms see other heads: each counts once."""
    norms, parameters = dense()
    placements = Decoder(CONFIG, MeshAxis.alone("tp")).parameter_placements()
    assert placements.keys() == parameters.keys()
    for rank, found in enumerate(launched(4, decode_in_all_stages)):
        own_norms, own = found[stage]
        assert own_norms == pytest.approx(norms, rel=1e-9)
        for name, x in own.items():
            full = parameters[name]
            for dim, length in enumerate(x.shape):
                if length != full.size(dim):
                    full = full.narrow(dim, (rank % 2) * -(-full.size(dim) // 2), length)
            assert_close(x, full, eps=1e-9)
