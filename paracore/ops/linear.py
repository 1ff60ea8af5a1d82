"""Linear layers that share one input and are cut over the tp axis by their output features.

Y_i = X W_i^T + b_i for the layers i that read X (Q, K and V; gate and up; the LM head). `t` is this rank,
T the size of the axis, S the length of the whole sequence in dim 0 of X:

|                  | X the same on every rank          | X cut along the sequence                         |
|------------------|-----------------------------------|--------------------------------------------------|
| x given          | [S, ..., in]                      | [S/T, ..., in]                                   |
| outputs          | [S, ..., out_i/T]                 | [S, ..., out_i/T]                                |
| forward          | nothing                           | all-gather of X, once for all layers             |
| kept             | X                                 | this rank's part of X                            |
| backward         | dX = sum_i(dY_i W_i)              | all-gather of X while dX = sum_i(dY_i W_i)       |
|                  | all-reduce of dX while            | reduce-scatter of dX while                       |
|                  | dW_i = dY_i^T X, db_i = sum(dY_i) | dW_i = dY_i^T X, db_i = sum(dY_i)                |

The whole of X lives in forward and in backward only as long as the products that read it. Sources: Shoeybi et
al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2, which gathers again instead of keeping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paracore import trace
from paracore.ops.autocast import autocast
from paracore.parallel.collectives import (
    Pending,
    gather_shards,
    start_gather,
    start_sum_in_place,
    start_sum_to_shards,
)
from paracore.parallel.mesh import MeshAxis


def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    tp: MeshAxis,
    *,
    length: int | None = None,
) -> tuple[Tensor, ...]:
    """Return x W^T + b for each of this rank's weights [out_i/T, in] and biases [out_i/T] or None.

    x: [S, ..., in], the same on every rank of tp; or, where `length` gives S, this rank's part of dim 0 as
    `shard_range` cuts it. Returns [S, ..., out_i/T] each; see the table above. Differentiable once; under
    autocast everything is cast to its dtype before it travels.

    Raises UsageError where x is not the part that `length` gives this rank.
    """
    if tp.size == 1:
        if length is not None:
            x = gather_shards(x, tp, 0, length)  # communicates nothing, but refuses another length
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    device = x.device.type
    x, *parameters = autocast(x, *weights, *biases)
    with torch.autocast(device, enabled=False):
        outputs: tuple[Tensor, ...] = _ColumnLinear.apply(x, tp, length, *parameters)
    return outputs


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    @trace.ranged("paracore.column_linear.forward")
    def forward(
        ctx: Any, x: Tensor, tp: MeshAxis, length: int | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        layers = len(parameters) // 2
        ctx.tp, ctx.length = tp, length
        weights = [weight for weight in parameters[:layers] if weight is not None]
        ctx.save_for_backward(x, *weights)
        whole = x if length is None else gather_shards(x, tp, 0, length)
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, parameters[layers:], strict=True))

    @staticmethod
    @once_differentiable
    @trace.ranged("paracore.column_linear.backward")
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        needs_dx, _, _, *needs = ctx.needs_input_grad
        needs_dw, needs_db = needs[: len(weights)], needs[len(weights) :]
        with torch.autocast(x.device.type, enabled=False):
            gathers = ctx.length is not None and any(needs_dw)
            whole = start_gather(x, ctx.tp, 0, ctx.length) if gathers else None
            dx = start_reduction(_input_gradient(dys, weights), ctx.tp, ctx.length) if needs_dx else None
            x = x if whole is None else whole()
            dws = [
                _weight_gradient(dy, x) if needed else None for dy, needed in zip(dys, needs_dw, strict=True)
            ]
            dbs = [_rows(dy).sum(0) if needed else None for dy, needed in zip(dys, needs_db, strict=True)]
            return None if dx is None else dx(), None, None, *dws, *dbs


def _input_gradient(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return sum_i(dY_i W_i), this rank's part of the sum over ranks, [S, ..., in]."""
    first, *others = zip(dys, weights, strict=True)
    dx = _rows(first[0]) @ first[1]
    for dy, weight in others:
        dx.addmm_(_rows(dy), weight)
    return dx.view(*dys[0].shape[:-1], dx.size(-1))


def start_reduction(dx: Tensor, tp: MeshAxis, length: int | None) -> Pending:
    """Start the sum over tp of every rank's part of dX, [S, ..., in]; `length` gives S where X is cut.

    This rank's tokens of it are returned then, else all. dx: contiguous, and given up.
    """
    return start_sum_in_place(dx, tp) if length is None else start_sum_to_shards(dx, tp, 0)


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return _rows(dy).T @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.size(-1))  # -1 would not do for empty shards
