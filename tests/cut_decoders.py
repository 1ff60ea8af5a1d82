"""Decoders cut over tp in every way, the dense ones they must equal, and both on one batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paracore.checkpoint import shard_state_dict
from paracore.nn import Decoder, DecoderConfig
from paracore.nn.initialization import perturb_constants_
from paracore.optim import gradient_norm
from paracore.parallel import GradientSync, Ledger, MeshAxis, ParameterPlacement, Traffic

BATCH, HIDDEN, LAYERS = 2, 24, 2
CUTS = [(True, False), (False, True), (True, True)]  # the sequence, the vocabulary


@dataclasses.dataclass(frozen=True)
class Case:
    """cuts: of the sequence, and of the vocabulary."""

    vocab_size: int
    length: int
    cuts: tuple[bool, bool]
    tied: bool = False
    kv_heads: int = 12
    dtype: torch.dtype = torch.float64
    labels: bool = True

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=HIDDEN,
            num_layers=LAYERS,
            num_heads=12,
            num_kv_heads=self.kv_heads,
            head_dim=4,
            intermediate_size=37,  # uneven over any tp
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            tie_word_embeddings=self.tied,
        )

    def dense(self) -> Decoder:
        """The model of one rank, no bias 0 and no norm weight 1."""
        model = Decoder(self.config, MeshAxis.alone("tp"), dtype=self.dtype)
        perturb_constants_(model, seed=0)
        return model

    def cut(self, tp: MeshAxis, dense: Decoder | None = None) -> Decoder:
        """The model over tp, with the weights of `dense`, or initial ones."""
        sequence, vocabulary = self.cuts
        options: dict[str, Any] = {"sequence_parallel": sequence, "vocab_parallel": vocabulary}
        model = Decoder(self.config, tp, dtype=self.dtype, **options)
        if dense is not None:
            model.load_state_dict(shard_state_dict(dense.state_dict(), model.parameter_placements(), tp.rank))
        return model

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and labels: every fourth label is ignored, or all of them."""
        index = torch.arange(BATCH * self.length).view(BATCH, self.length)
        tokens = index.mul(7).remainder(self.vocab_size)
        labels = index.mul(5).add(self.vocab_size - 1).remainder(self.vocab_size)
        return tokens, labels.masked_fill((index % 4 == 1) | (not self.labels), -100)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """gradients: those that this rank holds, by name, tied ones under each of theirs.

    traffic: of the loss, of its backward, and of the sync.
    """

    logits: Tensor
    loss: Tensor
    norm: Tensor
    gradients: dict[str, Tensor]
    placements: dict[str, ParameterPlacement]
    traffic: list[list[Traffic]]

    def named(self) -> dict[str, Tensor]:
        return {"logits": self.logits, "loss": self.loss, "norm": self.norm} | self.gradients

    def shared(self, replicas: int) -> Tensor:
        """What `replicas` neighbours must hold alike, end to end."""
        names = [name for name, p in self.placements.items() if p.replicas == replicas]
        return torch.cat([self.gradients[name].flatten() for name in names])


def outcome(case: Case, model: Decoder, tp: MeshAxis) -> Outcome:
    """Forward and backward on the batch."""
    sync = GradientSync(model, tp)
    tokens, labels = case.batch()
    logits = model(tokens).detach()
    tp.ledger.take()
    loss = model.loss(tokens, labels)
    traffic = [tp.ledger.take()]
    loss.backward()
    traffic.append(tp.ledger.take())
    sync()
    traffic.append(tp.ledger.take())
    norm = gradient_norm(model, tp)
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    assert gradients.keys() == named.keys()
    return Outcome(logits, loss.detach(), norm, gradients, model.parameter_placements(), traffic)


def dense_outcome(case: Case, dense: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same of the dense model, copied to `dtype`."""
    return outcome(case, copy.deepcopy(dense).to(dtype), MeshAxis.alone("tp")).named()


def axis_of(size: int, rank: int) -> MeshAxis:
    """An axis that cannot communicate."""
    return MeshAxis("tp", size, rank, None, Ledger())


def states(case: Case, size: int, full: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The state dict of each of `size` ranks, through the model that each makes."""
    found = []
    for rank in range(size):
        model = case.cut(axis_of(size, rank))
        model.load_state_dict(shard_state_dict(full, model.parameter_placements(), rank))
        found.append(model.state_dict())
    return found
