"""Every collective of the package, plain and differentiable.

Plain collectives return a new tensor and never modify their input, but for `start_sum_in_place`. Each is
entered in the axis' ledger; over an axis of size 1 they return their input and enter nothing. Those
called `start_...` run while the caller goes on, until it calls what they return; their input must not be
written to until then.

The differentiable ones come in conjugate pairs (all_reduce is its own conjugate); "same" means that
every rank holds the same values, "partial" that the ranks' values must be summed, "shards" that they
must be concatenated:

| function       | forward                            | backward                           |
|----------------|------------------------------------|------------------------------------|
| copy_to        | same -> same (nothing)             | partial -> same (all-reduce)       |
| reduce_from    | partial -> same (all-reduce)       | same -> same (nothing)             |
| all_reduce     | partial -> same (all-reduce)       | partial -> same (all-reduce)       |
| scatter_to     | same -> shards (slice)             | shards -> same (all-gather)        |
| gather_from    | shards -> same (all-gather)        | same -> shards (slice)             |
| all_gather     | shards -> same (all-gather)        | partial -> shards (reduce-scatter) |
| reduce_scatter | partial -> shards (reduce-scatter) | shards -> same (all-gather)        |

`gather_from` is for results that every rank then uses alike; `all_gather` for inputs that each
rank then uses differently. Taking one for the other gives gradients wrong by a factor or a sum.

Sources: Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paracore import trace
from paracore.errors import UsageError
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import shard_range

# torch 2.13 renamed these two; the old names warn there, and the new ones are missing in 2.11.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Pending: TypeAlias = Callable[[], Tensor]
"""A collective under way: waits for it and returns its result."""

# ---------------------------------------------------------------- plain


def start_sum_in_place(x: Tensor, axis: MeshAxis) -> Pending:
    """Start an all-reduce that replaces `x`, contiguous, by the sum: for buffers of the caller's own."""
    if axis.size == 1:
        return lambda: x
    axis.ledger.enter("all_reduce", axis.name, _bytes(x))
    with trace.post("all_reduce", axis.name, _bytes(x)):
        work = dist.all_reduce(x, group=axis.connection(), async_op=True)
    return _after(work, "all_reduce", axis, lambda: x)


def start_gather(x: Tensor, axis: MeshAxis, dim: int, total: int) -> Pending:
    """Start an all-gather of the shards, cut by `shard_range`, of what has size `total` along `dim`."""
    require_shard(x, axis, dim, total)
    if axis.size == 1:
        return lambda: x
    longest = len(shard_range(total, axis.size, 0))
    padded = _pad(x.detach().movedim(dim, 0), longest).contiguous()
    gathered = padded.new_empty(axis.size * longest, *padded.shape[1:])
    axis.ledger.enter("all_gather", axis.name, _bytes(gathered))
    with trace.post("all_gather", axis.name, _bytes(gathered)):
        work = all_gather_single(gathered, padded, group=axis.connection(), async_op=True)
    # Only the last shards are shorter than the first: what they were padded with lies behind everything.
    return _after(work, "all_gather", axis, lambda: gathered[:total].movedim(0, dim).contiguous())


def start_sum_to_shards(x: Tensor, axis: MeshAxis, dim: int) -> Pending:
    """Start a reduce-scatter: this rank's shard along `dim`, by `shard_range`, of the sum over all ranks."""
    if axis.size == 1:
        return lambda: x
    lengths = _shard_lengths(x.size(dim), axis)
    padded = _pad(x.detach().movedim(dim, 0), axis.size * lengths[0]).contiguous()
    axis.ledger.enter("reduce_scatter", axis.name, _bytes(padded))
    shard = padded.new_empty(lengths[0], *padded.shape[1:])
    with trace.post("reduce_scatter", axis.name, _bytes(padded)):
        work = reduce_scatter_single(shard, padded, group=axis.connection(), async_op=True)
    return _after(
        work, "reduce_scatter", axis, lambda: shard[: lengths[axis.rank]].movedim(0, dim).contiguous()
    )


def sum_over(x: Tensor, axis: MeshAxis) -> Tensor:
    """All-reduce: the sum of every rank's `x`, on every rank."""
    if axis.size == 1:
        return x
    return start_sum_in_place(x.detach().clone(memory_format=torch.contiguous_format), axis)()


def gather_shards(x: Tensor, axis: MeshAxis, dim: int, total: int) -> Tensor:
    """All-gather the shards of a tensor whose size along `dim` is `total`, cut by `shard_range`."""
    return start_gather(x, axis, dim, total)()


