"""Cross entropy per token of logits whose vocabulary is cut over the tp axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paracore.chunks import chunks
from paracore.errors import UsageError
from paracore.ops.implementations import dtype_name
from paracore.parallel.collectives import gather_list
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import shard_range
from paracore.reference import accumulation_dtype


def token_losses(
    logits: Tensor, labels: Tensor, tp: MeshAxis, *, vocab_size: int, ignore_index: int = -100
) -> Tensor:
    """-log softmax(logits)[label] of each token, 0 where the label is `ignore_index`.

    logits: [..., V_t] in any float dtype, this rank's `shard_range(vocab_size, tp.size, tp.rank)` of the
    vocabulary, possibly empty; all of it over an axis of one rank. labels: [...] int64, global, the same on
    every rank of tp. Returns [...] in float32 (float64 for float64), the same bits on every rank. Its
    gradient is taken to be the same on every rank too; the logits' gradient is in their dtype.

    Forward gathers three numbers per token over tp, once (Shoeybi et al. 2019, section 3, fused into one
    collective by the online softmax of Milakov & Gimelshein 2018, algorithm 3); backward communicates
    nothing and keeps the logits as they came, the labels and two numbers per token. A token whose logits
    are -inf over the whole vocabulary has loss and gradients NaN, as in torch; an ignored token has
    zeros whatever its logits and its loss's gradient are. Autocast changes nothing.

    Raises UsageError for other shapes, dtypes or devices, before any communication; it looks at what this
    rank was given. A label outside [0, vocab_size) that is not `ignore_index` is a RuntimeError on every
    rank, before any communication; on a GPU it is an assertion of the device, so that the host need
    not wait.
    """
    _check_arguments(logits, labels, tp, vocab_size)
    within = (labels >= 0) & (labels < vocab_size)
    torch._assert_async(
        (within | (labels == ignore_index)).all(),
        f"a label is outside [0, {vocab_size}) and is not ignore_index={ignore_index}",
    )
    losses: Tensor = _TokenLosses.apply(logits, labels, tp, vocab_size, ignore_index)
    return losses


def _check_arguments(logits: Tensor, labels: Tensor, tp: MeshAxis, vocab_size: int) -> None:
    if vocab_size < 1:
        raise UsageError(f"vocab_size is {vocab_size}, must be at least 1")
    if logits.dim() == 0 or not logits.is_floating_point():
        raise UsageError(
            f"logits is {dtype_name(logits.dtype)} {list(logits.shape)}, must be a float tensor [..., V_t]"
        )
    _check_shard(logits.size(-1), tp, vocab_size)
    if labels.dtype != torch.int64 or labels.shape != logits.shape[:-1]:
        raise UsageError(
            f"labels is {dtype_name(labels.dtype)} {list(labels.shape)}, must be int64 "
            f"{list(logits.shape[:-1])}, the shape of logits without its last dim"
        )
    if labels.device != logits.device:
        raise UsageError(f"labels is on {labels.device}, must be on logits' device {logits.device}")
    if tp.size > 1:
        tp.connection()  # refuses an axis that cannot communicate


def _check_shard(length: int, tp: MeshAxis, vocab_size: int) -> None:
    shard = shard_range(vocab_size, tp.size, tp.rank)
    if length == len(shard):
        return
    whole = ": these are whole already" if length == vocab_size else ""
    raise UsageError(
        f"logits has {length} in its last dim, must have {len(shard)}, which rank {tp.rank} of {tp.size} "
        f"holds of vocab_size={vocab_size}{whole}"
    )


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, tp: MeshAxis, vocab_size: int, ignore_index: int
    ) -> Tensor:
        start = shard_range(vocab_size, tp.size, tp.rank).start
        held = gather_list(_shard_statistics(logits, labels - start), tp, [3] * tp.size, 0)
        maximum, log_sum, at_label = _combine(held)
        ctx.save_for_backward(logits, labels, maximum, log_sum)
        ctx.start, ctx.ignore_index = start, ignore_index
        # Not lse - at_label: of large logits lse has lost the digits that the loss consists of.
        return (log_sum + (maximum - at_label)).masked_fill_(labels == ignore_index, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, maximum, log_sum = ctx.saved_tensors
        ignored = labels == ctx.ignore_index
        dlogits = _gradient(logits, labels - ctx.start, ignored, maximum, log_sum, dlosses)
        return dlogits, None, None, None, None


def _shard_statistics(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [3, ...]: over this shard the maximum m, the sum of exp(logit - m), and the label's logit.

    labels: [...], counted from the shard's first column; the logit of a label that lies elsewhere is 0. A
    shard of nothing, or of -inf alone, has the maximum -inf and the sum 0.
    """
    size, dtype = logits.size(-1), accumulation_dtype(logits.dtype)
    statistics = logits.new_zeros(3, *labels.shape, dtype=dtype)
    statistics[0].fill_(float("-inf"))
    if size == 0:
        return statistics
    for index in chunks(labels.shape, size * dtype.itemsize):
        x = _copy(logits[index], dtype)
        columns, inside = _columns(labels[index], size)
        maximum, at_label = x.amax(-1), x.gather(-1, columns).squeeze(-1).masked_fill_(~inside, 0.0)
        total = x.sub_(_finite(maximum).unsqueeze(-1)).exp_().sum(-1)
        statistics[:, *index] = torch.stack([maximum, total, at_label])
    return statistics


