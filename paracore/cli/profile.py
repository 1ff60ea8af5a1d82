"""Profile training steps of a command: time per range, and how much communication hid behind compute.

    paracore profile -- paracore train --tp 2 --cp 2
    paracore profile --tool nsys -- paracore train --device cuda --tp 8
    paracore profile --read DIR

After a warm-up a few steps are recorded on every rank: DIR/rank0.json and so on, of torch.profiler (open
them at https://ui.perfetto.dev), or DIR/rank0.nsys-rep and .sqlite; summary.json and timeline.png lie beside
them. Ranges are those of paracore.trace; `--tool nvtx` emits them for a profiler that you attach yourself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from paracore import trace
from paracore.cli import exit_codes, flags, profile_tools
from paracore.cli.profile_report import memory_lines, report_lines
from paracore.errors import UsageError
from paracore.profiling import traces
from paracore.profiling.memory import MemoryRecorder
from paracore.profiling.session import NvtxRecorder, StepWindow, TorchRecorder
from paracore.profiling.summary import as_json, summarize
from paracore.profiling.timeline import draw_timeline

_COMMANDS = ("train", "validate")
_TOOLS = ("torch", "nsys", "ncu", "nvtx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `paracore profile`."""
    add = parser.add_argument
    add("--tool", choices=_TOOLS, default="torch", help="torch.profiler (default), or Nsight's")
    add("--memory", action="store_true", help="account for memory by range, in place of time")
    add("--out", type=Path, default=Path("profile_out"), metavar="DIR", help="default profile_out")
    add("--warm-up", type=int, default=3, metavar="N", help="steps before the measured ones (default 3)")
    add("--steps", type=int, default=2, metavar="N", help="steps to measure (default 2)")
    add("--read", type=Path, metavar="DIR", help="only read the traces there, or one trace")
    # What local ranks are started with: they record, and who started them reports.
    add("--as-rank", action="store_true", help=argparse.SUPPRESS)
    add("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="paracore train or validate ...")


def run(args: argparse.Namespace) -> int:
    """Run `paracore profile` and return its exit status."""
    if args.read is not None:
        return _report(args.read, traces.find_traces(args.read))
    command = _command(args.command_line)
    _check(args)
    inner = _parse(command)
    if args.memory and inner.zero == 3:
        raise UsageError(
            "--memory with --zero 3: FSDP2 resizes its buffers where no account of tensors sees it; use "
            "--zero 1 or 2, or torch.cuda.memory's snapshots"
        )
    world = flags.mesh_shape(inner).world_size
    inner.argv = ["profile", "--as-rank", *_options(args, args.tool), "--", *command]
    if "RANK" in os.environ:
        status = _record(args, inner, int(os.environ["RANK"]))
        if os.environ["RANK"] == "0" and not args.as_rank:
            print(f"traces are in {args.out}: paracore profile --read {args.out}")
        return status
    with _quiet_profiler():
        status = _record(args, inner, 0) if world == 1 else inner.run(inner)
    if status != exit_codes.PASSED or args.as_rank:
        return status
    return _finish(args, world)


def _parse(command: Sequence[str]) -> argparse.Namespace:
    from paracore.cli.main import build_parser  # not above: it imports this module

    return build_parser().parse_args(command)


def _command(line: Sequence[str]) -> list[str]:
    """Return the arguments of the paracore command to profile; raise UsageError for any other."""
    words = list(line[1:] if line[:1] == ["--"] else line)
    given = words[1:] if words and Path(words[0]).name == "paracore" else words
    if not given or given[0] not in _COMMANDS:
        raise UsageError(
            f"-- {' '.join(words) or '(nothing)'}: give a command that trains, as in `paracore profile -- "
            "paracore train --tp 2`; your own script records itself within paracore.trace.enabled(...), and "
            "under torchrun goes `torchrun ... -m paracore profile -- train ...`"
        )
    return given


def _check(args: argparse.Namespace) -> None:
    for name, least in (("warm_up", 0), ("steps", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.memory and args.tool != "torch":
        raise UsageError(f"--memory with --tool {args.tool}: memory is accounted for without a profiler")
    if args.tool in ("nsys", "ncu"):
        profile_tools.require(args.tool)
    if args.tool != "torch":
        trace.NvtxRanges()  # refuses before anything starts where the package is missing
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {args.out}: cannot be made a folder ({error.strerror})") from error
    flags.writable(args.out / "summary.json", flag="--out")


def _options(args: argparse.Namespace, tool: str) -> list[str]:
    numbers = ["--warm-up", str(args.warm_up), "--steps", str(args.steps)]
    return ["--tool", tool, *["--memory"] * args.memory, "--out", str(args.out), *numbers]


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Let torch.profiler's library say nothing when it starts and stops, unless the user wants to hear it."""
    added = "KINETO_LOG_LEVEL" not in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        yield
    finally:
        if added:
            del os.environ["KINETO_LOG_LEVEL"]


# ---------------------------------------------------------------- on each rank


def _record(args: argparse.Namespace, inner: argparse.Namespace, rank: int) -> int:
    """Run the command as this rank, and record its steps."""
    if args.tool in ("nsys", "ncu"):
        command = inner.argv[inner.argv.index("--") :]
        again = ["profile", "--as-rank", *_options(args, "nvtx"), *command]
        return profile_tools.run_under(args.tool, again, args.out, rank)
    with contextlib.ExitStack() as stack:
        sinks, window = _sinks(args, rank, stack)
        stack.enter_context(trace.enabled(*sinks, window))
        status: int = inner.run(inner)
    if status == exit_codes.PASSED:
        window.require_done()
    return status


def _sinks(
    args: argparse.Namespace, rank: int, stack: contextlib.ExitStack
) -> tuple[list[trace.Sink], StepWindow]:
    if args.memory:
        memory = MemoryRecorder(traces.trace_path(args.out, rank, ".memory.json"))
        return [memory], StepWindow(memory, args.warm_up, args.steps, lead_in=0)
    if args.tool == "nvtx":
        nvtx = trace.NvtxRanges()
        return [nvtx], StepWindow(NvtxRecorder(nvtx), args.warm_up, args.steps)
    ranges = trace.TorchRanges()
    stack.callback(ranges.close)
    return [ranges], StepWindow(TorchRecorder(traces.trace_path(args.out, rank)), args.warm_up, args.steps)


# ---------------------------------------------------------------- afterwards


def _finish(args: argparse.Namespace, world: int) -> int:
    """Report on the traces that the ranks have left."""
    if args.memory:
        paths = traces.require_ranks(args.out, world, ".memory.json")
        print("\n".join(memory_lines([json.loads(path.read_text())["ranges"] for path in paths])))
        return exit_codes.PASSED
    if args.tool == "nvtx":
        return exit_codes.PASSED  # whoever listened has the ranges
    if args.tool == "ncu":
        for path in traces.require_ranks(args.out, world, ".ncu-rep"):
            print(f"ncu --import {path} --page details")
        return exit_codes.PASSED
    if args.tool == "nsys":
        for path in traces.require_ranks(args.out, world, ".nsys-rep"):
            profile_tools.export(path)
    suffix = traces.NSYS if args.tool == "nsys" else traces.TORCH
    return _report(args.out, traces.require_ranks(args.out, world, suffix))


def _report(place: Path, paths: Sequence[Path]) -> int:
    """Print the report on traces; write summary.json and timeline.png beside them."""
    found = traces.read_traces(paths)
    ranks = [summarize(each) for each in found]
    print("\n".join(report_lines(ranks)))
    folder = place if place.is_dir() else place.parent
    (folder / "summary.json").write_text(json.dumps(as_json(ranks), indent=1, allow_nan=False) + "\n")
    draw_timeline(found, folder / "timeline.png")
    print(f"all figures: {folder / 'summary.json'}; one step: {folder / 'timeline.png'}")
    return exit_codes.PASSED
