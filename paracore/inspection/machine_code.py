"""What the compiler made of one kernel: its resources and instructions, read from the binary."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paracore.inspection.disassembly import (
    Instruction,
    count_classes,
    hottest_loop,
    parse_amdgcn,
    parse_sass,
)


@dataclass(frozen=True)
class Measurement:
    """The figures of one compiled kernel.

    registers: per thread (AMD: vector registers, accumulation registers included).
    spill_bytes: per thread. NVIDIA: stack frame and local memory; Triton's kernels use them for
        nothing else. AMD: scratch memory, and 4 bytes per spilled register, scalar registers included
        although those go to vector registers and not to memory.
    shared_bytes: per program, including the 1,024 bytes that CUDA reserves on sm_90 and newer.
    matrix_instructions, async_copies: in the whole kernel.
    loop_instructions: by class in the hottest loop, see `disassembly.hottest_loop`; `total` is their sum.
    loop_async_copies: asynchronous copies in that loop.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix_instructions: int
    async_copies: int
    loop_instructions: dict[str, int]
    loop_async_copies: int

    @classmethod
    def of(
        cls, instructions: Sequence[Instruction], *, registers: int, spill_bytes: int, shared_bytes: int
    ) -> Measurement:
        """Count the instructions and join the counts with the compiler's figures."""
        loop = hottest_loop(instructions)
        return cls(
            registers=registers,
            spill_bytes=spill_bytes,
            shared_bytes=shared_bytes,
            matrix_instructions=sum(instruction.kind == "matrix" for instruction in instructions),
            async_copies=sum(instruction.asynchronous_copy for instruction in instructions),
            loop_instructions=count_classes(loop),
            loop_async_copies=sum(instruction.asynchronous_copy for instruction in loop),
        )


def parse_resource_usage(text: str) -> dict[str, dict[str, int]]:
    """Read what `cuobjdump -res-usage` prints: each function's REG, STACK, SHARED, LOCAL, ..."""
    usages = {}
    for match in re.finditer(r"Function\s+(\S+):\s*\n\s*(\S.*)", text):
        usages[match[1]] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", match[2])}
    return usages


def measure_cubin(cubin: bytes, cuobjdump: str, *, dynamic_shared_bytes: int = 0) -> dict[str, Measurement]:
    """Measure each function of an NVIDIA binary; `cuobjdump` is that tool's path.

    dynamic_shared_bytes: shared memory that is asked for at launch, hence not in the binary.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = _output_of(cuobjdump, "-res-usage", "-sass", str(path))
    usages, functions = parse_resource_usage(text), parse_sass(text)
    return {
        name: Measurement.of(
            functions[name],
            registers=usage["REG"],
            spill_bytes=usage["STACK"] + usage["LOCAL"],
            shared_bytes=usage["SHARED"] + dynamic_shared_bytes,
        )
        for name, usage in usages.items()
    }


def measure_amdgcn(assembly: str, *, shared_bytes: int) -> Measurement:
    """Measure the one kernel of an AMD assembly text, whose metadata carries the compiler's figures."""

    def metadata(key: str) -> int:
        match = re.search(rf"^[\s-]*\.{key}:\s+(\d+)", assembly, re.MULTILINE)
        if match is None:
            raise ValueError(f"the assembly's metadata have no .{key}")
        return int(match[1])

    spilled = metadata("vgpr_spill_count") + metadata("sgpr_spill_count")
    return Measurement.of(
        parse_amdgcn(assembly),
        registers=metadata("vgpr_count"),
        spill_bytes=max(4 * spilled, metadata("private_segment_fixed_size")),
        shared_bytes=shared_bytes,
    )


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
