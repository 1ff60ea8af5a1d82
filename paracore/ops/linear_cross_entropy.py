"""The LM head and its loss in one: logits exist for a chunk of tokens at a time, forward and backward.

For each chunk of tokens x [n, H] of the hidden states, and this rank's V_t rows W of the head:

    logits = x W^T                                  [n, V_t]
    statistics, over tp                             one all-gather of four numbers per token
    losses                                          [n]
    logits <- d(sum of losses) / d(logits)          in place
    dX = logits W                                   [n, H]
    dW += logits^T x                                [V_t, H], in float32

The gradients are those of the sum of losses; backward multiplies them by what arrives, one number. So the
logits are computed once, where keeping nothing would compute them twice (Hsu et al. 2024, Liger Kernel).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paracore import trace
from paracore.chunks import chunks, equal_ranges
from paracore.errors import UsageError
from paracore.ops.autocast import autocast
from paracore.ops.cross_entropy import (
    OPERATION,
    Objective,
    check_labels,
    check_reduction,
    first_column,
    gradient_,
    reduce_losses,
    whole_size,
    whole_statistics,
)
from paracore.ops.implementations import dtype_name
from paracore.ops.linear import start_reduction
from paracore.ops.product import add_product, multiply
from paracore.parallel.collectives import gather_shards
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import shard_range
from paracore.reference import accumulation_dtype

# Logits alive at once. Fewer tokens make products too thin for the hardware, and dW, which every chunk reads
# and writes, the larger part of the traffic.
_CHUNK_BYTES = 64 << 20
_LEAST_TOKENS = 256


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp: MeshAxis | None = None,
    *,
    vocab_size: int | None = None,
    length: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    over: MeshAxis | None = None,
    chunk_tokens: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """Return cross_entropy(hidden @ weight.T, labels); see `paracore.cross_entropy`.

    hidden, weight, labels, tp, vocab_size, length, chunk_tokens: see `sum_of_losses`. reduction: "mean" or
    "sum". Raises UsageError as `paracore.cross_entropy` does.
    """
    tp = MeshAxis.alone("tp") if tp is None else tp
    vocab_size = whole_size(vocab_size, weight.size(0), tp)
    objective = Objective(vocab_size, ignore_index, label_smoothing, z_loss)
    check_reduction(reduction, over)
    if reduction == "none":
        raise UsageError('reduction="none": the gradients are computed before those of losses are known')
    total = sum_of_losses(
        hidden, weight, labels, objective, tp, length=length, chunk_tokens=chunk_tokens, impl=impl
    )
    loss = reduce_losses(total, labels, reduction, [over] if over else [], ignore_index)
    return loss.to(accumulation_dtype(hidden.dtype))


def sum_of_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    tp: MeshAxis,
    *,
    length: int | None = None,
    chunk_tokens: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """Return the sum of the losses of this rank's tokens, float64.

    hidden: [..., H], the same on every rank of tp; or, where `length` gives S, this rank's part of [S, ...,
    H], cut along dim 0 as `shard_range` says (sequence parallelism). weight: [V, H], or over tp [V_t, H],
    this rank's rows. labels: [...] or [S, ...] int64, global, the same on every rank of tp.

    Gradients are computed in forward, if any will be needed, and scaled in backward, which can run once;
    hidden's is summed over tp there. Alive are at most chunk_tokens tokens' logits (default: 64 MiB of them,
    but 256 tokens at least) and, with gradients, hidden's, a float32 sum of weight's and some MiB. Under
    autocast hidden and weight are cast to its dtype.
    """
    hidden, weight = autocast(hidden, weight)
    _check_arguments(hidden, weight, labels, tp, objective.vocab_size, length, impl)
    check_labels(labels, objective)
    if chunk_tokens is None:
        # By the largest shard, for every rank takes part in every chunk's all-gather: as many on each.
        largest = len(shard_range(objective.vocab_size, tp.size, 0))
        chunk_tokens = max(_LEAST_TOKENS, _CHUNK_BYTES // (largest * hidden.itemsize))
    elif chunk_tokens < 1:
        raise UsageError(f"chunk_tokens={chunk_tokens}: must be at least 1")
    how = _How(tp, objective, length, chunk_tokens, torch.is_grad_enabled(), impl)
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, how)
    return total


class _How(NamedTuple):
    tp: MeshAxis
    objective: Objective
    length: int | None
    chunk_tokens: int
    differentiates: bool
    impl: str | None


def _check_arguments(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp: MeshAxis,
    vocab_size: int,
    length: int | None,
    impl: str | None,
) -> None:
    if hidden.dim() == 0 or not hidden.is_floating_point():
        raise UsageError(
            f"hidden is {dtype_name(hidden.dtype)} {list(hidden.shape)}, must be a float tensor [..., H]"
        )
    shape = [len(shard_range(vocab_size, tp.size, tp.rank)), hidden.size(-1)]
    if list(weight.shape) != shape or weight.dtype != hidden.dtype or weight.device != hidden.device:
        raise UsageError(
            f"weight is {dtype_name(weight.dtype)} {list(weight.shape)} on {weight.device}, must be "
            f"{dtype_name(hidden.dtype)} {shape} on {hidden.device}: what rank {tp.rank} of {tp.size} holds "
            f"of vocab_size={vocab_size} for hidden {list(hidden.shape)}"
        )
    tokens = list(hidden.shape[:-1])
    if length is not None:
        own = len(shard_range(length, tp.size, tp.rank))
        if not tokens or tokens[0] != own:
            raise UsageError(
                f"hidden is {list(hidden.shape)}, must have {own} in dim 0: what rank {tp.rank} of {tp.size} "
                f"holds of length={length}"
            )
        tokens[0] = length
    if labels.dtype != torch.int64 or list(labels.shape) != tokens or labels.device != hidden.device:
        raise UsageError(
            f"labels is {dtype_name(labels.dtype)} {list(labels.shape)} on {labels.device}, must be int64 "
            f"{tokens} on {hidden.device}"
        )
    if tp.size > 1:
        tp.connection()  # refuses an axis that cannot communicate
    if not torch.compiler.is_compiling():
        OPERATION.choose(impl, hidden)  # refuses before hidden is gathered


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @trace.ranged("paracore.linear_cross_entropy.forward")
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, how: _How) -> Tensor:
        # Which inputs require gradients, under torch.no_grad() too.
        needs_dx, needs_dw = (how.differentiates and needed for needed in ctx.needs_input_grad[:2])
        whole = hidden if how.length is None else gather_shards(hidden, how.tp, 0, how.length)
        x = whole.reshape(labels.numel(), whole.size(-1))
        # Contiguous, whatever hidden's strides are: it will travel.
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
        dw = torch.empty_like(weight, dtype=accumulation_dtype(weight.dtype)) if needs_dw else None
        with torch.autocast(x.device.type, enabled=False):
            total = _walk(x, weight, labels.reshape(-1), how, dx, dw)
        ctx.how, ctx.shape, ctx.dtype = how, whole.shape, weight.dtype
        ctx.gradients = dx, dw
        return total

    @staticmethod
    @once_differentiable
    @trace.ranged("paracore.linear_cross_entropy.backward")
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: backward ran before, and its gradients were handed out")
        (dx, dw), ctx.gradients = ctx.gradients, None
        arriving = None
        if dx is not None:
            dx = _scale_(dx, dtotal).view(ctx.shape)
            arriving = start_reduction(dx, ctx.how.tp, to_shards=ctx.how.length is not None)
        dw = None if dw is None else _scale_(dw, dtotal).to(ctx.dtype)
        return None if arriving is None else arriving(), dw, None, None


def _walk(
    x: Tensor, weight: Tensor, labels: Tensor, how: _How, dx: Tensor | None, dw: Tensor | None
) -> Tensor:
    """Return the sum of losses, float64; write the gradients of x and weight to dx and dw."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    if dw is not None and len(x) == 0:
        dw.zero_()
    for chunk in equal_ranges(len(x), how.chunk_tokens):
        of_chunk = None if dx is None else dx[chunk]
        total += _of_chunk(x[chunk], weight, labels[chunk], how, of_chunk, dw, starts=chunk.start == 0)
    return total


