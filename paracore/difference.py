"""How far a tensor is from a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Difference(NamedTuple):
    """Mean and maximum of |x - reference|, and ||x - reference|| / ||reference||."""

    mean: float
    max: float
    rel_l2: float


def difference(x: Tensor, reference: Tensor) -> Difference:
    """Return how far `x` is from `reference`, computed in float64."""
    reference = reference.double()
    delta = x.double() - reference
    norm, off = torch.linalg.vector_norm(reference), torch.linalg.vector_norm(delta)
    relative = 0.0 if off == 0 else (off / norm).item()  # inf where the reference is all zero
    return Difference(delta.abs().mean().item(), delta.abs().max().item(), relative)


def worst_difference(copies: Sequence[Tensor], reference: Tensor) -> Difference:
    """Return the largest difference of any copy, so that no rank goes astray unseen."""
    return Difference(*map(_largest, zip(*(difference(copy, reference) for copy in copies), strict=True)))


def _largest(values: Sequence[float]) -> float:
    # max() passes over NaN unless it comes first.
    return math.nan if any(map(math.isnan, values)) else max(values)