def _copy(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy to compute in place in; contiguous, so that sums do not depend on the logits' strides."""
    return logits.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _columns(labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label, any for those outside the shard, [..., 1]; and which are inside."""
    return labels.clamp(0, size - 1).unsqueeze(-1), (labels >= 0) & (labels < size)


def _finite(maximum: Tensor) -> Tensor:
    """Return 0 in place of -inf, so that exp(-inf - maximum) is 0 and not NaN."""
    return maximum.masked_fill(maximum == float("-inf"), 0.0)


def _combine(held: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum, log of the sum of exp(logit - maximum), and the label's logit, [...] each.

    held: every rank's statistics, added up in the order of ranks: the same bits everywhere. A shard of -inf
    alone adds exp(-inf) = 0; where all are, -inf - -inf makes the token NaN, as torch has it.
    """
    maximum = held[0][0]
    for shard in held[1:]:
        maximum = torch.maximum(maximum, shard[0])
    total, at_label = torch.zeros_like(maximum), torch.zeros_like(maximum)
    for shard_maximum, shard_total, shard_at_label in held:
        total += shard_total * (shard_maximum - maximum).exp_()
        at_label += shard_at_label
    return maximum, total.log_(), at_label


def _gradient(
    logits: Tensor, labels: Tensor, ignored: Tensor, maximum: Tensor, log_sum: Tensor, dlosses: Tensor
) -> Tensor:
    """Return (softmax(logits) - onehot(labels)) * dlosses in logits' dtype, zero where `ignored`.

    labels: counted from the shard's first column. The softmax is exp(logits - maximum - log_sum), in this
    order: the sum of the two would be as inexact as lse.
    """
    size, dtype = logits.size(-1), accumulation_dtype(logits.dtype)
    dlogits = torch.empty_like(logits)
    if size == 0:
        return dlogits
    for index in chunks(labels.shape, size * dtype.itemsize):
        x = _copy(logits[index], dtype)
        x.sub_(maximum[index].unsqueeze(-1)).sub_(log_sum[index].unsqueeze(-1)).exp_()
        columns, inside = _columns(labels[index], size)
        x.scatter_add_(-1, columns, -inside.to(dtype).unsqueeze(-1))
        x.mul_(dlosses[index].unsqueeze(-1)).masked_fill_(ignored[index].unsqueeze(-1), 0.0)
        dlogits[index].copy_(x)
    return dlogits
