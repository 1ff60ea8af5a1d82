"""`python -m paracore.bench.plots`: pictures of the figures that were measured, for the README.

Reads the results of benchmarks (*.json) and tables of earlier ones (*.csv) in bench/results. Of what was
measured more than once the newest counts. Each picture names its sources, with digests, in its metadata,
so that a test can tell when it is out of date. The same results make the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from paracore.bench.modes import MODES
from paracore.bench.plot import COLORS
from paracore.bench.published import PEAK_MIB, RECOMPUTE, Place
from paracore.errors import UsageError
from paracore.figure import new_figure

FOLDER = Path(__file__).parent / "results"
SOURCE = "Source"  # the key of the metadata
_BLUE, _RED, _GREEN, _YELLOW, *_ = COLORS
_GREY = "#777777"
_WIDTH, _DPI, _COLORS = 8.5, 110, 64


@dataclass(frozen=True)
class Document:
    """What one benchmark of a CPU has written."""

    path: Path
    content: Mapping[str, Any]

    @property
    def date(self) -> str:
        """When it was measured, in a form that sorts."""
        return str(self.content["machine"]["date"])

    @property
    def conditions(self) -> str:
        """The machine, for titles."""
        machine = self.content["machine"]
        cores = f"{machine['cores']} cores, {machine['threads']} threads"
        return f"{machine['cpu']} ({machine['cpu_capability']}), {cores}, torch {machine['torch']}"

    @property
    def results(self) -> Sequence[Mapping[str, Any]]:
        """The rows."""
        found: Sequence[Mapping[str, Any]] = self.content["results"]
        return found


@dataclass(frozen=True)
class Picture:
    """A figure, and the files that it shows."""

    figure: Any
    sources: Sequence[Path]

    def source(self) -> str:
        """Return what the metadata says: the sources and the first digits of their digests."""
        digests = ((path, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(self.sources))
        return ", ".join(f"{path.name} {digest[:12]}" for path, digest in digests)

    def save(self, path: Path) -> None:
        """Write it as a PNG of few colours, without matplotlib's version in it."""
        from PIL import Image  # matplotlib needs it, and imports it too
        from PIL.PngImagePlugin import PngInfo

        for axes in self.figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
        self.figure.set_dpi(_DPI)
        self.figure.canvas.draw()
        pixels = Image.fromarray(numpy.asarray(self.figure.canvas.buffer_rgba())).convert("RGB")
        text = PngInfo()
        text.add_text(SOURCE, self.source())
        pixels.quantize(_COLORS).save(path, optimize=True, pnginfo=text)


