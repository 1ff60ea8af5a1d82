"""The mesh of processes, and one rank's view of each of its axes."""

from __future__ import annotations

import dataclasses
import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paracore.errors import UsageError
from paracore.parallel.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The size of every mesh axis; `tp` varies fastest, so that its groups are neighbours.

    With dp=2 and tp=2 the tp groups are [0, 1] and [2, 3], and the dp groups [0, 2] and [1, 3].
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise UsageError(f"{name}={size}: a mesh axis has at least one rank")

    @property
    def world_size(self) -> int:
        """The number of processes: pp * dp * cp * tp."""
        return math.prod(dataclasses.astuple(self))

    def require_world_size(self, world_size: int) -> None:
        """Raise UsageError unless `world_size` is the product of the axes."""
        if world_size != self.world_size:
            product = " * ".join(f"{name}={size}" for name, size in dataclasses.asdict(self).items())
            raise UsageError(
                f"world size {world_size} is not the product of the mesh, {product} = {self.world_size}"
            )

    def build(self, device_type: str) -> DeviceMesh:
        """Build the DeviceMesh over the default process group, which must be initialised.

        Every rank must call it. Raises UsageError when the world size is not the product of the axes.
        """
        self.require_world_size(dist.get_world_size())
        axes = dataclasses.asdict(self)
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


@dataclasses.dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh as one rank sees it: with whom it communicates, and where that is counted.

    Layers receive the axes they work over; nothing is global. An axis of size 1 has no group and
    never communicates, so a layer on `MeshAxis.alone("tp")` is the dense layer.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None
    ledger: Ledger

    @classmethod
    def alone(cls, name: str) -> MeshAxis:
        """Return an axis of size 1, which needs no torch.distributed."""
        return cls(name, size=1, rank=0, group=None, ledger=Ledger())

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str, ledger: Ledger) -> MeshAxis:
        """Return this rank's view of the axis `name` of `mesh`, its traffic counted in `ledger`."""
        group = mesh.get_group(name)
        return cls(name, group.size(), group.rank(), group if group.size() > 1 else None, ledger)

    def neighbours(self, count: int) -> MeshAxis:
        """Return the axis of the `count` neighbouring ranks around this one (0..count-1, count..., ...).

        Creates process groups: every rank of this axis must call it, in the same order.
        """
        if self.size % count:
            raise UsageError(f"axis {self.name} of size {self.size} has no subgroups of {count} ranks")
        if count == self.size:
            return self
        name = f"{self.name}[{count}]"
        if count == 1 or self.group is None:
            return MeshAxis(name, 1, 0, None, self.ledger)
        first = self.rank // count * count
        members = dist.get_process_group_ranks(self.group)[first : first + count]
        # Local synchronisation: ranks outside of this subgroup need not take part.
        group = dist.new_group(members, use_local_synchronization=True)
        return MeshAxis(name, count, self.rank - first, group, self.ledger)
