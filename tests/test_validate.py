"""validate passes for what is right and fails for what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paracore.cli.validate import report_lines
from paracore.difference import difference, worst_difference
from paracore.errors import UsageError
from paracore.nn import Decoder, DecoderConfig, RowParallelLinear
from paracore.ops import linear
from paracore.parallel import GradientSync, MeshAxis, collectives
from paracore.parallel.mesh import TrainingAxes
from paracore.training import Trainer
from paracore.validation import ValidationSettings, validate
from tests.conftest import Launch, training_axes


def settings(dtype: torch.dtype = torch.float32, steps: int = 0, **changes: Any) -> ValidationSettings:
    shape = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "intermediate_size": 37,
    }
    bias = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
    model = DecoderConfig(**(shape | bias | changes))
    return ValidationSettings(model, seq_len=9, batch_size=2, dtype=dtype, steps=steps, log_every=4)


def report_of(chosen: ValidationSettings) -> dict[str, Any] | None:
    return validate(chosen, training_axes(tp=dist.get_world_size()), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (4, {"num_kv_heads": 2}),
        (4, {"num_kv_heads": 1, "tie_word_embeddings": True}),
        (3, {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 36, "qk_norm": False, "output_bias": False}),
    ],
    ids=["tp2", "tp4 on 2 kv heads", "tp4 on 1 kv head, tied", "tp3 llama"],
)
def test_passes_for_every_kind_of_cut(
    launch: Launch, size: int, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    report, *others = launch(size, report_of, settings(dtype, **changes))
    assert others == [None] * (size - 1)
    assert report["failures"] == []
    assert report["passed"]
    if dtype == torch.float64:
        # Beyond the rule: in float64 nothing but rounding is left.
        assert report["forward"]["max_logit_diff"] < 1e-13
        assert report["backward"]["max_grad_diff"] < 1e-13


def test_report_has_every_key(launch: Launch) -> None:
    chosen = settings(steps=10)
    report = json.loads(json.dumps(launch(2, report_of, chosen)[0]))
    assert report["passed"]
    assert report["config"]["model"]["hidden_size"] == 32
    assert report["config"]["dtype"] == "float32"
    assert report["forward"].keys() == {"max_logit_diff", "loss_diff"}
    names = [row["name"] for row in report["backward"]["parameters"]]
    assert "model.layers.1.self_attn.k_norm.weight" in names
    assert all(
        {"name", "placement", "mean", "max", "rel_l2"} == row.keys()
        for row in report["backward"]["parameters"]
    )
    assert (
        report["backward"]["max_grad_diff"] == max(row["max"] for row in report["backward"]["parameters"]) > 0
    )
    assert [row["step"] for row in report["optimizer"]["trace"]] == [4, 8, 10]
    assert {"step", "mean", "max", "rel_l2"} <= report["optimizer"]["trace"][0].keys()
    assert 0 < report["optimizer"]["max_param_diff"] < 1e-2
    assert [row["name"] for row in report["float64"]["parameters"]] == names
    assert [row["step"] for row in report["float64"]["trace"]] == [4, 8, 10]
    assert "passed" in "\n".join(report_lines(report))


def test_traffic_of_one_step_is_reported(launch: Launch) -> None:
    report = launch(4, report_of, settings(num_kv_heads=2))[0]
    rows = {(r["phase"], r["kind"], r["axis"]): (r["count"], r["bytes"]) for r in report["comm"]}
    activation = 9 * 2 * 32 * 4  # S * B * H float32
    norms = 2 * 2 * 8  # layers * (q, k) * head dim
    key_value = 2 * 2 * (8 * 32 + 8)  # layers * (k, v) * one head's (weight + bias)
    assert rows == {
        ("forward", "all_reduce", "tp"): (4, 4 * activation),
        ("backward", "all_reduce", "tp"): (4, 4 * activation),
        ("gradient_sync", "all_reduce", "tp"): (1, 4 * (norms + 4)),  # and one presence flag per parameter
        ("gradient_sync", "all_reduce", "tp[2]"): (1, 4 * (key_value + 8)),
    }


# ---------------------------------------------------------------- faults put in on purpose


def without_gradient_sync() -> Any:
    """The gradients of q/k norms (and of shared key/value heads) stay partial."""
    return mock.patch.object(GradientSync, "__call__", return_value=None)


def synced_on_the_first_rank_only() -> Any:
    """The first rank's q/k norms are right, another's are off by one per cent."""
    original = GradientSync.__call__

    def broken(self: GradientSync) -> None:
        original(self)
        for bucket in self._buckets:
            for parameter in bucket.parameters if bucket.axis.rank else []:
                assert parameter.grad is not None
                parameter.grad.mul_(1.01)

    return mock.patch.object(GradientSync, "__call__", broken)


def key_value_subgroups_not_synced() -> Any:
    """Ranks that share a key/value head keep their own part of its gradient."""
    original = GradientSync.__init__

    def broken(self: GradientSync, model: Any, tp: MeshAxis, *token_axes: MeshAxis) -> None:
        original(self, model, tp, *token_axes)
        self._buckets = [bucket for bucket in self._buckets if bucket.axis.size == tp.size]

    return mock.patch.object(GradientSync, "__init__", broken)


def other_ranks_logits_are_wrong() -> Any:
    """The first rank computes the right logits, the others do not."""
    original = Decoder.forward

    def broken(self: Decoder, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, *args, **kwargs) * (1.5 if self.tp.rank else 1.0)

    return mock.patch.object(Decoder, "forward", broken)


def row_bias_before_the_reduction() -> Any:
    """The bias counts tp times."""

    def broken(self: RowParallelLinear, x: Tensor) -> Tensor:
        return collectives.reduce_from(F.linear(x, self.weight, self.bias), self.tp)

    return mock.patch.object(RowParallelLinear, "forward", broken)


def reduced_by(broken: Callable[..., Any], kind: type[torch.autograd.Function], phase: str) -> Any:
    """Sums over ranks are `broken` within forward or backward of one kind of linear layer."""
    original = getattr(kind, phase)

    def call(*args: Any) -> Any:
        with mock.patch.object(linear, "start_reduction", broken):
            return original(*args)

    return mock.patch.object(kind, phase, staticmethod(call))


def input_gradient_divided_by_tp() -> Any:
    """dX is averaged where it must be summed."""

    def broken(dx: Tensor, tp: MeshAxis, to_shards: bool) -> Callable[[], Tensor]:
        return lambda: collectives.sum_over(dx, tp) / tp.size

    return reduced_by(broken, linear._ColumnLinear, "backward")


def input_gradient_not_reduced() -> Any:
    """Every rank keeps its own part of dX."""
    return reduced_by(lambda dx, tp, to_shards: lambda: dx, linear._ColumnLinear, "backward")


def output_not_reduced() -> Any:
    """Every rank goes on with its own partial output."""
    return reduced_by(lambda y, tp, to_shards: lambda: y, linear._RowLinear, "forward")


def output_gradient_reduced_again() -> Any:
    """The backward of a row-parallel layer sums gradients that are whole already."""
    original = linear._RowLinear.backward

    def broken(ctx: Any, dy: Tensor) -> Any:
        return original(ctx, collectives.sum_over(dy, ctx.cut.tp))

    return mock.patch.object(linear._RowLinear, "backward", staticmethod(broken))


FAULTS: list[Callable[[], Any]] = [
    without_gradient_sync,
    synced_on_the_first_rank_only,
    other_ranks_logits_are_wrong,
    row_bias_before_the_reduction,
    input_gradient_divided_by_tp,
    input_gradient_not_reduced,
    output_not_reduced,
    output_gradient_reduced_again,
]


def report_with(fault: Callable[[], Any], chosen: ValidationSettings) -> dict[str, Any] | None:
    with fault():
        return report_of(chosen)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fails_when_a_collective_is_wrong(
    launch: Launch, fault: Callable[[], Any], dtype: torch.dtype
) -> None:
    report = launch(2, report_with, fault, settings(dtype))[0]
    assert not report["passed"]
    assert report["failures"]
    assert "FAILED" in "\n".join(report_lines(report))


def test_fails_when_shared_key_value_heads_are_not_summed(launch: Launch) -> None:
    report = launch(4, report_with, key_value_subgroups_not_synced, settings(num_kv_heads=2))[0]
    broken = {failure.split(":")[0] for failure in report["failures"]}
    assert "gradient of model.layers.0.self_attn.k_proj.weight" in broken
    assert "gradient of model.layers.0.self_attn.q_norm.weight" not in broken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fails_when_the_sync_stops_after_the_first_step(launch: Launch, dtype: torch.dtype) -> None:
    # Steps so large that bfloat16 weights, of two to three digits, move at all.
    chosen = dataclasses.replace(settings(dtype, steps=4), lr=0.05)
    report = launch(2, report_with, gradient_sync_once, chosen)[0]
    assert any(failure.startswith("final") for failure in report["failures"])
    assert not any(failure.startswith("gradient") for failure in report["failures"])


def gradient_sync_once() -> Any:
    """The first backward is synced, no later one."""
    original, called = GradientSync.__call__, list[GradientSync]()

    def broken(self: GradientSync) -> None:
        if self._buckets and not called:
            called.append(self)
            original(self)

    return mock.patch.object(GradientSync, "__call__", broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_right_run_passes_whatever_the_seed(launch: Launch, dtype: torch.dtype, seed: int) -> None:
    chosen = dataclasses.replace(settings(dtype, steps=8, num_kv_heads=2), seed=seed)
    report = launch(4, report_of, chosen)[0]
    assert report["failures"] == []


def test_a_fault_that_only_the_optimizer_shows(launch: Launch) -> None:
    report = launch(2, report_with, learning_rate_is_one_per_cent_higher, settings(steps=8))[0]
    assert not report["passed"]
    assert any("final parameters" in failure or "after step" in failure for failure in report["failures"])
    assert not any("gradient" in failure for failure in report["failures"])


def learning_rate_is_one_per_cent_higher() -> Any:
    """The parallel model trains with another learning rate than the dense one."""
    original = Trainer.__init__

    def broken(self: Trainer, model: Any, *, lr: float, **options: Any) -> None:
        original(self, model, lr=lr * (1.01 if model.tp.size > 1 else 1.0), **options)

    return mock.patch.object(Trainer, "__init__", broken)


# ---------------------------------------------------------------- the measure


def test_difference() -> None:
    off = difference(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 2.0, 2.0]))
    assert off == (1.0, 3.0, 1.0)
    assert difference(torch.zeros(2), torch.zeros(2)).rel_l2 == 0.0
    assert difference(torch.ones(2), torch.zeros(2)).rel_l2 == torch.inf
    assert worst_difference([torch.ones(1), torch.tensor([3.0])], torch.ones(1)) == (2.0, 2.0, 2.0)
    assert math.isnan(worst_difference([torch.ones(1), torch.tensor([torch.nan])], torch.ones(1)).rel_l2)


def test_not_a_number_never_passes(launch: Launch) -> None:
    report = launch(2, report_with, outputs_not_a_number, settings())[0]
    assert not report["passed"]


def outputs_not_a_number() -> Any:
    """The parallel model computes NaN, the dense one does not."""

    return reduced_by(
        lambda y, tp, to_shards: lambda: collectives.sum_over(y, tp) * torch.nan, linear._RowLinear, "forward"
    )


@pytest.mark.parametrize("name", ["seq_len", "batch_size", "log_every", "steps"])
def test_bad_settings_are_refused(name: str) -> None:
    changes: dict[str, Any] = {name: -1}
    with pytest.raises(UsageError, match=f"{name}=-1"):
        dataclasses.replace(settings(), **changes)


def test_dense_against_itself_has_no_difference(tmp_path: Path) -> None:
    report = validate(settings(steps=4), TrainingAxes.alone(), torch.device("cpu"))
    assert report is not None
    assert report["passed"]
    assert report["forward"]["max_logit_diff"] == 0.0
    assert report["backward"]["max_grad_diff"] == 0.0
    assert report["optimizer"]["max_param_diff"] == 0.0
    assert report["comm"] == []
