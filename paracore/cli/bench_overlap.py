"""The case zero_overlap of `paracore bench`: it has ranks that report, in place of contenders to be timed."""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch

from paracore.bench import zero_overlap
from paracore.bench.machine import describe_machine, machine_line
from paracore.cli import bench_flags as flags

_DIMS, _DEFAULT = zip(*dataclasses.asdict(zero_overlap.Model()).items(), strict=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the case; `run` checks their values."""
    add = parser.add_argument
    add(
        "--shapes",
        nargs="+",
        metavar="AxB",
        help=f"{' x '.join(_DIMS)}, as in {'x'.join(map(str, _DEFAULT))}",
    )
    flags.add_threads(parser)
    add("--seconds", type=float, default=60.0, help="for all samples, without warm-up (default: %(default)g)")
    add("--seed", type=int, default=0, help="of the data (default: %(default)s)")
    flags.add_outputs(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Measure and report; return 0.

    Raises UsageError, before anything is measured, for arguments that cannot be served.
    """
    shapes = [flags.shape_of(args.case, _DIMS, _DEFAULT, text) for text in args.shapes or ()] or [_DEFAULT]
    models = [zero_overlap.Model(*shape) for shape in shapes]
    flags.check_positive(args, "seconds", "threads")
    flags.check_outputs(args)
    with flags.threads(args.threads):
        machine, threads = describe_machine(torch.device("cpu")), torch.get_num_threads()
        print(machine_line(machine), flush=True)
        found = []
        for model in models:
            seconds = args.seconds / len(models)
            found.append(zero_overlap.run(model, threads=threads, seconds=seconds, seed=args.seed))
            print("", zero_overlap.format_report(found[-1]), sep="\n", flush=True)
    if args.json:
        document = {"machine": machine, "case": args.case, "units": zero_overlap.UNITS, "results": found}
        args.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return 0
