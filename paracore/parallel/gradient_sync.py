"""The sum of partial gradients: few collectives, driven by placements and by who holds which tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paracore import trace
from paracore.errors import UsageError
from paracore.parallel.collectives import start_sum_in_place
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import ParameterPlacement, collect_placements

# An attribute of gradients that are sums: adding to such a tensor keeps it, a fresh gradient lacks it.
_SUMMED = "_paracore_summed"


class GradientSync:
    """Sums the gradients that the replicas of a parameter hold in parts.

    model: its placements lie over `tp`. Replicas over tp hold parts of a gradient where their placement
        says so: q/k norms, and key/value heads that several ranks share.
    token_axes: the axes whose ranks hold other tokens of the batch (cp). Every rank there holds the whole
        model, as far as tp lets it, and the part of each gradient that its own tokens give, so all
        parameters are summed. Summed, not averaged: the loss is divided by the number of tokens of all
        ranks before backward, as `Decoder.loss` does, so parts weigh by the number of their tokens.

    Call it once per optimizer step, after the last backward and before clipping. All parameters that share
    a set of replicas, and the dtype of their sums, travel in one flat buffer: one all-reduce over the tp
    axis for those replicated over all of it, one over each key/value head's subgroup where key/value heads
    are fewer than ranks, then one over each of `token_axes`.

    Sums are taken in float32 at least. A parameter without a gradient on some ranks counts as zero
    there; without a gradient on every rank it keeps none.

    Gradients that it has summed must not be added to: zero them with `set_to_none=True`, torch's
    default, before the next backward. UsageError is raised where a sum would be summed again.

    Creates process groups: every rank of the mesh must construct it, with the same model.
    """

    def __init__(self, model: nn.Module, tp: MeshAxis, *token_axes: MeshAxis) -> None:
        placements = collect_placements(model, tp.size)
        parameters = dict(model.named_parameters())  # tied parameters once
        partial: dict[int, dict[str, nn.Parameter]] = defaultdict(dict)
        for name, parameter in parameters.items():
            if placements[name].partial_gradient:
                partial[placements[name].replicas][name] = parameter
        self._buckets = [
            bucket
            for replicas, shared in sorted(partial.items())
            for bucket in _buckets(tp.neighbours(replicas), shared, placements)
        ]
        for axis in token_axes:
            if axis.size > 1:
                self._buckets += _buckets(axis, parameters, placements)

    @trace.ranged("paracore.gradient_sync.sum")
    def __call__(self) -> None:
        """Replace every partial gradient by its sum over the replicas."""
        if any(hasattr(p.grad, _SUMMED) for bucket in self._buckets for p in bucket.parameters):
            raise UsageError("gradients are summed already: call GradientSync once per optimizer step")
        for bucket in self._buckets:
            _sum_gradients(bucket)


@dataclass(frozen=True)
class _Bucket:
    """Parameters whose gradients are summed over `axis` in one buffer of `dtype`.

    rooms: how many elements each gets there: as many as its largest shard over tp has. So buffers are alike
        on all ranks of the mesh, and a parameter that several tp ranks hold is summed over another axis in
        the same order by each of them, to the same bits: a backend orders additions by the place in a buffer.
    """

    axis: MeshAxis
    parameters: list[nn.Parameter]
    rooms: list[int]
    dtype: torch.dtype


def _buckets(
    axis: MeshAxis, parameters: Mapping[str, nn.Parameter], placements: Mapping[str, ParameterPlacement]
) -> list[_Bucket]:
    by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        by_dtype[torch.promote_types(parameter.dtype, torch.float32)].append(name)
    return [
        _Bucket(
            axis,
            [parameters[name] for name in names],
            [math.prod(placements[name].local_shape(0)) for name in names],  # rank 0 has a largest shard
            dtype,
        )
        for dtype, names in by_dtype.items()
    ]


def _sum_gradients(bucket: _Bucket) -> None:
    parameters, axis = bucket.parameters, bucket.axis
    # Behind the gradients travels one number per parameter: on how many ranks it has one.
    flat = parameters[0].new_zeros(sum(bucket.rooms) + len(parameters), dtype=bucket.dtype)
    *sums, holders = flat.split([*bucket.rooms, len(parameters)])
    for parameter, room in zip(parameters, sums, strict=True):
        if parameter.grad is not None:
            room[: parameter.numel()] = parameter.grad.detach().flatten()
    holders.copy_(torch.tensor([float(p.grad is not None) for p in parameters]))
    start_sum_in_place(flat, axis)()
    for number, (parameter, total) in enumerate(zip(parameters, sums, strict=True)):
        # Asked of the device only where this rank does not know the answer.
        if parameter.grad is not None or holders[number] > 0:
            parameter.grad = total[: parameter.numel()].view_as(parameter).to(parameter.dtype)
            setattr(parameter.grad, _SUMMED, True)
