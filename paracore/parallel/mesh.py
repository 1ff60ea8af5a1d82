"""The mesh of processes, and one rank's view of each of its axes."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence

import torch
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

    rows: the ranks of the world along this axis, for this rank and for all others, as every rank
        knows them: [[0, 1], [2, 3]] for tp=2, dp=2.
    timeout: the longest wait in groups made by `neighbours`; None is torch's default.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None
    ledger: Ledger
    rows: Sequence[Sequence[int]] = ()
    timeout: datetime.timedelta | None = None
    _neighbours: dict[int, MeshAxis] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def alone(cls, name: str) -> MeshAxis:
        """Return an axis of size 1, which needs no torch.distributed."""
        return cls(name, size=1, rank=0, group=None, ledger=Ledger())

    @classmethod
    def of(
        cls, mesh: DeviceMesh, name: str, ledger: Ledger, timeout: datetime.timedelta | None = None
    ) -> MeshAxis:
        """Return this rank's view of the axis `name` of `mesh`, its traffic counted in `ledger`."""
        names = mesh.mesh_dim_names or ()
        if name not in names:
            raise UsageError(f"the mesh has no axis {name!r}, only {', '.join(names)}")
        group = mesh.get_group(name)
        if mesh.device_type == "cuda" and group.size() > 1:
            # NCCL connects a group in its first collective. Messages between some of its ranks cannot do
            # that: were they the first, they would wait for the others.
            dist.all_reduce(torch.zeros((), device="cuda"), group=group)
        rows = mesh.mesh.movedim(names.index(name), -1).reshape(-1, group.size()).tolist()
        return cls(
            name, group.size(), group.rank(), group if group.size() > 1 else None, ledger, rows, timeout
        )

    @classmethod
    def of_product(
        cls,
        mesh: DeviceMesh,
        names: Sequence[str],
        ledger: Ledger,
        timeout: datetime.timedelta | None = None,
    ) -> MeshAxis:
        """Return this rank's view of several axes taken as one, the last of `names` varying fastest.

        Where more than one of them has ranks to share it creates process groups: every rank of the mesh must
        call it.
        """
        axes = [cls.of(mesh, name, ledger, timeout) for name in names]
        several = [axis for axis in axes if axis.size > 1]
        if len(several) < 2:
            return several[0] if several else dataclasses.replace(axes[0], name="_".join(names))
        dims = [(mesh.mesh_dim_names or ()).index(name) for name in names]
        size = math.prod(axis.size for axis in axes)
        ends = range(-len(dims), 0)
        rows = mesh.mesh.movedim(dims, tuple(ends)).reshape(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout)
        return cls("_".join(names), size, group.rank(), group, ledger, rows, timeout)

    @classmethod
    def around(cls, group: dist.ProcessGroup, name: str) -> MeshAxis:
        """Return the axis of a process group, made elsewhere and in use already; its traffic is not kept."""
        return cls(name, group.size(), group.rank(), group if group.size() > 1 else None, Ledger())

    def connection(self) -> dist.ProcessGroup:
        """Return the process group; raise UsageError for an axis that was made without one."""
        if self.group is None:
            raise UsageError(
                f"axis {self.name} of {self.size} ranks has no process group: it cannot communicate"
            )
        return self.group

    def neighbours(self, count: int) -> MeshAxis:
        """Return the axis of the `count` neighbouring ranks around this one (0..count-1, count..., ...).

        The first call for a count creates process groups: every rank of the mesh must make it, in the
        same order.
        """
        if self.size % count:
            raise UsageError(f"axis {self.name} of size {self.size} has no subgroups of {count} ranks")
        if count == self.size:
            return self
        if count not in self._neighbours:
            self._neighbours[count] = self._subdivide(count)
        return self._neighbours[count]

    def _subdivide(self, count: int) -> MeshAxis:
        name, rank = f"{self.name}[{count}]", self.rank % count
        if count == 1:
            return MeshAxis(name, 1, 0, None, self.ledger)
        self.connection()
        rows = [list(row[i : i + count]) for row in self.rows for i in range(0, self.size, count)]
        group, _ = dist.new_subgroups_by_enumeration(rows, timeout=self.timeout)
        return MeshAxis(name, count, rank, group, self.ledger, rows, self.timeout)

    def __deepcopy__(self, memo: dict[int, object]) -> MeshAxis:
        # A copied model communicates over the same group, which cannot be copied.
        return self


@dataclasses.dataclass(frozen=True)
class ShardingAxes:
    """What an optimizer must know of the mesh.

    data: the ranks that hold the same parameters and other tokens, dp and cp taken as one: gradients are
    summed over it, and what is sharded is sharded over it. tp: the ranks among which parameters are cut.
    """

    data: MeshAxis
    tp: MeshAxis

    @classmethod
    def alone(cls) -> ShardingAxes:
        """Return the axes of a single rank."""
        return cls(MeshAxis.alone("data"), MeshAxis.alone("tp"))

    @classmethod
    def of(
        cls, mesh: DeviceMesh, ledger: Ledger | None = None, timeout: datetime.timedelta | None = None
    ) -> ShardingAxes:
        """Return this rank's view of those axes of `mesh` that are called dp, cp and tp.

        Every rank of the mesh must call it. Raises UsageError where there is none of them.
        """
        ledger, names = ledger or Ledger(), mesh.mesh_dim_names or ()
        data = [name for name in ("dp", "cp") if name in names]
        if not data and "tp" not in names:
            raise UsageError(f"the mesh has the axes {names}, must have one of dp, cp and tp")
        return cls(
            MeshAxis.of_product(mesh, data, ledger, timeout) if data else MeshAxis.alone("data"),
            MeshAxis.of(mesh, "tp", ledger, timeout) if "tp" in names else MeshAxis.alone("tp"),
        )


@dataclasses.dataclass(frozen=True)
class TrainingAxes(ShardingAxes):
    """All axes of a training mesh as one rank sees them.

    dp: the ranks that hold other sequences. cp: those that hold other parts of the same sequences. data is
    their product.
    """

    dp: MeshAxis
    cp: MeshAxis

    @classmethod
    def alone(cls) -> TrainingAxes:
        """Return the axes of a single rank."""
        data, tp, dp, cp = (MeshAxis.alone(name) for name in ("data", "tp", "dp", "cp"))
        return cls(data, tp, dp, cp)

    @classmethod
    def of(
        cls, mesh: DeviceMesh, ledger: Ledger | None = None, timeout: datetime.timedelta | None = None
    ) -> TrainingAxes:
        """Return this rank's view of those axes of `mesh` that are called dp, cp and tp, the others alone.

        Every rank of the mesh must call it. Raises UsageError where there is none of them.
        """
        ledger, names = ledger or Ledger(), mesh.mesh_dim_names or ()
        sharding = ShardingAxes.of(mesh, ledger, timeout)
        dp, cp = (
            MeshAxis.of(mesh, name, ledger, timeout) if name in names else MeshAxis.alone(name)
            for name in ("dp", "cp")
        )
        return cls(sharding.data, sharding.tp, dp, cp)
