"""validate over dp and with ZeRO stages: passes for what is right, fails for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from paracore.nn import DecoderConfig
from paracore.optim.gradients import Gradients
from paracore.optim.hyperparameters import Hyperparameters
from paracore.optim.partial_gradients import PartialGradients
from paracore.parallel.shards import ShardGather
from paracore.validation import ValidationSettings, validate
from tests.conftest import Launch, training_axes

CONFIG = DecoderConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=37
)


def settings(zero: int | None, **changes: Any) -> ValidationSettings:
    chosen: dict[str, Any] = {"seq_len": 17, "batch_size": 2, "steps": 3, "log_every": 1, "zero": zero}
    return ValidationSettings(CONFIG, **(chosen | changes))


def reports(sizes: dict[str, int], runs: list[ValidationSettings]) -> list[dict[str, Any] | None]:
    axes = training_axes(**sizes)
    return [validate(chosen, axes, torch.device("cpu")) for chosen in runs]


@pytest.mark.parametrize(
    "sizes",
    [{"dp": 3}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}],
    ids=lambda sizes: ",".join(f"{name}={size}" for name, size in sizes.items()),
)
def test_every_stage_passes_over_every_mesh(launch: Launch, sizes: dict[str, int]) -> None:
    runs = [settings(zero, mask="packed") for zero in (None, 0, 1, 2, 3)]
    runs.append(settings(2, dtype=torch.bfloat16, mask="packed"))
    world = 3 if sizes == {"dp": 3} else 4
    first, *_ = launch(world, reports, sizes, runs)
    for chosen, report in zip(runs, first, strict=True):
        assert report["failures"] == [], chosen
        assert report["config"]["dp"] == sizes["dp"]
        assert report["config"]["zero"] == chosen.zero


def test_eight_ranks_over_three_axes(launch: Launch) -> None:
    [report] = launch(8, reports, {"dp": 2, "cp": 2, "tp": 2}, [settings(2, mask="packed")])[0]
    assert report["failures"] == []
    kinds = {(row["phase"], row["kind"], row["axis"]) for row in report["comm"]}
    assert ("backward", "all_to_all", "dp_cp") in kinds  # and so not after it


def test_each_stage_holds_what_its_formula_says(launch: Launch) -> None:
    found = launch(2, reports, {"dp": 2}, [settings(zero, steps=0) for zero in range(4)])[0]
    for stage, report in enumerate(found):
        for row in report["memory"][:3]:
            padding = 0 if stage == 3 else 2 * 4096 * 4 * 2  # a grid cell per rank, of each of two tensors
            rounding = CONFIG.num_layers * 100 * 4  # FSDP2 gives a rank whole rows
            assert row["formula"] <= row["bytes"] <= row["formula"] + padding + rounding, (stage, row)


def gradients_not_summed() -> Any:
    """Every rank updates with the gradients of its own tokens."""

    def broken(self: Gradients) -> None:
        for bucket in self.buckets:
            if bucket.local is not None:
                bucket.total.copy_(bucket.local[: bucket.total.numel()])

    return mock.patch.object(Gradients, "reduce", broken)


def partial_gradients_not_summed() -> Any:
    """The gradients of q/k norms stay partial over tp."""
    return mock.patch.object(PartialGradients, "sum_", return_value=None)


def parameters_not_gathered() -> Any:
    """Every rank keeps its old values where another updates."""
    return mock.patch.multiple(ShardGather, __init__=lambda *_: None, finish=lambda *_: None)


def bias_correction_missing() -> Any:
    """Step sizes are those of a hundredth step from the beginning."""
    original = Hyperparameters.coefficients

    def broken(self: Hyperparameters, groups: Any, steps: Any, active: Any) -> Any:
        return original(self, groups, steps + 100, active)

    return mock.patch.object(Hyperparameters, "coefficients", broken)


FAULTS: list[tuple[Callable[[], Any], dict[str, int], int]] = [
    (gradients_not_summed, {"dp": 2}, 1),
    (partial_gradients_not_summed, {"tp": 2}, 0),
    (parameters_not_gathered, {"dp": 2}, 1),
    (bias_correction_missing, {"dp": 2}, 0),
]


def report_with(fault: Callable[[], Any], sizes: dict[str, int], zero: int) -> dict[str, Any] | None:
    with fault():
        return reports(sizes, [settings(zero)])[0]


@pytest.mark.parametrize(("fault", "sizes", "zero"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_fails_when_the_optimizer_is_wrong(
    launch: Launch, fault: Callable[[], Any], sizes: dict[str, int], zero: int
) -> None:
    report = launch(2, report_with, fault, sizes, zero)[0]
    assert not report["passed"]
