"""One optimizer step, the same for the dense model and for a rank of a cut one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paracore import trace
from paracore.errors import UsageError
from paracore.nn.decoder import Decoder
from paracore.nn.dropout import DropoutDraw
from paracore.nn.sequence import SequenceContext
from paracore.optim import AdamW, clip_gradients_, shard_parameters
from paracore.parallel.collectives import sum_over
from paracore.parallel.gradient_sync import GradientSync
from paracore.parallel.mesh import ShardingAxes, TrainingAxes

_NO_LABEL = -100


class Trainer:
    """A decoder with its optimizer.

    axes: the mesh; None for what the model knows of it, tp and cp. zero: the stage of paracore's AdamW; None
        is torch's, behind a `GradientSync`. max_norm: clip the norm of the whole model's gradient to this.
        seed: of dropout. steps: how many were taken; set it to go on where another run ended.
    Creates process groups: every rank of the mesh must construct it.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        lr: float,
        max_norm: float | None = None,
        axes: ShardingAxes | None = None,
        zero: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.max_norm, self.seed, self.steps = model, max_norm, seed, 0
        self.axes = ShardingAxes(model.cp, model.tp) if axes is None else axes
        self.optimizer: AdamW | torch.optim.AdamW
        if zero is None:
            self.sync_gradients = GradientSync(model, self.axes.tp, self.axes.data)
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        else:
            if zero == 3:
                shard_parameters(model, self.axes.data, forward_methods=("loss",))
            self.optimizer = AdamW(model, lr=lr, mesh=self.axes, stage=zero, max_norm=max_norm)

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        sequence: SequenceContext | None = None,
        *,
        lr_scale: float = 1.0,
        microbatches: int = 1,
        first_sequence: int | None = None,
    ) -> Tensor:
        """Update the parameters on one batch; return its loss, detached.

        tokens, labels: [B, S], this rank's part of the batch, in sequences that `sequence` describes; see
        `Decoder`. Every rank takes equally many `microbatches`, one after the other; gradients accumulate.
        first_sequence: the number of the first of them in the batch of all ranks of dp, for dropout; by
        default every rank of dp has equally many.
        """
        first_sequence = self._first_sequence(len(tokens)) if first_sequence is None else first_sequence
        if not 1 <= microbatches <= max(1, tokens.size(0)):
            raise UsageError(f"microbatches={microbatches}: must be from 1 to the batch of {tokens.size(0)}")
        with trace.step(self.model, self.optimizer):
            return self._step(tokens, labels, sequence, lr_scale, microbatches, first_sequence)

    def _step(
        self,
        tokens: Tensor,
        labels: Tensor,
        sequence: SequenceContext | None,
        lr_scale: float,
        microbatches: int,
        first_sequence: int,
    ) -> Tensor:
        valid = sum_over((labels != _NO_LABEL).sum().double().reshape(1), self.axes.data)[0]
        parts = zip(tokens.tensor_split(microbatches), labels.tensor_split(microbatches), strict=True)
        losses = []
        for part_tokens, part_labels in parts:
            draw = DropoutDraw(self.seed, first_sequence).of(f"step {self.steps}")
            with trace.range("paracore.training.forward"):
                loss = self.model.loss(
                    part_tokens, part_labels, sequence, over=self.axes.data, valid=valid, draw=draw
                )
            with trace.range("paracore.training.backward"):
                loss.backward()
            losses.append(loss.detach())
            first_sequence += len(part_tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer.defaults["lr"] * lr_scale
        self._update()
        self.steps += 1
        return torch.stack(losses).sum()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all ranks' tokens, zeros where there is none, and forget them.

        By name, tied parameters under each of theirs. Every rank must call it, in place of an update.
        """
        named = dict(self.model.named_parameters(remove_duplicate=False))
        if isinstance(self.optimizer, AdamW):
            whole = self.optimizer.whole_gradients()
            of_parameter = {id(named[name]): gradient for name, gradient in whole.items()}
        else:
            self.sync_gradients()
            of_parameter = {id(p): p.grad for p in named.values() if p.grad is not None}
        self.optimizer.zero_grad()
        return {
            name: of_parameter[id(p)] if id(p) in of_parameter else torch.zeros_like(p)
            for name, p in named.items()
        }

    def memory(self) -> dict[str, int] | None:
        """Return the bytes of parameters, gradients and states on this rank; None for torch's optimizer."""
        return self.optimizer.memory() if isinstance(self.optimizer, AdamW) else None

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name, tied ones under each of theirs."""
        if isinstance(self.optimizer, AdamW):
            self.optimizer.synchronize()
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named}

    def _first_sequence(self, sequences: int) -> int:
        if isinstance(self.axes, TrainingAxes):
            return self.axes.dp.rank * sequences
        same_sequences = self.axes.data is self.model.cp
        if self.axes.data.size > 1 and not same_sequences and self.model.config.drops:
            raise UsageError(
                f"first_sequence=None over {self.axes.data.size} ranks of {self.axes.data.name}: dropout "
                "must know which sequences these are; give the number of the first, or TrainingAxes"
            )
        return 0

    @trace.ranged("paracore.training.update")
    def _update(self) -> None:
        if isinstance(self.optimizer, AdamW):
            self.optimizer.step()
            return
        self.sync_gradients()
        if self.max_norm is not None:
            clip_gradients_(self.model, self.axes.tp, self.max_norm)
        with trace.range("paracore.adamw.step"):  # torch's
            self.optimizer.step()
        self.optimizer.zero_grad()
