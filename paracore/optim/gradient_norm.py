"""The norm of all gradients of a model cut over tp, each element counted once, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paracore import trace
from paracore.parallel.collectives import sum_over
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import collect_placements


@trace.ranged("paracore.gradient_norm.norm")
def gradient_norm(model: nn.Module, tp: MeshAxis) -> Tensor:
    """Return the L2 norm of the whole model's gradient, a float64 scalar, the same on every rank.

    Shards add up over tp; of the replicas of a parameter one counts. Call it after `GradientSync`: then
    the ranks of every other axis hold the same gradients, and nothing is to be added up there.
    Costs one all-reduce of 8 bytes.
    """
    placements = collect_placements(model, tp.size)
    device = next(model.parameters()).device
    square = torch.zeros(1, dtype=torch.float64, device=device)
    for name, parameter in model.named_parameters():  # tied parameters once
        if parameter.grad is not None and placements[name].counts_in_norm(tp.rank):
            square += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
    return sum_over(square, tp).sqrt().squeeze(0)


@trace.ranged("paracore.gradient_norm.clip")
def clip_gradients_(model: nn.Module, tp: MeshAxis, max_norm: float) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm before.

    A norm that is not finite leaves the gradients as they are: it is the caller's to skip the step.
    """
    norm = gradient_norm(model, tp)
    scale = (max_norm / norm).clamp(max=1.0)
    scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))
    for parameter in model.parameters():
        if parameter.grad is not None:
            # In 16 bits the scale itself would be off by up to half a per cent.
            exact = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32))
            parameter.grad.copy_(exact * scale)
    return norm
