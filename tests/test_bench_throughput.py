"""`paracore bench throughput`: what it reports of given times, and that real ranks take its turns."""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from paracore.bench.modes import MODES, Workload
from paracore.bench.throughput import measure, orders
from paracore.bench.training_report import throughput_rows
from paracore.cli.main import main
from paracore.nn.config import DecoderConfig
from tests.command_ranks import Ended, run_on_ranks
from tests.conftest import Launch, training_axes


def workload(batch_size: int = 4, policy: str = "fixed_global") -> Workload:
    return Workload(DecoderConfig(64, 32, 1, 4, 2), 16, batch_size, policy, torch.float32, 2)


def test_rates_are_of_all_ranks_together_at_the_median() -> None:
    ddp, tp = throughput_rows(workload(), {"ddp": [0.5, 0.25, 9.0], "tp": [1.0, 1.0, 1.0]})
    assert ddp["tokens"] == tp["tokens"] == 4 * 16
    assert ddp["median_ms"] == 500.0
    assert ddp["thousand_tokens_per_s"] == pytest.approx(64 / 0.5 / 1e3)
    assert (ddp["ratio"], tp["ratio"]) == (1.0, 0.5)


def test_a_ratio_is_of_tokens_and_not_of_times_where_batches_differ() -> None:
    ddp, tp = throughput_rows(workload(policy="fixed_per_rank"), {"ddp": [1.0], "tp": [1.0]})
    assert (ddp["tokens"], tp["tokens"]) == (128, 64)
    assert tp["ratio"] == 0.5


def test_percentiles_and_no_ratio_without_the_baseline() -> None:
    [row] = throughput_rows(workload(), {"tp": [float(second) for second in range(11)]})
    assert (row["p20_ms"], row["median_ms"], row["p80_ms"]) == (2000.0, 5000.0, 8000.0)
    assert row["ratio"] is None


def test_every_mode_has_one_turn_in_each_round_in_changing_order() -> None:
    found = orders(["a", "b", "c"], 20, seed=0)
    assert all(Counter(order) == Counter("abc") for order in found)
    assert len({order[0] for order in found}) == 3
    assert found == orders(["a", "b", "c"], 20, seed=0)  # on every rank


def samples_of_rank() -> dict[str, list[float]]:
    """On a clock that runs twice as fast on rank 1."""
    tp = training_axes(tp=2)
    axes = {"ddp": training_axes(dp=2), "tp": tp}
    ticks = itertools.count(step=1 + tp.tp.rank)
    return measure(
        workload(), axes, torch.device("cpu"), steps=3, warmup=2, seed=0, clock=lambda: float(next(ticks))
    )


def test_a_step_takes_as_long_as_it_takes_the_slowest_rank(launch: Launch) -> None:
    assert launch(2, samples_of_rank) == [{"ddp": [2.0] * 3, "tp": [2.0] * 3}] * 2


def test_end_to_end(tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("csv", "json", "png")}
    sizes = "--layers 1 --hidden-size 32 --heads 4 --kv-heads 2 --vocab-size 64 --seq-len 16 --batch-size 2"
    outputs = ("--csv", files["csv"], "--json", files["json"], "--plot", files["png"])
    command = ("bench", "throughput", *sizes.split(), "--steps", 2, "--warmup", 1, *outputs)
    first, second = run_on_ranks(2, *command)
    assert first.status == 0, first.err
    rows = json.loads(files["json"].read_text())["results"]
    assert [row["mode"] for row in rows] == list(MODES)
    for row in rows:
        assert row["steps"] == 2
        assert row["tokens"] == 32
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["thousand_tokens_per_s"] == pytest.approx(32 / row["median_ms"])
    with files["csv"].open(newline="") as file:
        assert [line["mode"] for line in csv.DictReader(file)] == list(MODES)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert first.out.count("thousand tokens/s") == 1
    assert second == Ended(0, "", ""), "one rank speaks"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "3"], "--batch-size 3 cannot be divided among the 2 ranks of ddp"),
        (["--steps", "0"], "--steps 0: must be greater than 0"),
        (["--warmup", "-1"], "--warmup -1: must be at least 0"),
        (["--timeout", "nan"], "--timeout nan: must be greater than 0"),
    ],
)
def test_bad_arguments_are_refused_before_any_rank_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", *arguments]) == 2
    assert message in capsys.readouterr().err
