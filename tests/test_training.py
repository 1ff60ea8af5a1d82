"""A step of training weighs tokens alike, whichever rank, sequence or microbatch holds them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.nn import Decoder, DecoderConfig
from paracore.parallel import MeshAxis
from paracore.training import Trainer
from tests.conftest import Launch, training_axes
from tests.numerics import relative_error

CONFIG = DecoderConfig(
    vocab_size=20, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=24
)
SEQUENCES, LENGTH, STEPS = 8, 6, 3


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, of which sequences have 0 to LENGTH that count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(20, (SEQUENCES, LENGTH), generator=generator)
    labels = torch.randint(20, (SEQUENCES, LENGTH), generator=generator)
    counting = torch.tensor([0, 6, 1, 5, 0, 0, 3, 2])[:, None]
    return tokens, labels.where(torch.arange(LENGTH) < counting, -100)


def decoder() -> Decoder:
    return Decoder(CONFIG, MeshAxis.alone("tp"), dtype=torch.float64)


def dense() -> tuple[list[float], dict[str, Tensor]]:
    trainer = Trainer(decoder(), lr=0.01, max_norm=0.5)
    losses = [trainer.step(*batch(step)).item() for step in range(STEPS)]
    return losses, trainer.parameters()


def over_ranks(zero: int | None) -> list[tuple[list[float], dict[str, Tensor]]]:
    axes, found = training_axes(dp=2), []
    for microbatches in (1, 3, 4):
        trainer = Trainer(decoder(), lr=0.01, max_norm=0.5, axes=axes, zero=zero)
        losses = []
        for step in range(STEPS):
            tokens, labels = (x.chunk(2)[axes.dp.rank] for x in batch(step))
            losses.append(trainer.step(tokens, labels, microbatches=microbatches).item())
        found.append((losses, trainer.parameters()))
    return found


@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_ranks_and_microbatches_with_unequal_counts_train_as_one_batch(
    launch: Launch, zero: int | None
) -> None:
    expected_losses, expected = dense()
    for of_rank in launch(2, over_ranks, zero):
        for losses, parameters in of_rank:
            assert losses == pytest.approx(expected_losses, rel=1e-12)
            for name, parameter in parameters.items():
                assert relative_error(parameter, expected[name]) < 1e-10, name


def test_more_microbatches_than_sequences_are_refused() -> None:
    with pytest.raises(UsageError, match="microbatches=9: must be from 1 to the batch of 8"):
        Trainer(decoder(), lr=0.01).step(*batch(0), microbatches=9)
