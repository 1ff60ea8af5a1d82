"""How a parameter lies over the tp axis.

Each parameter declares it once. That declaration drives the initialisation, the gradient sync, the
gradient norm, the conversion of checkpoints and the report of `paracore validate`.

Examples over tp=4:

| parameter                     | layout      | replicas | partial_gradient | why                           |
|-------------------------------|-------------|----------|------------------|-------------------------------|
| q_proj.weight                 | Shard(0)    | 1        | no               | column parallel               |
| o_proj.weight                 | Shard(1)    | 1        | no               | row parallel                  |
| k_proj.weight, 2 kv heads     | Shard(0)    | 2        | yes              | 2 ranks share one kv head     |
| q_norm.weight                 | Replicate() | 4        | yes              | each rank sees its own heads  |
| input_layernorm.weight        | Replicate() | 4        | no               | each rank sees the same input |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from paracore.errors import UsageError


def shard_range(total: int, parts: int, index: int) -> range:
    """Return which of `total` elements part `index` of `parts` holds.

    The rule is that of `torch.chunk` and DTensor: parts of ceil(total / parts) elements, the last
    ones shorter or empty.
    """
    length = -(-total // parts)
    start = min(index * length, total)
    return range(start, min(start + length, total))


@dataclasses.dataclass(frozen=True)
class ParameterPlacement:
    """How one parameter lies over an axis of `axis_size` ranks.

    full_shape: the shape of the whole parameter.
    layout: torch's `Shard(dim)` or `Replicate()`.
    replicas: how many neighbouring ranks hold the same values. A replicated parameter has
        `axis_size` of them, an ordinary shard one; key/value heads fewer than ranks lie between.
    partial_gradient: after backward each replica holds only a summand of the gradient, so the
        gradients must be summed over the replicas; otherwise they are identical already.
    """

    full_shape: tuple[int, ...]
    axis_size: int
    layout: Shard | Replicate
    replicas: int
    partial_gradient: bool = False

    @classmethod
    def replicate(
        cls, full_shape: Sequence[int], axis_size: int, *, partial_gradient: bool = False
    ) -> ParameterPlacement:
        """Every rank holds the whole parameter."""
        partial = partial_gradient and axis_size > 1
        return cls(tuple(full_shape), axis_size, Replicate(), axis_size, partial)

    @classmethod
    def shard(
        cls, full_shape: Sequence[int], axis_size: int, dim: int, *, replicas: int = 1
    ) -> ParameterPlacement:
        """`axis_size / replicas` shards along `dim`, each held by `replicas` neighbours.

        The replicas of a shard see different inputs or gradients, hence hold partial gradients.
        """
        if axis_size % replicas:
            raise UsageError(f"replicas={replicas} does not divide the axis of {axis_size} ranks")
        return cls(tuple(full_shape), axis_size, Shard(dim), replicas, replicas > 1)

    @property
    def num_shards(self) -> int:
        """Into how many different pieces the parameter is cut."""
        return self.axis_size // self.replicas

    def region(self, rank: int) -> tuple[range, ...]:
        """Return, per tensor dim, which indices of the whole parameter `rank` holds."""
        region = [range(length) for length in self.full_shape]
        if isinstance(self.layout, Shard):
            dim = self.layout.dim
            region[dim] = shard_range(self.full_shape[dim], self.num_shards, rank // self.replicas)
        return tuple(region)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what `rank` holds."""
        return tuple(len(indices) for indices in self.region(rank))

    def take(self, full: Tensor, rank: int) -> Tensor:
        """Return a contiguous copy of what `rank` holds of the whole parameter `full`."""
        if tuple(full.shape) != self.full_shape:
            raise UsageError(f"shape {tuple(full.shape)} is not the whole parameter's {self.full_shape}")
        slices = tuple(slice(indices.start, indices.stop) for indices in self.region(rank))
        return full[slices].clone(memory_format=torch.contiguous_format)

    def copies(self, held: Sequence[Tensor]) -> list[Tensor]:
        """Rebuild the whole parameter from what each rank holds, once from every set of replicas.

        All copies are equal unless a replica went astray.
        """
        if len(held) != self.axis_size:
            raise UsageError(f"{len(held)} shards given, the axis has {self.axis_size} ranks")
        for rank, tensor in enumerate(held):
            if tuple(tensor.shape) != self.local_shape(rank):
                raise UsageError(
                    f"rank {rank} holds shape {tuple(tensor.shape)}, "
                    f"its placement says {self.local_shape(rank)}"
                )
        if isinstance(self.layout, Replicate):
            return list(held)
        sets = (held[replica :: self.replicas] for replica in range(self.replicas))
        return [torch.cat(list(shards), dim=self.layout.dim) for shards in sets]

    def counts_in_norm(self, rank: int) -> bool:
        """Whether `rank` contributes this parameter to sums over all elements: one replica does."""
        return rank % self.replicas == 0

    @property
    def cut_dim(self) -> int | None:
        """The tensor dim along which the parameter is cut, or None."""
        return self.layout.dim if isinstance(self.layout, Shard) else None

    def __str__(self) -> str:
        text = f"Shard({self.layout.dim})" if isinstance(self.layout, Shard) else "Replicate"
        if isinstance(self.layout, Shard) and self.replicas > 1:
            text += f" x{self.replicas}"
        return text + (", gradient summed" if self.partial_gradient else "")


def collect_placements(model: nn.Module, axis_size: int) -> dict[str, ParameterPlacement]:
    """Return the placement of every parameter of `model` by its name, tied parameters under each name.

    A module declares those of its own parameters in an attribute `placements`, by local name. A
    parameter that no module declares is replicated and its gradient identical on every rank.
    """
    found: dict[str, ParameterPlacement] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        declared = getattr(module, "placements", {})
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            placement = declared.get(name) or ParameterPlacement.replicate(parameter.shape, axis_size)
            full_name = f"{prefix}.{name}" if prefix else name
            _check_declaration(full_name, parameter, placement, axis_size)
            found[full_name] = placement
    return found


def _check_declaration(
    name: str, parameter: nn.Parameter, placement: ParameterPlacement, axis_size: int
) -> None:
    if placement.axis_size != axis_size:
        raise UsageError(
            f"{name} is declared over an axis of {placement.axis_size} ranks, not over one of {axis_size}"
        )
    if tuple(parameter.shape) not in {placement.local_shape(rank) for rank in range(axis_size)}:
        raise UsageError(f"{name} has shape {tuple(parameter.shape)}, which no rank holds by its {placement}")
