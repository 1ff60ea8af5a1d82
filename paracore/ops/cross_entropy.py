"""Cross entropy of logits whose vocabulary may be cut over the tp axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paracore import trace
from paracore.errors import UsageError
from paracore.ops.fresh import fresh
from paracore.ops.implementations import Implementation, Operation, dtype_name
from paracore.ops.tokens import TokenOrder
from paracore.parallel.collectives import gather_list, reduce_from
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import shard_range
from paracore.reference import accumulation_dtype

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyKernels(Protocol):
    """What a module of kernels offers; `paracore.reference_layers` defines it."""

    def cross_entropy_statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return maximum, sum of exponentials, label's logit and sum of differences of each token."""

    def cross_entropy_gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        log_sum: Tensor,
        coefficients: Tensor,
        dlogits: Tensor,
    ) -> None:
        """Write the gradient to dlogits, which may be logits."""


OPERATION: Operation[CrossEntropyKernels] = Operation(
    "cross_entropy",
    {
        "triton": Implementation(
            "paracore.kernels.cross_entropy", (torch.float32, torch.bfloat16, torch.float16)
        ),
        "native": Implementation("paracore._C", (torch.float32, torch.bfloat16)),
        "reference": Implementation("paracore.reference_layers"),
    },
)


@dataclass(frozen=True)
class Objective:
    """What is minimised for each token, with y = logits, y_l that of its label and log Z = log sum exp(y):

    (1 - e) (log Z - y_l) + e / V sum(log Z - y) + z (log Z)^2

    label_smoothing: e, torch's (Szegedy et al. 2016); z_loss: z (Chowdhery et al. 2022, section 5). A label
    that is ignore_index counts nothing.
    """

    vocab_size: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise UsageError(f"vocab_size={self.vocab_size}: must be at least 1")
        if not 0 <= self.label_smoothing <= 1:
            raise UsageError(f"label_smoothing={self.label_smoothing}: must be from 0 to 1")
        if not 0 <= self.z_loss < float("inf"):
            raise UsageError(f"z_loss={self.z_loss}: must be finite and not negative")

    def losses(self, statistics: Statistics, labels: Tensor) -> Tensor:
        """Return the loss of each token, [N]; 0 where it is ignored."""
        maximum, log_sum, at_label, differences = statistics
        # Not log Z - y_l: of large logits log Z has lost the digits that the loss consists of.
        losses = log_sum + (maximum - at_label)
        if self.label_smoothing:
            uniform = log_sum - differences / self.vocab_size
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * uniform
        if self.z_loss:
            losses = losses + self.z_loss * (maximum + log_sum).square()
        return losses.masked_fill(labels == self.ignore_index, 0.0)

    def coefficients(
        self, maximum: Tensor, log_sum: Tensor, labels: Tensor, dlosses: Tensor | None
    ) -> Tensor:
        """Return [3, N]: the gradient is a * softmax - b * onehot(label) - c. dlosses: [N], 1 if None."""
        weights = torch.ones_like(maximum) if dlosses is None else dlosses
        coefficients = torch.stack(
            [
                weights * (1 + 2 * self.z_loss * (maximum + log_sum)) if self.z_loss else weights,
                weights * (1 - self.label_smoothing),
                weights * (self.label_smoothing / self.vocab_size),
            ]
        )
        return coefficients.masked_fill(labels == self.ignore_index, 0.0)


