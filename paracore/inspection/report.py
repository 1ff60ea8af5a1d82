"""Holds measurements against requirements, and prints both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paracore.inspection.machine_code import Measurement
from paracore.kernels.configuration import Requirements


@dataclass(frozen=True)
class Row:
    """One configuration on one target. `missed`: the requirements it misses, in words; empty if none."""

    kernel: str
    config: str
    target: str
    measurement: Measurement | None
    missed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Flatten into one object; a kernel that did not compile has no figures, only `missed`."""
        figures = {} if self.measurement is None else asdict(self.measurement)
        names = {"kernel": self.kernel, "config": self.config, "target": self.target}
        return names | figures | {"missed": list(self.missed)}


def missed_requirements(measurement: Measurement, requirements: Requirements) -> tuple[str, ...]:
    """Return the requirements that the machine code misses, each with both numbers."""
    missed = []
    limit = requirements.max_spill_bytes
    if limit is not None and measurement.spill_bytes > limit:
        missed.append(f"spills {measurement.spill_bytes} bytes, at most {limit} allowed")
    count = measurement.matrix_instructions
    if requirements.matrix_instructions is True and count == 0:
        missed.append("no matrix instructions, at least 1 required")
    if requirements.matrix_instructions is False and count > 0:
        missed.append(f"{count} matrix instructions, none allowed")
    if requirements.loop_async_copies and measurement.loop_async_copies == 0:
        missed.append("no asynchronous copies in the hottest loop, at least 1 required")
    limit, total = requirements.max_loop_instructions, measurement.loop_instructions["total"]
    if limit is not None and total > limit:
        missed.append(f"{total} instructions in the hottest loop, at most {limit} allowed")
    limit = requirements.max_shared_bytes
    if limit is not None and measurement.shared_bytes > limit:
        missed.append(f"{measurement.shared_bytes} bytes of shared memory, at most {limit} allowed")
    return tuple(missed)


_HEADER = ("target", "kernel", "configuration", "regs", "spill", "shared", "matrix", "async", "hottest loop")
_KINDS = {
    "matrix": "mat",
    "memory": "mem",
    "float": "flt",
    "integer": "int",
    "special": "sfu",
    "control": "ctl",
}


def format_table(rows: Sequence[Row]) -> str:
    """Lay rows out as text: bytes for spill and shared, instruction counts for matrix, async and the loop."""
    lines = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = []
    for line, row in zip(lines, [None, *rows], strict=True):
        cells = [
            cell.ljust(width) if column < 3 or column == 8 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
        text.extend(f"    MISSED: {reason}" for reason in (row.missed if row else ()))
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    names = (row.target, row.kernel, row.config)
    measured = row.measurement
    if measured is None:
        return (*names, "-", "-", "-", "-", "-", "did not compile")
    loop = measured.loop_instructions
    kinds = " ".join(f"{short} {loop[kind]}" for kind, short in _KINDS.items() if loop[kind])
    figures = (
        measured.registers,
        measured.spill_bytes,
        measured.shared_bytes,
        measured.matrix_instructions,
        measured.async_copies,
    )
    return (*names, *map(str, figures), f"{loop['total']}: {kinds}")