def _of_chunk(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    how: _How,
    dx: Tensor | None,
    dw: Tensor | None,
    *,
    starts: bool,
) -> Tensor:
    """Do for the tokens of one chunk what `_walk` does; their logits are gone before the next one's come.

    What is in dw counts unless this chunk starts it.
    """
    logits = multiply(x, weight.T)  # [n, V_t]
    statistics = whole_statistics(logits, labels, how.tp, how.objective, how.impl)
    if dx is not None or dw is not None:
        maximum, log_sum = statistics.maximum, statistics.log_sum
        coefficients = how.objective.coefficients(maximum, log_sum, labels, None)
        own = labels - first_column(how.tp, how.objective)
        gradient_(logits, own, maximum, log_sum, coefficients, how.impl)
    if dx is not None:
        multiply(logits, weight, out=dx)
    if dw is not None:
        add_product(dw, logits.T, x, starts=starts)
    return how.objective.losses(statistics, labels).sum(dtype=torch.float64)


def _scale_(matrix: Tensor, factor: Tensor) -> Tensor:
    """Multiply by a float64 scalar, in float32 or better.

    A scalar on a GPU would be rounded to the matrix' 16 bits first, and with it all gradients be wrong by the
    same factor. A vector of one element is not.
    """
    factor = factor.to(accumulation_dtype(matrix.dtype)).view(1)
    if matrix.dtype == factor.dtype:
        return matrix.mul_(factor)
    for index in chunks(matrix.shape, factor.itemsize):
        matrix[index].mul_(factor)
    return matrix
