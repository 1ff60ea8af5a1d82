"""Reads what `nsys export --type sqlite` makes of a report of Nsight Systems.

Tables: NVTX_EVENTS, StringIds, CUPTI_ACTIVITY_KIND_RUNTIME, _KERNEL, _MEMCPY, _MEMSET; those of which nothing
was recorded are missing. Times are nanoseconds. Source: Nsight Systems User Guide, "SQLite schema reference".
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from paracore.errors import UsageError
from paracore.profiling.events import DeviceSpan, RankTrace, Span, communicates, waits
from paracore.trace import DOMAIN

_PUSH_POP, _DOMAIN_CREATE = 59, 75  # NVTX_EVENTS.eventType
_PEER_TO_PEER = 10  # CUPTI_ACTIVITY_KIND_MEMCPY.copyKind
_ID = 1 << 24  # a globalTid holds process and thread id in 24 bits each
_Launches = dict[tuple[int, int], tuple[int, str]]


def read_nsys_export(path: Path, rank: int = 0) -> RankTrace:
    """Return the trace in an .sqlite file, of `rank`; raise UsageError for what is no such file."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return _trace(database, rank)
    except (sqlite3.Error, ValueError, IndexError, TypeError) as error:  # of rows: no such column, or null
        raise UsageError(
            f"{path}: cannot be read as an export of Nsight Systems ({error}); make one with "
            f"nsys export --type sqlite --output {path} REPORT.nsys-rep"
        ) from error


def _trace(database: sqlite3.Connection, rank: int) -> RankTrace:
    database.row_factory = sqlite3.Row
    tables = {row["name"] for row in database.execute("SELECT name FROM sqlite_master")}
    if "NVTX_EVENTS" not in tables:
        raise ValueError("it has no table NVTX_EVENTS: nothing was recorded with --trace nvtx")
    strings = {row["id"]: row["value"] for row in database.execute("SELECT id, value FROM StringIds")}
    trace = RankTrace(rank, ranges=list(_ranges(database, strings)))
    launches = _launches(database) if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables else {}
    for kind in ("KERNEL", "MEMCPY", "MEMSET"):
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        if table in tables:
            trace.device.extend(_device_spans(database, table, kind, strings, launches))
    return trace


def _ranges(database: sqlite3.Connection, strings: dict[int, str]) -> Iterator[Span]:
    """Yield the ranges of paracore's domain; those that were open when recording ended have no end.

    Where the domain was made before recording began, what made it may be missing: names tell then.
    """
    rows = list(database.execute("SELECT * FROM NVTX_EVENTS ORDER BY start"))
    created = (row for row in rows if row["eventType"] == _DOMAIN_CREATE)
    domains = {row["domainId"] for row in created if _text(row, strings) == DOMAIN}
    for row in rows:
        if row["eventType"] != _PUSH_POP or row["end"] is None:
            continue
        name = _text(row, strings)
        if not (row["domainId"] in domains if domains else name.startswith(f"{DOMAIN}.")):
            continue
        payload = next((row[key] for key in ("uint64Value", "int64Value") if row[key] is not None), None)
        yield Span(name, row["start"], row["end"], _thread(row["globalTid"]), payload)


def _text(row: sqlite3.Row, strings: dict[int, str]) -> str:
    """Return an event's message: in the row, or registered by the program as a string."""
    return str(row["text"]) if row["text"] is not None else strings.get(row["textId"], "")


def _thread(global_tid: int) -> str:
    return f"thread {global_tid % _ID}"


def _launches(database: sqlite3.Connection) -> _Launches:
    """Return when, and on which thread, what was launched, by process and correlation id."""
    rows = database.execute("SELECT start, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME")
    return {
        (row["globalTid"] // _ID, row["correlationId"]): (row["start"], _thread(row["globalTid"]))
        for row in rows
    }


def _device_spans(
    database: sqlite3.Connection, table: str, kind: str, strings: dict[int, str], launches: _Launches
) -> Iterator[DeviceSpan]:
    for row in database.execute(f"SELECT * FROM {table} ORDER BY start"):
        name, moves = kind.lower(), False
        if kind == "KERNEL":
            name = strings.get(row["demangledName"], name)
            moves = communicates(name)
            if waits(name):
                continue
        elif kind == "MEMCPY":
            moves = row["copyKind"] == _PEER_TO_PEER
        yield DeviceSpan(
            name,
            row["start"],
            row["end"],
            f"device {row['deviceId']} stream {row['streamId']}",
            _value(row, "bytes"),
            moves,
            launches.get((row["globalPid"] // _ID, row["correlationId"])),
        )


def _value(row: sqlite3.Row, key: str) -> Any:
    return row[key] if key in row.keys() else None  # noqa: SIM118 (a Row iterates over its values)
