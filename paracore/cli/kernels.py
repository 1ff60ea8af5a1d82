"""`paracore kernels`: compile every kernel without a GPU, and hold it against its requirements."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paracore
from paracore.cli import exit_codes, flags
from paracore.errors import UsageError
from paracore.inspection.cuda import NVCC_ARCHITECTURES, find_nvcc, inspect_cuda
from paracore.inspection.report import Row, format_table, missed_requirements
from paracore.inspection.worker import CATALOGUE, Job, default_cache_folder, inspect, load_catalogue
from paracore.kernels.configuration import TARGETS

CUDA_SOURCES = Path(paracore.__file__).resolve().parent.parent / "csrc" / "cuda"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    parser.add_argument(
        "--target",
        action="append",
        choices=list(TARGETS),
        help="architecture; may be repeated (default: all)",
    )
    parser.add_argument(
        "--kernel", action="append", metavar="NAME", help="kernel; may be repeated (default: all)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="compile N at a time (default: %(default)s)",
    )
    parser.add_argument("--no-cache", action="store_true", help="compile anew, and keep nothing")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_folder(),
        metavar="DIR",
        help="where measurements are kept (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Compile, print the table, and return 1 if a kernel misses a requirement or does not compile, else 0.

    Raises UsageError if a flag's value makes no sense or Triton is missing.
    """
    if args.jobs is None or args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}; expected at least 1")
    if args.json is not None:
        flags.writable(args.json, flag="--json")  # before minutes of compiling, not after
    if importlib.util.find_spec("triton") is None:
        raise UsageError("triton is not installed, and the kernels are compiled with it: pip install triton")
    targets = args.target or list(TARGETS)
    cache = None if args.no_cache else args.cache_dir
    rows = _triton_rows(targets, args.kernel, args.jobs, cache)
    if args.kernel is None:
        rows += _cuda_rows(targets, args.jobs)
    print(format_table(rows))
    missed = sum(bool(row.missed) for row in rows)
    print(f"{len(rows)} configurations compiled, {missed} missed a requirement; cache: {cache or 'none'}")
    if args.json is not None:
        args.json.write_text(json.dumps({"kernels": [row.as_json() for row in rows]}, indent=1) + "\n")
    return exit_codes.FAILED if missed else exit_codes.PASSED


def _triton_rows(targets: list[str], kernels: list[str] | None, jobs: int, cache: Path | None) -> list[Row]:
    """One row per configuration and target, in the catalogue's order."""
    requirements = {
        Job(target, configuration.kernel_name, configuration.name): configuration.requirements
        for target in targets
        for configuration in load_catalogue(CATALOGUE)(TARGETS[target])
    }
    known = sorted({job.kernel for job in requirements})
    for kernel in kernels or ():
        if kernel not in known:
            raise UsageError(f"--kernel is {kernel!r}; expected one of {', '.join(known)}")
    wanted = [job for job in requirements if kernels is None or job.kernel in kernels]
    rows = {}
    for result in inspect(wanted, workers=jobs, cache=cache):
        job, measurement = result.job, result.measurement
        missed = (
            (result.error,) if measurement is None else missed_requirements(measurement, requirements[job])
        )
        rows[job] = Row(job.kernel, job.config, job.target, measurement, missed)
    return [rows[job] for job in wanted]


def _cuda_rows(targets: list[str], jobs: int) -> list[Row]:
    """One row per kernel of csrc/cuda and target; none where there are no sources, or no nvcc."""
    sources = sorted(CUDA_SOURCES.glob("*.cu"))
    nvcc = find_nvcc()
    if not sources:
        return []
    if nvcc is None:
        print(f"nvcc is not on the path: {', '.join(source.name for source in sources)} not compiled")
        return []
    pairs = [(source, target) for source in sources for target in NVCC_ARCHITECTURES if target in targets]
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda pair: inspect_cuda(pair[0], pair[1], nvcc), pairs)
        return [row for rows in found for row in rows]
