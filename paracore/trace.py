"""Named ranges over what paracore does, for whoever watches: Nsight, torch.profiler, an account of memory.

    with trace.enabled(trace.NvtxRanges()):  # or TorchRanges(), or both
        train()

| range                                     | over                                                      |
|-------------------------------------------|-----------------------------------------------------------|
| paracore.<operation>.<phase>              | one call: paracore.rms_norm.forward                       |
| paracore.<operation>.<phase>.step<N>      | one step of a ring: paracore.ring_attention.forward.step2 |
| paracore.collectives.<kind>.<axis>.post   | starting a collective, or an exchange of messages         |
| paracore.collectives.<kind>.<axis>.wait   | waiting for it                                            |
| paracore.adamw.<phase>                    | reduce, norm, clip, step, write_out                       |
| paracore.training.<phase>                 | step, and in it forward, backward, update                 |

A `post` carries the collective's bytes, as the ledger counts them. Between post and wait the collective is in
flight: what a rank waits for is `wait` alone. `paracore profile` reads all that. Without ranges are FSDP2's
own collectives (ZeRO 3), which show by the backend's names, and backward of linear layers that are not cut,
where it is torch's.

Whether ranges are on is one value of the process, not of a context: backward runs in threads of autograd's,
which see no context variable of the thread that called it. Off, a range is the test of that value. In code
compiled by torch.compile there are no ranges; within operations that it calls there are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from paracore.arrivals import Arrivals, Work
from paracore.errors import UsageError

DOMAIN = "paracore"
STEP = "paracore.training.step"
MEASURED = "paracore.measured"
"""What `paracore profile` opens around each step that it measures."""
RECORDED = "paracore.recorded"
"""What it opens around all that is to be recorded: the measured steps and, if there is one, that before."""

Facts = Mapping[str, int | str]
P = ParamSpec("P")
R = TypeVar("R")

Context = AbstractContextManager[object, bool | None]
"""A range that is entered and left."""


class Sink:
    """Who learns of ranges."""

    def open(self, name: str, facts: Facts) -> Context:
        """Return a range that is entered and left in one thread, within all those that are open there."""
        return _OFF

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Context:
        """Return what is entered around a training step, outside its range."""
        return _OFF

    def follow(self, works: Sequence[Work]) -> Sequence[Work]:
        """Return what is to be waited for in place of these messages between processes."""
        return works


# torch.compile knows this class alone.
_OFF = contextlib.nullcontext()
_sinks: tuple[Sink, ...] = ()


def enabled(*sinks: Sink) -> AbstractContextManager[None]:
    """Let `sinks` learn of all ranges of this process, whatever thread they are in, meanwhile."""
    return _told((*_sinks, *sinks))


def disabled() -> AbstractContextManager[None]:
    """Let nobody learn of ranges meanwhile."""
    return _told(())


@contextlib.contextmanager
def _told(sinks: tuple[Sink, ...]) -> Iterator[None]:
    global _sinks
    before, _sinks = _sinks, sinks
    try:
        yield
    finally:
        _sinks = before


def _off() -> bool:
    # In this order: torch.compile compiles anew whenever a value that it has read changes, such as `_sinks`.
    return torch.compiler.is_compiling() or not _sinks


def range(name: str, number: int | None = None, **facts: int | str) -> Context:
    """Return the range `name`, to be entered by `with`. number: what is appended to the name, if any.

    facts: what is said of it besides, such as bytes, where the tool has room for it.
    """
    if _off():
        return _OFF
    return _Range(name if number is None else f"{name}{number}", facts)


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Put every call of the decorated function into the range `name`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _off():
                return function(*args, **kwargs)
            with _Range(name, {}):
                return function(*args, **kwargs)

        return call

    return decorate


def operation(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Do what `ranged` does for a function that `torch.library.custom_op` registers."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        call = ranged(name)(function)
        # Registration evaluates annotations among the names of the module that a function is from: `call` is
        # from this one.
        call.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
        return call

    return decorate


def post(kind: str, axis: str, num_bytes: int) -> Context:
    """Return the range of starting a collective of so many bytes over the mesh axis called `axis`."""
    if _off():
        return _OFF
    return _Range(f"paracore.collectives.{kind}.{axis}.post", {"bytes": num_bytes})


def wait(kind: str, axis: str) -> Context:
    """Return the range of waiting for such a collective."""
    if _off():
        return _OFF
    return _Range(f"paracore.collectives.{kind}.{axis}.wait", {})


@contextlib.contextmanager
def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put a training step, forward to update, into its range: profilers count steps by it.

    model, optimizer: whose memory an account of memory tells apart.
    """
    with contextlib.ExitStack() as stack:
        for sink in _sinks:
            stack.enter_context(sink.step(model, optimizer))
        stack.enter_context(range(STEP))
        yield


