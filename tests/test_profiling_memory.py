"""The account of memory: what torch's own tracker counts, told apart by what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from paracore import trace
from paracore.optim import AdamW
from paracore.parallel.mesh import TrainingAxes
from paracore.profiling.memory import KINDS, MemoryAccount
from paracore.training import Trainer
from tests.conftest import Launch, training_axes
from tests.ranges import LENGTH, take_step, trainer_of

BATCH = 2 * LENGTH * 8  # bytes of the tokens of `take_step`


def account_of(trainer: Trainer, axes: TrainingAxes, steps: int = 1) -> MemoryAccount:
    for _ in range(2):
        take_step(trainer, axes)
    account = MemoryAccount(trainer.model, trainer.optimizer)
    with trace.enabled(account), account:
        for _ in range(steps):
            take_step(trainer, axes)
    return account


def held_by(trainer: Trainer) -> dict[str, int]:
    """Return the bytes that a trainer holds between steps, gradients included."""
    if isinstance(trainer.optimizer, AdamW):
        return trainer.optimizer.memory()
    size = sum(parameter.nbytes for parameter in trainer.model.parameters())
    return {"parameters": size, "gradients": size, "states": 2 * size}


def test_the_peak_is_that_of_torchs_own_tracker() -> None:
    axes = TrainingAxes.alone()
    trainer = trainer_of(axes)
    ours = sum(account_of(trainer, axes).peaks[trace.STEP].values())
    with MemTracker() as theirs:
        theirs.track_external(trainer.model, trainer.optimizer)
        take_step(trainer, axes)
    peak = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert 0 <= ours - peak <= 2 * BATCH  # which theirs does not see


@pytest.mark.parametrize("zero", [None, 0], ids=["torch's AdamW", "paracore's AdamW"])
def test_parameters_gradients_and_moments_are_told_apart(zero: int | None) -> None:
    axes = TrainingAxes.alone()
    trainer = trainer_of(axes, zero=zero)
    account = account_of(trainer, axes)
    update, forward = (account.peaks[f"paracore.training.{phase}"] for phase in ("update", "forward"))
    held = held_by(trainer)
    for peak in (update, forward):
        assert peak["parameters"] == held["parameters"]
        assert held["states"] <= peak["optimizer"] <= held["states"] + 1024  # torch's counts of steps
    assert update["gradients"] == held["gradients"]
    # torch's are gone after the step; ours stay in their buffer.
    assert forward["gradients"] == (0 if zero is None else held["gradients"])
    assert forward["activations"] > update["activations"]
    assert forward["communication"] == 0


def test_peaks_of_ranges_do_not_depend_on_how_many_steps_are_looked_at() -> None:
    axes = TrainingAxes.alone()
    one, two = (account_of(trainer_of(axes), axes, steps).peaks for steps in (1, 2))
    assert one.keys() == two.keys()
    for name, peak in one.items():
        assert sum(two[name].values()) == pytest.approx(sum(peak.values()), abs=BATCH), name
        assert sum(peak.values()) <= sum(one[trace.STEP].values())
        assert set(peak) == set(KINDS)


def peaks_over(sizes: dict[str, int], zero: int | None, options: dict[str, Any]) -> Any:
    axes = training_axes(**sizes)
    trainer = trainer_of(axes, zero=zero, **options)
    peaks = account_of(trainer, axes).peaks
    held = held_by(trainer)
    if zero is not None:
        trainer.optimizer.synchronize()  # type: ignore[union-attr]
    return peaks, held


def test_buffers_of_messages_and_collectives_are_communication(launch: Launch) -> None:
    options = {"sequence_parallel": True}
    for peaks, _ in launch(2, peaks_over, {"tp": 2}, None, options):
        assert peaks["paracore.collectives.all_gather.tp.wait"]["communication"] > 0
    for peaks, _ in launch(2, peaks_over, {"cp": 2}, None, {}):
        assert peaks["paracore.collectives.exchange.cp.wait"]["communication"] > 0


def test_sharded_states_are_counted_as_this_rank_holds_them(launch: Launch) -> None:
    for peaks, held in launch(2, peaks_over, {"dp": 2}, 2, {}):
        peak = peaks["paracore.adamw.step"]
        assert peak["optimizer"] == held["states"]
        assert peak["gradients"] == held["gradients"]
        assert peak["communication"] >= held["transfers"] > 0
        assert peak["parameters"] == held["parameters"]
