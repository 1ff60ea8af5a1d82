"""Memory: the size of the last-level cache, what is free, and the peak that one call reaches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd.profiler import profile

_CPU_CACHES = Path("/sys/devices/system/cpu")
_UNKNOWN_CACHE_BYTES = 64 * 2**20  # where the system does not tell: more than most CPUs have per socket
_MI300_INFINITY_CACHE_BYTES = 256 * 2**20  # lies behind the L2 that torch reports


def last_level_cache_bytes(device: torch.device) -> int:
    """Return the size of the largest cache before `device`'s memory, over all its sockets."""
    if device.type == "cuda":
        l2: int = torch.cuda.get_device_properties(device).L2_cache_size
        return max(l2, _MI300_INFINITY_CACHE_BYTES) if torch.version.hip else l2
    return cpu_cache_bytes(_CPU_CACHES)


def cpu_cache_bytes(root: Path) -> int:
    """Return the sum of all last-level caches listed under `root`, laid out as Linux's sysfs does.

    CPUs that share a cache list it each under the same `shared_cpu_list`; it counts once.
    """
    found: dict[int, dict[str, int]] = {}  # level -> CPUs that share the cache -> bytes
    for size in root.glob("cpu[0-9]*/cache/index*/size"):
        level = int((size.parent / "level").read_text())
        sharing = (size.parent / "shared_cpu_list").read_text()
        found.setdefault(level, {})[sharing] = int(size.read_text().strip().removesuffix("K")) * 1024
    return sum(found[max(found)].values()) if found else _UNKNOWN_CACHE_BYTES


def free_bytes(device: torch.device) -> int:
    """Return how much memory of `device` may still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the most memory that `call` holds at once beyond what was allocated before it.

    Counted is what torch's allocator of `device` hands out: intermediates, outputs and gradients,
    not the inputs. Not counted is scratch memory that libraries fetch behind torch's back.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _peak_bytes_on_cpu(call)


def _peak_bytes_on_cpu(call: Callable[[], object]) -> int:
    with _stderr_closed(), profile(profile_memory=True) as profiler:
        call()
    results = profiler.kineto_results
    assert results is not None  # noqa: S101 (set when the profiler's context ends; for the type checker)
    allocations = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        held += event.nbytes()  # negative when memory is given back
        peak = max(peak, held)
    return peak


@contextmanager
def _stderr_closed() -> Iterator[None]:
    """Silence the profiler's library, which announces every start and stop on the process's stderr."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
