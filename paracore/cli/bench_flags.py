"""What the cases of `paracore bench` share: outputs, threads, and checks of values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from paracore.bench.case import format_shape
from paracore.errors import UsageError
from paracore.figure import picture_formats

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def add_outputs(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add those of the flags --json, --csv and --plot that are named."""
    texts = {
        "json": "write all there is to know",
        "csv": "write the results as a table",
        "plot": "draw the results; the ending chooses the format",
    }
    for name in names:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=texts[name])


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add --threads."""
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU (default: torch's)")


def one_of(argument: str, value: str, allowed: Iterable[str]) -> str:
    """Return `value`; raise UsageError unless it is allowed."""
    if value not in allowed:
        raise UsageError(f"{argument} {value}: unknown; choose from {', '.join(allowed)}")
    return value


def shape_of(case: str, dims: Sequence[str], example: Sequence[int], text: str) -> tuple[int, ...]:
    """Return the numbers of `text`, as in 8x4; raise UsageError unless there is one for each of `dims`."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or text.count("x") + 1 != len(dims):
        raise UsageError(
            f"--shapes {text}: {case} takes {' x '.join(dims)}, each at least 1, "
            f"as in {format_shape(example)}"
        )
    return tuple(map(int, text.split("x")))


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UsageError unless the numbers called so are greater than 0, where they are given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not value > 0:  # also refuses nan
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be greater than 0")


def check_outputs(args: argparse.Namespace) -> None:
    """Raise UsageError unless every file can be written, and none overwrites another."""
    outputs = {f"--{name}": path for name in ("json", "csv", "plot") if (path := getattr(args, name, None))}
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
    plot = outputs.get("--plot")
    if plot and plot.suffix.removeprefix(".") not in picture_formats():
        raise UsageError(f"--plot {plot}: must end in one of {', '.join(sorted(picture_formats()))}")


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
