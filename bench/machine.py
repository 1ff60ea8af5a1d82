"""What a result depends on besides the code: the machine, the versions, the environment, the date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

import paracore
from paracore.bench.memory import last_level_cache_bytes

# Variables known to change times: huge pages, thread counts, allocators, the choice of implementation.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "MALLOC_CONF",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PARACORE_IMPL",
    "PYTORCH_CUDA_ALLOC_CONF",
    "THP_MEM_ALLOC_ENABLE",
    "TRITON_INTERPRET",
)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the facts to print beside results measured on `device`, ready for JSON."""
    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "device": str(device),
        "cache_mib": last_level_cache_bytes(device) / 2**20,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton") or _version("pytorch-triton-rocm"),
        "paracore": paracore.__version__,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Return `describe_machine`'s facts in one line of text."""
    parts = [
        f"{machine['cpu']} ({machine['cpu_capability']})",
        f"{machine['cores']} cores, {machine['threads']} threads",
        f"GPU {machine['gpu'] or 'none'}",
        f"cache {machine['cache_mib']:g} MiB",
        *(f"{name} {machine[name] or 'absent'}" for name in ("python", "torch", "triton", "paracore")),
        *(f"{name}={value}" for name, value in machine["environment"].items()),
        machine["date"],
    ]
    return "; ".join(parts)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _usable_cores() -> int:
    """Cores this process may run on: a container or `taskset` may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
