"""What is there to be profiled runs, and records what it says; the cost of ranges is counted rightly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paracore import trace
from paracore.bench import profile_target, trace_overhead
from paracore.cli import exit_codes, profile
from paracore.profiling.traces import find_traces, read_traces
from paracore.profiling.window import measured_steps


@pytest.mark.parametrize("target", profile_target.TARGETS)
def test_a_target_is_recorded_forward_and_backward(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_target, "HEADS", 4)
    monkeypatch.setattr(profile_target, "HIDDEN", 4 * profile_target.HEAD_DIM)
    profile_target.main([target, "--tokens", "16", "--out", str(tmp_path)])
    [found] = read_traces(find_traces(tmp_path))
    names = [span.name for span in found.ranges]
    assert len(measured_steps(found)) == profile_target.STEPS
    operations = ("rms_norm", "attention", "swiglu") if target == "layer" else (target,)
    for operation in operations:
        for phase in ("forward", "backward"):
            assert f"paracore.{operation}.{phase}" in names


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--tokens", "0"], "--tokens 0: must be at least 1"), (["--tool", "nvtx"], "need the package nvtx")],
)
def test_bad_requests_are_refused_in_a_line(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(SystemExit) as ended:
        profile_target.main(["rms_norm", *flags])
    assert ended.value.code == exit_codes.USAGE
    assert message in capsys.readouterr().err


def test_a_target_is_not_written_over_a_training_runs_traces() -> None:
    assert profile._DEFAULTS["out"] != profile_target.OUT


def test_the_cost_of_a_range_is_that_of_the_sinks_that_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = trace_overhead._Count()
    monkeypatch.setattr(trace_overhead, "CALLS", 7)
    with trace.enabled(calls):
        trace_overhead.range_seconds()
    assert calls.ranges == 5 * 7
