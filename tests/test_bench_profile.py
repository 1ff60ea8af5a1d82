"""What is there to be profiled runs, and records what it says; the cost of ranges is counted rightly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paracore import trace
from paracore.bench import profile_target, trace_overhead
from paracore.errors import UsageError
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


def test_a_target_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="--tokens 0: must be at least 1"):
        profile_target.main(["rms_norm", "--tokens", "0"])


def test_the_cost_of_a_range_is_that_of_the_sinks_that_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = trace_overhead._Count()
    monkeypatch.setattr(trace_overhead, "CALLS", 7)
    assert torch.tensor(trace_overhead.range_seconds()).isfinite()
    with trace.enabled(calls):
        trace_overhead.range_seconds()
    assert calls.ranges == 5 * 7
