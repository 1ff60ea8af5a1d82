"""What `nsys export` writes, made by hand with known times; without torch, since a stand-in for nsys runs it.

The tables are those of the SQLite schema that Nsight Systems documents, with the columns that matter and some
that do not; no nsys has written them.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

MS = 1_000_000  # ns

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER,
    int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
"""
_CUDA_SCHEMA = """
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
    eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
    returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
"""
PID, TID = 4242, 4243
GLOBAL_PID = PID << 24
GLOBAL_TID = GLOBAL_PID | TID
_PUSH_POP, _DOMAIN_CREATE = 59, 75
_OURS, _NCCL = 3, 2  # domains


class NsysExport:
    """An .sqlite file in the making; times in ms."""

    def __init__(self, path: Path, *, cuda: bool = True) -> None:
        self.path, self._strings, self._correlation = path, 0, 0
        # Without journal and waits for the disk: this file needs to outlive nothing.
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
        self._database.executescript(_SCHEMA + (_CUDA_SCHEMA if cuda else ""))
        for domain, name in ((_OURS, "paracore"), (_NCCL, "NCCL")):
            made = {"start": 0, "eventType": _DOMAIN_CREATE, "globalTid": GLOBAL_TID}
            self._insert("NVTX_EVENTS", **made, text=name, domainId=domain)

    def range(
        self, name: str, begin: float, end: float | None, *, domain: int = _OURS, bytes_: int | None = None
    ) -> None:
        """Add a pushed and popped range, its message a registered string."""
        self._insert(
            "NVTX_EVENTS",
            start=round(begin * MS),
            end=None if end is None else round(end * MS),
            eventType=_PUSH_POP,
            textId=self._string(name),
            domainId=domain,
            globalTid=GLOBAL_TID,
            int64Value=bytes_,
        )

    def foreign_range(self, name: str, begin: float, end: float) -> None:
        """Add a range of another library's domain."""
        self.range(name, begin, end, domain=_NCCL)

    def kernel(self, name: str, launched: float, begin: float, end: float, stream: int = 7) -> None:
        """Add a kernel and its launch."""
        string = self._string(name)
        self._insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            **self._activity(launched, begin, end, stream),
            demangledName=string,
            shortName=string,
        )

    def copy(self, kind: int, launched: float, begin: float, end: float, bytes_: int, stream: int) -> None:
        """Add a copy of a kind as ENUM_CUDA_MEMCPY_OPER numbers them, and its launch."""
        place = self._activity(launched, begin, end, stream)
        self._insert("CUPTI_ACTIVITY_KIND_MEMCPY", **place, bytes=bytes_, copyKind=kind)

    def _activity(self, launched: float, begin: float, end: float, stream: int) -> dict[str, int]:
        self._correlation += 1
        self._insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=round(launched * MS),
            end=round(launched * MS) + 1000,
            eventClass=0,
            globalTid=GLOBAL_TID,
            correlationId=self._correlation,
            nameId=self._string("cudaLaunchKernel"),
            returnValue=0,
        )
        return {
            "start": round(begin * MS),
            "end": round(end * MS),
            "deviceId": 0,
            "contextId": 1,
            "streamId": stream,
            "correlationId": self._correlation,
            "globalPid": GLOBAL_PID,
        }

    def _string(self, text: str) -> int:
        self._strings += 1
        self._insert("StringIds", id=self._strings, value=text)
        return self._strings

    def _insert(self, table: str, **row: Any) -> None:
        columns, places = ", ".join(row), ", ".join("?" * len(row))
        self._database.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", list(row.values()))
