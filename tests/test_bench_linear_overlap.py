"""The benchmark of overlapped layers: what messages cost is counted rightly; all ways do the same work."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paracore.bench import linear_overlap
from paracore.bench.linear_overlap import FIELDS, MIN_ROUNDS, MODES, Turn, calibrate, measure, summary
from paracore.bench.parallel_layers import BOTH, FORWARD, LAYERS, STEP, Layer, Model
from paracore.bench.watch import HostClock, Watch
from paracore.cli import bench as command
from paracore.errors import UsageError
from paracore.parallel import collectives
from paracore.parallel.overlap import Overlap
from tests.bench_doubles import Clock
from tests.conftest import Launch, tp_axis

TINY = Model(hidden=16, intermediate=24, query_heads=4, kv_heads=2, tokens=12)


class Messages:
    """Messages on a clock of their own: each takes a second to start and some to arrive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.log: list[str] = []
        self.watch = Watch(HostClock(self.clock.now))
        monkeypatch.setattr(dist, "all_reduce", lambda seconds: self._work("all_reduce", seconds))
        several = lambda waits: [self._work("message", seconds) for seconds in waits]  # noqa: E731
        monkeypatch.setattr(dist, "batch_isend_irecv", several)

    def _work(self, name: str, seconds: float) -> Any:
        messages = self
        messages.log.append(f"start {name}")
        messages.clock.time += 1.0

        class Work:
            def wait(self) -> None:
                messages.log.append(f"wait for {name}")
                messages.clock.time += seconds

        return Work()

    def compute(self, seconds: float) -> None:
        self.log.append("compute")
        self.clock.time += seconds

    def layer(self) -> None:
        """Two messages started together, an all-reduce, and computing in between."""
        first, second = dist.batch_isend_irecv([2.0, 3.0])  # type: ignore[list-item]
        self.compute(10.0)
        first.wait()
        pending: Any = dist.all_reduce(5.0)
        self.compute(20.0)
        second.wait()
        pending.wait()


ORDER = [
    *["start message"] * 2,
    "compute",
    "wait for message",
    "start all_reduce",
    "compute",
    "wait for message",
    "wait for all_reduce",
]
COST = 3 * 1.0 + 2.0 + 3.0 + 5.0


def test_starting_and_waiting_is_counted_and_computing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Messages(monkeypatch)
    with messages.watch.watching():
        messages.layer()
    assert messages.log == ORDER
    assert messages.watch.take() == COST
    assert messages.watch.take() == 0.0
    messages.layer()
    assert messages.watch.take() == 0.0  # nobody watches any more


def test_recorded_messages_are_sent_again_in_their_order_without_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = Messages(monkeypatch)
    with messages.watch.recording() as steps:
        messages.layer()
    for _ in range(2):
        messages.log.clear()
        messages.watch.take()
        start = messages.clock.now()
        for step in steps:
            step()
        assert messages.log == [entry for entry in ORDER if entry != "compute"]
        assert messages.clock.now() - start == messages.watch.take() == COST


def test_left_out_messages_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Messages(monkeypatch)
    with messages.watch.leaving_out():
        pending: Any = dist.all_reduce(5.0)
        messages.compute(1.0)
        pending.wait()
        assert dist.batch_isend_irecv([2.0]) == []  # type: ignore[list-item]
    assert messages.log == ["compute"]


def test_the_functions_are_put_back_after_a_failure() -> None:
    names = ("all_gather_single", "reduce_scatter_single")
    before = [getattr(collectives, name) for name in names]

    def fail() -> None:
        assert not any(getattr(collectives, name) in before for name in names)
        raise RuntimeError

    with pytest.raises(RuntimeError), Watch(HostClock()).watching():
        fail()
    assert [getattr(collectives, name) for name in names] == before


def test_hidden_is_of_the_messages_alone() -> None:
    seconds = {"compute": 4.0, "messages": 2.5, "collectives": 4.0, "plain": 8.0, "overlapped": 5.0}
    held_up = {"compute": 0.0, "messages": 2.0, "collectives": 4.0, "plain": 3.0, "overlapped": 0.5}
    samples = {f"{mode}_seconds": [99.0, seconds[mode], 0.0] for mode in MODES}
    samples |= {f"{mode}_held_up": [held_up[mode]] for mode in MODES}
    figures = summary(samples)
    assert figures["hidden"] == 0.75
    assert figures["plain_hidden"] == 0.25
    assert figures["ratio"] == 1.6
    assert figures["compute_over_messages"] == 1.6


def test_where_no_messages_are_seen_what_takes_longer_than_computing_is_not_hidden() -> None:
    samples = {f"{mode}_{field}": [0.0] for mode in MODES for field in FIELDS}
    samples |= {"compute_seconds": [5.0], "overlapped_seconds": [6.0], "plain_seconds": [9.0]}
    samples |= {"collectives_seconds": [4.0], "collectives_held_up": [4.0]}
    assert summary(samples)["hidden"] == 0.75
    samples["overlapped_seconds"] = [4.9]
    assert summary(samples)["hidden"] == 1


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.7])
def test_the_link_is_as_slow_as_the_ratio_asks_for(ratio: float) -> None:
    bandwidth = math.nan

    def limit(value: float) -> None:
        nonlocal bandwidth
        bandwidth = value

    def turn(name: str) -> Turn:
        seconds = 2.0 if name == "compute" else 0.3 + 1e8 / bandwidth  # each message costs something
        return {"seconds": seconds, "held_up": 0.0, "sent": 1e8}

    assert calibrate(turn, limit, ratio) == bandwidth
    assert 2.0 / turn("messages")["seconds"] == pytest.approx(ratio, rel=0.1)


