"""`paracore bench CASE`: times the implementations of one operation against each other and the machine."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from paracore.bench import zero_overlap
from paracore.bench.case import DIRECTIONS, Case, Contender, Setting, compiled, format_shape
from paracore.bench.cases import CASES
from paracore.bench.machine import describe_machine, machine_line
from paracore.bench.plot import plot, plot_formats
from paracore.bench.report import LEGEND, format_table, write_csv, write_json
from paracore.bench.results import Refusal, Result
from paracore.bench.runner import Options, run_setting
from paracore.errors import UsageError

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES = sorted((*CASES, zero_overlap.NAME))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `paracore bench`; `run` checks their values."""
    add = parser.add_argument
    add("case", metavar="CASE", help=f"what to measure: {', '.join(_NAMES)}")
    add("--impl", nargs="+", metavar="NAME", help="contenders beside the baseline (default: all)")
    add("--compile", action="store_true", help="also the baseline under torch.compile")
    add("--shapes", nargs="+", metavar="AxB", help="as in 8192x4096 (default: the case's)")
    add("--dtype", nargs="+", metavar="DTYPE", help=f"of {', '.join(_DTYPES)} (default: the case's)")
    add("--direction", nargs="+", metavar="WAY", help=f"of {', '.join(DIRECTIONS)} (default: the case's)")
    add("--variant", nargs="+", metavar="NAME", help="of the case's variants (default: all)")
    add("--device", help="cpu, cuda or cuda:N (default: cuda where there is a GPU)")
    add("--threads", type=int, help="threads of torch on the CPU (default: torch's)")
    add("--seconds", type=float, default=60.0, help="for all samples, without warm-up (default: %(default)g)")
    add("--seed", type=int, default=0, help="of the data and of the order of turns (default: %(default)s)")
    add(
        "--memory-limit",
        type=int,
        metavar="MIB",
        help="for a set of rotated inputs (default: 1/4 of what is free)",
    )
    add("--json", type=Path, metavar="FILE", help="write all there is to know")
    add("--csv", type=Path, metavar="FILE", help="write the results as a table")
    add("--plot", type=Path, metavar="FILE", help="draw the results; the ending chooses the format")


def run(args: argparse.Namespace) -> int:
    """Measure and report; return 1 if a contender named by --impl refused or nothing was measured, else 0.

    Raises UsageError, before anything is measured, for arguments that cannot be served.
    """
    if _one_of("CASE", args.case, _NAMES) == zero_overlap.NAME:
        return _run_overlap(args)
    case = CASES[args.case]
    settings = _settings(case, args)
    contenders = _contenders(case, args)
    _check_numbers(args)
    _check_outputs(args)
    options = Options.for_device(
        settings[0].device,
        seconds=args.seconds / len(settings),
        seed=args.seed,
        memory_limit=None if args.memory_limit is None else args.memory_limit * 2**20,
    )
    with _threads(args.threads):
        return _measure_and_report(case, settings, contenders, options, args)


def _run_overlap(args: argparse.Namespace) -> int:
    """It has ranks that report, in place of contenders that are timed, and so a report of its own."""
    for name in ("impl", "compile", "dtype", "direction", "variant", "device", "memory_limit", "csv", "plot"):
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')}: {args.case} does not take it")
    dims, default = zip(*dataclasses.asdict(zero_overlap.Model()).items(), strict=True)
    shapes = [_shape(args.case, dims, default, text) for text in args.shapes or ()] or [default]
    models = [zero_overlap.Model(*shape) for shape in shapes]
    _check_numbers(args)
    _check_outputs(args)
    with _threads(args.threads):
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
    given = [_shape(case.name, case.dims, case.shapes[0], text) for text in args.shapes or ()]
    shapes = given or case.shapes
    dtypes = (
        [_DTYPES[_one_of("--dtype", name, _DTYPES)] for name in args.dtype] if args.dtype else case.dtypes
    )
    directions = [_one_of("--direction", name, case.directions) for name in args.direction or case.directions]
    variants = [_one_of("--variant", name, case.variants) for name in args.variant or case.variants]
    return [
        Setting(shape, dtype, direction, variant, device)
        for shape, dtype, direction, variant in itertools.product(shapes, dtypes, directions, variants)
    ]


def _contenders(case: Case, args: argparse.Namespace) -> dict[str, Contender]:
    """Return the chosen contenders; the baseline is always one, as the others are compared with it."""
    chosen = {_one_of("--impl", name, case.contenders) for name in args.impl or case.contenders}
    found = {name: case.contenders[name] for name in case.contenders if name in {case.baseline, *chosen}}
    if args.compile:
        found[f"{case.baseline}_compiled"] = compiled(case.contenders[case.baseline])
    return found


def _one_of(argument: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise UsageError(f"{argument} {value}: unknown; choose from {', '.join(allowed)}")
    return value


def _shape(case: str, dims: Sequence[str], example: Sequence[int], text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or text.count("x") + 1 != len(dims):
        raise UsageError(
            f"--shapes {text}: {case} takes {' x '.join(dims)}, each at least 1, "
            f"as in {format_shape(example)}"
        )
    return tuple(map(int, text.split("x")))


def _device(text: str | None) -> torch.device:
    gpus = torch.cuda.device_count()
    if text is None:
        text = "cuda" if gpus else "cpu"
    known = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{index}" for index in range(gpus))]
    return torch.device(_one_of("--device", text, known))


def _check_numbers(args: argparse.Namespace) -> None:
    """Check that sizes and times are positive."""
    for argument, value in (
        ("--seconds", args.seconds),
        ("--threads", args.threads),
        ("--memory-limit", args.memory_limit),
    ):
        if value is not None and not value > 0:  # also refuses nan
            raise UsageError(f"{argument} {value}: must be greater than 0")


def _check_outputs(args: argparse.Namespace) -> None:
    """Check that every file can be written, and that none overwrites another."""
    outputs = {f"--{name}": path for name in ("json", "csv", "plot") if (path := getattr(args, name))}
    for argument, path in outputs.items():
        if list(outputs.values()).count(path) > 1:
            raise UsageError(f"{argument} {path}: each output needs a file of its own")
        try:
            existed = path.exists()
            path.open("a").close()  # the one sure way to know; permissions alone do not tell
            if not existed:
                path.unlink()
        except OSError as error:
            raise UsageError(f"{argument} {path}: cannot be written ({error.strerror})") from error
    if args.plot and args.plot.suffix.removeprefix(".") not in plot_formats():
        raise UsageError(f"--plot {args.plot}: must end in one of {', '.join(sorted(plot_formats()))}")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
