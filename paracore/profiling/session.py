"""Records some training steps of this process, for whichever tool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from paracore import trace
from paracore.errors import UsageError


class Recorder(Protocol):
    """What begins to record, and ends."""

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin; model and optimizer are those whose steps follow."""

    def stop(self) -> None:
        """End, and write what was recorded."""

    def discard(self) -> None:
        """End, and write nothing."""


class TorchRecorder:
    """torch.profiler, whose trace is written to `path`, in the format that Perfetto and Chrome read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See `Recorder`."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Without record_shapes the bytes of ranges are left out.
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def stop(self) -> None:
        """See `Recorder`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))

    def discard(self) -> None:
        """See `Recorder`."""
        self._profile.stop()


class NvtxRecorder:
    """A range around the recorded steps, at which Nsight begins and ends to record.

    With CUDA the profiler interface is told so too, for capture ranges of that kind.
    """

    def __init__(self, ranges: trace.NvtxRanges) -> None:
        self._range = ranges.open(trace.RECORDED, {})

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See `Recorder`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        self._range.__enter__()

    def stop(self) -> None:
        """See `Recorder`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.discard()

    def discard(self) -> None:
        """See `Recorder`."""
        self._range.__exit__(None, None, None)
        if torch.cuda.is_available():
            torch.cuda.profiler.stop()


class StepWindow(trace.Sink):
    """Lets some steps pass, then has some recorded: those of the first model that takes one.

    A run may train others besides, such as the dense model that it is compared with: these have no ranges.

    warm_up: steps before the measured ones. lead_in: so many of these are recorded, too, so that a tool's
        start-up is in none of the measured steps, and what one step posts and the next waits for is seen
        whole; with any, the measured steps are those in the range `trace.MEASURED`.
    """

    def __init__(self, recorder: Recorder, warm_up: int, steps: int, *, lead_in: int = 1) -> None:
        self._recorder, self._first, self._end = recorder, warm_up, warm_up + steps
        self._begin, self._leads = max(0, warm_up - lead_in), lead_in > 0
        self._model: nn.Module | None = None
        self._taken = 0

    @contextlib.contextmanager
    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """See `Sink`."""
        self._model = self._model or model
        if model is not self._model:
            with trace.disabled():
                yield
            return
        if self._taken >= self._end:
            yield
            return
        if self._taken == self._begin:
            self._recorder.start(model, optimizer)
        is_measured = self._leads and self._taken >= self._first
        self._taken += 1
        try:
            with trace.range(trace.MEASURED) if is_measured else contextlib.nullcontext():
                yield
        except BaseException:
            if self._taken > self._begin:
                self._recorder.discard()
            self._taken = 0  # whoever goes on begins anew
            raise
        if self._taken == self._end:
            self._recorder.stop()

    def require_done(self) -> None:
        """Raise UsageError unless all steps were recorded."""
        require_steps(self._taken, self._first, self._end - self._first)


def require_steps(taken: int, warm_up: int, steps: int) -> None:
    """Raise UsageError where a command takes fewer training steps than those to pass and to record."""
    if taken < warm_up + steps:
        raise UsageError(
            f"the command takes {taken} training steps, but {warm_up} to warm up and {steps} to be measured "
            f"make {warm_up + steps}: let it take more, or give fewer by --warm-up and --steps"
        )
