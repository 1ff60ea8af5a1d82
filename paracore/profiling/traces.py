"""Finds and reads the traces of a run, one file per rank."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from paracore.errors import UsageError
from paracore.profiling.events import RankTrace
from paracore.profiling.nsys_export import read_nsys_export
from paracore.profiling.torch_trace import read_torch_trace

TORCH, NSYS, MEMORY, NCU = ".json", ".sqlite", ".memory.json", ".ncu-rep"
_TRACE = re.compile(r"rank(\d+)\.(json|json\.gz|sqlite)")
# What each way to profile leaves of a rank.
_FILES = {
    "torch": r"rank\d+\.json(\.gz)?",
    "nsys": r"rank\d+\.(nsys-rep|sqlite)",
    "ncu": r"rank\d+\.ncu-rep",
    "memory": r"rank\d+\.memory\.(json|pickle)",
}


def trace_path(folder: Path, rank: int, suffix: str = TORCH) -> Path:
    """Return where a rank's trace lies in a folder."""
    return folder / f"rank{rank}{suffix}"


def find_traces(place: Path) -> list[Path]:
    """Return the traces in a folder, or the file itself; raise UsageError where there is none."""
    if place.is_file():
        return [place]
    found = [path for path in sorted(place.glob("rank*")) if _TRACE.fullmatch(path.name)]
    if not found:
        raise UsageError(
            f"{place}: holds no trace, which would be called rank0{TORCH} (of torch.profiler) or rank0{NSYS} "
            "(exported by nsys)"
        )
    return found


def remove_old(folder: Path, way: str) -> None:
    """Remove what an earlier run has left there of its ranks: those that it had more would mix with the new.

    way: "torch", "nsys", "ncu" or "memory"; what others have left stays, as does all of other names.
    """
    for path in folder.glob("rank*"):
        if re.fullmatch(_FILES[way], path.name):
            path.unlink()


def read_traces(paths: Iterable[Path]) -> list[RankTrace]:
    """Return the traces in files, in the order of ranks; a name such as rank3.json says whose it is.

    Raises UsageError for a file that is no trace, for one without any range of paracore's, and for two of one
    rank.
    """
    found: dict[int, RankTrace] = {}
    sources: dict[int, Path] = {}
    for path in paths:
        trace = _read(path)
        if not trace.ranges:
            raise UsageError(
                f"{path}: has no range of paracore's: record it with `paracore profile`, or within "
                "paracore.trace.enabled(...)"
            )
        if trace.rank in found:
            raise UsageError(
                f"{sources[trace.rank]} and {path.name} are both of rank {trace.rank}: keep the traces of "
                "each run in a folder of their own, such as --out gives"
            )
        found[trace.rank], sources[trace.rank] = trace, path
    return [found[rank] for rank in sorted(found)]


def _read(path: Path) -> RankTrace:
    named = _TRACE.fullmatch(path.name)
    if path.suffix == NSYS:
        return read_nsys_export(path, int(named[1]) if named else 0)
    trace = read_torch_trace(path)
    return dataclasses.replace(trace, rank=int(named[1])) if named else trace


def require_world(folder: Path, traces: Sequence[RankTrace]) -> None:
    """Raise UsageError unless these, found in a folder, are the traces of all ranks of one run."""
    sizes = sorted({trace.world_size for trace in traces if trace.world_size is not None})
    if len(sizes) > 1:
        raise UsageError(
            f"{folder}: holds traces of runs of {' and '.join(map(str, sizes))} ranks: keep those of each "
            "run in a folder of their own"
        )
    present = {trace.rank for trace in traces}
    count = sizes[0] if sizes else max(present) + 1  # nsys does not know how many there were
    missing = [str(rank) for rank in range(count) if rank not in present]
    if missing:
        raise UsageError(
            f"{folder}: of {count} ranks the traces of rank {', '.join(missing)} are missing: copy them "
            "there, profile again, or name one trace, which is read alone"
        )
    if len(present) > count:
        raise UsageError(
            f"{folder}: holds a trace of rank {max(present)}, but the run had {count} ranks: remove those of "
            "earlier runs"
        )


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
