"""Counts the bytes of all tensors that are alive, and of the scratch memory of native operations."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from paracore.ops.scratch import Scratch, scratch_of


class MemoryTracker(TorchDispatchMode):
    """While active, follows every tensor that an operation takes or returns, until nobody holds it any more.

    live: the bytes of tensors that are alive. kept: thread memory of native operations; it counts from the
    first call that needs it on, since threads keep it. peak: the most of both, and of what an operation takes
    while it runs, at any time.

    A storage's bytes are read once: those that are resized later, as FSDP2 does with its own, are counted
    wrongly.

    torch.distributed._tools.mem_tracker.MemTracker counts the same tensors. It also keeps books on every
    module, in time that grows with the square of the layers, and knows nothing of scratch memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.kept = Scratch()
        self._known: dict[int, int] = {}  # bytes of storages that are alive, by id

    def track(self, *tensors: Tensor) -> None:
        """Follow tensors made before."""
        for tensor in tensors:
            self._follow(tensor)
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; count what it made, and what it took meanwhile."""
        scratch = scratch_of(func, args)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, result)):
            self._follow(tensor)
        self.kept = Scratch(*map(max, self.kept, scratch))._replace(temporary=0)
        self.peak = max(self.peak, self.live + sum(self.kept) + scratch.temporary)
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._known:
            self._known[id(storage)] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._forget, id(storage))

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
