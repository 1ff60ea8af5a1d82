"""Loss curves: their rows, as CSV and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paracore.figure import new_figure


class LossRow(NamedTuple):
    """One row of loss.csv: losses in nats per token, means over the steps since the row before."""

    step: int
    loss: float
    held_out_loss: float
    tokens_per_s: float


def write_losses(rows: Sequence[LossRow], path: Path) -> None:
    """Write the rows as CSV, with a header."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(LossRow._fields)
        writer.writerows(rows)


def plot_losses(curves: Mapping[str, Sequence[LossRow]], path: Path) -> None:
    """Draw the training and held-out loss of each named run over the steps, as a PNG at `path`."""
    figure = new_figure(figsize=(8, 5), dpi=120)
    axes = figure.add_subplot()
    for index, (name, rows) in enumerate(curves.items()):
        steps = [row.step for row in rows]
        # Equal runs coincide: the wide pale curve below stays visible under the thin dark one.
        width, alpha = (6.0, 0.35) if index else (1.5, 1.0)
        axes.plot(
            steps, [row.loss for row in rows], f"C{index}", lw=width, alpha=alpha, label=f"{name}, training"
        )
        axes.plot(
            steps,
            [row.held_out_loss for row in rows],
            f"C{index}--",
            lw=width,
            alpha=alpha,
            label=f"{name}, held out",
        )
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Byte-level language model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
