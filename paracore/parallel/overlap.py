"""Gathers and sums along the sequence as messages that travel while their ranks compute.

A sequence of `total` tokens lies over the T ranks of an axis as `shard_range` cuts it; every shard is cut
again, into `chunks` sub-chunks:

|               | `ChunkedGather`                        | `start_sum_of_products`                         |
|---------------|----------------------------------------|-------------------------------------------------|
| a rank holds  | its shard                              | a part, a product, of every token's sum         |
| a rank wants  | all shards                             | the sums of its own tokens                      |
| message       | its sub-chunk, to every other rank     | the product of another's sub-chunk, to that one |
| order of work | own shard first, others as they arrive | other ranks' sub-chunks first, own shard last   |
| messages sent | (T - 1) chunks: T - 1 times a shard    | (T - 1) chunks: T - 1 times a shard             |

The outer loop goes over sub-chunks and the inner over ranks, as all that send to one share its link. Where
products take as long as messages or longer, one part in 2 chunks of the messages of two ranks is left to wait
for; half of them, were shards not cut again. Sums are taken in float32 or better in the order of ranks,
whichever message came first, and rounded once: the same bits in every run.

A rank holds T - 1 times a shard of products until they are sent, and as much of what it has received, where a
reduce-scatter would hold all of its product and its shard of the sum.

Source: the decomposition of Wang et al. 2023, "Overlap communication with dependent computation via
decomposition", with direct messages in place of a ring.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.parallel.collectives import Pending, require_shard
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.messages import Exchange
from paracore.parallel.placement import shard_range
from paracore.parallel.symmetric import SymmetricWorkspace, Workspace
from paracore.reference import accumulation_dtype

MOST_CHUNKS = 8  # more hide little that is not hidden, and each message and product has a cost of its own
LEAST_CHUNKS = 4  # fewer leave more than an eighth in sight
LEAST_ROWS = 128  # of a product: of 64 rows, half as long again on a CPU
GOOD_ROWS = 256  # of a product: no slower than many times as many
LEAST_BYTES = 128 << 10  # of a message: smaller ones take as long as this
# Over peer memory our own products run in place of the library's. In float32 they have no tensor cores to
# use.
PEER_DTYPES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How sequence-parallel layers overlap their products with communication.

    chunks: sub-chunks of each rank's shard. By default LEAST_CHUNKS with LEAST_ROWS and LEAST_BYTES in each
    at least, up to MOST_CHUNKS with GOOD_ROWS in each; where the shape does not allow the least, plain
    collectives. Raises UsageError below 1. peers: where the ranks reach each other's memory through it,
    nothing is cut or sent: products wait for what copy engines bring, see `paracore.ops.fused_linear`.
    """

    chunks: int | None = None
    peers: Workspace | None = dataclasses.field(default=None, repr=False)  # each rank has its own
    obstacle: str | None = None  # why the ranks do not reach each other's memory, once `on` has asked

    def __post_init__(self) -> None:
        if self.chunks is not None and self.chunks < 1:
            raise UsageError(f"chunks={self.chunks}: must be at least 1, or None to go by the shape")

    def on(self, device: torch.device, axis: MeshAxis) -> Overlap:
        """Return how the ranks overlap on `device`: over peer memory if NVLink connects all of them.

        A number of chunks asks for messages in any case. Every rank of `axis` must call it, with the same: on
        a GPU it communicates. `describe` tells what has become of it.
        """
        if device.type != "cuda" or axis.size == 1 or self.chunks or self.peers:
            return self
        try:
            return dataclasses.replace(self, peers=SymmetricWorkspace(axis, device))
        except UsageError as error:
            return dataclasses.replace(self, obstacle=str(error))

    def describe(self, shape: Sequence[int], dtype: torch.dtype, axis: MeshAxis) -> str:
        """Say how a cut [total, ..., features] travels, for people."""
        if axis.size == 1:
            return "nothing travels over one rank"
        chunks = self.chunks_of(shape, dtype, axis)
        if chunks == 0:
            return f"collectives: {list(shape)} has too little for {LEAST_CHUNKS} sub-chunks on each rank"
        if self.peers is not None and dtype in PEER_DTYPES:
            return "over peer memory"
        return f"{chunks} sub-chunks on each rank" + (f"; {self.obstacle}" if self.obstacle else "")

    def chunks_of(self, shape: Sequence[int], dtype: torch.dtype, axis: MeshAxis) -> int:
        """Return how many sub-chunks to cut each shard of [total, ..., features] into; 0: use collectives.

        The same on every rank.
        """
        if axis.size == 1:
            return 0
        if self.chunks is not None:
            return self.chunks
        rows = len(shard_range(shape[0], axis.size, 0)) * math.prod(shape[1:-1])
        possible = min(MOST_CHUNKS, rows // LEAST_ROWS, rows * shape[-1] * dtype.itemsize // LEAST_BYTES)
        return min(possible, max(LEAST_CHUNKS, rows // GOOD_ROWS)) if possible >= LEAST_CHUNKS else 0


class ChunkedGather:
    """All shards along dim 0 of what has size `total` there, of which `x` is this rank's; starts when made.

    whole: [total, ...], where shards arrive as `arrivals` says. x must not be written to until all have.
    Raises UsageError, before anything is sent, where x is not this rank's shard.
    """

    def __init__(self, x: Tensor, axis: MeshAxis, total: int, chunks: int) -> None:
        require_shard(x, axis, 0, total)
        x = x.detach().contiguous()
        self.whole = x.new_empty(total, *x.shape[1:])
        cuts = [_sub_chunks(total, axis, rank, chunks) for rank in range(axis.size)]
        own = shard_range(total, axis.size, axis.rank)
        self._own = slice(own.start, own.stop)
        self._under_way: list[tuple[Exchange, slice]] = []
        for chunk in range(chunks):
            outgoing = cuts[axis.rank][chunk]
            for to, by in _partners(axis):
                exchange, incoming = Exchange(axis), cuts[by][chunk]
                exchange.send(x[outgoing.start - own.start : outgoing.stop - own.start], to)
                exchange.receive(self.whole[incoming], by)
                exchange.start()
                self._under_way.append((exchange, incoming))
        self.whole[self._own] = x

    def arrivals(self) -> Iterator[slice]:
        """Yield rows of `whole` that are there: this rank's at once, other sub-chunks as they arrive."""
        yield self._own
        for exchange, rows in self._under_way:
            exchange.wait()
            yield rows

    def finish(self) -> Tensor:
        """Wait for whatever has not arrived, and return `whole`."""
        for _ in self.arrivals():
            pass
        return self.whole


def start_sum_of_products(
    product: Callable[[slice], Tensor], like: Tensor, axis: MeshAxis, chunks: int
) -> Pending:
    """Start to sum over the ranks what each has a part of, and return this rank's shard of it along dim 0.

    product: returns this rank's part of some rows, new and contiguous: called for other ranks' sub-chunks,
    each of which is sent while the next is computed, and last for this rank's own shard. like: of the whole
    sum's shape, [total, ...], and of its dtype and device; not read.
    """
    total, own = like.size(0), shard_range(like.size(0), axis.size, axis.rank)
    received = {by: like.new_empty(len(own), *like.shape[1:]) for _, by in _partners(axis)}
    cuts = [_sub_chunks(total, axis, rank, chunks) for rank in range(axis.size)]
    under_way: list[tuple[list[Exchange], slice]] = []
    for chunk in range(chunks):
        rows = cuts[axis.rank][chunk]
        local, exchanges = slice(rows.start - own.start, rows.stop - own.start), []
        for to, by in _partners(axis):
            exchange, outgoing = Exchange(axis), cuts[to][chunk]
            if outgoing.start < outgoing.stop:
                exchange.send(product(outgoing), to)
            exchange.receive(received[by][local], by)
            exchange.start()
            exchanges.append(exchange)
        under_way.append((exchanges, local))
    parts = received | {axis.rank: product(slice(own.start, own.stop))}

    def finish() -> Tensor:
        result = torch.empty_like(parts[axis.rank])
        for exchanges, rows in under_way:
            for exchange in exchanges:
                exchange.wait()
            result[rows] = _sum([parts[rank][rows] for rank in range(axis.size)])
        return result

    return finish


def _partners(axis: MeshAxis) -> list[tuple[int, int]]:
    """Return to whom this rank sends and from whom it receives, step by step: no rank twice in any step."""
    return [((axis.rank + step) % axis.size, (axis.rank - step) % axis.size) for step in range(1, axis.size)]


def _sub_chunks(total: int, axis: MeshAxis, rank: int, chunks: int) -> list[slice]:
    """Return the rows of `rank`'s shard, sub-chunk by sub-chunk; the last ones may be shorter, or empty."""
    shard = shard_range(total, axis.size, rank)
    parts = (shard_range(len(shard), chunks, chunk) for chunk in range(chunks))
    return [slice(shard.start + part.start, shard.start + part.stop) for part in parts]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Add up in the order given, in float32 or better."""
    first, second, *others = parts
    total = first.to(accumulation_dtype(first.dtype)) + second
    for part in others:
        total += part
    return total
