"""`paracore profile`, end to end: real ranks over gloo, a stand-in for nsys, and what it refuses."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paracore import trace
from paracore.bench.shaped_link import ShapedLink, require_means, shaped_link
from paracore.cli import exit_codes
from paracore.cli.main import main
from paracore.errors import UsageError
from paracore.parallel.messages import Exchange
from paracore.profiling.events import Collective, parents
from paracore.profiling.overlap import overlap_of
from paracore.profiling.session import StepWindow, TorchRecorder
from paracore.profiling.torch_trace import read_torch_trace
from paracore.profiling.traces import find_traces, read_traces
from paracore.profiling.window import measured, measured_steps
from tests.command_ranks import run_launcher, run_on_ranks
from tests.conftest import Launch, axis_over_all
from tests.test_cli import TINY, first_on_path

ROOT = Path(__file__).parent.parent


def train(folder: Path, *flags: object) -> list[object]:
    return ["--", "paracore", "train", *TINY, "--steps", 3, "--out", folder / "train", *flags]


OPERATIONS = (
    *("rms_norm", "swiglu", "rotary", "embedding", "column_linear", "row_linear", "ring_attention"),
    "linear_cross_entropy",
)


def test_a_training_step_of_four_ranks_is_profiled_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--warm-up", 1, "--steps", 1, "--out", tmp_path)
    first, *_ = run_on_ranks(4, "profile", *options, *train(tmp_path, "--tp", 2, "--cp", 2))
    assert first.status == 0, first.err
    assert f"traces are in {tmp_path}: paracore profile --read {tmp_path}" in first.out
    assert main(["profile", "--read", str(tmp_path)]) == exit_codes.PASSED
    out = capsys.readouterr().out
    assert "4 ranks, 1 steps; ms per step" in out
    assert "share of communication hidden behind compute: " in out
    traces = read_traces(find_traces(tmp_path))
    assert [each.rank for each in traces] == [0, 1, 2, 3]
    for each in traces:
        names = {span.name for span in each.ranges}
        for operation in OPERATIONS:
            assert {f"paracore.{operation}.forward", f"paracore.{operation}.backward"} <= names
        for phase, step in itertools.product(("forward", "backward"), range(2)):
            assert f"paracore.ring_attention.{phase}.step{step}" in names
        for kind in ("all_reduce.tp", "all_reduce.cp", "exchange.cp"):
            assert {f"paracore.collectives.{kind}.{end}" for end in ("post", "wait")} <= names
        assert {"paracore.gradient_sync.sum", "paracore.gradient_norm.clip", "paracore.adamw.step"} <= names
        around = parents(each.ranges)  # raises where they do not nest
        assert sum(span.name == trace.STEP for span in each.ranges) == 2  # the first leads in
        assert len(measured_steps(each)) == 1
        outermost = {each.ranges[number].name for number, parent in enumerate(around) if parent is None}
        assert outermost == {trace.STEP, trace.MEASURED}
        assert any(span.bytes for span in each.ranges if span.name.endswith("exchange.cp.post"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 <= summary["hidden"] <= 1
    assert {(row["kind"], row["axis"]) for row in summary["ranks"][0]["collectives"]} >= {
        ("all_reduce", "tp"),
        ("exchange", "cp"),
    }
    assert (tmp_path / "timeline.png").stat().st_size > 0


def messages_behind_a_sleep(folder: str, arrivals: bool) -> Any:
    """Send and receive, sleep, then wait; return whether the record ended before the sleep did, and times."""
    axis = axis_over_all("cp")
    path = Path(folder) / f"rank{axis.rank}.json"
    ranges = trace.TorchRanges(arrivals=arrivals)
    window = StepWindow(TorchRecorder(path), 0, 1)
    model, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)])
    with trace.enabled(ranges, window), trace.step(model, optimizer):
        exchange, arriving = Exchange(axis), torch.empty(1000)
        exchange.send(torch.ones(1000), 1 - axis.rank)
        exchange.receive(arriving, 1 - axis.rank)
        exchange.start()
        with trace.range("paracore.training.sleep"):
            time.sleep(1.0)
        exchange.wait()
    ranges.close()
    found = read_torch_trace(path)
    [sleep] = [span for span in found.ranges if span.name.endswith("sleep")]
    [received] = [span for span in found.messages if span.name == "gloo:recv"]
    total = overlap_of(found, measured(found)).total
    wait = sum(span.end - span.begin for span in found.ranges if span.name.endswith(".wait"))
    return bool((arriving == 1).all()), received.end < sleep.end, total.hidden, total.exposed == wait


@pytest.mark.parametrize("arrivals", [True, False])
def test_the_real_profiler_shows_when_messages_arrive_and_sleep_is_no_communication(
    launch: Launch, tmp_path: Path, arrivals: bool
) -> None:
    # Without the thread gloo's record lasts until somebody waits.
    assert launch(2, messages_behind_a_sleep, str(tmp_path), arrivals) == [(True, arrivals, 0, True)] * 2


def test_memory_is_accounted_for_in_a_run_of_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--memory", "--warm-up", "1", "--steps", "1", "--out", str(tmp_path)]
    assert main(["profile", *flags, *map(str, train(tmp_path))]) == exit_codes.PASSED
    out = capsys.readouterr().out
    assert "1 ranks; MiB of tensors alive at the peak of each range" in out
    peaks = json.loads((tmp_path / "rank0.memory.json").read_text())["ranges"]
    assert peaks[trace.STEP]["parameters"] > 0
    assert not list(tmp_path.glob("rank0.json")), "times under an account of memory would mislead"


def test_a_model_that_is_trained_beside_is_not_profiled(tmp_path: Path) -> None:
    flags = ["--warm-up", "0", "--steps", "2", "--out", str(tmp_path)]
    assert main(["profile", *flags, *map(str, train(tmp_path, "--compare-dense"))]) == exit_codes.PASSED
    [found] = read_traces(find_traces(tmp_path))
    steps = [span for span in found.ranges if span.name == trace.STEP]
    assert len(steps) == 2
    for each in found.ranges:
        assert each.name == trace.MEASURED or any(s.begin <= each.begin <= s.end for s in steps)


# ---------------------------------------------------------------- Nsight

# A stand-in: it runs the command, and exports the ranges that the stand-in for the package nvtx has kept.
FAKE_NSYS = """
    #!{python}
    import json, os, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    words = sys.argv[1:]
    output = words[words.index("--output") + 1]
    if words[0] == "profile":
        command = words[words.index(sys.executable) :]
        Path(output + ".nsys-rep").write_text(json.dumps(words))
        os.environ["FAKE_NVTX"] = output + ".ranges"
        os.execv(command[0], command)
    from tests.nsys_export import NsysExport
    report = words[-1]
    export = NsysExport(Path(output), cuda=False)
    for name, begin, end in json.loads(Path(report.replace(".nsys-rep", ".ranges")).read_text()):
        export.range(name, begin * 1e3, end * 1e3)