class Statistics(NamedTuple):
    """Of each token, over the whole vocabulary, [N] each.

    The maximum m of its logits (0 for -inf), the logarithm of the sum of exp(logit - m), the logit of its
    label, and the sum of (logit - m).
    """

    maximum: Tensor
    log_sum: Tensor
    at_label: Tensor
    differences: Tensor


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: MeshAxis | None = None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    over: MeshAxis | None = None,
    impl: str | None = None,
) -> Tensor:
    """Return the cross entropy of logits, whole or cut over tp by vocabulary; `Objective` has the formula.

    logits: [..., V] in any float dtype, or over tp [..., V_t], this rank's `shard_range(vocab_size, ...)`,
    which may be empty. vocab_size: V, to be given over more than one rank. labels: [...] int64, global, the
    same on every rank of tp.

    reduction: "none" gives [...]; "sum" and "mean" a scalar, over the labels that are not ignore_index of
    all ranks of `over` (those that hold other tokens, say `TrainingAxes.data`; None is this rank), however
    many each has. With no such label at all it is 0, with gradients of 0. Every rank returns the same loss,
    and its gradient is the part that this rank's tokens have in it: parts are to be added up, not averaged.

    Losses are in float32 (float64 for float64), the logits' gradient in their dtype; logits are read once
    forward, once backward, never modified, and copied only where they are no matrix: where the last dim is
    not contiguous, or over tp the others not in order. Over tp one all-gather of four numbers per token, in
    forward (Shoeybi et al. 2019, section 3, with the online softmax of Milakov & Gimelshein 2018). A token
    whose logits are -inf over the whole vocabulary has loss and gradients NaN, as in torch. Autocast changes
    nothing. impl: "triton", "native", "reference" or None; see `paracore.ops.implementations`.

    Raises UsageError for other shapes, dtypes, devices or values, for logits that are whole already, or when
    the implementation refuses, before any communication. A label outside [0, V) that is not ignore_index is a
    RuntimeError, on a GPU an assertion of the device.
    """
    tp = MeshAxis.alone("tp") if tp is None else tp
    check_logits(logits, labels)
    vocab_size = whole_size(vocab_size, logits.size(-1), tp)
    objective = Objective(vocab_size, ignore_index, label_smoothing, z_loss)
    check_reduction(reduction, over)
    _check_shard(logits.size(-1), tp, vocab_size)
    check_labels(labels, objective)
    order = TokenOrder(logits, as_given=tp.size > 1)  # tokens meet those of other ranks one by one
    losses = order.restore(_Losses.apply(order.matrix(logits), order.vector(labels), tp, objective, impl))
    if reduction == "none":
        return losses
    total = losses.sum(dtype=torch.float64)
    return reduce_losses(total, labels, reduction, [over] if over else [], ignore_index).to(losses.dtype)


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """Raise UsageError unless logits, or what they are made of, are [..., D] and labels [...]."""
    if logits.dim() == 0 or not logits.is_floating_point():
        raise UsageError(
            f"logits is {dtype_name(logits.dtype)} {list(logits.shape)}, must be a float tensor [..., V]"
        )
    if labels.dtype != torch.int64 or labels.shape != logits.shape[:-1] or labels.device != logits.device:
        raise UsageError(
            f"labels is {dtype_name(labels.dtype)} {list(labels.shape)} on {labels.device}, must be int64 "
            f"{list(logits.shape[:-1])} on {logits.device}, as logits without their last dim"
        )


def whole_size(vocab_size: int | None, held: int, tp: MeshAxis) -> int:
    """Return V, where this rank holds `held` of it; raise UsageError where it would be a guess.

    Of 7 over two ranks, one would take its 4 for half of 8 and the other its 3 for half of 6; and whole
    logits could not be told from a shard.
    """
    if vocab_size is None and tp.size > 1:
        raise UsageError(
            f"vocab_size=None: must be given over {tp.size} ranks of axis {tp.name}; rank {tp.rank} holds "
            f"{held}"
        )
    return held if vocab_size is None else vocab_size


def check_reduction(reduction: str, over: MeshAxis | None) -> None:
    """Raise UsageError for an unknown reduction, or for ranks that it cannot be taken over."""
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction={reduction!r}: must be one of {', '.join(REDUCTIONS)}")
    if over is not None and reduction == "none":
        raise UsageError(f'reduction="none": nothing is summed over the axis {over.name} that over gives')
    if over is not None and over.size > 1:
        over.connection()  # refuses an axis that cannot communicate


def check_labels(labels: Tensor, objective: Objective) -> None:
    """Refuse labels outside the vocabulary, without a wait for the device."""
    within = (labels >= 0) & (labels < objective.vocab_size)
    torch._assert_async(
        (within | (labels == objective.ignore_index)).all(),
        f"a label is outside [0, {objective.vocab_size}) and is not ignore_index={objective.ignore_index}",
    )


def reduce_losses(
    total: Tensor,
    labels: Tensor,
    reduction: str,
    over: Sequence[MeshAxis],
    ignore_index: int,
    valid: Tensor | None = None,
) -> Tensor:
    """Return the sum or mean over the labels of all ranks of `over`, float64, of this rank's total.

    valid: the number of labels to divide by, if it is not theirs.
    """
    # In float64, where counts are exact beyond 2^24 tokens too.
    sums = torch.stack([total, (labels != ignore_index).sum().double()])
    for axis in over:
        sums = reduce_from(sums, axis)
    return sums[0] / (sums[1] if valid is None else valid).clamp(min=1) if reduction == "mean" else sums[0]


