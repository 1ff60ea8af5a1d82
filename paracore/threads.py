"""How many threads this process computes with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


def available_cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Compute with every core while the other local ranks wait for this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(available_cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)
