"""The flags of `paracore bench memory` and `throughput`: the modes, the models, the batches, the ranks."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paracore.bench import published
from paracore.bench.machine import describe_machine, machine_line
from paracore.bench.modes import BASELINE, MODES, POLICIES, Workload
from paracore.bench.training_plot import Quantity, plot
from paracore.bench.training_report import Fields, write_csv, write_json
from paracore.cli import bench_flags as flags
from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.parallel.mesh import MeshShape

_DTYPES = ("float32", "bfloat16")

Defaults = Mapping[str, Any]

TUTORIAL: Defaults = {
    "layers": [8, 16, 32, 64],
    "seq_len": [2048],
    "vocab_size": [6400],
    "hidden_size": published.HIDDEN_SIZE,
    "heads": published.HEADS,
    "kv_heads": published.KV_HEADS,
    "batch_size": 2,
    "dtype": published.DTYPE,
}
"""The tutorial's, whose figures ours are compared with."""


def add_arguments(
    parser: argparse.ArgumentParser, defaults: Callable[[str], Defaults], *, batch_policy: str
) -> None:
    """Add the flags. defaults: those of a device type; sizes that vary are lists."""
    cpu, cuda = defaults("cpu"), defaults("cuda")

    def default(name: str) -> str:
        texts = [_text(choice[name]) for choice in (cpu, cuda)]
        return f"default {texts[0]}" if texts[0] == texts[1] else f"default {texts[0]}; {texts[1]} on cuda"

    add = parser.add_argument
    described = "; ".join(f"{name}: {mode.description}" for name, mode in MODES.items())
    add("--modes", nargs="+", metavar="MODE", default=list(MODES), help=f"{described} (default: all five)")
    for name, text in (("layers", "L"), ("seq_len", "S"), ("vocab_size", "V")):
        add(_flag(name), type=int, nargs="+", metavar="N", help=f"{text}, one or several ({default(name)})")
    sizes = {
        "hidden_size": "H",
        "heads": "query heads",
        "kv_heads": "key/value heads",
        "batch_size": "sequences",
    }
    for name, text in sizes.items():
        add(_flag(name), type=int, metavar="N", help=f"{text} ({default(name)})")
    add("--intermediate-size", type=int, metavar="N", help="I (default pi * H, rounded up to 64)")
    policies = "; ".join(f"{name}: {text}" for name, text in POLICIES.items())
    add("--batch-policy", default=batch_policy, metavar="HOW", help=f"{policies} (default {batch_policy})")
    add("--dtype", help=f"of {', '.join(_DTYPES)} ({default('dtype')})")
    add("--tie-embeddings", action="store_true", help="one matrix for embedding and LM head")
    add("--ranks", type=int, default=published.RANKS, metavar="N", help="of the world (default %(default)s)")
    add("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    flags.add_outputs(parser, "csv", "plot", "json")
    parser.set_defaults(defaults=defaults)


def workloads(args: argparse.Namespace) -> list[Workload]:
    """Return every combination of the sizes asked for, all of which every mode can train.

    Raises UsageError otherwise, and for files that cannot be written.
    """
    flags.one_of("--device", args.device, ("cpu", "cuda"))
    for name in args.modes:
        flags.one_of("--modes", name, MODES)
    given = {name: value for name, value in vars(args).items() if value is not None}
    chosen = {**args.defaults(args.device), **given}
    dtype = flags.DTYPES[flags.one_of("--dtype", chosen["dtype"], _DTYPES)]
    found = [
        Workload(
            config=DecoderConfig(
                vocab_size=vocab_size,
                hidden_size=chosen["hidden_size"],
                num_layers=layers,
                num_heads=chosen["heads"],
                num_kv_heads=chosen["kv_heads"],
                intermediate_size=args.intermediate_size,
                tie_word_embeddings=args.tie_embeddings,
            ),
            seq_len=seq_len,
            batch_size=chosen["batch_size"],
            policy=args.batch_policy,
            dtype=dtype,
            ranks=args.ranks,
        )
        for layers, seq_len, vocab_size in itertools.product(
            chosen["layers"], chosen["seq_len"], chosen["vocab_size"]
        )
    ]
    for workload, name in itertools.product(found, args.modes):
        workload.require(name)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    if args.device == "cuda" and torch.cuda.device_count() < local:
        raise UsageError(f"--device cuda: {torch.cuda.device_count()} GPUs for {local} local ranks")
    flags.check_outputs(args)
    return found


def modes(args: argparse.Namespace) -> list[str]:
    """Return the modes asked for, the one that others are compared with first."""
    return sorted(dict.fromkeys(args.modes), key=lambda name: (name != BASELINE, list(MODES).index(name)))


def world(args: argparse.Namespace) -> MeshShape:
    """Return a mesh of all ranks; those of the modes are built within it."""
    return MeshShape(dp=args.ranks)


def write(
    args: argparse.Namespace, units: Mapping[str, str], rows: Sequence[Fields], quantity: Quantity
) -> None:
    """Write the files asked for."""
    machine = describe_machine(torch.device(args.device))
    if args.json:
        write_json(args.json, machine, args.case, units, rows)
    if args.csv:
        write_csv(args.csv, rows)
    if args.plot:
        path: Path = args.plot
        plot(path, f"paracore bench {args.case}, {args.ranks} ranks", machine_line(machine), rows, quantity)


def percent(value: object) -> str:
    """Return a share in percent; "-" where there is none."""
    return f"{100 * value:.1f} %" if isinstance(value, float) else "-"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
