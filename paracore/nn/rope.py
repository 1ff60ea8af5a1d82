"""Frequencies of rotary position embeddings, and the ways to stretch them to longer contexts."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position p is treated as p / factor (Chen et al. 2023): all frequencies fall alike."""

    factor: float


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Slow frequencies fall by `factor`, fast ones stay (Peng et al. 2023, YaRN, section 3.2).

    A frequency is slow when it turns less than `slow_turns` times over the original context, fast
    when it turns more than `fast_turns` times; between the two the factor is interpolated.
    """

    factor: float
    original_context: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Every frequency falls by a factor of its own, found by search (Ding et al. 2024, LongRoPE)."""

    factors: tuple[float, ...]
    context_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies fall by `factor`, fast ones stay (Grattafiori et al. 2024, the Llama 3 models).

    A frequency is slow when it turns less than `slow_turns` times over the original context, fast when it
    turns more than `fast_turns` times; between the two its fall is interpolated by its turns.
    """

    factor: float
    original_context: int
    slow_turns: float = 1.0
    fast_turns: float = 4.0


RopeScaling = LinearScaling | YarnScaling | LongRopeScaling | Llama3Scaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of dims, [head_dim / 2] float64, and a magnitude.

    Cosines and sines are multiplied by the magnitude (1 unless the scaling asks for more).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = theta**-exponents
    match scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case YarnScaling(factor):
            kept = _yarn_kept(head_dim, theta, scaling)
            return frequencies * (kept + (1 - kept) / factor), 0.1 * math.log(factor) + 1.0
        case Llama3Scaling(factor, original_context, slow_turns, fast_turns):
            turns = original_context * frequencies / (2 * math.pi)
            kept = ((turns - slow_turns) / (fast_turns - slow_turns)).clamp(0, 1)
            return frequencies * (kept + (1 - kept) / factor), 1.0
        case LongRopeScaling(factors, context_factor, original_context):
            magnitude = math.sqrt(1 + math.log(context_factor) / math.log(original_context))
            return frequencies / torch.tensor(factors, dtype=torch.float64), magnitude


def _yarn_kept(head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Return how much of each frequency is kept: 1 for fast pairs of dims, 0 for slow ones."""

    def pair_that_turns(turns: float) -> float:
        per_turn = scaling.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(per_turn) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.fast_turns)), 0)
    last = min(math.ceil(pair_that_turns(scaling.slow_turns)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
