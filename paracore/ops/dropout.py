"""Dropout whose mask is a function of where an element lies in the whole batch, whoever holds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paracore import trace
from paracore.counter_random import philox_words
from paracore.errors import UsageError
from paracore.reference_attention import dropout_threshold

_WORDS = 1 << 18  # drawn at once: 2 MiB for each of a dozen buffers of int64


def dropout(x: Tensor, p: float, seed: int, positions: Tensor, first_sequence: int = 0) -> Tensor:
    """Drop each element with probability p, and divide the others by 1 - p (Srivastava et al. 2014).

    x: [S, B, H], any float dtype. Element (s, b, h) is dropped where word h % 4 of Philox4x32-10(counter =
    (h / 4, positions[s], first_sequence + b, 0), key = seed) is less than p * 2^32: ranks that hold parts of
    a batch drop what one that holds all of it would. positions: [S] int64, where the tokens lie in the whole
    sequence, below 2^32; first_sequence: the number of x's first sequence in the whole batch. seed: a signed
    64-bit integer; give each layer and step its own. Backward draws the mask again: nothing is kept.

    Raises UsageError for other shapes or values.
    """
    if not 0 <= p < 1:
        raise UsageError(f"p={p}: must be at least 0 and less than 1")
    if x.dim() != 3 or positions.shape != x.shape[:1]:
        raise UsageError(
            f"x is {list(x.shape)} and positions {list(positions.shape)}, must be [S, B, H] and [S]"
        )
    if not x.is_floating_point() or positions.dtype != torch.int64 or positions.device != x.device:
        raise UsageError(
            f"x is {x.dtype} on {x.device} and positions {positions.dtype} on {positions.device}, must be a "
            "float dtype and torch.int64 on one device"
        )
    if not 0 <= first_sequence <= (1 << 32) - x.size(1):
        raise UsageError(f"first_sequence={first_sequence}: sequences must be from 0 to 2^32 - 1")
    if not -(1 << 63) <= seed < 1 << 63:
        raise UsageError(f"seed={seed}: must be a signed 64-bit integer")
    if p == 0:
        return x
    y: Tensor = _Dropout.apply(x, p, seed & 0xFFFFFFFFFFFFFFFF, positions, first_sequence)
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    @trace.ranged("paracore.dropout.forward")
    def forward(ctx: Any, x: Tensor, p: float, seed: int, positions: Tensor, first_sequence: int) -> Tensor:
        ctx.place = p, seed, first_sequence
        ctx.save_for_backward(positions)
        return _masked(x, p, seed, positions, first_sequence)

    @staticmethod
    @once_differentiable
    @trace.ranged("paracore.dropout.backward")
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        p, seed, first_sequence = ctx.place
        (positions,) = ctx.saved_tensors
        return _masked(dy, p, seed, positions, first_sequence), None, None, None, None


def _masked(x: Tensor, p: float, seed: int, positions: Tensor, first_sequence: int) -> Tensor:
    _, B, H = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = max(1, _WORDS // max(1, B * H))
    for part, out, position in zip(x.split(rows), y.split(rows), positions.split(rows), strict=True):
        kept = _words(position, B, H, seed, first_sequence) >= dropout_threshold(p)
        out.copy_(torch.where(kept, part / (1 - p), 0.0))
    return y


def _words(positions: Tensor, B: int, H: int, seed: int, first_sequence: int) -> Tensor:
    """Return a random 32-bit word for each element, [S, B, H] int64."""
    device = positions.device
    features = torch.arange(-(-H // 4), device=device)
    sequences = torch.arange(first_sequence, first_sequence + B, device=device)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox_words(features, positions[:, None, None], sequences, zero, (seed & 0xFFFFFFFF, seed >> 32))
    return torch.stack(words, -1).flatten(-2)[..., :H]
