"""The case fuse of `paracore bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paracore.bench import fuse
from paracore.bench.machine import describe_machine, machine_line
from paracore.cli import bench_flags as flags
from paracore.cli import exit_codes
from paracore.cli.table import table
from paracore.errors import UsageError

_DTYPES = tuple(name for name, dtype in flags.DTYPES.items() if dtype in fuse.LOSS_LIMITS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the case; `run` checks their values."""
    add = parser.add_argument
    for field in dataclasses.fields(fuse.Model):
        add(
            f"--{field.name.replace('_', '-')}",
            type=int,
            default=field.default,
            help="(default: %(default)s)",
        )
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--dtype", nargs="+", default=_DTYPES, help=f"of weights (default: {' '.join(_DTYPES)})")
    flags.add_threads(parser)
    add(
        "--seconds",
        type=float,
        default=60.0,
        help=f"for the rounds of each dtype, without warm-up; at least {fuse.MIN_ROUNDS} are taken "
        "(default: %(default)g)",
    )
    add("--seed", type=int, default=0, help="of weights and tokens (default: %(default)s)")
    flags.add_outputs(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Measure and report; return 1 if the fused model computes something else, else 0.

    Raises UsageError, before anything is measured, for arguments that cannot be served.
    """
    flags.check_positive(args, "seconds", "threads")
    model = fuse.Model(*(getattr(args, field.name) for field in dataclasses.fields(fuse.Model)))
    device = torch.device(flags.one_of("--device", args.device, ("cpu", "cuda")))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU")
    dtypes = [flags.DTYPES[flags.one_of("--dtype", name, _DTYPES)] for name in args.dtype]
    flags.check_outputs(args)
    found = []
    with flags.threads(args.threads):
        machine = describe_machine(device)
        print(machine_line(machine), flush=True)
        for dtype in dtypes:
            found.append(fuse.run(model, dtype, device, seconds=args.seconds, seed=args.seed))
            print("", _format(found[-1]), sep="\n", flush=True)
    if args.json:
        options = {"seconds": args.seconds, "seed": args.seed}
        document = {
            "machine": machine,
            "case": args.case,
            "options": options,
            "units": fuse.UNITS,
            "results": found,
        }
        args.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return exit_codes.PASSED if all(result["passed"] for result in found) else exit_codes.FAILED


def _format(found: Mapping[str, Any]) -> str:
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    shape = ", ".join(f"{name} {value}" for name, value in found["model"].items())
    yield f"{fuse.NAME}, {found['dtype']}: {shape}"
    yield f"  {found['rounds']} rounds; eager's attention: {found['attention']}"
    eager = found["seconds"][fuse.EAGER]["median"]
    titles = ["", "median ms", "p25", "p75", "of eager", "peak MiB"]
    yield from table(titles, [_row(found, name, eager) for name in found["seconds"]])
    ratio, limit = _times(found["ratio"]), _times(found["limit"])
    yield f"  fused is {ratio} as fast; if all but the products took no time, it would be {limit}"
    if fuse.OWN_PRODUCTS in found["seconds"]:
        own, torchs = (found["seconds"][name]["median"] for name in (fuse.OWN_PRODUCTS, fuse.PRODUCTS))
        yield (
            f"  this CPU has no units for {found['dtype']}: products by torch take {torchs / eager:.2f} of "
            f"eager's time, and {torchs / own:.1f} times as long as by way of float32"
        )
    peaks = found["peak_mib"]
    yield f"  peak beyond the parameters: {peaks[fuse.FUSED] / peaks[fuse.EAGER]:.2f} of eager's"
    differs = ", ".join(
        f"{name} off by {'nothing finite' if value is None else format(value, '.1e')} "
        f"(allowed {found['allowed'][name]:.0e})"
        for name, value in found["difference"].items()
    )
    yield f"  {'PASSED' if found['passed'] else 'FAILED'}: loss {found['loss'][fuse.EAGER]}; {differs}"
    yield f"  {found['replaced']} modules were replaced, {len(found['left'])} left" + "".join(
        f"\n    {entry['name']}: {entry['reason']}" for entry in found["left"]
    )


def _row(found: Mapping[str, Any], name: str, eager: float) -> list[str]:
    seconds, peak = found["seconds"][name], found["peak_mib"].get(name)
    milliseconds = [f"{1e3 * seconds[key]:.1f}" for key in ("median", "p25", "p75")]
    return [name, *milliseconds, f"{seconds['median'] / eager:.3f}", "-" if peak is None else f"{peak:.1f}"]


def _times(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f}) times"
