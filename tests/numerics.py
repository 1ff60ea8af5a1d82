"""How results are judged: errors against the float64 reference, and seeded random inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers that depend on nothing but shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||, in float64."""
    x, reference = x.detach().double(), reference.detach().double()
    return float((x - reference).norm() / reference.norm().clamp_min(1e-300))


def assert_close(x: Tensor, reference: Tensor, *, eps: float = 1e-13) -> None:
    """Equal in shape, and up to rounding in value."""
    assert x.shape == reference.shape
    assert relative_error(x, reference) <= eps, (x, reference)


def assert_as_exact_as(
    x: Tensor, contender: Tensor, reference: Tensor, *, floor: float, name: str = ""
) -> None:
    """The rule of the project: x's error to float64 is at most twice the contender's, plus a floor."""
    error, other = relative_error(x, reference), relative_error(contender, reference)
    assert error <= 2 * other + floor, f"{name}: error {error:.3e}, the other implementation's {other:.3e}"


def all_equal(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are bitwise the same."""
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """Fresh buffers start as NaN, so that what is left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def kept_for_backward() -> Iterator[list[Tensor]]:
    """Collects the tensors that autograd saves within."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the memory that operations took within it and that is in use: `peak` at most.

    given: tensors that were there before; views of them take nothing. What a custom op holds only while it
    runs is not seen: call the kernel itself for that.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._known = {StorageWeakRef(tensor.untyped_storage()): 0 for tensor in given}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._known.setdefault(StorageWeakRef(storage), storage.nbytes())
        self._known = {storage: size for storage, size in self._known.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._known.values()))
        return result
