"""The sum of partial gradients of replicated parameters: one collective, driven by placements."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from paracore.errors import UsageError
from paracore.parallel.collectives import sum_over
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import collect_placements

# An attribute of gradients that are sums: adding to such a tensor keeps it, a fresh gradient lacks it.
_SUMMED = "_paracore_summed"


class GradientSync:
    """Sums the gradients that the replicas of a parameter hold in parts.

    Call it once per optimizer step, after the last backward and before clipping. All parameters
    that share a set of replicas travel in one flat buffer: one all-reduce over the tp axis for
    those replicated over all of it (q/k norms), one over each key/value head's subgroup where
    key/value heads are fewer than ranks.

    Sums are taken in float32 at least. A parameter without a gradient on some ranks counts as zero
    there; without a gradient on every rank it keeps none.

    Gradients that it has summed must not be added to: zero them with `set_to_none=True`, torch's
    default, before the next backward. UsageError is raised where a sum would be summed again.

    Creates process groups: every rank of the mesh must construct it, with the same model.
    """

    def __init__(self, model: nn.Module, axis: MeshAxis) -> None:
        by_replicas: dict[int, list[nn.Parameter]] = defaultdict(list)
        placements = collect_placements(model, axis.size)
        for name, parameter in model.named_parameters():  # tied parameters once
            if placements[name].partial_gradient:
                by_replicas[placements[name].replicas].append(parameter)
        self._buckets = [
            (axis.neighbours(replicas), parameters) for replicas, parameters in sorted(by_replicas.items())
        ]

    def __call__(self) -> None:
        """Replace every partial gradient by its sum over the replicas."""
        for axis, parameters in self._buckets:
            if any(hasattr(parameter.grad, _SUMMED) for parameter in parameters):
                raise UsageError("gradients are summed already: call GradientSync once per optimizer step")
            _sum_gradients(parameters, axis)


def _sum_gradients(parameters: list[nn.Parameter], axis: MeshAxis) -> None:
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    # Behind the gradients travels one number per parameter: on how many ranks it has one.
    pieces = [_flat_gradient(parameter, dtype) for parameter in parameters]
    present = torch.tensor([float(p.grad is not None) for p in parameters], dtype=dtype)
    total = sum_over(torch.cat([*pieces, present.to(pieces[0].device)]), axis)
    *sums, present = total.split([*(piece.numel() for piece in pieces), len(parameters)])
    for parameter, gradient, holders in zip(parameters, sums, present.tolist(), strict=True):
        if holders:
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
            setattr(parameter.grad, _SUMMED, True)


def _flat_gradient(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
    return parameter.grad.detach().to(dtype).flatten()
