"""Train a byte-level language model on real text, cut over the mesh.

By default the text is the source code of Python's standard library. Writes loss.csv and loss.png
into the folder given by --out; with --compare-dense the first rank also trains the dense model on
the same batches (dense_loss.csv), both curves are drawn, and a table compares the two runs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from paracore.checkpoint import gather_copies
from paracore.cli import exit_codes, flags
from paracore.cli.distributed import Rank, run_on_mesh
from paracore.cli.loss_curve import LossRow, plot_losses, write_losses
from paracore.cli.table import table
from paracore.data import BYTE_VOCABULARY, ByteCorpus, standard_library_sources
from paracore.difference import Difference, worst_difference
from paracore.errors import UsageError
from paracore.nn.decoder import Decoder
from paracore.nn.sequence import SequenceContext
from paracore.parallel.layout import parse_layout
from paracore.parallel.masks import causal
from paracore.parallel.mesh import TrainingAxes
from paracore.threads import all_cores
from paracore.training import Trainer

_HELD_OUT_BATCHES = 4
_MAX_GRADIENT_NORM = 1.0
_MASK = causal()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `paracore train`."""
    flags.add_mesh_flags(parser)
    flags.add_model_flags(parser, vocab_size=BYTE_VOCABULARY, layers=4, seq_len=128, batch_size=8)
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="default: Python's standard library"
    )
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="optimizer steps (default 300)")
    parser.add_argument("--log-every", type=int, default=20, metavar="K", help="steps per row (default 20)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at its peak (default 0.003)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and the order of the text (default 0)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("train_out"), metavar="DIR", help="default train_out"
    )
    parser.add_argument("--compare-dense", action="store_true", help="train the dense model beside it")