def documents(folder: Path, case: str) -> list[Document]:
    """Return the results of a case, the oldest first: those on CPUs with nothing set in the environment."""
    found = [Document(path, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    own = [
        document
        for document in found
        if document.content.get("case") == case
        and document.content["machine"]["device"] == "cpu"
        and not document.content["machine"]["environment"]
    ]
    return sorted(own, key=lambda document: document.date)


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV whose comments begin with #."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def _title(what: str, shown: Iterable[Document]) -> str:
    shown = list(shown)
    dates = sorted({document.date[:10] for document in shown})
    machines = "; ".join(sorted({document.conditions for document in shown}))
    return f"{what}\n{machines}; {' and '.join(dates)}"


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class Shown:
    """One operation of the picture, and where its rows are."""

    label: str
    case: str
    shape: tuple[int, ...]
    variant: str = "plain"
    direction: str = "forward_backward"

    def times(self, found: Sequence[Document]) -> dict[str, tuple[float, Document]]:
        """Return by dtype how many times as fast as torch our kernel was, the newest that there is."""
        return {
            row["dtype"]: (row["ratio"], document)
            for document in found
            for row in document.results
            if row["contender"] == "native"
            and tuple(row["shape"]) == self.shape
            and (row["variant"], row["direction"]) == (self.variant, self.direction)
        }


OPERATIONS = (
    Shown("RMSNorm, [8192, 4096]", "rms_norm", (8192, 4096)),
    Shown("RMSNorm with residual, [8192, 4096]", "rms_norm", (8192, 4096), "residual"),
    Shown("SwiGLU, [8192, 2432]", "swiglu", (8192, 2432)),
    Shown("rotary embedding, [4096, 1, 32 + 8, 128]", "rope", (4096, 1, 32, 8, 128)),
    Shown("cross entropy, 4096 tokens, V 32000", "cross_entropy", (4096, 32000)),
    Shown("LM head and loss, 1024 x 2048, V 32000", "linear_cross_entropy", (1024, 2048, 32000)),
    Shown("attention, causal, S 4096, D 64", "attention", (1, 8, 8, 4096, 64), "causal"),
    Shown("attention, causal, S 4096, D 128", "attention", (1, 8, 8, 4096, 128), "causal"),
    Shown("attention, window 512, S 8192 *", "attention", (1, 8, 8, 8192, 64), "window"),
    Shown("attention, 16 documents, S 8192 *", "attention", (1, 8, 8, 8192, 64), "documents"),
    Shown("AdamW, 50 million elements", "adamw", (50_000_000,), "flat", "forward"),
    Shown("norm, clip, AdamW, zeroing, likewise", "optimizer_step", (50_000_000,), "decoder", "forward"),
)
_DTYPES = {"float32": _BLUE, "bfloat16": _RED}


def operations(folder: Path) -> Picture | None:
    """How many times as fast as torch each operation is, forward and backward."""
    found = {shown: shown.times(documents(folder, shown.case)) for shown in OPERATIONS}
    found = {shown: times for shown, times in found.items() if times}
    if not found:
        return None
    used = [document for times in found.values() for _, document in times.values()]
    figure = new_figure(figsize=(_WIDTH, 0.3 * len(found) + 1.1))
    figure.suptitle(
        _title("Times as fast as eager torch, forward and backward (AdamW: one step)", used), fontsize=8
    )
    axes = figure.add_subplot()
    places = range(len(found))
    for index, (dtype, color) in enumerate(_DTYPES.items()):
        own = [(place, times[dtype][0]) for place, times in enumerate(found.values()) if dtype in times]
        bars = axes.barh(
            [place + 0.38 * (index - 0.5) for place, _ in own],
            [ratio - 1 for _, ratio in own],  # of a logarithm, so each begins at 1
            0.36,
            left=1,
            color=color,
            label=dtype,
        )
        axes.bar_label(bars, [f"{ratio:.2f}" for _, ratio in own], fontsize=7, padding=2)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_xlim(0.95, 40)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(list(places), [shown.label for shown in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        "* torch: with a dense boolean mask. AdamW in bfloat16: with float32 master and moments", fontsize=7
    )
    axes.legend(fontsize=8, loc="lower right")
    return Picture(figure, list({document.path for document in used}))


# ---------------------------------------------------------------- memory


def memory(folder: Path) -> Picture | None:
    """The peak by layers, each mode beside what is published for it."""
    tables = sorted(folder.glob("*-memory.csv"))
    if not tables:
        return None
    path = tables[-1]
    peaks = {
        (Place(*(int(row[name]) for name in Place._fields)), row["mode"]): float(row["peak_mib"])
        for row in read_table(path)
    }
    # The series that is published for every mode.
    layers = sorted({place.layers for place, _ in peaks if place[1:] == (2048, 6400, 4)})
    places = [Place(number, 2048, 6400, 4) for number in layers]
    figure = new_figure(figsize=(_WIDTH, 2.7))
    figure.suptitle(
        "Peak memory of a rank in training, GiB, and in percent of what is published for the same model\n"
        "hidden 768, S 2048, V 6400, batch 4, bfloat16, torch's AdamW, two ranks; "
        f"paracore bench memory, {path.name[:10]}; no GPU",
        fontsize=8,
    )
    for panel, mode in zip(figure.subplots(1, len(MODES), sharey=True), MODES, strict=True):
        theirs = [_published(place, mode) / 1024 for place in places]
        ours = [peaks[place, mode] / 1024 for place in places]
        panel.plot(layers, theirs, color=_GREY, marker="o", markersize=3, linestyle="--", label="published")
        panel.plot(layers, ours, color=_BLUE, marker="o", markersize=3, label="paracore")
        shares = sorted(100 * own / other for own, other in zip(ours, theirs, strict=True))
        panel.set_title(f"{mode.replace('_', ' + ')}: {shares[0]:.0f} to {shares[-1]:.0f} %", fontsize=8)
        panel.set_xticks(layers)
        panel.set_xlabel("layers", fontsize=8)
        panel.set_ylim(0, None)
        panel.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    return Picture(figure, [path])


def _published(place: Place, mode: str) -> float:
    """Return the figure for a mode; where sequence parallelism gathers again in backward, as ours does."""
    figures = PEAK_MIB[place]
    return figures[RECOMPUTE if mode == "tp_sp" and RECOMPUTE in figures else mode]


# ---------------------------------------------------------------- overlap

_LAYERS = {"qkv": "Q, K, V", "gate_up": "gate, up", "o": "attention\noutput", "down": "down"}
_RATIOS = ("1", "1.7")
_BARS = (  # hidden size, direction
    ("1024", "forward", _BLUE),
    ("1024", "forward+backward", _RED),
    ("512", "forward", "#a3bbd3"),
    ("512", "forward+backward", "#f6b2ba"),
)


def overlap(folder: Path) -> Picture | None:
    """The share of communication that linear layers hide, where products take as long, and longer."""
    tables = sorted(folder.glob("*-linear_overlap-hidden1024.csv"))[-1:]
    shares = {
        (row["ratio"], row["layer"], "1024", row["direction"]): float(row["hidden"])
        for path in tables
        for row in read_table(path)
    }
    used = [d for d in documents(folder, "linear_overlap") if d.path.stem.rpartition("ratio")[2] in _RATIOS]
    for document in used:
        ratio = document.path.stem.rpartition("ratio")[2]
        for row in document.results:
            key = ratio, row["layer"], str(row["model"]["hidden"]), row["direction"]
            shares[key] = row["figures"]["hidden"]
    if not shares or not used:
        return None
    figure = new_figure(figsize=(_WIDTH, 3.1))
    what = "Communication hidden behind products, tp=2, sequence parallel, over an emulated link"
    figure.suptitle(_title(f"{what}; one thread per rank, float32", used), fontsize=8)
    for panel, ratio in zip(figure.subplots(1, len(_RATIOS), sharey=True), _RATIOS, strict=True):
        for index, (hidden, direction, color) in enumerate(_BARS):
            own = [
                (place, 100 * shares[ratio, layer, hidden, direction])
                for place, layer in enumerate(_LAYERS)
                if (ratio, layer, hidden, direction) in shares
            ]
            bars = panel.bar(
                [place + 0.21 * (index - 1.5) for place, _ in own],
                [share for _, share in own],
                0.2,
                color=color,
                label=f"hidden {hidden}, {direction.replace('+', ' and ')}",
            )
            panel.bar_label(bars, [f"{share:.0f}" for _, share in own], fontsize=6.5, padding=1)
        panel.set_xticks(range(len(_LAYERS)), list(_LAYERS.values()), fontsize=8)
        panel.set_title(f"products asked to take {ratio} times as long as messages", fontsize=8)
        panel.set_ylim(0, 108)
    figure.axes[0].set_ylabel("% of communication", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_BARS), fontsize=7)
    return Picture(figure, [*tables, *(document.path for document in used)])


# ---------------------------------------------------------------- fuse

_TURNS = {
    "eager": _GREY,
    "fused": _BLUE,
    "products by torch": _YELLOW,
    "products by paracore": _GREEN,
}


def fuse(folder: Path) -> Picture | None:
    """A training step of transformers' Qwen3 as it is and fused: time and memory."""
    found = documents(folder, "fuse")
    rows = {row["dtype"]: (row, document) for document in found for row in document.results}
    rows = {dtype: rows[dtype] for dtype in _DTYPES if dtype in rows}
    if not rows:
        return None
    used = [document for _, document in rows.values()]
    model = next(iter(rows.values()))[0]["model"]
    shape = (
        f"{model['layers']} layers, hidden {model['hidden']}, V {model['vocabulary']}, S {model['sequence']}"
    )
    figure = new_figure(figsize=(_WIDTH, 3.0))
    what = "A training step of transformers' Qwen3, as it is and after paracore.fuse"
    figure.suptitle(_title(f"{what}; {shape}", used), fontsize=8)
    seconds, peaks = figure.subplots(1, 2)
    _fuse_panel(seconds, rows, lambda row: {k: v["median"] for k, v in row["seconds"].items()}, "s", "{:.2f}")
    seconds.set_yscale("log")
    seconds.set_ylim(bottom=1)
    _fuse_panel(peaks, rows, lambda row: row["peak_mib"], "MiB beyond the parameters", "{:.0f}")
    handles, labels = seconds.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7)
    return Picture(figure, list({document.path for document in used}))


def _fuse_panel(
    axes: Any,
    rows: Mapping[str, tuple[Mapping[str, Any], Document]],
    values: Callable[[Mapping[str, Any]], Mapping[str, float]],
    unit: str,
    text: str,
) -> None:
    for index, (name, color) in enumerate(_TURNS.items()):
        own = [(place, values(row)) for place, (row, _) in enumerate(rows.values())]
        own = [(place, found) for place, found in own if name in found]
        heights = [found[name] for _, found in own]
        bars = axes.bar([p + 0.21 * (index - 1.5) for p, _ in own], heights, 0.2, color=color, label=name)
        axes.bar_label(bars, [text.format(height) for height in heights], fontsize=7, padding=1)
    axes.set_xticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.margins(y=0.1)


PICTURES: Mapping[str, Callable[[Path], Picture | None]] = {
    "operations.png": operations,
    "memory.png": memory,
    "overlap.png": overlap,
    "fuse.png": fuse,
}


def draw(folder: Path, out: Path) -> list[Path]:
    """Draw every picture that there are results for, and return the files.

    folder: where the results are. Raises UsageError where there are none.
    """
    pictures = {name: make(folder) for name, make in PICTURES.items()}
    if not any(pictures.values()):
        raise UsageError(f"--results {folder}: has no results, must be bench/results of a checkout")
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        if picture is not None:
            picture.save(out / name)
    return [out / name for name, picture in pictures.items() if picture is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print the files."""
    parser = argparse.ArgumentParser(
        prog="python -m paracore.bench.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=FOLDER, help="(default: bench/results)")
    parser.add_argument("--out", type=Path, default=FOLDER / "plots", help="(default: bench/results/plots)")
    options = parser.parse_args(arguments)
    print("\n".join(map(str, draw(options.results, options.out))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
