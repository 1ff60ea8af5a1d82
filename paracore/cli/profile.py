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
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paracore import trace
from paracore.cli import exit_codes, flags, profile_tools
from paracore.cli.profile_report import memory_lines, report_lines
from paracore.errors import UsageError
from paracore.profiling import traces
from paracore.profiling.memory import MemoryRecorder
from paracore.profiling.session import NvtxRecorder, StepWindow, TorchRecorder, require_steps
from paracore.profiling.summary import as_json, summarize
from paracore.profiling.timeline import draw_timeline

_COMMANDS = ("train", "validate")
_TOOLS = ("torch", "nsys", "ncu", "nvtx")
_NSIGHT = ("nsys", "ncu")
_DEFAULTS = {"tool": "torch", "out": Path("profile_out"), "warm_up": 3, "steps": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `paracore profile`."""
    add = parser.add_argument
    # Without defaults, which are `_DEFAULTS`: beside --read, what is given tells from what is not.
    add("--tool", choices=_TOOLS, help="torch.profiler (default), or Nsight's")
    add("--memory", action="store_true", help="account for memory by range, in place of time")
    add("--out", type=Path, metavar="DIR", help="default profile_out")
    add("--warm-up", type=int, metavar="N", help="steps before the measured ones (default 3)")
    add("--steps", type=int, metavar="N", help="steps to measure (default 2)")
    add("--read", type=Path, metavar="DIR", help="only read the traces there, or one trace")
    # What local ranks are started with: they record, and who started them reports.
    add("--as-rank", action="store_true", help=argparse.SUPPRESS)
    add("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="paracore train or validate ...")


def run(args: argparse.Namespace) -> int:
    """Run `paracore profile` and return its exit status."""
    if args.read is not None:
        _require_alone(args)
        return _report(args.read, traces.find_traces(args.read))
    for name, default in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    command = _command(args.command_line)
    inner = _parse(command)
    _check(args, inner.steps)
    if args.memory and inner.zero == 3:
        raise UsageError(
            "--memory with --zero 3: FSDP2 resizes its buffers where no account of tensors sees it; use "
            "--zero 1 or 2, or torch.cuda.memory's snapshots"
        )
    world = flags.mesh_shape(inner).world_size
    inner.argv = ["profile", "--as-rank", *_options(args, args.tool), "--", *command]
    # Here, since no rank writes before all have met in what follows; on each of a launcher's hosts.
    if not args.as_rank and args.tool != "nvtx" and os.environ.get("LOCAL_RANK", "0") == "0":
        traces.remove_old(args.out, "memory" if args.memory else args.tool)
    if "RANK" in os.environ:
        return _record_for_launcher(args, inner, int(os.environ["RANK"]))
    with _quiet_profiler():
        status = _record(args, inner, 0) if world == 1 else inner.run(inner)
    if status == exit_codes.PASSED:
        return _finish(args, world)
    if args.tool in _NSIGHT and status != exit_codes.INTERRUPTED:
        # It may be the tool's own, which means something else than ours.
        print(
            f"paracore: error: the command under {args.tool} ended with status {status}; what it or "
            f"{args.tool} had to say is above",
            file=sys.stderr,
        )
        return exit_codes.CRASHED
    return status


def _require_alone(args: argparse.Namespace) -> None:
    """Refuse beside --read what has no meaning there."""
    given = [f"--{name.replace('_', '-')}" for name in _DEFAULTS if getattr(args, name) is not None]
    given += ["--memory"] * args.memory + [" ".join(args.command_line)] * bool(args.command_line)
    if given:
        raise UsageError(f"--read {args.read} with {', '.join(given)}: nothing is run; give --read alone")


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


def _check(args: argparse.Namespace, steps: int) -> None:
    """Raise UsageError for what cannot be done; steps: how many the command takes."""
    for name, least in (("warm_up", 0), ("steps", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    require_steps(steps, args.warm_up, args.steps)
    if args.memory and args.tool != "torch":
        raise UsageError(f"--memory with --tool {args.tool}: memory is accounted for without a profiler")
    if args.tool in _NSIGHT:
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


def _record_for_launcher(args: argparse.Namespace, inner: argparse.Namespace, rank: int) -> int:
    """Do what `_record` does; say where the traces are, unless the ranks' starter reports itself."""
    status = _record(args, inner, rank)
    if status == exit_codes.PASSED and rank == 0 and not args.as_rank:
        if args.memory:
            print(f"accounts of memory are in {args.out}")
        elif args.tool == "torch":
            print(f"traces are in {args.out}: paracore profile --read {args.out}")
    return status


def _record(args: argparse.Namespace, inner: argparse.Namespace, rank: int) -> int:
    """Run the command as this rank, and record its steps."""
    if args.tool in _NSIGHT:
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
        memory = MemoryRecorder(traces.trace_path(args.out, rank, traces.MEMORY))
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
        paths = traces.require_ranks(args.out, world, traces.MEMORY)
        print("\n".join(memory_lines([json.loads(path.read_text())["ranges"] for path in paths])))
        return exit_codes.PASSED
    if args.tool == "nvtx":
        return exit_codes.PASSED  # whoever listened has the ranges
    if args.tool == "ncu":
        for path in traces.require_ranks(args.out, world, traces.NCU):
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
    if place.is_dir():
        traces.require_world(place, found)
    ranks = [summarize(each) for each in found]
    print("\n".join(report_lines(ranks)))
    folder = place if place.is_dir() else place.parent
    (folder / "summary.json").write_text(json.dumps(as_json(ranks), indent=1, allow_nan=False) + "\n")
    draw_timeline(found, folder / "timeline.png")
    print(f"all figures: {folder / 'summary.json'}; one step: {folder / 'timeline.png'}")
    return exit_codes.PASSED