def follow(works: Sequence[Work]) -> Sequence[Work]:
    """Return what is to be waited for in place of messages over gloo, so that their arrival is seen."""
    for sink in _sinks:
        works = sink.follow(works)
    return works


class _Range:
    """A range, as every sink has it."""

    __slots__ = ("_contexts", "_facts", "_name")

    def __init__(self, name: str, facts: Facts) -> None:
        self._name, self._facts = name, facts
        self._contexts: list[Context] = []

    def __enter__(self) -> None:
        for sink in _sinks:
            context = sink.open(self._name, self._facts)
            context.__enter__()
            self._contexts.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._contexts:
            self._contexts.pop().__exit__(kind, error, traceback)


# ---------------------------------------------------------------- tools


class TorchRanges(Sink):
    """Ranges in torch.profiler; facts are shown there with record_shapes=True.

    arrivals: while torch.profiler records, wait for gloo's messages in a thread, so that its records of them
        end when they arrive.
    """

    def __init__(self, *, arrivals: bool = True) -> None:
        self._arrivals = Arrivals() if arrivals else None

    def open(self, name: str, facts: Facts) -> Context:
        """See `Sink`."""
        # torch.profiler.record_function takes ten times as long, and has no room for facts.
        context: Context = torch._C._profiler._RecordFunctionFast(name, (), dict(facts))
        return context

    def follow(self, works: Sequence[Work]) -> Sequence[Work]:
        """See `Sink`."""
        if self._arrivals is None or not torch._C._autograd._profiler_enabled():
            return works
        return [self._arrivals.follow(works)]

    def close(self) -> None:
        """End the thread that waits for messages."""
        if self._arrivals is not None:
            self._arrivals.close()


COLORS = {
    "communication": 0xFFEE6677,
    "compute": 0xFF4477AA,
    "optimizer": 0xFF228833,
    "training": 0xFFBBBBBB,
}
"""ARGB by category; told apart by all eyes."""


def category(name: str) -> str:
    """Return what kind of range `name` is: a key of `COLORS`."""
    part = name.split(".")[1]
    kinds = {
        "collectives": "communication",
        "adamw": "optimizer",
        "gradient_norm": "optimizer",
        "gradient_sync": "optimizer",
        "training": "training",
        "measured": "training",
        "recorded": "training",
        "decoder": "training",
    }
    return kinds.get(part, "compute")


class NvtxRanges(Sink):
    """Ranges of NVTX in a domain of their own, by category in colour, with the bytes as payload.

    Needs the package nvtx. Without a tool that listens, such as Nsight Systems, they cost next to nothing.
    Raises UsageError where the package is missing.
    """

    def __init__(self) -> None:
        try:
            import nvtx  # not above: it is optional
        except ImportError as error:
            raise UsageError(
                f"NVTX ranges need the package nvtx, which cannot be imported ({error}): pip install nvtx, "
                "or pip install 'paracore[profile]'"
            ) from error
        self._domain: Any = nvtx.get_domain(DOMAIN)
        self._attributes: dict[str, Any] = {}  # of ranges without payload, by name

    def open(self, name: str, facts: Facts) -> Context:
        """See `Sink`."""
        payload = facts.get("bytes")
        if payload is not None:
            return _NvtxRange(self._domain, self._describe(name, payload))
        if name not in self._attributes:
            self._attributes[name] = self._describe(name, None)
        return _NvtxRange(self._domain, self._attributes[name])

    def _describe(self, name: str, payload: int | str | None) -> Any:
        kind = category(name)
        return self._domain.get_event_attributes(
            message=name, color=COLORS[kind], category=kind, payload=payload
        )


class _NvtxRange:
    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Any, attributes: Any) -> None:
        self._domain, self._attributes = domain, attributes

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *_: object) -> None:
        self._domain.pop_range()
