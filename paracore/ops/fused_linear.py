"""Linear layers over the tp axis whose products run while their rows travel, over peer memory.

`t` is this rank, T the size of the axis, S the length of the whole sequence in dim 0, rank r's part of it
being X_r [S/T, ..., in]:

|                | gather_matmul                           | matmul_scatter                          |
|----------------|-----------------------------------------|-----------------------------------------|
| result         | Y_i = X W_i^T + b_i of the whole X      | this rank's part of sum_t(A_t B_t)      |
| chunk          | the rows of Y of one X_r                | the rows of A_t B_t of one rank         |
| order          | t, t+1, ..., t-1: its own first         | t-1, ..., t+1, t: its own last          |
| copy stream    | pulls X_r from r, sets the chunk's flag | pushes a finished chunk to its owner    |
| product        | waits for the flag of a tile's chunk    | raises the chunk's counter by each tile |
| what is reused | what X_t is pulled from: two, by turns  | what is pushed into: one                |
| barriers       | one, before the product                 | beside the product's begin; at its end  |

Nothing can be pulled before it is there, or overwritten before it was read:

- gather_matmul: X_t is put down, then the barrier, then the others pull. It is put where it lay two calls
  ago; whoever came to the barrier of the last call had pulled everything of the one before. So one barrier
  per call does, and costs two parts in place of one.
- matmul_scatter: the second barrier says that all has been pushed, and the parts can be added up. The first,
  on the copy stream, says that all have added up what the call before brought; the product is under way
  meanwhile, so it costs nothing, and parts of the size of the whole result need not be kept twice.

The product that waits never waits for a kernel: copies and flags take no multiprocessor, and the barrier is
before it. The kernels that wait on the copy stream are waited for by no kernel. Sums are taken in the order
of ranks in float32 and rounded once. There is no autograd here, and no fallback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paracore import trace
from paracore.errors import UsageError
from paracore.parallel.collectives import Pending
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import shard_range
from paracore.parallel.symmetric import Region, Workspace

if TYPE_CHECKING:
    from paracore.kernels.matmul import TileOrder  # elsewhere imported by who calls it: it needs Triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_ORDERS = 64  # of tiles, kept per workspace

# ---------------------------------------------------------------- all-gather and product


@trace.ranged("paracore.fused_linear.gather_product")
def gather_matmul(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    axis: MeshAxis,
    length: int,
    workspace: Workspace,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return x W^T + b for each weight and bias, and x itself, of which every rank holds a part.

    x_shard: this rank's part of x [S, ..., in] along dim 0, as `shard_range` cuts it; length: S. weights:
    [out_i, in], biases: [out_i] or None, all in one of DTYPES. Returns [S, ..., out_i] each, and x. The
    widest product is computed first, while x arrives; the others then find all of it. workspace: over `axis`;
    every rank must make the same calls with it. Not differentiable.

    Raises UsageError, before any communication, for other shapes or dtypes, and for tensors that require
    gradients.
    """
    _check_gather(x_shard, axis, length, workspace)
    _check_layers(x_shard, weights, biases, workspace)
    whole = x_shard.new_empty(length, *x_shard.shape[1:])
    outputs = tuple(x_shard.new_empty(*whole.shape[:-1], weight.size(0)) for weight in weights)
    weights = [_readable(weight) for weight in weights]
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    products = zip(weights, biases, outputs, strict=True)
    first, *others = sorted(products, key=lambda product: -product[0].size(0))
    ring = _gather_ring(axis)
    order = _tile_order(whole, ring, workspace)
    with workspace.call() as ticket:
        _pull(x_shard, whole, ring, ticket, workspace)
        try:
            _waiting_product(whole, *first, order, ticket, workspace)
        finally:
            with trace.wait("all_gather", axis.name):
                workspace.copies.join()  # whatever failed, nothing may be written once `whole` is gone
        for weight, bias, output in others:
            _product(whole, weight, bias, output)
    return outputs, whole


