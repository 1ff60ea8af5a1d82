"""Compiles the CUDA sources with nvcc, for GPUs that are not there, and measures the machine code."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from paracore.inspection.machine_code import measure_cubin
from paracore.inspection.report import Row, missed_requirements
from paracore.kernels.configuration import Requirements

# The "a" variants carry the instructions of one architecture alone (wgmma, tcgen05), as Triton's targets do.
NVCC_ARCHITECTURES = {"sm_80": "sm_80", "sm_90": "sm_90a", "sm_100": "sm_100a"}


def find_nvcc() -> str | None:
    """Return nvcc's path, or None where there is no CUDA toolkit."""
    return shutil.which("nvcc")


def inspect_cuda(source: Path, target: str, nvcc: str) -> list[Row]:
    """Compile a .cu file for one of `NVCC_ARCHITECTURES`: a row per kernel, or one that says why not.

    CUDA kernels must not spill. They are compiled alone, as nothing in csrc/cuda includes torch's headers.
    """
    from triton import knobs  # only here: the command line is imported where there is no Triton, too

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = [nvcc, "-cubin", f"-arch={NVCC_ARCHITECTURES[target]}", "-O3", "-std=c++17", "-Xptxas=-v"]
        compiled = subprocess.run(
            [*command, "-o", str(cubin), str(source)], capture_output=True, text=True, check=False
        )
        if compiled.returncode != 0:
            return [Row(source.name, "nvcc", target, None, (compiled.stderr.strip()[-2000:],))]
        functions = measure_cubin(cubin.read_bytes(), knobs.nvidia.cuobjdump.path)  # Triton's wheel has one
    # A stack frame is no spill here: printf takes its arguments there.
    spills = parse_spills(compiled.stderr)
    functions = {name: replace(found, spill_bytes=spills[name]) for name, found in functions.items()}
    return [
        Row(name, source.name, target, measurement, missed_requirements(measurement, Requirements()))
        for name, measurement in sorted(functions.items())
    ]


def parse_spills(text: str) -> dict[str, int]:
    """Read what `ptxas -v` prints: the bytes that each function spills per thread."""
    pattern = r"Function properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores"
    return {match[1]: int(match[2]) for match in re.finditer(pattern, text)}