"""
FAKE_NVTX = """
    import atexit, json, os, time
    class Domain:
        def __init__(self):
            self.open, self.done = [], []
            atexit.register(self.write)
        def write(self):
            if "FAKE_NVTX" in os.environ:
                with open(os.environ["FAKE_NVTX"], "w") as file:
                    json.dump(self.done, file)
        def get_event_attributes(self, **attributes):
            return attributes["message"]
        def push_range(self, name):
            self.open.append((name, time.monotonic()))
        def pop_range(self):
            name, begin = self.open.pop()
            if any(other == "paracore.recorded" for other, _ in self.open):
                self.done.append((name, begin, time.monotonic()))
    domain = Domain()
    def get_domain(name):
        return domain
"""


@pytest.fixture
def nsight(tmp_path: Path) -> dict[str, str]:
    """Return the environment in which there are stand-ins for nsys and nvtx."""
    tools = tmp_path / "tools"
    tools.mkdir()
    nsys = tools / "nsys"
    nsys.write_text(textwrap.dedent(FAKE_NSYS).strip().format(python=sys.executable, root=str(ROOT)))
    nsys.chmod(0o755)
    (tools / "nvtx.py").write_text(textwrap.dedent(FAKE_NVTX))
    return {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": first_on_path(tools)}


def test_every_rank_runs_under_nsys_and_its_export_is_read(tmp_path: Path, nsight: dict[str, str]) -> None:
    out = tmp_path / "out"
    options = ("--tool", "nsys", "--warm-up", 1, "--steps", 2, "--out", out)
    status, printed, error = run_launcher("profile", *options, *train(tmp_path, "--tp", 2), **nsight)
    assert status == 0, error
    assert "2 ranks, 2 steps; ms per step" in printed
    for rank in range(2):
        words = json.loads((out / f"rank{rank}.nsys-rep").read_text())
        assert words[words.index("--nvtx-capture") + 1] == "paracore.recorded@paracore"
        assert words[words.index("--capture-range-end") + 1] == "stop"  # the run goes on
    [first, *_] = read_traces(find_traces(out))
    assert len(measured_steps(first)) == 2
    assert sum(span.name == trace.STEP for span in first.ranges) == 3


def test_gathers_that_the_next_step_waits_for_are_counted_once(tmp_path: Path) -> None:
    options = ("--warm-up", 1, "--steps", 1, "--out", tmp_path)
    status, out, err = run_launcher("profile", *options, *train(tmp_path, "--dp", 2, "--zero", 2))
    assert (status, err) == (0, "")  # torch.profiler's library is quiet
    assert "2 ranks, 1 steps; ms per step" in out
    for each in read_traces(find_traces(tmp_path)):
        [step] = measured_steps(each)
        waits = [span for span in each.ranges if span.name == "paracore.collectives.all_gather.dp.wait"]
        found = overlap_of(each, measured(each)).collectives
        gathers = found[Collective("all_gather", "dp")]
        assert gathers.count == sum(step.begin <= span.begin < step.end for span in waits) > 0
        assert gathers.bytes > 0
        assert gathers.unpaired == 1  # the last one, whose wait is in a step that is not there
        assert not any(which.axis == "-" for which in found)


@pytest.mark.parametrize("status", [exit_codes.FAILED, 3])
def test_a_failure_of_nsys_is_no_verdict_of_ours(tmp_path: Path, nsight: dict[str, str], status: int) -> None:
    (tmp_path / "tools" / "nsys").write_text(f"#!/bin/sh\nexit {status}\n")
    options = ("--tool", "nsys", "--warm-up", 1, "--out", tmp_path)
    ended, _, error = run_launcher("profile", *options, *train(tmp_path), **nsight)
    assert ended == exit_codes.CRASHED
    assert f"the command under nsys ended with status {status}; what it or nsys had to say" in error


def test_without_nsys_the_error_offers_torchs_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("nsys", "ncu"):
        assert main(["profile", "--tool", tool, "--", "train"]) == exit_codes.USAGE
        error = capsys.readouterr().err
        assert f"--tool {tool}: there is no {tool} on the PATH; install Nsight" in error
        assert "or use --tool torch, which needs nothing" in error


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "-- (nothing): give a command that trains, as in `paracore profile -- paracore train --tp 2`"),
        ("-- python train.py", "-- python train.py: give a command that trains"),
        ("-- paracore env", "-- paracore env: give a command that trains"),
        ("--steps 0 -- train", "--steps 0: must be at least 1"),
        ("--warm-up -1 -- train", "--warm-up -1: must be at least 0"),
        (
            "--memory --tool nvtx -- train",
            "--memory with --tool nvtx: memory is accounted for without a profiler",
        ),
        ("--memory -- train --dp 2 --zero 3", "--memory with --zero 3: FSDP2 resizes its buffers"),
        ("--out /dev/null/x -- train", "--out /dev/null/x: cannot be made a folder"),
        ("--read {tmp}", "holds no trace"),
        ("--read {tmp}/nowhere", "holds no trace"),
        ("--read {tmp} --tool torch", "--read {tmp} with --tool: nothing is run; give --read alone"),
        ("--read {tmp} --memory --steps 2", "with --steps, --memory: nothing is run"),
        ("--read {tmp} -- train", "with -- train: nothing is run"),
    ],
)
def test_bad_requests_are_refused(
    argv: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *argv.format(tmp=tmp_path).split()]) == exit_codes.USAGE
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["torch", "nvtx"])
def test_a_command_with_too_few_steps_is_told_so_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    flags = ["--tool", tool, "--warm-up", "2", "--steps", "3", "--out", str(tmp_path / "out")]
    assert main(["profile", *flags, *map(str, train(tmp_path, "--tp", 2))]) == exit_codes.USAGE
    error = capsys.readouterr().err
    assert "the command takes 3 training steps, but 2 to warm up and 3 to be measured make 5" in error
    assert not list(tmp_path.iterdir())


def test_a_run_of_fewer_ranks_is_not_mixed_with_an_earlier_one_nor_with_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rank0.memory.json", "rank1.json"):
        (tmp_path / name).write_text("{}")
    flags = ["--warm-up", "0", "--steps", "1", "--out", str(tmp_path)]
    assert main(["profile", *flags, *map(str, train(tmp_path))]) == exit_codes.PASSED
    assert main(["profile", "--read", str(tmp_path)]) == exit_codes.PASSED
    assert (tmp_path / "rank0.memory.json").exists()
    found = json.loads((tmp_path / "rank0.json").read_text())
    found["distributedInfo"] = found.get("distributedInfo", {}) | {"world_size": 2}
    (tmp_path / "rank0.json").write_text(json.dumps(found))
    assert main(["profile", "--read", str(tmp_path)]) == exit_codes.USAGE
    assert "of 2 ranks the traces of rank 1 are missing" in capsys.readouterr().err
    assert main(["profile", "--read", str(tmp_path / "rank0.json")]) == exit_codes.PASSED


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "traces are in {out}: paracore profile --read {out}"),
        (["--memory"], "accounts of memory are in {out}"),
        (["--tool", "nvtx"], ""),
    ],
)
def test_under_a_launcher_what_was_written_is_said(tmp_path: Path, flags: list[str], said: str) -> None:
    options = (*flags, "--warm-up", 0, "--steps", 1, "--out", tmp_path)
    [done] = run_on_ranks(1, "profile", *options, *train(tmp_path))
    assert done.status == 0, done.err
    found = [line for line in done.out.splitlines() if line.startswith(("traces", "accounts"))]
    assert found == [said.format(out=tmp_path)] * bool(said)


def test_traces_are_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--warm-up", "0", "--steps", "1", "--out", str(tmp_path)]
    assert main(["profile", *flags, *map(str, train(tmp_path))]) == exit_codes.PASSED
    report = capsys.readouterr().out.partition("1 ranks, 1 steps")[2]
    assert "paracore.adamw.step" in report
    for place in (tmp_path, tmp_path / "rank0.json"):
        assert main(["profile", "--read", str(place)]) == exit_codes.PASSED
        assert capsys.readouterr().out.partition("1 ranks, 1 steps")[2] == report.replace(
            "paracore train", ""
        )


def enter(link: ShapedLink) -> None:
    rank = int(os.environ["RANK"])
    link.enter(rank)
    os.environ.update(link.environment(rank))


def test_overlap_hides_more_of_what_a_slow_link_carries(tmp_path: Path) -> None:
    try:
        require_means()
    except UsageError as error:
        pytest.skip(str(error))
    sizes = ["--hidden-size", 256, "--layers", 1, "--seq-len", 512, "--batch-size", 2, "--steps", 3]
    hidden = []
    with shaped_link(2, 60e6) as link:
        for overlap in ([], ["--overlap", 4]):
            out = tmp_path / f"out{len(overlap)}"
            options = ["--warm-up", 1, "--steps", 2, "--out", out]
            training = [
                "train",
                "--tp",
                2,
                "--sequence-parallel",
                *overlap,
                *sizes,
                "--out",
                tmp_path / "train",
            ]
            join = functools.partial(enter, link)
            first, _ = run_on_ranks(2, "profile", *options, "--", *training, prepare=join)
            assert first.status == 0, first.err
            assert f"traces are in {out}: paracore profile --read {out}" in first.out
            assert main(["profile", "--read", str(out)]) == exit_codes.PASSED
            hidden.append(json.loads((out / "summary.json").read_text())["hidden"])
    assert hidden[1] > hidden[0]