def test_every_round_has_a_turn_of_each_mode() -> None:
    log: list[str] = []

    def turn(name: str) -> Turn:
        log.append(name)
        return dict.fromkeys(FIELDS, float(len(log)))

    samples = measure(turn, seconds=0.0, seed=1, clock=itertools.count().__next__)
    rounds = [log[i : i + len(MODES)] for i in range(0, len(log), len(MODES))]
    assert len(rounds) == 1 + MIN_ROUNDS  # the first warms up
    assert all(sorted(names) == sorted(MODES) for names in rounds)
    assert len(set(map(tuple, rounds))) > 2
    assert {len(values) for values in samples.values()} == {MIN_ROUNDS}


def _work_both_ways() -> None:
    axis = tp_axis()
    for name in LAYERS:
        layer = Layer(name, TINY, torch.float64)
        run = layer.build(axis, torch.device("cpu"))
        axis.ledger.take()
        for direction in layer.directions:
            plain = run(None, direction == BOTH)
            collective = {traffic.kind for traffic in axis.ledger.take()}
            overlapped = run(Overlap(chunks=2), direction == BOTH)
            messages = {traffic.kind for traffic in axis.ledger.take()}
            assert "send" in messages, name
            assert "send" not in collective, name
            torch.testing.assert_close(overlapped, plain)


def test_both_ways_compute_the_same_and_communicate_differently(launch: Launch) -> None:
    launch(2, _work_both_ways)


def bench(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    shape = "x".join(str(value) for value in vars(TINY).values())
    small = ("--shapes", shape, "--seconds", 0.001, "--threads", 2, "--chunks", 2, "--layers", "qkv", "step")
    assert bench(linear_overlap.NAME, *small, "--device", "cpu", "--json", file) == 0
    document = json.loads(file.read_text())
    assert document["case"] == linear_overlap.NAME
    assert document["chunks"] == 2
    results = document["results"]
    measured = [(result["layer"], result["direction"]) for result in results]
    assert measured == [("qkv", FORWARD), ("qkv", BOTH), (STEP, BOTH)]
    for result in results:
        assert result["model"] == vars(TINY)
        assert (result["tp"], result["threads_per_rank"], result["dtype"]) == (2, 1, "float32")
        assert result["bandwidth"] is None
        assert result["measured_bandwidth"] is None
        assert result["rounds"] == MIN_ROUNDS
        assert set(result["samples"]) == {f"{mode}_{field}" for mode in MODES for field in FIELDS}
        figures = result["figures"]
        assert all(map(math.isfinite, figures.values()))
        assert figures["compute_held_up"] == 0.0
        for mode in ("messages", "collectives", "plain", "overlapped"):
            assert 0.0 < figures[f"{mode}_held_up"] <= figures[f"{mode}_seconds"]
    out = capsys.readouterr().out
    assert "16 hidden x 24 intermediate x 4 query_heads x 2 kv_heads x 12 tokens; float32, tp 2" in out
    assert out.count("forward+backward") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "8b"], "--shapes 8b: linear_overlap takes hidden x intermediate x query_heads"),
        (["--shapes", "small8"], "--shapes small8: unknown; choose from small, 7b, 70b, or give sizes"),
        (["--shapes", "18x24x4x2x12"], "hidden=18: must be a multiple of query_heads=4"),
        (["--shapes", "16x25x4x2x12"], "intermediate=25 cannot be divided over tp=2 ranks"),
        (["--tp", "2", "3", "--threads", "6"], "intermediate=2816 cannot be divided over tp=3 ranks"),
        (["--tp", "1"], "--tp 1: one rank has nobody to send to"),
        (["--threads", "3"], "3 threads cannot be divided among 2 ranks; see --threads"),
        (["--layers", "lm_head"], "--layers lm_head: unknown; choose from qkv, gate_up, o, down, step"),
        (["--dtype", "int8"], "--dtype int8: unknown"),
        (["--chunks", "0"], "--chunks 0: must be greater than 0"),
        (["--bandwidth", "nan"], "--bandwidth nan: must be greater than 0"),
        (["--bandwidth", "1e9"], r"a shaped link of 1e\+09 MB/s: must be 0.1 to 100000"),
        (["--bandwidth", "9", "--ratio", "1"], "--bandwidth 9.0 with --ratio 1.0: give one of them"),
        (["--seconds", "0"], "--seconds 0.0: must be greater than 0"),
        (["--device", "tpu"], "--device tpu: unknown; choose from cpu, cuda"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_overlap, "run", lambda *_: pytest.fail("measured"))
    threads = [] if "--threads" in arguments else ["--threads", "2"]
    device = [] if "--device" in arguments else ["--device", "cpu"]
    with pytest.raises(UsageError, match=message):
        bench(linear_overlap.NAME, *threads, *device, *arguments)


def test_without_root_a_bandwidth_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_overlap, "run", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for flag in ("--bandwidth", "--ratio"):
        with pytest.raises(UsageError, match="only root may make; this is user 1000"):
            bench(linear_overlap.NAME, "--device", "cpu", "--threads", 2, flag, 1)
