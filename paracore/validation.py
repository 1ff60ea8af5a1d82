"""The runs that prove a model cut over the mesh equal to the dense one; paracore.verdict has the rules."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paracore.checkpoint import gather_copies, shard_state_dict
from paracore.counter_random import integers_at, permute
from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.nn.decoder import Decoder
from paracore.nn.dropout import DropoutDraw
from paracore.nn.initialization import perturb_constants_
from paracore.nn.sequence import SequenceContext
from paracore.ops.implementations import dtype_name
from paracore.parallel.collectives import gather_list
from paracore.parallel.layout import contiguous, parse_layout
from paracore.parallel.ledger import Traffic
from paracore.parallel.masks import Mask, causal, documents, sliding_window
from paracore.parallel.mesh import MeshAxis, TrainingAxes
from paracore.parallel.overlap import Overlap
from paracore.threads import all_cores
from paracore.training import Trainer
from paracore.verdict import Report

PERTURBED_RUNS = 4


@dataclasses.dataclass(frozen=True)
class ValidationSettings:
    """What is validated: a model, a batch of random tokens, and a run of AdamW over it.

    mask: "causal", "window:N" (a token sees N, itself the last of them), or "packed" (documents of uneven
        lengths behind one another; the last token of each has no label).
    layout, strategy: how the sequence lies over cp, see `parse_layout`, and how keys travel.
    batch_size: sequences of each rank of dp. zero: the stage of paracore's AdamW, or None for torch's.
    sequence_parallel, vocab_parallel: what is cut over tp besides. overlap: how it travels. See `Decoder`.
    """

    model: DecoderConfig
    seq_len: int = 256
    batch_size: int = 2
    dtype: torch.dtype = torch.float32
    steps: int = 20
    log_every: int = 10
    lr: float = 1e-3
    seed: int = 0
    mask: str = "causal"
    layout: str = "zigzag"
    strategy: str = "ring"
    zero: int | None = None
    sequence_parallel: bool = False
    vocab_parallel: bool = False
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.steps < 0:
            raise UsageError(f"steps={self.steps}: must not be negative")
        self.sequence(1)

    def sequence(self, cp_size: int) -> SequenceContext:
        """Return the sequence as it lies over `cp_size` ranks; raise UsageError for what has no meaning."""
        mask = _mask(self.mask, self.seq_len, self.seed)
        return SequenceContext(parse_layout(self.layout)(mask, self.seq_len, cp_size), mask, self.strategy)


class Batch(NamedTuple):
    """Tokens and next-token labels, both [B, S] int64, and the sequence in which they lie.

    first_sequence: the number of the first of them in the batch of all ranks.
    """

    tokens: Tensor
    labels: Tensor
    sequence: SequenceContext
    first_sequence: int = 0

    def shard(self, sequence: SequenceContext, axes: TrainingAxes) -> Batch:
        """Return what this rank holds of it, dealt out over dp and, as `sequence` says, over cp."""
        tokens, labels = (sequence.part(x, axes.dp, axes.cp) for x in (self.tokens, self.labels))
        return Batch(tokens, labels, sequence, axes.dp.rank * len(tokens))


def validate(settings: ValidationSettings, axes: TrainingAxes, device: torch.device) -> dict[str, Any] | None:
    """Compare the model cut over `axes` with the dense one; return the report on the first rank.

    Every rank must call it; the others get None. The report has the keys `config`, `forward`,
    `backward`, `optimizer`, `float64`, `comm`, `memory`, `failures` and `passed`; README.md describes them.
    """
    tp, cp, dp = axes.tp, axes.cp, axes.dp
    options: dict[str, Any] = {"seed": settings.seed, "device": device, "dtype": settings.dtype}
    dense = Decoder(settings.model, MeshAxis.alone("tp"), **options)
    perturb_constants_(dense, settings.seed)
    model = Decoder(
        settings.model,
        tp,
        cp,
        sequence_parallel=settings.sequence_parallel,
        vocab_parallel=settings.vocab_parallel,
        overlap=settings.overlap,
        **options,
    )
    placements = model.parameter_placements()
    model.load_state_dict(shard_state_dict(dense.state_dict(), placements, tp.rank))
    parallel = Trainer(model, lr=settings.lr, axes=axes, zero=settings.zero)
    batch = _random_batch(settings, dp.size, device)
    part = batch.shard(settings.sequence(cp.size), axes)
    facts = {
        "tp": tp.size,
        "cp": cp.size,
        "dp": dp.size,
        "overlap": model.describe_overlap(*part.tokens.shape),
    }
    report = Report(_plain(settings) | facts, settings.dtype, placements)
    beside = DenseRuns.start(dense, settings) if tp.rank == 0 and axes.data.rank == 0 else None

    first = _first_pass(parallel, part)
    report.enter_traffic(first.traffic)
    report.enter_memory(parallel.memory(), _formula(model, settings.zero or 0, axes.data.size))
    logits = _whole_logits(first.logits, part, axes)
    losses = [loss for held in _on_every_rank(first.loss, axes.data) for loss in _on_every_rank(held, tp)]
    outputs = {"logits": _on_every_rank(logits, tp), "loss": losses}
    gradients = gather_copies(first.gradients, placements, tp, axes.data)
    if beside is not None:
        with all_cores():
            runs = (beside.exact, beside.dense, *beside.perturbed)
            exact, ours, *moved = (_first_pass(trainer, batch) for trainer in runs)
        report.judge_forward(outputs, exact.outputs(), ours.outputs(), [run.outputs() for run in moved])
        report.judge_backward(gradients, exact.gradients, ours.gradients, [run.gradients for run in moved])

    for step in range(1, settings.steps + 1):
        _step(parallel, part)
        if beside is not None:
            # One step at a time: the other ranks wait for this one.
            with all_cores():
                beside.step(batch)
        if step % settings.log_every == 0 or step == settings.steps:
            logits = _whole_logits(_logits(parallel, part), part, axes)
            if beside is not None:
                report.judge_point(step, logits, *beside.logits(batch))
    parameters = gather_copies(parallel.parameters(), placements, tp, axes.data)
    if beside is not None and settings.steps:
        report.judge_parameters(
            parameters, beside.dense.parameters(), [run.parameters() for run in beside.perturbed]
        )
    return report.finish() if beside is not None else None


# ---------------------------------------------------------------- the dense runs


@dataclasses.dataclass(frozen=True)
class DenseRuns:
    """The dense model, the same in float64, and from weights perturbed by one unit in the last place."""

    dense: Trainer
    exact: Trainer
    perturbed: list[Trainer]

    @classmethod
    def start(cls, dense: Decoder, settings: ValidationSettings) -> DenseRuns:
        """Copy `dense` for each run."""
        models = [_perturbed(dense, settings.seed, run) for run in range(PERTURBED_RUNS)]
        models += [dense, copy.deepcopy(dense).double()]
        *perturbed, ours, exact = (Trainer(model, lr=settings.lr) for model in models)
        return cls(ours, exact, perturbed)

    def step(self, batch: Batch) -> None:
        """Take one step of AdamW in every run."""
        for trainer in (self.dense, self.exact, *self.perturbed):
            _step(trainer, batch)

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the logits of the dense, the exact and the perturbed runs."""
        perturbed = [_logits(trainer, batch) for trainer in self.perturbed]
        return _logits(self.dense, batch), _logits(self.exact, batch), perturbed