def _check_shard(length: int, tp: MeshAxis, vocab_size: int) -> None:
    shard = shard_range(vocab_size, tp.size, tp.rank)
    if length != len(shard):
        whole = ": these are whole already" if length == vocab_size else ""
        raise UsageError(
            f"logits has {length} in its last dim, must have {len(shard)}, which rank {tp.rank} of {tp.size} "
            f"holds of vocab_size={vocab_size}{whole}"
        )
    if tp.size > 1:
        tp.connection()  # refuses an axis that cannot communicate


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, tp: MeshAxis, objective: Objective, impl: str | None
    ) -> Tensor:
        statistics = whole_statistics(logits, labels, tp, objective, impl)
        ctx.save_for_backward(logits, labels, statistics.maximum, statistics.log_sum)
        ctx.tp, ctx.objective, ctx.impl = tp, objective, impl
        return objective.losses(statistics, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, maximum, log_sum = ctx.saved_tensors
        coefficients = ctx.objective.coefficients(maximum, log_sum, labels, dlosses)
        own = labels - first_column(ctx.tp, ctx.objective)
        dlogits = _gradient(logits, own, maximum, log_sum, coefficients, ctx.impl)
        return dlogits, None, None, None, None


def first_column(tp: MeshAxis, objective: Objective) -> int:
    """Return which of the whole vocabulary this rank's first column is."""
    return shard_range(objective.vocab_size, tp.size, tp.rank).start


def whole_statistics(
    logits: Tensor, labels: Tensor, tp: MeshAxis, objective: Objective, impl: str | None
) -> Statistics:
    """Return the statistics of logits [N, V_t] over the whole vocabulary: one all-gather over tp."""
    held = _statistics(logits, labels - first_column(tp, objective), impl)
    sizes = [len(shard_range(objective.vocab_size, tp.size, rank)) for rank in range(tp.size)]
    return _combine(gather_list(held, tp, [4] * tp.size, 0), sizes)


def _combine(held: list[Tensor], sizes: list[int]) -> Statistics:
    """Add up every rank's statistics in the order of ranks: the same bits everywhere.

    sizes: how many columns each has.
    """
    maximum = torch.stack([shard[0] for shard in held]).amax(0)
    maximum = maximum.masked_fill(maximum == float("-inf"), 0.0)
    total, at_label, differences = (torch.zeros_like(maximum) for _ in range(3))
    for (m, shard_total, shard_at_label, shard_differences), size in zip(held, sizes, strict=True):
        total += shard_total * (m - maximum).exp()
        at_label += shard_at_label
        if size:
            differences += shard_differences + size * (m - maximum)
    return Statistics(maximum, total.log(), at_label, differences)


@torch.library.custom_op("paracore::cross_entropy_statistics", mutates_args=())
@trace.operation("paracore.cross_entropy.statistics")
def _statistics(logits: Tensor, labels: Tensor, impl: str | None) -> Tensor:
    return OPERATION.choose(impl, logits).cross_entropy_statistics(logits, labels)


@_statistics.register_fake
def _(logits: Tensor, labels: Tensor, impl: str | None) -> Tensor:
    return logits.new_empty(4, len(labels), dtype=accumulation_dtype(logits.dtype))


@torch.library.custom_op("paracore::cross_entropy_gradient", mutates_args=())
@trace.operation("paracore.cross_entropy.gradient")
def _gradient(
    logits: Tensor, labels: Tensor, maximum: Tensor, log_sum: Tensor, coefficients: Tensor, impl: str | None
) -> Tensor:
    dlogits = fresh(logits, logits.shape)
    kernels = OPERATION.choose(impl, logits)
    kernels.cross_entropy_gradient(logits, labels, maximum, log_sum, coefficients, dlogits)
    return dlogits


@_gradient.register_fake
def _(
    logits: Tensor, labels: Tensor, maximum: Tensor, log_sum: Tensor, coefficients: Tensor, impl: str | None
) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op("paracore::cross_entropy_gradient_", mutates_args=("logits",))
@trace.operation("paracore.cross_entropy.gradient")
def gradient_(
    logits: Tensor, labels: Tensor, maximum: Tensor, log_sum: Tensor, coefficients: Tensor, impl: str | None
) -> None:
    """Replace logits [N, V_t] by their gradient; labels are counted from the shard's first column."""
    kernels = OPERATION.choose(impl, logits)
    kernels.cross_entropy_gradient(logits, labels, maximum, log_sum, coefficients, logits)


@gradient_.register_fake
def _(
    logits: Tensor, labels: Tensor, maximum: Tensor, log_sum: Tensor, coefficients: Tensor, impl: str | None
) -> None:
    return None
