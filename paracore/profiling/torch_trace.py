"""Reads what torch.profiler's `export_chrome_trace` writes.

Times there are microseconds, with nanoseconds behind the point.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paracore.errors import UsageError
from paracore.profiling.events import DeviceSpan, RankTrace, Span, communicates, waits

_PREFIX = "paracore."
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
# Operators by namespace, such as aten::mm; all else among cpu_op contains them, waits included.
_OPERATOR = re.compile(r"(?!autograd::|torch::autograd::|c10d::|_c10d_functional::)[a-z_]\w*::\w+")
_BACKEND = re.compile(r"(gloo|mpi):\w+")


def read_torch_trace(path: Path) -> RankTrace:
    """Return the trace in a file, .json or .json.gz; raise UsageError for what is no such file."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt") as file:
                document = json.load(file)
        else:
            document = json.loads(path.read_text())
        return _trace(document)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: cannot be read as a trace of torch.profiler ({type(error).__name__}: {error}); the run "
            "that wrote it may have been interrupted: profile again"
        ) from error


def _trace(document: Mapping[str, Any]) -> RankTrace:
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: (_ns(event["ts"]), _lane(event))
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    run = document.get("distributedInfo", {})
    trace = RankTrace(run.get("rank", 0), world_size=run.get("world_size"))
    for event in events:
        category, name = event.get("cat"), event["name"]
        begin = _ns(event["ts"])
        place = begin, begin + _ns(event.get("dur", 0)), _lane(event)
        if category in _DEVICE and not waits(name):
            launched = launches.get(event.get("args", {}).get("correlation"))
            trace.device.append(DeviceSpan(name, *place, None, communicates(name), launched))
        elif category in ("cpu_op", "user_annotation"):
            if name.startswith(_PREFIX):
                trace.ranges.append(Span(name, *place, event.get("args", {}).get("bytes")))
            elif _BACKEND.fullmatch(name):
                trace.messages.append(Span(name, *place))
            elif category == "cpu_op" and _OPERATOR.fullmatch(name):
                trace.operations.append(Span(name, *place))
    return trace


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _lane(event: Mapping[str, Any]) -> str:
    args = event.get("args", {})
    if event.get("cat") in _DEVICE:
        return f"device {args.get('device', event['pid'])} stream {args.get('stream', event['tid'])}"
    return f"thread {event['tid']}"
