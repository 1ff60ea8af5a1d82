"""The cases of `paracore bench` that time the implementations of one operation against each other."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch

from paracore.bench.case import Case, Contender, Setting, compiled
from paracore.bench.cases import CASES
from paracore.bench.machine import describe_machine, machine_line
from paracore.bench.plot import plot
from paracore.bench.report import LEGEND, format_table, write_csv, write_json
from paracore.bench.results import Refusal, Result
from paracore.bench.runner import Options, run_setting
from paracore.cli import bench_flags as flags


def add_arguments(parser: argparse.ArgumentParser, case: Case) -> None:
    """Add the flags of a case; `run` checks their values."""
    add = parser.add_argument
    example = "x".join(map(str, case.shapes[0]))
    add("--impl", nargs="+", metavar="NAME", help=f"of {', '.join(case.contenders)} (default: all)")
    add("--compile", action="store_true", help=f"also {case.baseline}, the baseline, under torch.compile")
    add("--shapes", nargs="+", metavar="AxB", help=f"{' x '.join(case.dims)}, as in {example}")
    add("--dtype", nargs="+", metavar="DTYPE", help=f"of {', '.join(flags.DTYPES)} (default: the case's)")
    add("--direction", nargs="+", metavar="WAY", help=f"of {', '.join(case.directions)} (default: all)")
    add("--variant", nargs="+", metavar="NAME", help=f"of {', '.join(case.variants)} (default: all)")
    add("--device", help="cpu, cuda or cuda:N (default: cuda where there is a GPU)")
    flags.add_threads(parser)
    add("--seconds", type=float, default=60.0, help="for all samples, without warm-up (default: %(default)g)")
    add("--seed", type=int, default=0, help="of the data and of the order of turns (default: %(default)s)")
    add(
        "--memory-limit",
        type=int,
        metavar="MIB",
        help="for a set of rotated inputs (default: 1/4 of what is free)",
    )
    flags.add_outputs(parser, "json", "csv", "plot")


def run(args: argparse.Namespace) -> int:
    """Measure and report; return 1 if a contender named by --impl refused or nothing was measured, else 0.

    Raises UsageError, before anything is measured, for arguments that cannot be served.
    """
    case = CASES[args.case]
    settings = _settings(case, args)
    contenders = _contenders(case, args)
    flags.check_positive(args, "seconds", "threads", "memory_limit")
    flags.check_outputs(args)
    options = Options.for_device(
        settings[0].device,
        seconds=args.seconds / len(settings),
        seed=args.seed,
        memory_limit=None if args.memory_limit is None else args.memory_limit * 2**20,
    )
    with flags.threads(args.threads):
        return _measure_and_report(case, settings, contenders, options, args)


def _measure_and_report(
    case: Case,
    settings: Sequence[Setting],
    contenders: dict[str, Contender],
    options: Options,
    args: argparse.Namespace,
) -> int:
    machine = describe_machine(settings[0].device)
    print(machine_line(machine), LEGEND, sep="\n", flush=True)
    rows: list[Result] = []
    refusals: list[Refusal] = []
    for setting in settings:
        measured, refused = run_setting(case, setting, contenders, options)
        print("", format_table(case.name, setting, measured, refused), sep="\n", flush=True)
        rows += measured
        refusals += refused
    if args.json:
        used = {"seconds_per_setting": options.seconds, "seed": options.seed}
        write_json(args.json, machine, case.name, used, rows, refusals)
    if args.csv:
        write_csv(args.csv, rows, refusals)
    if args.plot:
        plot(args.plot, f"paracore bench {case.name}", machine_line(machine), rows, case.bound)
    return int(not rows or any(refused.contender in (args.impl or ()) for refused in refusals))


def _settings(case: Case, args: argparse.Namespace) -> list[Setting]:
    device = _device(args.device)
    given = [flags.shape_of(case.name, case.dims, case.shapes[0], text) for text in args.shapes or ()]
    shapes = given or case.shapes
    dtypes = (
        [flags.DTYPES[flags.one_of("--dtype", name, flags.DTYPES)] for name in args.dtype]
        if args.dtype
        else case.dtypes
    )
    directions = [
        flags.one_of("--direction", name, case.directions) for name in args.direction or case.directions
    ]
    variants = [flags.one_of("--variant", name, case.variants) for name in args.variant or case.variants]
    return [
        Setting(shape, dtype, direction, variant, device)
        for shape, dtype, direction, variant in itertools.product(shapes, dtypes, directions, variants)
    ]


def _contenders(case: Case, args: argparse.Namespace) -> dict[str, Contender]:
    """Return the chosen contenders; the baseline is always one, as the others are compared with it."""
    chosen = {flags.one_of("--impl", name, case.contenders) for name in args.impl or case.contenders}
    found = {name: case.contenders[name] for name in case.contenders if name in {case.baseline, *chosen}}
    if args.compile:
        found[f"{case.baseline}_compiled"] = compiled(case.contenders[case.baseline])
    return found


def _device(text: str | None) -> torch.device:
    gpus = torch.cuda.device_count()
    if text is None:
        text = "cuda" if gpus else "cpu"
    known = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{index}" for index in range(gpus))]
    return torch.device(flags.one_of("--device", text, known))
