"""One optimizer step, the same for the dense model and for a rank of a cut one."""

from __future__ import annotations

import torch
from torch import Tensor

from paracore.nn.decoder import Decoder
from paracore.nn.sequence import SequenceContext
from paracore.optim import clip_gradients_
from paracore.parallel.gradient_sync import GradientSync


class Trainer:
    """A decoder with the sync of its partial gradients and torch's AdamW.

    max_norm: clip the norm of the whole model's gradient to this; None leaves it.
    Creates process groups: every rank of the model's mesh must construct it.
    """

    def __init__(self, model: Decoder, *, lr: float, max_norm: float | None = None) -> None:
        self.model, self.max_norm = model, max_norm
        self.sync_gradients = GradientSync(model, model.tp, model.cp)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        sequence: SequenceContext | None = None,
        *,
        lr_scale: float = 1.0,
    ) -> Tensor:
        """Update the parameters on one batch; return its loss, detached.

        tokens, labels: [B, S], this rank's part of the sequences that `sequence` describes; see `Decoder`.
        """
        loss = self.model.loss(tokens, labels, sequence)
        loss.backward()
        self.sync_gradients()
        if self.max_norm is not None:
            clip_gradients_(self.model, self.model.tp, self.max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer.defaults["lr"] * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
