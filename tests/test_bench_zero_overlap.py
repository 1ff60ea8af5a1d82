"""The benchmark of overlap: the emulated link delays as one would, and what is hidden is counted rightly."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paracore.bench import zero_overlap
from paracore.bench.link import Link, Transfer, crossing, optimizer_over
from paracore.bench.zero_overlap import CALIBRATION, MIN_ROUNDS, RATIO, Model, Turn, measure, summary
from paracore.cli import bench as command
from paracore.errors import UsageError
from paracore.optim import flat_parameters, gradients
from paracore.parallel.mesh import MeshAxis
from tests.bench_doubles import Clock


class RealWork:
    """A message that has really arrived after some seconds of waiting."""

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        self._clock, self._seconds = clock, seconds

    def wait(self) -> None:
        self._clock.time += self._seconds


class Line:
    """A link of 100 bytes per second on a clock of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.link = Link(100.0, self.clock.now, self.compute)

    def compute(self, seconds: float) -> None:
        self.clock.time += seconds

    def send(self, bytes_: int, real_seconds: float = 0.0) -> Transfer:
        return self.link.carry(RealWork(self.clock, real_seconds), bytes_)


def test_who_waits_at_once_is_blocked_for_the_whole_transfer() -> None:
    line = Line()
    line.send(200).wait()
    assert (line.clock.time, line.link.blocked) == (2.0, 2.0)


def test_what_is_computed_meanwhile_hides_the_transfer() -> None:
    line = Line()
    first, second = line.send(200), line.send(100)
    line.compute(1.5)
    first.wait()
    assert line.link.blocked == 0.5
    line.compute(10.0)
    second.wait()
    assert line.link.blocked == 0.5  # it had arrived long before


def test_transfers_queue_behind_each_other() -> None:
    line = Line()
    transfers = [line.send(100) for _ in range(3)]
    for transfer in transfers:
        transfer.wait()
    assert line.link.blocked == 3.0
    line.compute(1.0)  # an idle link saves up nothing
    line.send(100).wait()
    assert line.link.blocked == 4.0


def test_a_real_transfer_that_is_slower_counts_as_it_is() -> None:
    line = Line()
    line.send(100, real_seconds=3.0).wait()
    assert line.link.blocked == 3.0
    assert line.link.carried == 100
    assert line.link.reset() == 3.0
    assert (line.link.blocked, line.link.carried) == (0.0, 0)


def test_a_link_without_limit_delays_nothing() -> None:
    line = Line()
    line.link.bandwidth = float("inf")
    line.send(10**12).wait()
    assert line.link.blocked == 0.0


def test_only_what_leaves_a_rank_crosses_the_link() -> None:
    axis = MeshAxis("data", 4, 0, None, MeshAxis.alone("data").ledger)
    assert crossing(torch.zeros(8), axis) == 24


def test_the_optimizer_is_put_back_as_it_was() -> None:
    names = [(gradients, "ShardSum"), (gradients, "ShardGather"), (flat_parameters, "ShardGather")]
    before = [getattr(module, name) for module, name in names]
    with optimizer_over(Link()):
        assert not any(getattr(*place) is old for place, old in zip(names, before, strict=True))
    assert all(getattr(*place) is old for place, old in zip(names, before, strict=True))


SERIAL: Turn = {
    "forward": 1.3,  # the parameters of the overlapped step before arrive meanwhile
    "forward_blocked": 0.3,
    "backward": 2.0,
    "backward_blocked": 0.0,
    "gradients_blocked": 1.0,
    "parameters_blocked": 0.6,
    "step": 2.0,
    "bytes": 500.0,
}
OVERLAPPED: Turn = {
    "forward": 1.0,
    "forward_blocked": 0.0,
    "backward": 2.1,
    "backward_blocked": 0.1,
    "gradients_blocked": 0.2,
    "parameters_blocked": 0.0,
    "step": 0.5,
    "bytes": 500.0,
}


def test_turns_alternate_and_shares_are_of_the_messages_alone() -> None:
    log: list[Any] = []

    def turn(name: str) -> Turn:
        log.append(name)
        return SERIAL if name == "serial" else OVERLAPPED

    samples, bandwidth = measure(turn, log.append, seconds=0.0, clock=itertools.count().__next__)
    assert bandwidth == 500.0 * RATIO / 2.0  # backward takes RATIO times as long as the messages
    assert log[:CALIBRATION] == ["serial"] * CALIBRATION
    rounds = ["serial", "overlapped"] * (1 + MIN_ROUNDS)  # the first warms up
    assert log[CALIBRATION:] == [bandwidth, *rounds]
    assert {len(values) for values in samples.values()} == {MIN_ROUNDS}
    figures = summary(samples)
    assert figures["gradients_hidden"] == pytest.approx(0.8)
    assert figures["parameters_hidden"] == pytest.approx(0.5)
    assert figures["backward_over_gradients"] == 2.0
    assert figures["forward_alone"] == 1.0
    assert figures["serial_step"] == 1.0 + 2.0 + 2.0
    assert figures["overlapped_step"] == pytest.approx(1.3 + 2.1 + 0.5)


def test_rounds_go_on_while_another_one_fits() -> None:
    clock = Clock()

    def turn(name: str) -> Turn:
        clock.time += 1.0
        return SERIAL if name == "serial" else OVERLAPPED

    samples, _ = measure(turn, lambda _: None, seconds=20.0, clock=clock.now)
    assert len(samples["serial_step"]) == 10


def bench(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], quick_ranks: None) -> None:
    file = tmp_path / "out.json"
    small = ("--shapes", "2x2x8x16x4", "--seconds", 0.001, "--threads", 2)
    assert bench(zero_overlap.NAME, *small, "--json", file) == 0
    document = json.loads(file.read_text())
    [result] = document["results"]
    assert result["model"] == {"ranks": 2, "layers": 2, "hidden": 8, "vocabulary": 16, "tokens": 4}
    assert result["bandwidth"] > 0
    assert all(len(values) == MIN_ROUNDS for values in result["samples"].values())
    figures = result["figures"]
    # Both kinds of step send everything once: a serial one is blocked for what the link takes at least.
    assert 0 < figures["gradients_alone"] < figures["serial_step"]
    assert 0 <= figures["gradients_sticking_out_within_backward"] <= figures["gradients_sticking_out"]
    assert figures["parameters_alone"] > 0
    out = capsys.readouterr().out
    assert "2 ranks x 2 layers x 8 hidden x 16 vocabulary x 4 tokens" in out
    assert "% hidden" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--shapes", "2x2"],
            "zero_overlap takes ranks x layers x hidden x vocabulary x tokens, .* 2x12x256",
        ),
        (["--shapes", "1x2x8x16x4"], "1 rank has nobody to send to"),
        (["--shapes", "2x2x7x16x4"], "hidden=7: must be even"),
        (["--shapes", "2x2x8x16x4", "--threads", "3"], "3 threads cannot be divided among 2 ranks"),
        (["--seconds", "0"], "--seconds 0.0: must be greater than 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench(zero_overlap.NAME, *arguments)


def test_a_model_of_any_even_width_can_be_built() -> None:
    for hidden in (2, 64, 130, 192):
        assert Model(layers=1, hidden=hidden, vocabulary=3, tokens=1).build(0).config.hidden_size == hidden
