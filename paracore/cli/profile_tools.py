"""The command lines of Nsight Systems and Nsight Compute, one report per rank."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paracore.errors import UsageError
from paracore.trace import DOMAIN, MEASURED, RECORDED

_NAMES = {
    "nsys": "Nsight Systems (https://developer.nvidia.com/nsight-systems)",
    "ncu": "Nsight Compute (https://developer.nvidia.com/nsight-compute)",
}


def require(tool: str) -> None:
    """Raise UsageError, with what to do instead, where a tool is not installed."""
    if shutil.which(tool) is None:
        raise UsageError(
            f"--tool {tool}: there is no {tool} on the PATH; install {_NAMES[tool]}, or use --tool torch, "
            "which needs nothing and records the same ranges"
        )


def command_line(tool: str, report: Path) -> list[str]:
    """Return what goes before the command of a rank, so that `report` (without ending) is of that rank.

    nsys records from one step before the measured ones on, ncu these alone. Under ncu, which runs each kernel
    many times over, collectives are left alone: they would wait for ranks that are elsewhere.
    """
    if tool == "nsys":
        return [
            *["nsys", "profile", "--output", str(report), "--force-overwrite", "true"],
            *["--trace", "cuda,nvtx,osrt", "--sample", "none", "--cpuctxsw", "none"],
            *["--capture-range", "nvtx", "--nvtx-capture", f"{RECORDED}@{DOMAIN}"],
            *["--capture-range-end", "stop"],
        ]
    return [
        *["ncu", "--export", str(report), "--force-overwrite", "--target-processes", "all"],
        *["--nvtx", "--nvtx-include", f"{DOMAIN}@{MEASURED}/"],
        *["--kernel-name", "regex:^(?!nccl)", "--set", "full"],
    ]


def run_under(tool: str, argv: Sequence[str], folder: Path, rank: int) -> int:
    """Run `paracore` with these arguments under a tool and return its exit status.

    A rank that a launcher has started becomes the tool, and so keeps the process that the launcher watches.
    """
    line = [*command_line(tool, folder / f"rank{rank}"), sys.executable, "-m", "paracore", *argv]
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(line[0], line)
    return subprocess.run(line, check=False).returncode


def export(report: Path) -> Path:
    """Let nsys write what it recorded as an SQLite file beside the report; return that."""
    path = report.with_suffix(".sqlite")
    line = [
        "nsys",
        "export",
        "--type",
        "sqlite",
        "--force-overwrite",
        "true",
        "--output",
        str(path),
        str(report),
    ]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    if done.returncode != 0 or not path.is_file():
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(f"{report}: nsys cannot export it ({said[-1] if said else 'it says nothing'})")
    return path