def start_gather(x_shard: Tensor, axis: MeshAxis, length: int, workspace: Workspace) -> Pending:
    """Start to gather x [S, ..., in] for products that need all of it, while the caller's stream goes on.

    Arguments as for `gather_matmul`, and refusals. What is returned must be called: it lets the caller's
    stream wait for x, and returns it. Meanwhile the workspace may serve another call.
    """
    _check_gather(x_shard, axis, length, workspace)
    whole = x_shard.new_empty(length, *x_shard.shape[1:])
    with workspace.call() as ticket:
        _pull(x_shard, whole, _gather_ring(axis), ticket, workspace)

    def finish() -> Tensor:
        workspace.copies.join()
        return whole

    return finish


def _gather_ring(axis: MeshAxis) -> list[int]:
    """Return the ranks in the order in which their parts come: from this one on."""
    return [(axis.rank + step) % axis.size for step in range(axis.size)]


def _pull(x_shard: Tensor, whole: Tensor, ring: Sequence[int], ticket: int, workspace: Workspace) -> None:
    """Let the parts of the ring's ranks come into `whole`, one after the other.

    The flag of each place in that order becomes `ticket` when the part is there.
    """
    axis, own, copies = workspace.axis, workspace.axis.rank, workspace.copies
    axis.ledger.enter("all_gather", axis.name, whole.nbytes)
    copies.join()  # whoever comes to the barrier must have pulled what was put down for the last call
    region = workspace.region("gather", 2 * _part(whole, 0, axis).nbytes)
    half = region.next_half()
    # Both by the caller's stream: a copy within one device is a kernel, and finds no room beside the product.
    _part(whole, own, axis).copy_(x_shard)
    region.view(own, half, x_shard.shape, whole.dtype).copy_(x_shard)
    region.barrier()
    copies.fork()
    with trace.post("all_gather", axis.name, whole.nbytes):
        for index, rank in enumerate(ring):
            part = _part(whole, rank, axis)
            if rank != own and part.numel() > 0:
                copies.copy(part, region.view(rank, half, part.shape, part.dtype))
            copies.set_flag(workspace.flags, index, ticket)


def _waiting_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    order: TileOrder,
    ticket: int,
    workspace: Workspace,
) -> None:
    from paracore.kernels.matmul import Arrivals, matmul

    matmul(
        _rows(x),
        weight,
        _rows(out),
        bias=bias,
        order=order,
        arrivals=Arrivals(workspace.flags, ticket),
        programs=workspace.programs,
        timeout_seconds=workspace.timeout_seconds,
    )


# ---------------------------------------------------------------- product and reduce-scatter


