"""What a process really holds: Linux's own count, on a heap that gives memory back at once."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

SUPPORTED = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")
MIB = 2**20
_M_MMAP_THRESHOLD = -3


def return_memory_at_once() -> None:
    """Let every allocation of a MiB or more have pages of its own, which its end gives back: no fragments."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def peak_growth(call: Callable[[], object]) -> int:
    """Return by how many bytes the process grew at most during `call`, its results included."""
    reset = _reset_peak()
    before = _status("VmRSS" if reset else "VmHWM")
    result = call()
    after = _status("VmHWM")
    del result
    return after - before


def tensor_bytes(*values: object) -> int:
    """Return the bytes of all tensors among `values`."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def touched(*shape: int, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    """Return a tensor all of whose pages are there."""
    return torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_(requires_grad)


def _reset_peak() -> bool:
    """Let the peak be what the process holds now; False where that is not permitted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
