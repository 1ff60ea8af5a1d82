"""The case throughput of `paracore bench`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from paracore.bench import throughput
from paracore.bench.machine import describe_machine, machine_line
from paracore.bench.modes import BASELINE, MODES
from paracore.bench.training_plot import THROUGHPUT
from paracore.bench.training_report import THROUGHPUT_UNITS, Fields, throughput_rows, title
from paracore.cli import bench_flags as flags
from paracore.cli import bench_workload, exit_codes
from paracore.cli.bench_workload import TUTORIAL, Defaults
from paracore.cli.distributed import Rank, run_on_mesh
from paracore.cli.table import table
from paracore.errors import UsageError
from paracore.parallel.mesh import TrainingAxes

_LAPTOP: Defaults = {
    "layers": [4],
    "seq_len": [256],
    "vocab_size": [1024],
    "hidden_size": 256,
    "heads": 8,
    "kv_heads": 4,
    "batch_size": 4,
    "dtype": "float32",
}
_GPU: Defaults = {**TUTORIAL, "layers": [8, 32], "batch_size": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the case."""
    bench_workload.add_arguments(
        parser, lambda device: _GPU if device == "cuda" else _LAPTOP, batch_policy="fixed_global"
    )
    add = parser.add_argument
    add("--steps", type=int, default=20, metavar="N", help="measured, of each mode (default %(default)s)")
    add("--warmup", type=int, default=3, metavar="N", help="steps before (default %(default)s)")
    add("--seed", type=int, default=0, help="of weights, tokens and the order of turns (default %(default)s)")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="longest wait for another rank (default 600)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the files asked for; return the exit status."""
    workloads, names = bench_workload.workloads(args), bench_workload.modes(args)
    flags.check_positive(args, "steps", "timeout")
    if args.warmup < 0:
        raise UsageError(f"--warmup {args.warmup}: must be at least 0")

    def worker(rank: Rank) -> int:
        axes = {name: TrainingAxes.of(MODES[name].mesh(args.ranks).build(rank.device.type)) for name in names}
        if rank.is_first:
            print(machine_line(describe_machine(rank.device)), flush=True)
        rows: list[Fields] = []
        for workload in workloads:
            samples = throughput.measure(
                workload, axes, rank.device, steps=args.steps, warmup=args.warmup, seed=args.seed
            )
            own = throughput_rows(workload, samples)
            if rank.is_first:
                print("", title(workload), *_lines(own), sep="\n", flush=True)
            rows += own
        if rank.is_first:
            bench_workload.write(args, THROUGHPUT_UNITS, rows, THROUGHPUT)
        return exit_codes.PASSED

    return run_on_mesh(
        worker,
        bench_workload.world(args),
        args.argv,
        device=args.device,
        timeout=args.timeout,
        traceback=args.traceback,
    )


def _lines(rows: Sequence[Fields]) -> Iterator[str]:
    titles = ("mode", "thousand tokens/s", f"of {BASELINE}", "ms per step", "p20", "p80")
    cells = [
        (
            str(row["mode"]),
            f"{row['thousand_tokens_per_s']:.4g}",
            "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
            *(f"{row[name]:.2f}" for name in ("median_ms", "p20_ms", "p80_ms")),
        )
        for row in rows
    ]
    yield from table(titles, cells)
    yield f"  {rows[0]['steps']} steps of each mode, in turn; of a step the time of the slowest rank"