@trace.ranged("paracore.fused_linear.product_scatter")
def matmul_scatter(
    factors: Sequence[tuple[Tensor, Tensor]],
    axis: MeshAxis,
    workspace: Workspace,
    *,
    partial_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return this rank's rows of the sum over all ranks of sum_i(A_i B_i).

    factors: A_i [S, ..., K_i] and B_i [K_i, out], all in one of DTYPES; S and out are the same on every rank.
    Returns [S/T, ..., out] in their dtype, dim 0 as `shard_range` cuts S. partial_dtype: what the ranks' sums
    are sent in, their own dtype by default; float32 is twice as long on its way, and spares one rounding.
    Several factors are joined along K first, so that each rank's sum is rounded once, too. workspace: over
    `axis`; every rank must make the same calls with it. Not differentiable.

    Raises UsageError, before any communication, for other shapes or dtypes, and for tensors that require
    gradients.
    """
    _check_workspace(axis, workspace)
    _check_factors(factors, partial_dtype, workspace)
    a, b = _one_product(factors)
    partial = a.new_empty(*a.shape[:-1], b.size(1), dtype=partial_dtype or a.dtype)
    ring = [(axis.rank - step) % axis.size for step in range(1, axis.size + 1)]
    axis.ledger.enter("reduce_scatter", axis.name, partial.nbytes)
    own = _part(partial, axis.rank, axis)
    total = own.new_empty(own.shape, dtype=a.dtype)
    with workspace.call():
        region = workspace.region("scatter", (axis.size - 1) * _part(partial, 0, axis).nbytes)
        workspace.counters.zero_()
        workspace.copies.fork()
        # First the product, which waits for nothing, then what waits for it: were it the other way round,
        # loading the product's kernel might have to wait until the device is idle.
        expected = _signalling_product(a, b, partial, ring, workspace)
        with trace.post("reduce_scatter", axis.name, partial.nbytes):
            _push_chunks(partial, ring, expected, region, workspace)
        with trace.wait("reduce_scatter", axis.name):
            workspace.copies.join()
            region.barrier()
        _add_up(total, own, region, workspace)
    return total


def _signalling_product(
    a: Tensor, b: Tensor, partial: Tensor, ring: Sequence[int], workspace: Workspace
) -> tuple[int, ...]:
    """Compute a b; return what the counter of each number of the ring is when its rows are done."""
    from paracore.kernels.matmul import Completions, expected_counts, matmul

    order = _tile_order(a, ring, workspace)
    matmul(
        _rows(a),
        b.T,
        _rows(partial),
        order=order,
        completions=Completions(workspace.counters),
        programs=workspace.programs,
        timeout_seconds=workspace.timeout_seconds,
    )
    counts: tuple[int, ...] = expected_counts(order, b.size(1), a.dtype)
    return counts


def _push_chunks(
    partial: Tensor,
    ring: Sequence[int],
    expected: Sequence[int],
    region: Region,
    workspace: Workspace,
) -> None:
    """Copy each chunk but this rank's own to whom it belongs, as soon as its counter says that it is done."""
    copies, sender = workspace.copies, workspace.axis.rank
    copies.barrier(region)
    for index, owner in enumerate(ring[:-1]):
        chunk = _part(partial, owner, workspace.axis)
        if chunk.numel() == 0:
            continue
        slot = sender - (sender > owner)  # in the order of ranks, the owner left out
        copies.wait(workspace.counters, index, expected[index])
        copies.copy(region.view(owner, slot * chunk.nbytes, chunk.shape, chunk.dtype), chunk)


def _add_up(total: Tensor, own: Tensor, region: Region, workspace: Workspace) -> None:
    """Write to `total` the sum of this rank's own rows and of all that it was sent."""
    from paracore.kernels.partial_sum import partial_sum

    axis = workspace.axis
    if own.numel() > 0:
        received = region.view(axis.rank, 0, (axis.size - 1, *own.shape), own.dtype)
        partial_sum(total, own, received, axis.rank)


def _one_product(factors: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return A [S, ..., sum K_i] and B [sum K_i, out], whose product is sum_i(A_i B_i)."""
    if len(factors) == 1:
        ((a, b),) = factors
        return a, _readable(b)
    return torch.cat([a for a, _ in factors], dim=-1), torch.cat([b for _, b in factors])


# ---------------------------------------------------------------- both


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    from paracore.kernels.matmul import matmul

    matmul(_rows(x), weight, _rows(out), bias=bias)


def _tile_order(a: Tensor, ring: Sequence[int], workspace: Workspace) -> TileOrder:
    """Return the order of tiles that takes the rows of the ring's ranks one rank after another."""
    from paracore.kernels.matmul import block_rows, tile_order

    width, block = math.prod(a.shape[1:-1]), block_rows(a.dtype, a.device)
    parts = [shard_range(a.size(0), workspace.axis.size, rank) for rank in ring]
    chunks = tuple((part.start * width, len(part) * width) for part in parts)
    if (chunks, block) not in workspace.cache:
        if len(workspace.cache) >= MOST_ORDERS:  # of lengths that differ from batch to batch
            workspace.cache.clear()
        workspace.cache[chunks, block] = tile_order(chunks, a.device, block)
    order: TileOrder = workspace.cache[chunks, block]
    return order


def _part(x: Tensor, rank: int, axis: MeshAxis) -> Tensor:
    """Return the part of dim 0 of `x` that belongs to `rank`."""
    part = shard_range(x.size(0), axis.size, rank)
    return x[part.start : part.stop]


def _rows(x: Tensor) -> Tensor:
    """Return x [..., K] as a matrix whose rows are contiguous."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.size(-1))  # -1 would not do for empty tensors
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _readable(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows or columns are contiguous, as the kernel reads it."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


# ---------------------------------------------------------------- checks


def _check_workspace(axis: MeshAxis, workspace: Workspace) -> None:
    if axis.size == 1:
        raise UsageError(f"axis {axis.name} has one rank: nothing travels, use torch.nn.functional.linear")
    if workspace.axis is not axis:
        raise UsageError(
            f"workspace is over axis {workspace.axis.name} (rank {workspace.axis.rank} of "
            f"{workspace.axis.size}), must be over the axis {axis.name} that is given"
        )


def _check_gather(x_shard: Tensor, axis: MeshAxis, length: int, workspace: Workspace) -> None:
    _check_workspace(axis, workspace)
    expected = len(shard_range(length, axis.size, axis.rank))
    if x_shard.dim() < 2 or x_shard.size(0) != expected:
        raise UsageError(
            f"x_shard has shape {list(x_shard.shape)}, must be [{expected}, ..., in]: the part of "
            f"rank {axis.rank} of {axis.size} of length={length}"
        )
    _check_tensors({"x_shard": x_shard}, workspace)


def _check_layers(
    x_shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], workspace: Workspace
) -> None:
    if not weights or len(biases) != len(weights):
        raise UsageError(f"{len(weights)} weights and {len(biases)} biases, must be as many and at least one")
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.dim() != 2 or weight.size(1) != x_shard.size(-1):
            raise UsageError(
                f"weights[{index}] has shape {list(weight.shape)}, must be [out, {x_shard.size(-1)}] as "
                f"x_shard is {list(x_shard.shape)}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise UsageError(
                f"biases[{index}] has shape {list(bias.shape)}, must be [{weight.size(0)}] as its weight is "
                f"{list(weight.shape)}"
            )
    tensors = {"x_shard": x_shard} | _numbered("weights", weights) | _numbered("biases", biases)
    _check_tensors(tensors, workspace)


def _check_factors(
    factors: Sequence[tuple[Tensor, Tensor]], partial_dtype: torch.dtype | None, workspace: Workspace
) -> None:
    if not factors:
        raise UsageError("factors is empty, must be at least one pair")
    first_a, first_b = factors[0]
    for index, (a, b) in enumerate(factors):
        fits = a.dim() >= 2 and b.dim() == 2 and a.size(-1) == b.size(0)
        if not fits or a.shape[:-1] != first_a.shape[:-1] or b.size(1) != first_b.size(-1):
            raise UsageError(
                f"factors[{index}] have shapes {list(a.shape)} and {list(b.shape)}, must be [S, ..., K] and "
                f"[K, out] with S, ... and out as in {list(first_a.shape)} and {list(first_b.shape)}"
            )
    if partial_dtype not in (None, first_a.dtype, torch.float32):
        raise UsageError(f"partial_dtype is {partial_dtype}, must be None, {first_a.dtype} or torch.float32")
    left, right = zip(*factors, strict=True)
    _check_tensors(_numbered("factors' A", left) | _numbered("factors' B", right), workspace)


def _numbered(name: str, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {f"{name}[{index}]": tensor for index, tensor in enumerate(tensors) if tensor is not None}


def _check_tensors(tensors: dict[str, Tensor], workspace: Workspace) -> None:
    first, device = next(iter(tensors.values())), workspace.flags.device
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.dtype != first.dtype or tensor.device != device:
            kinds = ", ".join(map(str, DTYPES))
            raise UsageError(
                f"{name} is {tensor.dtype} on {tensor.device}, must be one of {kinds}, the same for all (the "
                f"first is {first.dtype}), on {device}, where the workspace is"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UsageError(f"{name} requires a gradient, and this product has none: call it under no_grad")
