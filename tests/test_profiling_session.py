"""Which steps are recorded, and what is left where one fails."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from paracore import trace
from paracore.profiling.memory import MemoryRecorder
from paracore.profiling.session import NvtxRecorder, Recorder, StepWindow, TorchRecorder
from tests.test_trace import FakeNvtx


@pytest.mark.parametrize("kind", ["torch", "memory", "nvtx"])
def test_a_step_that_fails_ends_the_recording_and_writes_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    path = tmp_path / "rank0.json"
    with contextlib.ExitStack() as stack:
        sinks, recorder = recorder_of(kind, path, stack, monkeypatch)
        window = StepWindow(recorder, 1, 2)
        stack.enter_context(trace.enabled(*sinks, window))
        for fails in (False, False, True):
            if not fails:
                with trace.step(model, optimizer):
                    pass
                continue
            with pytest.raises(ValueError, match="in a step"), trace.step(model, optimizer):
                raise ValueError("in a step")
        assert not torch._C._autograd._profiler_enabled()
        assert not path.exists()
        for _ in range(3):  # whoever goes on is recorded from the start
            with trace.step(model, optimizer):
                pass
        window.require_done()
    assert path.exists() == (kind != "nvtx")


def recorder_of(
    kind: str, path: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[trace.Sink], Recorder]:
    if kind == "memory":
        memory = MemoryRecorder(path)
        return [memory], memory
    if kind == "nvtx":
        monkeypatch.setitem(sys.modules, "nvtx", FakeNvtx())
        nvtx = trace.NvtxRanges()
        return [nvtx], NvtxRecorder(nvtx)
    ranges = trace.TorchRanges()
    stack.callback(ranges.close)
    return [ranges], TorchRecorder(path)
