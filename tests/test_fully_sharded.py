"""AdamW over FSDP2's shards, and what modules read of each other while parameters are gathered."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paracore.errors import UsageError
from paracore.optim import AdamW, shard_parameters
from tests.adamw_cases import flat_of
from tests.conftest import Launch, training_axes


class Branches(nn.Module):
    """Two layers, of which forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.branches[0](x)
        return y + self.branches[1](x) if both else y


def norms_of_branches(stage: int) -> list[Any]:
    axes = training_axes(dp=2)
    torch.manual_seed(0)
    model = Branches()
    if stage == 3:
        shard_parameters(model, axes.data)
    optimizer = AdamW(model, mesh=axes, stage=stage, lr=0.0)
    found: list[Any] = []
    for both, factor in ((True, 1e30), (False, 1.0), (True, float("inf")), (False, 1.0)):
        (model(torch.ones(1, 8), both).sum() * factor).backward()
        optimizer.step()
        found.append((float(optimizer.gradient_norm), optimizer.skipped))
    return found


def test_a_gradient_of_an_earlier_step_counts_in_no_later_norm(launch: Launch) -> None:
    expected = launch(2, norms_of_branches, 0)[0]
    assert [skipped for _, skipped in expected] == [False, False, True, False]
    assert expected[1] == expected[3]
    for stage in (2, 3):
        found = launch(2, norms_of_branches, stage)[0]
        assert [skipped for _, skipped in found] == [skipped for _, skipped in expected]
        assert [norm for norm, _ in found] == pytest.approx([norm for norm, _ in expected], rel=1e-6)


def held_back() -> list[str]:
    axes = training_axes(dp=2)
    model = Branches()
    shard_parameters(model, axes.data)
    optimizer = AdamW(model, mesh=axes, stage=3)
    with optimizer.no_sync(), optimizer.no_sync():
        model(torch.ones(1, 8), True).sum().backward()
    found = []
    for _ in range(2):
        try:
            optimizer.step()
            found.append("stepped")
        except UsageError as error:
            found.append(str(error))
        model(torch.ones(1, 8), True).sum().backward()  # brings those before along
    return found


def test_gradients_that_fsdp_still_holds_back_are_not_forgotten_in_silence(launch: Launch) -> None:
    refused, stepped = launch(2, held_back)[0]
    assert "the last must run outside" in refused
    assert stepped == "stepped"


def attention_after_a_step(overlap: bool) -> Tensor:
    axes = training_axes(dp=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Identity())
    optimizer = AdamW(model, mesh=axes, stage=1, lr=0.1, overlap=overlap, bucket_mib=1e-4)
    x = torch.randn(5, 1, 16)
    for _ in range(3):
        out = model[0](x, x, x)[0]  # reads out_proj's weight, and never calls it
        assert not overlap or not flat_of(optimizer).gathering
        out.square().sum().backward()
        optimizer.step()
    out = model[0](x, x, x)[0]
    assert isinstance(out, Tensor)
    return out.detach()


def test_what_a_module_reads_of_its_children_is_whole(launch: Launch) -> None:
    outputs = [out for overlap in (True, False) for out in launch(2, attention_after_a_step, overlap)]
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_a_model_with_an_optimizer_can_be_saved_and_copied_and_the_optimizer_cannot() -> None:
    model = Branches()
    optimizer = AdamW(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        AdamW(other)
        assert torch.equal(other(torch.ones(1, 8), True), model(torch.ones(1, 8), True))
    with pytest.raises(UsageError, match="use state_dict"):
        copy.deepcopy(optimizer)


def without_a_mesh() -> str:
    with pytest.raises(UsageError) as refusal:
        AdamW(nn.Linear(2, 2), stage=1)
    return str(refusal.value)


def disagreeing() -> str:
    axes = training_axes(dp=2)
    with pytest.raises(UsageError) as refusal:
        AdamW(nn.Linear(2, 2), mesh=axes, stage=1 + axes.data.rank)
    return str(refusal.value)


def test_ranks_that_mean_different_things_all_learn_of_it(launch: Launch) -> None:
    assert launch(2, without_a_mesh) == ["stage=1 without mesh: over which of the 2 ranks?"] * 2
    first, second = launch(2, disagreeing)
    assert first == second
    assert "ranks disagree on options" in first