def sum_to_shards(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Reduce-scatter: this rank's shard along `dim`, by `shard_range`, of the sum of every rank's `x`."""
    return start_sum_to_shards(x, axis, dim)()


def gather_list(x: Tensor, axis: MeshAxis, lengths: list[int], dim: int) -> list[Tensor]:
    """All-gather: what every rank holds, in the order of ranks.

    `lengths[r]` is the size of rank r's tensor along `dim`; all other sizes must agree. Shorter
    tensors travel padded to the longest, since not every backend gathers uneven sizes.
    """
    _require_length(x, axis, lengths, dim)
    if axis.size == 1:
        return [x]
    longest = max(lengths)
    whole = gather_shards(_pad(x.detach().movedim(dim, 0), longest), axis, 0, axis.size * longest)
    pieces = whole.unflatten(0, (axis.size, longest))
    return [piece[:length].movedim(0, dim) for piece, length in zip(pieces, lengths, strict=True)]


def require_shard(x: Tensor, axis: MeshAxis, dim: int, total: int) -> None:
    """Raise UsageError unless x has this rank's part, by `shard_range`, of `total` along `dim`."""
    _require_length(x, axis, _shard_lengths(total, axis), dim)


def take_shard(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Return a contiguous copy of this rank's shard of `x` along `dim` (`x` itself over one rank)."""
    if axis.size == 1:
        return x
    indices = shard_range(x.size(dim), axis.size, axis.rank)
    return x.detach().narrow(dim, indices.start, len(indices)).clone(memory_format=torch.contiguous_format)


def _after(work: dist.Work, kind: str, axis: MeshAxis, result: Pending) -> Pending:
    def finish() -> Tensor:
        with trace.wait(kind, axis.name):
            work.wait()
        return result()

    return finish


def _bytes(x: Tensor) -> int:
    return x.numel() * x.itemsize  # not nbytes, which torch.compile cannot tell of sizes that vary


def _shard_lengths(total: int, axis: MeshAxis) -> list[int]:
    return [len(shard_range(total, axis.size, rank)) for rank in range(axis.size)]


def _require_length(x: Tensor, axis: MeshAxis, lengths: list[int], dim: int) -> None:
    if x.size(dim) != lengths[axis.rank]:
        raise UsageError(
            f"rank {axis.rank} holds {x.size(dim)} along dim {dim}, expected {lengths[axis.rank]}"
        )


def _pad(x: Tensor, length: int) -> Tensor:
    missing = length - x.size(0)
    return x if missing == 0 else F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing])


# ---------------------------------------------------------------- differentiable


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        return sum_over(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.total = axis, dim, x.size(dim)
        return take_shard(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_shards(grad, ctx.axis, ctx.dim, ctx.total), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int, total: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gather_shards(x, axis, dim, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return take_shard(grad, ctx.axis, ctx.dim), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int, total: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gather_shards(x, axis, dim, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return sum_to_shards(grad, ctx.axis, ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.total = axis, dim, x.size(dim)
        return sum_to_shards(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_shards(grad, ctx.axis, ctx.dim, ctx.total), None, None


def copy_to(x: Tensor, axis: MeshAxis) -> Tensor:
    """Enter a region where each rank uses the same `x` differently: forward nothing, backward all-reduce."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: Tensor, axis: MeshAxis) -> Tensor:
    """Leave a region with a partial sum on each rank: forward all-reduce, backward nothing."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """Sum `x` over the ranks where each then uses the sum differently: all-reduce both ways."""
    return copy_to(reduce_from(x, axis), axis)


def scatter_to(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Keep this rank's shard of `x`, the same on every rank, along `dim`; backward all-gathers."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, dim)


def gather_from(x: Tensor, axis: MeshAxis, dim: int, total: int | None = None) -> Tensor:
    """All-gather shards along `dim` for a use that is the same on every rank; backward slices.

    `total`: the whole size along `dim`, where the shards are uneven (default: axis.size * x.size(dim)).
    """
    return x if axis.size == 1 else _Gather.apply(x, axis, dim, _whole(x, axis, dim, total))


def all_gather(x: Tensor, axis: MeshAxis, dim: int, total: int | None = None) -> Tensor:
    """All-gather shards along `dim` for a use that differs by rank; backward reduce-scatters.

    `total`: the whole size along `dim`, where the shards are uneven (default: axis.size * x.size(dim)).
    """
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim, _whole(x, axis, dim, total))


def reduce_scatter(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """Sum partial `x` over the ranks and keep this rank's shard along `dim`; backward all-gathers."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def _whole(x: Tensor, axis: MeshAxis, dim: int, total: int | None) -> int:
    return axis.size * x.size(dim) if total is None else total
