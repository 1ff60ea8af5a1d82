"""Logits and labels, and what torch says of them over the whole vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paracore.reference import accumulation_dtype
from tests.numerics import randn

INF, NAN = float("inf"), float("nan")
LEADING = (3, 5)


def random_labels(vocab_size: int, *shape: int) -> Tensor:
    """Labels of which every fourth is ignored."""
    labels = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(vocab_size))
    labels.view(-1)[::4] = -100
    return labels


def random_tokens(
    vocab_size: int, dtype: torch.dtype = torch.float64, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Whole logits, labels, and gradients of the losses."""
    logits = (factor * randn(*LEADING, vocab_size, seed=vocab_size)).to(dtype)
    return (
        logits,
        random_labels(vocab_size, *LEADING),
        randn(*LEADING, seed=1, dtype=accumulation_dtype(dtype)),
    )


# One token each: logits over a vocabulary of 5, label, gradient of the loss.
_NOTHING, _FINITE = [-INF] * 5, [1.0, -2.0, 0.5, 3.0, 0.0]
SPECIAL = {
    "the label's logit is -inf": ([1.0, -INF, 2.0, 0.0, 1.0], 1, 1.0),
    "every logit is -inf": (_NOTHING, 2, 1.0),
    "the first shard is -inf": ([-INF, -INF, -INF, 1.0, 2.0], 4, 1.0),
    "the last shards are -inf": ([1.0, 2.0, -INF, -INF, -INF], 0, 1.0),
    "two logits of 1e30": ([1e30, 0.0, -1e30, 0.0, 1e30], 4, 1.0),
    "all logits are far below zero": ([-1e30] * 5, 3, 1.0),
    "a loss that nobody uses": (_FINITE, 3, 0.0),
    "ignored": (_FINITE, -100, 1.0),
    "ignored, and every logit is -inf": (_NOTHING, -100, 1.0),
    "ignored, and its gradient is NaN": (_FINITE, -100, NAN),
}


def special_tokens() -> tuple[Tensor, Tensor, Tensor]:
    logits, labels, dlosses = zip(*SPECIAL.values(), strict=True)
    return torch.tensor(logits), torch.tensor(labels), torch.tensor(dlosses)


def torch_losses(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Each token's loss by torch over the whole vocabulary, in float32 or better."""
    exact = logits.to(accumulation_dtype(logits.dtype)).flatten(0, -2)
    flat = labels.flatten()
    losses = F.cross_entropy(exact, flat, reduction="none", label_smoothing=label_smoothing)
    if z_loss:
        counted = exact.masked_fill((flat == -100).unsqueeze(-1), 0.0)
        losses = losses + z_loss * counted.logsumexp(-1).square().masked_fill(flat == -100, 0.0)
    return losses.view(labels.shape)


def gradient_floor(dlosses: Tensor, dexact: Tensor, floor: float) -> float:
    """The floor of the gradient's relative error.

    With one word 1 - (1 - e) - e cancels, and what remains is as exact as these are.
    """
    if dexact.size(-1) > 1:
        return floor
    return floor * (1 + float(dlosses.double().norm() / dexact.norm().clamp_min(1e-300)))


def torch_gradient(
    logits: Tensor, labels: Tensor, dlosses: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses and gradient of the logits by torch over the whole vocabulary."""
    leaf = logits.detach().requires_grad_()
    losses = torch_losses(leaf, labels, label_smoothing=label_smoothing, z_loss=z_loss)
    losses.backward(dlosses)
    assert leaf.grad is not None
    return losses.detach(), leaf.grad
