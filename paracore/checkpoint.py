"""Conversion of state dicts between the dense model and any tp size, and gathers of live tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.parallel.collectives import gather_list
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import ParameterPlacement

Placements = Mapping[str, ParameterPlacement]


def shard_state_dict(full: Mapping[str, Tensor], placements: Placements, rank: int) -> dict[str, Tensor]:
    """Return what `rank` of the tp axis holds of the dense state dict `full`, as contiguous copies.

    Raises UsageError when names or shapes do not fit the placements.
    """
    _require_names(full, placements)
    return {name: placements[name].take(tensor, rank) for name, tensor in full.items()}


def merge_state_dicts(shards: Sequence[Mapping[str, Tensor]], placements: Placements) -> dict[str, Tensor]:
    """Return the dense state dict from those of all ranks of the tp axis, in order.

    Raises UsageError when names, shapes or the number of ranks do not fit the placements, or when
    ranks that must hold the same values do not.
    """
    for shard in shards:
        _require_names(shard, placements)
    return {name: _merge_one(name, shards, placement) for name, placement in placements.items()}


def _merge_one(name: str, shards: Sequence[Mapping[str, Tensor]], placement: ParameterPlacement) -> Tensor:
    first, *others = placement.copies([shard[name] for shard in shards])
    if not all(torch.equal(first, other) for other in others):
        raise UsageError(f"{name}: the {placement.replicas} ranks that share it hold different values")
    return first


def gather_copies(
    held: Mapping[str, Tensor], placements: Placements, tp: MeshAxis, data: MeshAxis | None = None
) -> dict[str, list[Tensor]]:
    """Rebuild whole tensors on every rank from what each holds; over each axis one all-gather per tensor.

    data: the ranks that hold the same model, of dp and cp. Returns every copy that the ranks hold, so that a
    replica gone astray can be seen: for each rank of data one of an ordinary shard, tp of a replicated
    parameter. Every rank must call it.
    """
    _require_names(held, placements)
    data = MeshAxis.alone("data") if data is None else data
    return {name: _gather_one(held[name], placement, tp, data) for name, placement in placements.items()}


def _gather_one(held: Tensor, placement: ParameterPlacement, tp: MeshAxis, data: MeshAxis) -> list[Tensor]:
    dim = placement.cut_dim or 0
    lengths = [placement.local_shape(rank)[dim] for rank in range(tp.size)]
    replicas = gather_list(held, data, [held.size(0)] * data.size, 0)
    return [copy for replica in replicas for copy in placement.copies(gather_list(replica, tp, lengths, dim))]


def _require_names(tensors: Mapping[str, Tensor], placements: Placements) -> None:
    missing, unknown = placements.keys() - tensors.keys(), tensors.keys() - placements.keys()
    if missing or unknown:
        raise UsageError(f"state dict lacks {sorted(missing)} and has unknown {sorted(unknown)}")
