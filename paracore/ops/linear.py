"""Linear layers cut over the tp axis, with the communication before and behind their products.

Column parallel: layers i that share X (Q, K and V; gate and up; the LM head), cut by their output features,
Y_i = X W_i^T + b_i. T is the size of the axis, S the length of the whole sequence, dim 0:

|                  | X the same on every rank          | X cut along the sequence                         |
|------------------|-----------------------------------|--------------------------------------------------|
| x given          | [S, ..., in]                      | [S/T, ..., in]                                   |
| outputs          | [S, ..., out_i/T]                 | [S, ..., out_i/T]                                |
| forward          | nothing                           | all-gather of X, once for all layers             |
| kept             | X                                 | this rank's part of X                            |
| backward         | dX = sum_i(dY_i W_i)              | all-gather of X while dX = sum_i(dY_i W_i)       |
|                  | all-reduce of dX while            | reduce-scatter of dX while                       |
|                  | dW_i = dY_i^T X, db_i = sum(dY_i) | dW_i = dY_i^T X, db_i = sum(dY_i)                |

Row parallel: one layer cut by its input features, Y = sum_t(X_t W_t^T) over the ranks t:

|                  | Y the same on every rank          | Y cut along the sequence                         |
|------------------|-----------------------------------|--------------------------------------------------|
| x given          | [S, ..., in/T]                    | [S, ..., in/T]                                   |
| output           | [S, ..., out]                     | [S/T, ..., out]                                  |
| forward          | all-reduce of X_t W_t^T           | reduce-scatter of X_t W_t^T                      |
| backward         | dX_t = dY W_t, dW_t = dY^T X_t    | all-gather of dY; dX_t = dY W_t, dW_t = dY^T X_t |

With an `Overlap` the collectives along the sequence become messages of sub-chunks. Y, dX and dX_t are
computed as the sub-chunks come, or sent as they are computed; dW and dW_t wait for the whole of X or dY,
which travels behind other products: see `paracore.parallel.overlap`. That whole lives only as long as the
products that read it. Sources: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2, which
gathers again instead of keeping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paracore import trace
from paracore.errors import UsageError
from paracore.ops import fused_linear
from paracore.ops.autocast import autocast, autocast_dtype
from paracore.ops.product import is_widened, multiply, sum_of_products
from paracore.parallel.collectives import (
    Pending,
    gather_shards,
    require_shard,
    start_gather,
    start_sum_in_place,
    start_sum_to_shards,
)
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.overlap import PEER_DTYPES, ChunkedGather, Overlap, start_sum_of_products
from paracore.parallel.symmetric import Workspace


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b: torch.nn.functional.linear, itself but where a CPU lacks units for 16-bit numbers.

    x: [..., in]; weight: [out, in]; bias: [out]; returns [..., out]. There the products go by way of float32
    (`paracore.ops.product`), each rounded once; kept for backward are x and weight as they are, and it is
    differentiable once. Under autocast everything is cast as torch casts it.

    Raises UsageError for shapes that do not fit.
    """
    features = weight.size(-1)
    if weight.dim() != 2 or x.dim() == 0 or x.size(-1) != features:
        raise UsageError(
            f"weight is {list(weight.shape)}, must be [out, in] for x {list(x.shape)}: [..., in]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(
            f"bias is {list(bias.shape)}, must be [{weight.size(0)}] for weight {list(weight.shape)}"
        )
    given = [x, weight] if bias is None else [x, weight, bias]
    dtype = autocast_dtype(x)
    agree = all(t.device == x.device and autocast_dtype(t) == dtype for t in given)  # else torch's to refuse
    if not agree or not is_widened(dtype, x.device):
        return F.linear(x, weight, bias)
    operands = autocast(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        y: Tensor = _Linear.apply(*operands)
    return y


def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    tp: MeshAxis,
    *,
    length: int | None = None,
    overlap: Overlap | None = None,
) -> tuple[Tensor, ...]:
    """Return x W^T + b for each of this rank's weights [out_i/T, in] and biases [out_i/T] or None.

    x: [S, ..., in], the same on every rank of tp; or, where `length` gives S, this rank's part of dim 0 as
    `shard_range` cuts it. overlap: of what travels then. Returns [S, ..., out_i/T] each; see the table above.
    Differentiable once; under autocast everything is cast to its dtype before it travels.

    Raises UsageError where x is not the part that `length` gives this rank.
    """
    if length is not None:
        require_shard(x, tp, 0, length)
    if tp.size == 1:
        with trace.range("paracore.column_linear.forward"):
            return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    device = x.device.type
    x, *parameters = autocast(x, *weights, *biases)
    _check_operands(x, parameters, overlap)
    cut = _Cut(tp, x.size(0) if length is None else length, length is not None, overlap)
    with torch.autocast(device, enabled=False):
        outputs: tuple[Tensor, ...] = _ColumnLinear.apply(x, cut, *parameters)
    return outputs