def run(args: argparse.Namespace) -> int:
    """Run `paracore train` and return its exit status."""
    shape = flags.mesh_shape(args)
    flags.decoder_config(args)
    flags.overlap(args)
    for name in ("steps", "log_every"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.vocab_size < BYTE_VOCABULARY:
        raise UsageError(f"--vocab-size {args.vocab_size}: bytes need at least {BYTE_VOCABULARY}")
    corpus = ByteCorpus(args.text or standard_library_sources(), args.seq_len)
    flags.positive(args.lr, flag="--lr")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {args.out}: cannot be made a folder ({error.strerror})") from error
    flags.writable(args.out / "loss.csv", flag="--out")
    return run_on_mesh(
        lambda rank: _train(args, corpus, rank),
        shape,
        args.argv,
        device=args.device,
        timeout=args.timeout,
        traceback=args.traceback,
    )


def _train(args: argparse.Namespace, corpus: ByteCorpus, rank: Rank) -> int:
    runs = {_mesh(rank.axes): TrainingRun(args, corpus, rank.axes, rank.device)}
    if args.compare_dense and rank.is_first:
        alone, sequences = TrainingAxes.alone(), args.batch_size * rank.axes.dp.size
        cuts = {"zero": None, "sequence_parallel": False, "vocab_parallel": False, "overlap": None}
        dense = argparse.Namespace(**vars(args) | cuts | {"batch_size": sequences})
        runs["dense"] = TrainingRun(dense, corpus, alone, rank.device)
    main = next(iter(runs.values()))
    tokens = len(main.sequence.layout.ranks[rank.axes.cp.rank])
    overlap = main.trainer.model.describe_overlap(args.batch_size, tokens)
    if overlap is not None and rank.is_first:
        print(f"overlap: {overlap}", flush=True)
    # On a terminal only (disable=None), and of one rank only.
    progress = tqdm(total=args.steps, unit="step", disable=None if rank.is_first else True)
    for step in range(args.steps):
        main.step(step)
        if "dense" in runs:
            with all_cores():
                runs["dense"].step(step)
        if rank.is_first and main.rows and main.rows[-1].step == step + 1:
            _write_losses(args.out, runs)  # as they come: an interrupted run keeps what it has
        progress.update()
        progress.set_postfix_str(f"loss {main.last_loss:.3f}", refresh=False)
    progress.close()
    if args.compare_dense:
        _compare(runs, main.trainer, rank)
    if rank.is_first:
        plot_losses({name: run.rows for name, run in runs.items()}, args.out / "loss.png")
        last = main.rows[-1]
        print(f"step {last.step}: loss {last.loss:.4f}, held out {last.held_out_loss:.4f} nats per byte")
        print(f"loss curve: {args.out / 'loss.png'}")
    return exit_codes.PASSED


def _mesh(axes: TrainingAxes) -> str:
    others = [f", {axis.name}={axis.size}" for axis in (axes.cp, axes.dp) if axis.size > 1]
    return f"tp={axes.tp.size}" + "".join(others)


class TrainingRun:
    """One model's way through the text, with a row of losses every `--log-every` steps."""

    def __init__(
        self, args: argparse.Namespace, corpus: ByteCorpus, axes: TrainingAxes, device: torch.device
    ) -> None:
        self.args, self.corpus, self.axes, self.device = args, corpus, axes, device
        model = Decoder(
            flags.decoder_config(args),
            axes.tp,
            axes.cp,
            seed=args.seed,
            device=device,
            dtype=flags.torch_dtype(args.dtype),
            sequence_parallel=args.sequence_parallel,
            vocab_parallel=args.vocab_parallel,
            overlap=flags.overlap(args),
        )
        layout = parse_layout(args.layout)(_MASK, args.seq_len, axes.cp.size)
        self.sequence = SequenceContext(layout, _MASK, args.strategy)
        self.trainer = Trainer(
            model, lr=args.lr, max_norm=_MAX_GRADIENT_NORM, axes=axes, zero=args.zero, seed=args.seed
        )
        self.rows: list[LossRow] = []
        self.last_loss = math.nan
        self._losses: list[float] = []
        self._seconds = 0.0

    def step(self, step: int) -> None:
        """Train on the batch of `step` (0, 1, ...); every so often measure the held-out loss."""
        args, start = self.args, time.perf_counter()
        batch = self._part(*self.corpus.training_batch(step, self._sequences, args.seed))
        loss = self.trainer.step(
            *batch,
            self.sequence,
            lr_scale=learning_rate_scale(step, args.steps),
        )
        self.last_loss = loss.item()
        self._losses.append(self.last_loss)
        self._seconds += time.perf_counter() - start
        if not math.isfinite(self.last_loss):
            raise RuntimeError(f"the loss is {self.last_loss} at step {step + 1}; try a smaller --lr")
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            self._log(step + 1)

    def _log(self, step: int) -> None:
        count, tokens = len(self._losses), self._sequences * self.args.seq_len
        mean = sum(self._losses) / count
        self.rows.append(LossRow(step, mean, self._held_out_loss(), count * tokens / self._seconds))
        self._losses, self._seconds = [], 0.0

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        total = 0.0
        self.trainer.model.eval()
        for index in range(_HELD_OUT_BATCHES):
            batch = self._part(*self.corpus.held_out_batch(index, _HELD_OUT_BATCHES, self._sequences))
            total += self.trainer.model.loss(*batch, self.sequence, over=self.axes.data).item()
        self.trainer.model.train()
        return total / _HELD_OUT_BATCHES

    def _part(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this rank holds of the whole batch, [dp * B, S] each."""
        mine = (self.sequence.part(x, self.axes.dp, self.axes.cp) for x in (tokens, labels))
        tokens, labels = (x.to(self.device) for x in mine)
        return tokens, labels

    @property
    def _sequences(self) -> int:
        """Sequences of one step: --batch-size for each rank of dp."""
        return int(self.args.batch_size) * self.axes.dp.size


def learning_rate_scale(step: int, steps: int) -> float:
    """Rise linearly over the first twentieth of the steps, then fall along a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def _write_losses(folder: Path, runs: dict[str, TrainingRun]) -> None:
    for name, run in runs.items():
        write_losses(run.rows, folder / ("dense_loss.csv" if name == "dense" else "loss.csv"))


def _compare(runs: dict[str, TrainingRun], trainer: Trainer, rank: Rank) -> None:
    """Print how far the two runs are apart, losses and final parameters; every rank must call it."""
    placements = trainer.model.parameter_placements()
    copies = gather_copies(trainer.parameters(), placements, rank.axes.tp, rank.axes.data)
    if rank.is_first:
        main, dense = runs.values()
        parameters = dense.trainer.model.state_dict()
        differences = [worst_difference(copies[name], parameters[name]) for name in copies]
        print("\n".join(_comparison(_mesh(rank.axes), main.rows, dense.rows, differences)))


def _comparison(
    mesh: str, rows: list[LossRow], dense: list[LossRow], parameters: list[Difference]
) -> Iterator[str]:
    yield f"{mesh} beside the dense model, nats per byte"
    titles = ("step", "loss", "dense", "difference", "held out", "dense", "difference", "tokens/s", "dense")
    cells = [
        (
            str(row.step),
            *_side_by_side(row.loss, other.loss),
            *_side_by_side(row.held_out_loss, other.held_out_loss),
            f"{row.tokens_per_s:.0f}",
            f"{other.tokens_per_s:.0f}",
        )
        for row, other in zip(rows, dense, strict=True)
    ]
    yield from table(titles, cells)
    yield f"  final parameters: max difference {max(p.max for p in parameters):.3e}"


def _side_by_side(value: float, other: float) -> tuple[str, str, str]:
    return f"{value:.5f}", f"{other:.5f}", f"{value - other:.1e}"
