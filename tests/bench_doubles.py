"""Stand-ins for the bench's tests: time that passes only when told to, and a GPU with a launch queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from paracore.bench.case import Case, Contender, Function, Inputs, Setting, Work, random_tensor
from paracore.bench.limits import Limit


class Clock:
    """A clock that `work` moves; it logs who worked and on what."""

    def __init__(self) -> None:
        self.time = 0.0
        self.log: list[tuple[str, object]] = []

    def now(self) -> float:
        return self.time

    def work(self, name: str, seconds: float | Callable[[float], float]) -> Callable[[object], None]:
        """Return a call that takes `seconds`, or what `seconds` says at the time it starts."""

        def call(inputs: object) -> None:
            self.log.append((name, inputs))
            self.time += seconds(self.time) if callable(seconds) else seconds

        return call


def setting_of(shape: tuple[int, ...] = (4, 8), direction: str = "forward") -> Setting:
    return Setting(shape, torch.float32, direction, "plain", torch.device("cpu"))


class TimedCase(Case):
    """Contenders that take given times, or refuse; the work is 1e9 bytes and 2e12 operations."""

    name = "timed"
    dims = ("rows", "columns")
    shapes = ((4, 8),)
    dtypes = (torch.float32,)
    baseline = "base"
    contenders: ClassVar[Mapping[str, Contender]] = {}

    def __init__(self, clock: Clock, seconds: dict[str, float], refusing: dict[str, Function] | None = None):
        self._clock = clock
        self.all = {name: Contender(self._build(name, taken)) for name, taken in seconds.items()}
        for name, function in (refusing or {}).items():
            self.all[name] = Contender(lambda _, function=function: function)  # type: ignore[misc]

    def _build(self, name: str, seconds: float) -> Callable[[Setting], Function]:
        def function(x: Tensor, out: Tensor | None = None) -> Tensor:
            self._clock.work(name, seconds)(x.data_ptr())
            return x

        return lambda _: function

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        return Inputs({"x": random_tensor(setting.shape, setting, generator)})

    def work(self, setting: Setting) -> Work:
        return Work(bytes=10**9, flops=2 * 10**12)

    def limits(self, *_: object) -> dict[str, Limit]:
        """Replaces `limits.limits`: copy_ moves 10 GB/s, clone 5 GB/s, matmul does 8 TFLOP/s."""
        copy, matmul = Work(bytes=10**9, flops=0), Work(bytes=0, flops=8 * 10**12)
        seconds = {"copy_": (0.1, copy), "clone": (0.2, copy), "matmul": (1.0, matmul)}
        return {
            name: Limit(Contender(self._build(name, taken)), self.inputs, work)
            for name, (taken, work) in seconds.items()
        }


class LaunchQueue:
    """A GPU for `CudaTimer`: kernels run in order, each no earlier than its launch by the host.

    One sleep cycle takes a nanosecond. `cuda` stands in for the module torch.cuda.
    """

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.synchronisations: list[float] = []
        queue = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = queue.device = max(queue.device, queue.host)

            def query(self) -> bool:
                return self.at <= queue.host

            def synchronize(self) -> None:
                queue.host = max(queue.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        self.cuda = SimpleNamespace(
            Event=Event,
            synchronize=self.synchronize,
            _sleep=lambda cycles: self.launch(0.0, cycles * 1e-9),
            device=contextlib.nullcontext,
        )

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def launch(self, launch_seconds: float, kernel_seconds: float) -> None:
        """Queue a kernel; the host is busy for `launch_seconds` before it may start."""
        self.host += launch_seconds
        self.device = max(self.device, self.host) + kernel_seconds