def row_linear(
    x: Tensor, weight: Tensor, tp: MeshAxis, *, is_cut: bool = True, overlap: Overlap | None = None
) -> Tensor:
    """Return this rank's tokens of sum_t(x_t W_t^T), cut along dim 0 as `shard_range` says, or all.

    x: [S, ..., in/T]; weight: [out, in/T], this rank's columns. is_cut: return [S/T, ..., out], with
    `overlap` of what travels; else [S, ..., out], the same on every rank. See the table above. Differentiable
    once; under autocast both are cast to its dtype.
    """
    if tp.size == 1:
        with trace.range("paracore.row_linear.forward"):
            return linear(x, weight)
    device = x.device.type
    x, weight = autocast(x, weight)
    _check_operands(x, [weight], overlap)
    with torch.autocast(device, enabled=False):
        y: Tensor = _RowLinear.apply(x, weight, _Cut(tp, x.size(0), is_cut, overlap))
    return y


def _check_operands(x: Tensor, parameters: Sequence[Tensor | None], overlap: Overlap | None) -> None:
    """Refuse what a product would refuse while messages are under way, which nobody would then wait for."""
    for parameter in parameters:
        if parameter is not None and (parameter.dtype != x.dtype or parameter.device != x.device):
            raise UsageError(
                f"a weight or bias is {parameter.dtype} on {parameter.device}, must be as x: {x.dtype} on "
                f"{x.device}"
            )
        if parameter is not None and parameter.dim() == 2 and parameter.size(1) != x.size(-1):
            raise UsageError(
                f"a weight is {list(parameter.shape)}, must be [out, {x.size(-1)}] for x {list(x.shape)}"
            )
    if overlap is not None and torch.compiler.is_compiling():
        raise UsageError(
            "overlap: messages between products cannot be compiled; leave the layer out of the graph"
        )


