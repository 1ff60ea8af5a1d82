"""The case linear_overlap of `paracore bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch

from paracore.bench import linear_overlap
from paracore.bench.linear_overlap import COLUMNS, LEGEND, Conditions
from paracore.bench.machine import describe_machine, machine_line
from paracore.bench.parallel_layers import BOTH, LAYERS, MODELS, Layer, Model
from paracore.bench.shaped_link import check as check_link
from paracore.cli import bench_flags as flags
from paracore.errors import UsageError
from paracore.parallel.overlap import Overlap

_DIMS, _EXAMPLE = zip(*dataclasses.asdict(MODELS["small"]).items(), strict=True)
_WIDTHS = {"layer": max(map(len, LAYERS)), "direction": len(BOTH)}
_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
_SHAPES = {"cpu": ("small",), "cuda": ("7b", "70b")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the case; `run` checks their values."""
    add = parser.add_argument
    sizes = f"or {' x '.join(_DIMS)}, as in {'x'.join(map(str, _EXAMPLE))}"
    add("--tp", type=int, nargs="+", default=[2], metavar="T", help="ranks (default: 2)")
    add("--bandwidth", type=float, metavar="MB/s", help="over a shaped link of 1e6 bytes per s; needs root")
    add(
        "--ratio",
        type=float,
        help="over a shaped link on which compute takes RATIO times as long as messages",
    )
    add(
        "--shapes",
        nargs="+",
        metavar="MODEL",
        help=f"of {', '.join(MODELS)} {sizes} (default: small on CPUs)",
    )
    add("--layers", nargs="+", default=LAYERS, metavar="NAME", help=f"of {', '.join(LAYERS)} (default: all)")
    add("--chunks", type=int, metavar="N", help="parts of each rank's shard (default: by its size)")
    add("--dtype", metavar="DTYPE", help=f"of {', '.join(flags.DTYPES)} (default: float32, bfloat16 on GPUs)")
    add("--device", help="cpu or cuda (default: cuda where there are GPUs for all ranks)")
    flags.add_threads(parser)
    add("--seconds", type=float, default=60.0, help="for all samples, without warm-up (default: %(default)g)")
    add("--seed", type=int, default=0, help="of the data and of the order of turns (default: %(default)s)")
    flags.add_outputs(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Measure and report; return 0.

    Raises UsageError, before anything is measured, for arguments that cannot be served.
    """
    flags.check_positive(args, "seconds", "threads", "ratio", "bandwidth", "chunks")
    device, overlap = _device(args), Overlap(chunks=args.chunks)
    layers = _layers(args, device)
    flags.check_outputs(args)
    with flags.threads(args.threads):
        conditions = _conditions(args, device, sum(len(layer.directions) for layer in layers))
        machine = describe_machine(torch.device(device))
        print(machine_line(machine), LEGEND, sep="\n", flush=True)
        found = [result for condition in conditions for result in _measure(layers, overlap, condition)]
    if args.json:
        document = {
            "machine": machine,
            "case": args.case,
            "units": linear_overlap.UNITS,
            "chunks": args.chunks,
            "results": found,
        }
        args.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return 0


def _measure(layers: Sequence[Layer], overlap: Overlap, conditions: Conditions) -> list[dict[str, Any]]:
    """Measure, and print each row as soon as it is there: all of them may take long."""
    found: list[dict[str, Any]] = []
    for row in linear_overlap.run(layers, overlap, conditions):
        if not found or found[-1]["model"] != row["model"]:
            print("", _title(row), _line(list(COLUMNS)), sep="\n")
        print(_line([cell(row) for cell in COLUMNS.values()]), flush=True)
        found.append(row)
    return found


def _line(cells: Sequence[str]) -> str:
    widths = [max(len(title), _WIDTHS.get(title, 6)) for title in COLUMNS]
    return "  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _title(row: dict[str, Any]) -> str:
    sizes = " x ".join(f"{value} {name}" for name, value in row["model"].items())
    return (
        f"{linear_overlap.NAME}: {sizes}; {row['dtype']}, tp {row['tp']}, threads per rank "
        f"{row['threads_per_rank']}"
    )


def _device(args: argparse.Namespace) -> str:
    gpus = torch.cuda.device_count()
    name = args.device or ("cuda" if gpus >= max(args.tp) else "cpu")
    flags.one_of("--device", name, _DTYPES)
    if name == "cuda" and gpus < max(args.tp):
        raise UsageError(f"--device cuda: {gpus} GPUs for --tp {max(args.tp)}")
    if name == "cuda" and (args.bandwidth or args.ratio):
        raise UsageError("--device cuda: --bandwidth and --ratio shape the link between processes on CPUs")
    return name


def _layers(args: argparse.Namespace, device: str) -> list[Layer]:
    for name in args.layers:
        flags.one_of("--layers", name, LAYERS)
    dtype = flags.DTYPES[flags.one_of("--dtype", args.dtype or _DTYPES[device], flags.DTYPES)]
    models = [_model(args.case, text) for text in args.shapes or _SHAPES[device]]
    for model in models:
        for tp in args.tp:
            model.require(tp)
    return [Layer(name, model, dtype, args.seed) for model in models for name in args.layers]


def _model(case: str, text: str) -> Model:
    if text in MODELS:
        return MODELS[text]
    if not text[:1].isdigit():
        raise UsageError(f"--shapes {text}: unknown; choose from {', '.join(MODELS)}, or give sizes")
    return Model(*flags.shape_of(case, _DIMS, _EXAMPLE, text))


def _conditions(args: argparse.Namespace, device: str, settings: int) -> list[Conditions]:
    """Return those for each size of tp; `settings` of each share the time."""
    threads = torch.get_num_threads()
    if args.bandwidth and args.ratio:
        raise UsageError(f"--bandwidth {args.bandwidth} with --ratio {args.ratio}: give one of them")
    for tp in args.tp:
        if tp < 2:
            raise UsageError(f"--tp {tp}: one rank has nobody to send to, must be at least 2")
        if threads % tp:
            raise UsageError(f"{threads} threads cannot be divided among {tp} ranks; see --threads")
        if args.bandwidth or args.ratio:
            check_link(tp, 1e6 * (args.bandwidth or 1.0))
    return [
        Conditions(
            tp=tp,
            threads=threads,
            seconds=args.seconds / settings / len(args.tp),
            seed=args.seed,
            device_type=device,
            bandwidth=None if args.bandwidth is None else 1e6 * args.bandwidth,
            ratio=args.ratio,
        )
        for tp in args.tp
    ]
