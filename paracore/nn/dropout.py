"""What dropout draws from: the same numbers for every mesh, others for every layer and step."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from paracore.counter_random import key_of
from paracore.nn.config import DecoderConfig
from paracore.ops.dropout import dropout
from paracore.ops.ring_attention import Options


@dataclasses.dataclass(frozen=True)
class DropoutDraw:
    """One draw of all masks of a model.

    seed: of this step, or of this part of a step: with equal seeds masks are equal. first_sequence: the
    number of this rank's first sequence in the batch of all ranks of dp.
    """

    seed: int
    first_sequence: int = 0

    def of(self, name: str) -> DropoutDraw:
        """Return the draw of a part of the model, independent of those of other names."""
        low, high = key_of(self.seed, name)
        word = low | high << 32
        return dataclasses.replace(self, seed=word - (word >> 63 << 64))  # as a signed 64-bit integer


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The dropout of one forward pass, or of one layer in it.

    draw: None where nothing is dropped. positions: [S], where the tokens that a rank holds between the
    tensor-parallel regions lie in the whole sequence.
    """

    config: DecoderConfig
    draw: DropoutDraw | None
    positions: Tensor

    def of(self, name: str) -> Dropout:
        """Return the dropout of a part of the model."""
        return dataclasses.replace(self, draw=None if self.draw is None else self.draw.of(name))

    def hidden(self, x: Tensor, name: str) -> Tensor:
        """Drop elements of the hidden states x, [S, B, H]."""
        if self.draw is None:
            return x
        draw = self.draw.of(name)
        return dropout(x, self.config.dropout, draw.seed, self.positions, draw.first_sequence)

    def attention(self, name: str, first_head: int) -> Options:
        """Return what `attention` and `ring_attention` take, for heads of which the first is `first_head`."""
        if self.draw is None or self.config.attention_dropout == 0:
            return {}
        draw = self.draw.of(name)
        return {
            "dropout_p": self.config.attention_dropout,
            "seed": draw.seed,
            "first_batch": draw.first_sequence,
            "first_head": first_head,
        }
