"""The case memory of `paracore bench`."""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence

from paracore.bench.modes import BASELINE, MODES, Workload
from paracore.bench.peak_memory import measure_on_cuda, predict
from paracore.bench.training_plot import PEAK
from paracore.bench.training_report import MEMORY_UNITS, Fields, memory_rows, title
from paracore.cli import bench_flags as flags
from paracore.cli import bench_workload, exit_codes
from paracore.cli.bench_workload import TUTORIAL, percent
from paracore.cli.distributed import Rank, run_on_mesh
from paracore.cli.table import table
from paracore.errors import UsageError
from paracore.parallel.mesh import TrainingAxes
from paracore.threads import available_cores

_TIMEOUT = 600.0  # seconds that a rank waits for another


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the case."""
    bench_workload.add_arguments(parser, lambda device: TUTORIAL, batch_policy="fixed_per_rank")
    parser.add_argument(
        "--threads",
        type=int,
        help="of a rank on the CPU: native kernels have memory for each (default: cores / --ranks)",
    )


def run(args: argparse.Namespace) -> int:
    """Find the peaks, print them, and write the files asked for; return 0."""
    workloads, names = bench_workload.workloads(args), bench_workload.modes(args)
    flags.check_positive(args, "threads")
    if args.device == "cuda":
        if args.threads is not None:
            raise UsageError(f"--threads {args.threads}: of no consequence with --device cuda; leave it out")
        return _run_on_cuda(args, workloads, names)
    cores = available_cores()
    threads = args.threads or max(1, cores // args.ranks)
    print(
        f"predicted from the tensors of rank 0, which has the largest shards; {threads} threads", flush=True
    )
    jobs = list(itertools.product(workloads, names))
    peaks = dict(zip(jobs, predict(jobs, threads=threads, processes=cores), strict=True))
    _report(args, {workload: {name: peaks[workload, name] for name in names} for workload in workloads})
    return exit_codes.PASSED


def _run_on_cuda(args: argparse.Namespace, workloads: Sequence[Workload], names: Sequence[str]) -> int:
    def worker(rank: Rank) -> int:
        peaks: dict[Workload, dict[str, int]] = {workload: {} for workload in workloads}
        for name in names:
            axes = TrainingAxes.of(MODES[name].mesh(args.ranks).build("cuda"))
            for workload in workloads:
                peaks[workload][name] = measure_on_cuda(workload, name, axes, rank.device)
                gc.collect()  # a model refers to itself, and would be there in the next measurement
        if rank.is_first:
            print("measured: the most that torch's allocator had handed out, of all ranks")
            _report(args, peaks)
        return exit_codes.PASSED

    return run_on_mesh(
        worker,
        bench_workload.world(args),
        args.argv,
        device="cuda",
        timeout=_TIMEOUT,
        traceback=args.traceback,
    )


def _report(args: argparse.Namespace, peaks: Mapping[Workload, Mapping[str, int]]) -> None:
    rows: list[Fields] = []
    for workload, by_mode in peaks.items():
        own = memory_rows(workload, by_mode)
        print("", title(workload), *_lines(own), sep="\n", flush=True)
        rows += own
    bench_workload.write(args, MEMORY_UNITS, rows, PEAK)


def _lines(rows: Sequence[Fields]) -> Iterator[str]:
    titles = ["mode", "peak MiB", f"saved of {BASELINE}"]
    published = any(row["published_mib"] is not None for row in rows)
    cells = [
        [
            str(row["mode"]),
            _mib(row["peak_mib"]),
            "-" if row["mode"] == BASELINE else percent(row["saving"]),
            *([_both(row, "published_mib", _mib), _both(row, "of_published", percent)] if published else []),
        ]
        for row in rows
    ]
    yield from table([*titles, *(["published", "of published"] if published else [])], cells)
    if any(row["published_recompute_mib"] is not None for row in rows):
        yield "  after the stroke: sequence parallelism that gathers again in backward, as ours does"


def _both(row: Fields, field: str, text: object) -> str:
    """Return a published figure, and behind a stroke the one with recomputation, where there is one."""
    show = _mib if text is _mib else percent
    recompute = row[f"{field.removesuffix('_mib')}_recompute{'_mib' if field.endswith('_mib') else ''}"]
    return show(row[field]) + (f" / {show(recompute)}" if recompute is not None else "")


def _mib(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-"
