"""`paracore bench CASE`: measures speed and memory, against others and against the machine's limits.

`paracore bench` alone lists the cases; `paracore bench CASE --help` says what a case takes.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

from paracore.bench import fuse, linear_overlap, peak_memory, throughput, zero_overlap
from paracore.bench.cases import CASES
from paracore.cli import (
    bench_fuse,
    bench_linear_overlap,
    bench_memory,
    bench_operations,
    bench_overlap,
    bench_throughput,
    exit_codes,
)


class _Command(NamedTuple):
    """A case: what it measures, its flags, and what runs it."""

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _commands() -> dict[str, _Command]:
    commands = {
        fuse.NAME: _Command(fuse.__doc__ or "", bench_fuse.add_arguments, bench_fuse.run),
        linear_overlap.NAME: _Command(
            linear_overlap.__doc__ or "", bench_linear_overlap.add_arguments, bench_linear_overlap.run
        ),
        "memory": _Command(peak_memory.__doc__ or "", bench_memory.add_arguments, bench_memory.run),
        "throughput": _Command(
            throughput.__doc__ or "", bench_throughput.add_arguments, bench_throughput.run
        ),
        zero_overlap.NAME: _Command(
            zero_overlap.__doc__ or "", bench_overlap.add_arguments, bench_overlap.run
        ),
    }
    for name, case in CASES.items():
        description = getattr(inspect.getmodule(case), "__doc__", None) or ""
        add_arguments = functools.partial(bench_operations.add_arguments, case=case)
        commands[name] = _Command(description, add_arguments, bench_operations.run)
    return dict(sorted(commands.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each case; `run` checks the values of its flags."""
    cases = parser.add_subparsers(dest="case", metavar="CASE", title="cases")
    for name, command in _commands().items():
        case = cases.add_parser(
            name,
            help=command.description.partition("\n")[0],
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(case)
        case.add_argument(
            "--traceback",
            action="store_true",
            default=argparse.SUPPRESS,  # it may stand before CASE as well, and is to be kept then
            help="when something fails, show where",
        )
        case.set_defaults(run_case=command.run)


def run(args: argparse.Namespace) -> int:
    """Measure and report, and return the exit status; without a case, list them all.

    Raises UsageError, before anything is measured, for arguments that cannot be served.
    """
    if args.case is None:
        commands = _commands()
        width = max(map(len, commands))
        for name, command in commands.items():
            print(f"{name:{width}}  {command.description.partition(chr(10))[0]}")
        return exit_codes.PASSED
    status: int = args.run_case(args)
    return status
