"""Prove that the model cut over the mesh equals the dense one.

Compares forward, backward and a run of AdamW, each also with the dense run in float64, and ends
with status 1 when the parallel run is less exact than the rules of paracore.verdict allow.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paracore.cli import exit_codes, flags
from paracore.cli.distributed import Rank, run_on_mesh
from paracore.cli.table import table
from paracore.validation import ValidationSettings, validate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `paracore validate`."""
    flags.add_mesh_flags(parser)
    flags.add_model_flags(parser, vocab_size=6400, layers=6, seq_len=256, batch_size=2)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="AdamW steps (default 20)")
    parser.add_argument(
        "--log-every", type=int, default=10, metavar="K", help="compare every K steps (default 10)"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (default 0)")
    parser.add_argument(
        "--mask",
        default="causal",
        metavar="WHICH",
        help="causal, window:N (a token sees N with itself), or packed: documents of uneven lengths "
        "(default causal)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")


def run(args: argparse.Namespace) -> int:
    """Run `paracore validate` and return its exit status."""
    shape = flags.mesh_shape(args)
    flags.positive(args.lr, flag="--lr")
    settings = ValidationSettings(
        model=flags.decoder_config(args),
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        dtype=flags.torch_dtype(args.dtype),
        steps=args.steps,
        log_every=args.log_every,
        lr=args.lr,
        seed=args.seed,
        mask=args.mask,
        layout=args.layout,
        strategy=args.strategy,
        zero=args.zero,
        sequence_parallel=args.sequence_parallel,
        vocab_parallel=args.vocab_parallel,
        overlap=flags.overlap(args),
    )
    if args.json is not None:
        flags.writable(args.json, flag="--json")

    def worker(rank: Rank) -> int:
        report = validate(settings, rank.axes, rank.device)
        if report is None:
            return exit_codes.PASSED
        print("\n".join(report_lines(report)), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(_json_values(report), indent=1, allow_nan=False) + "\n")
        return exit_codes.PASSED if report["passed"] else exit_codes.FAILED

    return run_on_mesh(
        worker, shape, args.argv, device=args.device, timeout=args.timeout, traceback=args.traceback
    )


def _json_values(value: Any) -> Any:
    """Return `value` with NaN and infinities, which JSON lacks, as the strings "nan", "inf", "-inf"."""
    if isinstance(value, dict):
        return {key: _json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the report as text for a terminal."""
    config, forward, backward = report["config"], report["forward"], report["backward"]
    optimizer, float64 = report["optimizer"], report["float64"]
    yield f"{_mesh(config)} against dense, {config['dtype']}, {config['mask']} mask"
    yield ""
    yield "forward"
    yield f"  max logits difference   {forward['max_logit_diff']:.6e}"
    yield f"  loss difference         {forward['loss_diff']:.6e}"
    for name in ("logits", "loss"):
        yield f"  {name + ' error to float64':24}{_errors(float64[name])}"
    yield ""
    yield from _backward_lines(backward, float64["parameters"])
    if optimizer["trace"]:
        yield ""
        yield from _optimizer_lines(optimizer, float64["trace"])
    yield ""
    yield "communication of one step, forward to gradient sync"
    yield from table(
        ("phase", "kind", "axis", "count", "bytes"),
        [(r["phase"], r["kind"], r["axis"], str(r["count"]), str(r["bytes"])) for r in report["comm"]],
    )
    if report["memory"]:
        yield ""
        yield "bytes held by this rank between steps, padding included"
        rows = [(r["kind"], str(r["bytes"]), str(r["formula"] or "")) for r in report["memory"]]
        yield from table(("kind", "bytes", "formula"), rows)
    yield ""
    yield from (f"FAILED  {failure}" for failure in report["failures"])
    yield (
        "passed"
        if report["passed"]
        else f"failed: {len(report['failures'])} differences beyond what is allowed"
    )


def _mesh(config: dict[str, Any]) -> str:
    axes = [f"tp={config['tp']}"]
    axes += [name.replace("_", " ") for name in ("sequence_parallel", "vocab_parallel") if config[name]]
    if config["overlap"]:
        axes.append(f"overlap ({config['overlap']})")
    if config["cp"] > 1:
        axes.append(f"cp={config['cp']} ({config['layout']} layout, {config['strategy']})")
    if config["dp"] > 1:
        axes.append(f"dp={config['dp']}")
    if config["zero"] is not None:
        axes.append(f"ZeRO stage {config['zero']}")
    return ", ".join(axes)


def _errors(row: dict[str, float]) -> str:
    return f"parallel {row['parallel']:.3e}, dense {row['dense']:.3e}, allowed {row['limit']:.3e}"


def _backward_lines(backward: dict[str, Any], exact: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "backward"
    yield f"  max gradient difference {backward['max_grad_diff']:.6e}"
    rows = [
        (p["name"], p["placement"], *_figures(p, "mean", "max", "rel_l2"), *_figures(e, "parallel", "dense"))
        for p, e in zip(backward["parameters"], exact, strict=True)
    ]
    titles = ("parameter", "placement", "mean", "max", "rel L2", "to float64", "dense to float64")
    yield from table(titles, rows)


def _optimizer_lines(optimizer: dict[str, Any], exact: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "AdamW, logits"
    rows = [
        (str(p["step"]), *_figures(p, "mean", "max", "rel_l2", "limit"), *_figures(e, "parallel", "dense"))
        for p, e in zip(optimizer["trace"], exact, strict=True)
    ]
    yield from table(("step", "mean", "max", "rel L2", "allowed", "to float64", "dense to float64"), rows)
    yield f"  max final parameter difference {optimizer['max_param_diff']:.6e}"
    yield f"  (worst of the perturbed dense runs {optimizer['perturbed_max_param_diff']:.6e})"


def _figures(row: dict[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(f"{row[key]:.3e}" for key in keys)