class _Cut(NamedTuple):
    """How a sequence of `length` tokens lies over tp, cut or whole on every rank, and how it travels."""

    tp: MeshAxis
    length: int
    is_cut: bool
    overlap: Overlap | None

    def chunks(self, x: Tensor, features: int) -> int:
        """Return the sub-chunks of each shard of [S, ..., features], x being like it; 0: collectives."""
        if not self.is_cut or self.overlap is None:
            return 0
        return self.overlap.chunks_of((self.length, *x.shape[1:-1], features), x.dtype, self.tp)

    def peers(self, x: Tensor, features: int) -> Workspace | None:
        """Return what the ranks reach each other's memory through, where they do and `chunks` is not 0."""
        if self.overlap is None or x.dtype not in PEER_DTYPES or not self.chunks(x, features):
            return None
        return self.overlap.peers


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        y = x.new_empty(*x.shape[:-1], weight.size(0))
        _multiply(x, weight.T, bias, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        with torch.autocast("cpu", enabled=False):
            dx = _sum_of_products([dy], [weight]) if needs_dx else None
            dw = _weight_gradient(dy, x) if needs_dw else None
        return dx, dw, _rows(dy).sum(0) if needs_db else None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    @trace.ranged("paracore.column_linear.forward")
    def forward(ctx: Any, x: Tensor, cut: _Cut, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        layers = len(parameters) // 2
        ctx.cut = cut
        weights = [weight for weight in parameters[:layers] if weight is not None]
        ctx.save_for_backward(x, *weights)
        outputs, _ = _gather_products(x, [w.T for w in weights], parameters[layers:], cut)
        return outputs

    @staticmethod
    @once_differentiable
    @trace.ranged("paracore.column_linear.backward")
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        needs_dx, _, *needs = ctx.needs_input_grad
        needs_dw, needs_db = needs[: len(weights)], needs[len(weights) :]
        with torch.autocast(x.device.type, enabled=False):
            whole = _start_gather(x, ctx.cut) if any(needs_dw) else None
            dx = _start_sum_of_products(dys, weights, ctx.cut) if needs_dx else None
            x, whole = (x if whole is None else whole()), None
            dws = [
                _weight_gradient(dy, x) if needed else None for dy, needed in zip(dys, needs_dw, strict=True)
            ]
            dbs = [_rows(dy).sum(0) if needed else None for dy, needed in zip(dys, needs_db, strict=True)]
            del x  # the whole, before dX's last parts come
            return None if dx is None else dx(), None, *dws, *dbs


class _RowLinear(torch.autograd.Function):
    @staticmethod
    @trace.ranged("paracore.row_linear.forward")
    def forward(ctx: Any, x: Tensor, weight: Tensor, cut: _Cut) -> Tensor:
        ctx.cut = cut
        ctx.save_for_backward(x, weight)
        return _start_sum_of_products([x], [weight.T], cut)()

    @staticmethod
    @once_differentiable
    @trace.ranged("paracore.row_linear.backward")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            factors = [weight] if needs_dx else []
            dxs, whole = _gather_products(dy, factors, [None for _ in factors], ctx.cut)
            return dxs[0] if dxs else None, _weight_gradient(whole, x) if needs_dw else None, None


# ---------------------------------------------------------------- products and what travels before or behind


def _gather_products(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None], cut: _Cut
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return X M_i + b_i, [S, ..., out_i], for each M_i [in, out_i], and the whole X; x: this rank's part."""
    if not matrices:
        return (), _start_gather(x, cut)()
    peers, chunks = cut.peers(x, x.size(-1)), cut.chunks(x, x.size(-1))
    if peers:
        return fused_linear.gather_matmul(x, [m.T for m in matrices], biases, cut.tp, cut.length, peers)
    if chunks:
        gather = ChunkedGather(x, cut.tp, cut.length, chunks)
        whole, arrivals = gather.whole, gather.arrivals()
    else:
        whole = gather_shards(x, cut.tp, 0, cut.length) if cut.is_cut else x
        arrivals = iter([slice(None)])
    try:
        outputs = tuple(whole.new_empty(*whole.shape[:-1], m.size(1)) for m in matrices)
        for rows in arrivals:
            for m, b, y in zip(matrices, biases, outputs, strict=True):
                _multiply(whole[rows], m, b, y[rows])
    finally:
        for _ in arrivals:  # none where all went well; else messages would be left for the next call
            pass
    return outputs, whole


def _start_gather(x: Tensor, cut: _Cut) -> Pending:
    """Start to gather the whole X."""
    if not cut.is_cut:
        return lambda: x
    peers, chunks = cut.peers(x, x.size(-1)), cut.chunks(x, x.size(-1))
    if peers:
        return fused_linear.start_gather(x, cut.tp, cut.length, peers)
    if chunks:
        return ChunkedGather(x, cut.tp, cut.length, chunks).finish
    return start_gather(x, cut.tp, 0, cut.length)


def _start_sum_of_products(xs: Sequence[Tensor], matrices: Sequence[Tensor], cut: _Cut) -> Pending:
    """Start the sum over ranks of sum_i(X_i M_i), [S, ..., out]; this rank's tokens of it where they are cut.

    The products have been computed when it returns, or are under way on the current stream.
    """
    like = xs[0].new_empty(()).expand(*xs[0].shape[:-1], matrices[0].size(1))
    peers, chunks = cut.peers(like, like.size(-1)), cut.chunks(like, like.size(-1))
    if peers:
        total = fused_linear.matmul_scatter(list(zip(xs, matrices, strict=True)), cut.tp, peers)
        return lambda: total
    if not chunks:
        return start_reduction(_sum_of_products(xs, matrices), cut.tp, to_shards=cut.is_cut)
    return start_sum_of_products(
        lambda rows: _sum_of_products([x[rows] for x in xs], matrices), like, cut.tp, chunks
    )


@trace.ranged("paracore.linear.product")
def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Write X M + b to y [..., out], contiguous."""
    multiply(_rows(x), matrix, bias=bias, out=_rows(y))


@trace.ranged("paracore.linear.product")
def _sum_of_products(xs: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """Return sum_i(X_i M_i), [..., out]: this rank's part of a sum over ranks."""
    total = sum_of_products([(_rows(x), matrix) for x, matrix in zip(xs, matrices, strict=True)])
    return total.view(*xs[0].shape[:-1], total.size(-1))


def start_reduction(part: Tensor, tp: MeshAxis, *, to_shards: bool) -> Pending:
    """Start the sum over tp of every rank's part [S, ..., features], contiguous and given up.

    to_shards: this rank's tokens of it are returned, else all.
    """
    return start_sum_to_shards(part, tp, 0) if to_shards else start_sum_in_place(part, tp)


@trace.ranged("paracore.linear.weight_gradient")
def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return multiply(_rows(dy).T, _rows(x))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.size(-1))  # -1 would not do for empty shards
