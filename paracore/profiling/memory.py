"""What memory is for, at the moment when a range needs the most of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from paracore import trace
from paracore.optim import AdamW
from paracore.profiling.tracker import MemoryTracker, tensors_in

KINDS = ("activations", "communication", "optimizer", "gradients", "parameters")
"""What a tensor may be for. Where several are true of one, the later counts.

communication: it was handed to a collective or message. activations: everything else, temporaries included.
"""

Bytes = dict[str, int]


class MemoryAccount(MemoryTracker, trace.Sink):
    """While active, the bytes of all tensors that are alive, by what they are for; and peaks by range.

    It counts the tensors that torch.distributed._tools.mem_tracker.MemTracker counts. What kernels take
    beside tensors, and what an allocator keeps in reserve, is not in it. Storages that are resized are
    counted wrongly: it is not for FSDP2 (ZeRO 3), which does so with its buffers out of every mode's sight.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self._kinds: dict[int, str] = {}  # of storages, by id
        self._bytes: Bytes = dict.fromkeys(KINDS, 0)
        self._open: list[Bytes] = []  # the peaks so far of the ranges that are open
        self.peaks: dict[str, Bytes] = {}
        self._look()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; count what it made."""
        if DTensor in types:
            return NotImplemented  # its local tensors come by themselves
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, result)):
            self._follow(tensor)
        if func.namespace == "c10d":
            for tensor in tensors_in(args):
                self._mark("communication", tensor)
        self._keep_peaks()
        return result

    @contextmanager
    def open(self, name: str, facts: trace.Facts) -> Iterator[None]:
        """Note the peak of a range."""
        self._look()
        self._open.append(dict(self._bytes))
        try:
            yield
        finally:
            self._look()
            peak = self._open.pop()
            if sum(peak.values()) >= sum(self.peaks.get(name, {}).values()):
                self.peaks[name] = peak

    def _keep_peaks(self) -> None:
        for number, peak in enumerate(self._open):
            if sum(peak.values()) < self.live:
                self._open[number] = dict(self._bytes)

    def _look(self) -> None:
        """See what is a parameter, a gradient or the optimizer's by now."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._mark("parameters", tensor)
            if tensor.grad is not None:
                self._mark("gradients", tensor.grad)
        for kind, tensors in _held(self._optimizer).items():
            for tensor in tensors:
                self._mark(kind, tensor)

    def _mark(self, kind: str, tensor: Tensor) -> None:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._follow(tensor)
        key = id(tensor.untyped_storage())
        before = self._kinds[key]
        if KINDS.index(kind) > KINDS.index(before):
            self._kinds[key] = kind
            self._bytes[before] -= self._known[key]
            self._bytes[kind] += self._known[key]

    def _follow(self, tensor: Tensor) -> None:
        super()._follow(tensor)
        key = id(tensor.untyped_storage())
        if key not in self._kinds:
            self._kinds[key] = KINDS[0]
            self._bytes[KINDS[0]] += self._known[key]

    def _forget(self, key: int) -> None:
        self._bytes[self._kinds.pop(key, KINDS[0])] -= self._known[key]
        super()._forget(key)


def _held(optimizer: torch.optim.Optimizer) -> Mapping[str, list[Tensor]]:
    """Return the tensors that an optimizer holds, by their kind."""
    if isinstance(optimizer, AdamW):
        held = optimizer.tensors()
        return {"gradients": held["gradients"], "optimizer": held["states"]}
    values = (value for state in optimizer.state.values() for value in state.values())
    return {"optimizer": [value for value in values if isinstance(value, Tensor)]}


class MemoryRecorder(trace.Sink):
    """Writes the peaks of some steps to `path`; with CUDA also the allocator's snapshot, .pickle, beside it.

    That snapshot is what https://docs.pytorch.org/memory_viz draws.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._account: MemoryAccount | None = None

    def open(self, name: str, facts: trace.Facts) -> trace.Context:
        """See `paracore.trace.Sink`."""
        return super().open(name, facts) if self._account is None else self._account.open(name, facts)

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See `paracore.profiling.session.Recorder`."""
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
        self._account = MemoryAccount(model, optimizer)
        self._account.__enter__()

    def stop(self) -> None:
        """See `paracore.profiling.session.Recorder`."""
        account = self._account
        assert account is not None, "stop comes after start"  # noqa: S101 (not the user's doing)
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._path.with_suffix(".pickle")))
        self.discard()
        self._path.write_text(json.dumps({"units": "bytes", "ranges": account.peaks}, indent=1) + "\n")

    def discard(self) -> None:
        """See `paracore.profiling.session.Recorder`."""
        account, self._account = self._account, None
        assert account is not None, "it comes after start"  # noqa: S101 (not the user's doing)
        account.__exit__(None, None, None)
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(enabled=None)