def _perturbed(model: Decoder, seed: int, run: int) -> Decoder:
    """Return a copy with every weight moved by one unit in the last place, up or down at random."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            index = torch.arange(parameter.numel(), device=parameter.device).view_as(parameter)
            up = integers_at(index, seed, f"perturbation {run} of {name}", 2) == 1
            towards = torch.where(up, torch.inf, -torch.inf).to(parameter)
            parameter.copy_(torch.nextafter(parameter, towards))
    return moved


def _formula(model: Decoder, stage: int, ranks: int) -> dict[str, int]:
    """Return the bytes of each kind on a rank, as ZeRO has it (Rajbhandari et al. 2020, figure 1)."""
    unique = list(model.parameters())
    numel = sum(p.numel() for p in unique)
    whole = numel * unique[0].itemsize
    wide = torch.promote_types(unique[0].dtype, torch.float32)
    states = numel * wide.itemsize * (2 if wide == unique[0].dtype else 3)  # a master besides the moments
    return {
        "parameters": -(-whole // ranks) if stage == 3 else whole,
        "gradients": -(-whole // ranks) if stage >= 2 else whole,
        "states": -(-states // ranks) if stage >= 1 else states,
    }


# ---------------------------------------------------------------- one run


class FirstPass(NamedTuple):
    """What the first forward and backward left, and what was sent.

    logits: [B, S, V] of the tokens that the rank holds; the loss is that of all.
    """

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    traffic: dict[str, list[Traffic]]

    def outputs(self) -> dict[str, Tensor]:
        """Return logits and loss by name."""
        return {"logits": self.logits, "loss": self.loss}


def _first_pass(trainer: Trainer, batch: Batch) -> FirstPass:
    logits = _logits(trainer, batch)
    _take_traffic(trainer.model)
    draw = DropoutDraw(trainer.seed, batch.first_sequence)
    loss = trainer.model.loss(batch.tokens, batch.labels, batch.sequence, over=trainer.axes.data, draw=draw)
    traffic = {"forward": _take_traffic(trainer.model)}
    loss.backward()
    traffic["backward"] = _take_traffic(trainer.model)
    gradients = trainer.gradients()
    traffic["gradient_sync"] = _take_traffic(trainer.model)
    return FirstPass(logits, loss.detach(), gradients, traffic)


def _take_traffic(model: Decoder) -> list[Traffic]:
    """Take what was sent over both axes; they may share one ledger, which is empty the second time."""
    return [*model.tp.ledger.take(), *model.cp.ledger.take()]


@torch.no_grad()
def _logits(trainer: Trainer, batch: Batch) -> Tensor:
    trainer.model.eval()
    logits: Tensor = trainer.model(batch.tokens, sequence=batch.sequence)
    trainer.model.train()
    return logits


def _step(trainer: Trainer, batch: Batch) -> None:
    trainer.step(batch.tokens, batch.labels, batch.sequence, first_sequence=batch.first_sequence)


def _whole_logits(logits: Tensor, part: Batch, axes: TrainingAxes) -> Tensor:
    """Return the logits of all sequences, whole, from those of the tokens that each rank holds."""
    of_sequences = part.sequence.layout.unshard(logits, axes.cp, 1)
    return torch.cat(gather_list(of_sequences, axes.dp, [len(of_sequences)] * axes.dp.size, 0))


def _on_every_rank(output: Tensor, axis: MeshAxis) -> list[Tensor]:
    """Return the output of each rank: all should be the same."""
    flat = output.reshape(-1)
    return [copy.view(output.shape) for copy in gather_list(flat, axis, [flat.numel()] * axis.size, 0)]


# ---------------------------------------------------------------- the batch


def _random_batch(settings: ValidationSettings, dp_size: int, device: torch.device) -> Batch:
    B, S = settings.batch_size * dp_size, settings.seq_len
    index = torch.arange(B * (S + 1), device=device)
    text = integers_at(index, settings.seed, "tokens", settings.model.vocab_size).view(B, S + 1)
    sequence = SequenceContext(contiguous(S, 1), _mask(settings.mask, S, settings.seed))
    labels = text[:, 1:].clone()
    if settings.mask == "packed":
        labels[:, [end - 1 for end in _packed(S, settings.seed) if end]] = -100
    return Batch(text[:, :-1], labels, sequence)


def _mask(text: str, length: int, seed: int) -> Mask:
    """Return the mask that `ValidationSettings.mask` names."""
    name, _, number = text.partition(":")
    if text == "causal":
        return causal()
    if text == "packed":
        return causal() & documents(_packed(length, seed))
    if name == "window" and number.isdecimal() and int(number) > 0:
        return sliding_window(min(int(number), length) - 1, 0)
    raise UsageError(f"mask={text!r}: must be causal, packed, or window:N with N at least 1")


def _packed(length: int, seed: int) -> list[int]:
    """Return the boundaries of documents of 1/32 to 17/32 of the length, in an order that the seed decides.

    Over two ranks and more, the longest does not fit on one, and over few the shortest fill none.
    """
    parts = (17, 7, 4, 3, 1)
    order = [permute(index, len(parts), seed, "documents") for index in range(len(parts))]
    return [sum(parts[i] for i in order[:count]) * length // 32 for count in range(len(parts) + 1)]


def _plain(settings: ValidationSettings) -> dict[str, Any]:
    """Return the settings as JSON knows them."""
    return dataclasses.asdict(settings) | {"dtype": dtype_name(settings.dtype)}
