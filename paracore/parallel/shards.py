"""Sums of flat buffers over the ranks of an axis, each rank keeping its shard, and gathers of such shards.

Both run while the caller goes on: they start when the object is made, and end in `finish`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from paracore import trace
from paracore.parallel.collectives import all_gather_single, reduce_scatter_single
from paracore.parallel.mesh import MeshAxis


class ShardSum:
    """The sum of every rank's `buffer`, of which this rank gets its shard.

    buffer: [axis.size * n], not to be written to until `finish`. received: room for as many, or None.
    With it each rank is sent its shard (all-to-all) and adds the parts up in the order of ranks, in the dtype
    of the total: the same bits in every run, and 16-bit parts lose nothing in a float32 sum. Without it the
    backend reduce-scatters, in the buffer's dtype and an order of its own.
    """

    def __init__(self, buffer: Tensor, received: Tensor | None, axis: MeshAxis) -> None:
        group = axis.connection()
        self._kind, self._axis = "reduce_scatter" if received is None else "all_to_all", axis.name
        if received is None:
            shard = buffer.new_empty(buffer.numel() // axis.size)
            axis.ledger.enter(self._kind, axis.name, buffer.nbytes)
            with trace.post("reduce_scatter", axis.name, buffer.nbytes):
                self._work = reduce_scatter_single(shard, buffer, group=group, async_op=True)
            self._parts: tuple[Tensor, ...] = (shard,)
        else:
            axis.ledger.enter(self._kind, axis.name, buffer.nbytes)
            with trace.post("all_to_all", axis.name, buffer.nbytes):
                self._work = dist.all_to_all_single(received, buffer, group=group, async_op=True)
            self._parts = received.chunk(axis.size)

    def finish(self, total: Tensor, *, accumulate: bool) -> None:
        """Wait, and write the sum to `total` [n], or add it there."""
        with trace.wait(self._kind, self._axis):
            self._work.wait()
        for index, part in enumerate(self._parts):
            if index or accumulate:
                total.add_(part)
            else:
                total.copy_(part)


class ShardGather:
    """All shards of `buffer` [axis.size * n], of which this rank has its own, in place."""

    def __init__(self, buffer: Tensor, axis: MeshAxis) -> None:
        axis.ledger.enter("all_gather", axis.name, buffer.nbytes)
        own = buffer.chunk(axis.size)[axis.rank]
        self._axis = axis.name
        with trace.post("all_gather", axis.name, buffer.nbytes):
            self._work = all_gather_single(buffer, own, group=axis.connection(), async_op=True)

    def finish(self) -> None:
        """Wait until the buffer is whole."""
        with trace.wait("all_gather", self._axis):
            self._work.wait()
