"""AdamW in one process: steps that are known, masters, what becomes of parameters, and wrong arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paracore.errors import UsageError
from paracore.reference_adamw import split_master
from tests.adamw_cases import Bag, adamw, dyadic
from tests.numerics import randn


def test_the_first_step_moves_every_parameter_by_the_learning_rate_whatever_its_gradient() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 3.0], dtype=torch.float64))
    optimizer = adamw([parameter], lr=0.25, weight_decay=0.0)
    parameter.grad = torch.tensor([100.0, 1.0], dtype=torch.float64)
    optimizer.step()
    assert parameter.tolist() == pytest.approx([2.75, 2.75], abs=1e-7)


def test_a_remainder_is_the_float32_master_bit_by_bit_over_a_thousand_steps() -> None:
    shapes = [(300,)]
    models = [Bag(shapes, torch.bfloat16) for _ in range(2)]
    optimizers = [
        adamw(model, lr=0.01, master=master, max_norm=0.5)
        for model, master in zip(models, ("float32", "remainder"), strict=True)
    ]
    for step in range(1000):
        given: list[Tensor | None] = [
            randn(*shape, seed=2 * step + index) for index, shape in enumerate(shapes)
        ]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(given).backward()
            optimizer.step()
    wide, split = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for name, parameter in models[1].named_parameters():
        assert all(torch.equal(wide[name][kind], split[name][kind]) for kind in wide[name])
        assert torch.equal(parameter, split_master(wide[name]["master"])[0])


def test_parameters_in_bfloat16_are_the_rounded_ones_of_a_run_in_float32() -> None:
    exact, rounded = Bag([(70,)]), Bag([(70,)], torch.bfloat16)
    with torch.no_grad():
        exact.p0.copy_(rounded.p0)
    optimizers = [adamw(model, lr=0.01) for model in (exact, rounded)]
    for step in range(50):
        for model, optimizer in zip((exact, rounded), optimizers, strict=True):
            model([dyadic(70, seed=step)]).backward()
            optimizer.step()
        assert torch.equal(rounded.p0, exact.p0.to(torch.bfloat16))
    assert torch.equal(optimizers[1].state_dict()["state"]["p0"]["master"], exact.p0)


@pytest.mark.parametrize("master", ["float32", "remainder"])
def test_the_master_follows_a_parameter_that_was_written_to(master: str) -> None:
    model, source = Bag([(9,), (4,)], torch.bfloat16), Bag([(9,), (4,)], torch.bfloat16, seed=5)
    optimizer = adamw(model, lr=0.0, weight_decay=0.0, master=master)
    model.load_state_dict(source.state_dict())
    model([torch.ones(9), torch.ones(4)]).backward()
    optimizer.step()
    for name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
        assert torch.equal(optimizer.state_dict()["state"][name]["master"].to(torch.bfloat16), parameter)


def test_a_master_outlives_a_write_that_changes_nothing() -> None:
    model = Bag([(9,)], torch.bfloat16)
    optimizer = adamw(model, lr=1e-4)
    model([torch.ones(9)]).backward()
    optimizer.step()
    before = optimizer.state_dict()["state"]["p0"]["master"]
    assert not torch.equal(before, before.to(torch.bfloat16).float())
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    optimizer.step()  # without a gradient: nothing moves
    assert torch.equal(optimizer.state_dict()["state"]["p0"]["master"], before)


def test_parameters_that_are_not_contiguous_are_updated() -> None:
    start, gradient = randn(5, 7, seed=0).t(), randn(7, 5, seed=1)
    own, other = nn.Parameter(start.clone().t().contiguous().t()), nn.Parameter(start.clone())
    assert not own.is_contiguous()
    for parameter, optimizer in ((own, adamw([own])), (other, torch.optim.AdamW([other]))):
        (parameter * gradient).sum().backward()
        optimizer.step()
    torch.testing.assert_close(own, other, rtol=1e-14, atol=0.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head, self.frozen = nn.Linear(3, 5, bias=False), nn.Linear(3, 3)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self) -> Tensor:
        found: Tensor = self.head(self.frozen(self.embedding(torch.arange(5)))).sum()
        return found


def test_tied_weights_are_held_once_and_frozen_ones_left_out() -> None:
    torch.manual_seed(0)
    model = Tied()
    frozen = [p.clone() for p in model.frozen.parameters()]
    weight = model.head.weight.detach().clone()
    optimizer = adamw(model, lr=0.1)
    assert model.head.weight is model.embedding.weight
    model().backward()
    assert model.head.weight.grad is not None
    expected = model.head.weight.grad.double().norm().item()
    optimizer.step()
    assert optimizer.gradient_norm.item() == pytest.approx(expected, rel=1e-6)
    assert list(optimizer.state_dict()["state"]) == ["embedding.weight"]
    assert optimizer.state_dict()["state"]["embedding.weight"]["step"] == 1
    assert all(map(torch.equal, model.frozen.parameters(), frozen))
    assert not torch.equal(model.head.weight, weight)


def test_moving_a_parameter_or_unfreezing_it_later_is_refused() -> None:
    model = Bag([(3,)])
    optimizer = adamw(model)
    model.p0.data = model.p0.detach().clone()
    with pytest.raises(UsageError, match=r"parameter 0 \[3\] was moved .* make the optimizer after that"):
        optimizer.step()
    model = Bag([(3,), (2,)])
    model.p1.requires_grad_(False)
    optimizer = adamw(model)
    model.p1.requires_grad_(True)
    model([torch.ones(3), torch.ones(2)]).backward()
    with pytest.raises(UsageError, match=r"parameter 1 \[2\] has a gradient, but required none"):
        optimizer.step()


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned() -> None:
    model = Bag([(3,)])
    optimizer = adamw(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model([torch.ones(3)])
        loss.backward()
        return loss

    before = model.p0.detach().clone()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss is not None
    assert loss.item() == pytest.approx(before.sum().item())
    assert not torch.equal(model.p0, before)


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_a_scheduler_sets_the_learning_rate(tensor: bool) -> None:
    own, other = Bag([(6,)], torch.float64), Bag([(6,)], torch.float64)
    lr: Any = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
    optimizers = adamw(own, lr=lr), torch.optim.AdamW(other.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for step in range(4):
        for model, optimizer, scheduler in zip((own, other), optimizers, schedulers, strict=True):
            model([dyadic(6, seed=step)]).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    torch.testing.assert_close(own.p0, other.p0, rtol=1e-13, atol=1e-14)


def test_a_learning_rate_of_zero_takes_the_place_of_a_tensor() -> None:
    model = Bag([(6,)])
    optimizer = adamw(model, lr=torch.tensor(0.1))
    for lr in (None, 0.0):
        before = model.p0.detach().clone()
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr
        model([torch.ones(6)]).backward()
        optimizer.step()
        assert torch.equal(model.p0, before) == (lr == 0.0)


def test_clipping_takes_the_norm_after_the_loss_scale_and_whole_gradients_are_not_clipped() -> None:
    model = Bag([(2,)], torch.float64)
    optimizer = adamw(model, max_norm=1.0, betas=(0.0, 0.0), eps=1.0, lr=1.0, weight_decay=0.0)
    before = model.p0.detach().clone()
    (model([torch.tensor([3.0, 4.0])]) * 1024).backward()
    assert optimizer.whole_gradients()["p0"].tolist() == [3072.0, 4096.0]
    optimizer.step(loss_scale=torch.tensor(1024.0))
    assert optimizer.gradient_norm.item() == 5.0
    clipped = torch.tensor([0.6, 0.8], dtype=torch.float64)
    torch.testing.assert_close(before - model.p0, clipped / (clipped + 1.0), rtol=1e-14, atol=1e-15)


def test_steps_without_clipping_or_skipping_take_no_norm_and_let_overflows_through() -> None:
    model = Bag([(2,)])
    optimizer = adamw(model, skip_nonfinite=False)
    model([torch.tensor([math.inf, 1.0])]).backward()
    optimizer.step()
    assert (optimizer.gradient_norm.item(), optimizer.skipped) == (0.0, False)
    assert model.p0.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, "stage=4: must be 0, 1, 2 or 3"),
        ({"master": "bfloat16"}, "master='bfloat16': must be one of float32, remainder, none"),
        ({"reduction": "sum"}, "reduction='sum': must be one of ordered, backend"),
        ({"max_norm": 0.0}, r"max_norm=0\.0: must be positive, or None"),
        ({"max_norm": math.nan}, "max_norm=nan: must be positive, or None"),
        ({"bucket_mib": 0.0}, r"bucket_mib=0\.0: must be positive"),
        ({"stochastic_rounding": True, "master": "remainder"}, "the rounding is part of the master"),
        ({"lr": -1.0}, r"lr=-1\.0: must be 0 or more, and finite"),
        ({"lr": math.inf}, "lr=inf: must be 0 or more, and finite"),
        ({"lr": torch.ones(2)}, r"lr is a tensor \[2\], must have one element"),
        (
            {"betas": (0.9, 1.0)},
            r"betas=\(0\.9, 1\.0\): must be two numbers, each at least 0",
        ),
        ({"betas": (0.9,)}, r"betas=\(0\.9,\): must be two numbers"),
        ({"eps": -1e-8}, "eps=-1e-08: must be 0 or more, and finite"),
        ({"weight_decay": math.nan}, "weight_decay=nan: must be 0 or more, and finite"),
    ],
)
def test_arguments_without_meaning_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        adamw(Bag([(3,)]), **arguments)


def test_groups_of_a_modules_parameters_have_its_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = [{"params": [p for p in model.parameters() if p.dim() == d], "weight_decay": d} for d in (1, 2)]
    optimizer = adamw(groups, module=model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == ["0.bias", "1.weight", "1.bias", "0.weight"]
    with pytest.raises(UsageError, match="params: number 0 is not a parameter of the module"):
        adamw(groups, module=nn.Linear(3, 4))


def test_a_remainder_is_for_bfloat16_alone() -> None:
    with pytest.raises(
        UsageError, match=r'master="remainder" for torch\.float16 parameters: must be bfloat16'
    ):
        adamw(Bag([(3,)], torch.float16), master="remainder")


def test_hyperparameters_are_judged_at_every_step_and_no_parameters_are_added_later() -> None:
    model = Bag([(3,)])
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = -0.5
    with pytest.raises(UsageError, match=r"lr=-0\.5: must be 0 or more"):
        optimizer.step()
    with pytest.raises(UsageError, match="parameters cannot be added later: make a new optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
