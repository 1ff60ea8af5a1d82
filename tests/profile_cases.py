"""Synthetic traces: what torch.profiler writes, by hand with known times. Those of nsys: nsys_export.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paracore.profiling.events import DeviceSpan, RankTrace, Span
from tests.nsys_export import MS

MAIN = "thread 7"


def span(name: str, begin: float, end: float, lane: str = MAIN, bytes_: int | None = None) -> Span:
    """Return a span from ms to ms."""
    return Span(name, round(begin * MS), round(end * MS), lane, bytes_)


def collective(
    kind: str, axis: str, post: tuple[float, float], wait: tuple[float, float], bytes_: int = 0
) -> list[Span]:
    """Return the two ranges of a collective."""
    name = f"paracore.collectives.{kind}.{axis}"
    return [span(f"{name}.post", *post, bytes_=bytes_), span(f"{name}.wait", *wait)]


def step(end: float, begin: float = 0.0) -> Span:
    return span("paracore.training.step", begin, end)


def counted(end: float, begin: float) -> list[Span]:
    """Return a step that is measured, among others that are not."""
    return [span("paracore.measured", begin, end), step(end, begin)]


def host_trace(*ranges: Span, operations: Sequence[Span] = (), messages: Sequence[Span] = ()) -> RankTrace:
    return RankTrace(0, list(ranges), list(operations), list(messages))


def device_span(
    begin: float, end: float, *, moves: bool = False, stream: int = 1, launched: float | None = None
) -> DeviceSpan:
    when = None if launched is None else (round(launched * MS), MAIN)
    name = "ncclDevKernel_AllReduce" if moves else "gemm"
    return DeviceSpan(
        name, round(begin * MS), round(end * MS), f"device 0 stream {stream}", None, moves, when
    )


# ---------------------------------------------------------------- torch.profiler's file


def event(name: str, category: str, begin: float, end: float, tid: Any = 7, **args: Any) -> dict[str, Any]:
    """Return a complete event, from ms to ms, as torch.profiler writes it: in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": begin * 1000,
        "dur": (end - begin) * 1000,
        "args": args,
    }


def write_torch_trace(path: Path, events: Sequence[dict[str, Any]], rank: int = 0) -> Path:
    metadata = {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "python"}}
    instant = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e9}
    document = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2},
        "traceEvents": [metadata, *events, instant],
    }
    path.write_text(json.dumps(document))
    return path
