"""Finds and reads the traces of a run, one file per rank."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from paracore.errors import UsageError
from paracore.profiling.events import RankTrace
from paracore.profiling.nsys_export import read_nsys_export
from paracore.profiling.torch_trace import read_torch_trace

_RANK = re.compile(r"rank(\d+)\D*")
TORCH, NSYS = ".json", ".sqlite"


def trace_path(folder: Path, rank: int, suffix: str = TORCH) -> Path:
    """Return where a rank's trace lies in a folder."""
    return folder / f"rank{rank}{suffix}"


def find_traces(place: Path) -> list[Path]:
    """Return the traces in a folder, or the file itself; raise UsageError where there is none."""
    if place.is_file():
        return [place]
    found = [path for path in sorted(place.glob("rank*")) if _is_trace(path)]
    if not found:
        raise UsageError(
            f"{place}: holds no trace, which would be called rank0{TORCH} (of torch.profiler) or rank0{NSYS} "
            "(exported by nsys)"
        )
    return found


def _is_trace(path: Path) -> bool:
    return path.name.endswith((TORCH, f"{TORCH}.gz", NSYS))


def read_traces(paths: Iterable[Path]) -> list[RankTrace]:
    """Return the traces in files, in the order of ranks; a name such as rank3.json says whose it is.

    Raises UsageError for a file that is no trace, for one without any range of paracore's, and for two of one
    rank.
    """
    found: dict[int, RankTrace] = {}
    for path in paths:
        trace = _read(path)
        if not trace.ranges:
            raise UsageError(
                f"{path}: has no range of paracore's: record it with `paracore profile`, or within "
                "paracore.trace.enabled(...)"
            )
        if trace.rank in found:
            raise UsageError(f"{path}: is of rank {trace.rank}, of which there is another trace already")
        found[trace.rank] = trace
    return [found[rank] for rank in sorted(found)]


def _read(path: Path) -> RankTrace:
    named = _RANK.match(path.name)
    if path.suffix == NSYS:
        return read_nsys_export(path, int(named[1]) if named else 0)
    trace = read_torch_trace(path)
    return dataclasses.replace(trace, rank=int(named[1])) if named else trace


def require_ranks(folder: Path, count: int, suffix: str) -> list[Path]:
    """Return the traces of ranks 0 to `count`; raise UsageError where any is missing."""
    paths = [trace_path(folder, rank, suffix) for rank in range(count)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise UsageError(
            f"{folder}: {len(missing)} of {count} ranks wrote no trace ({', '.join(missing)}): the command "
            "ended before its measured steps did"
        )
    return paths
