"""Linear layers cut over the tp axis, and over it also the sequence between them.

Y = X W^T + b, with torch's weight layout [out, in]. `t` is this rank, T the size of the tp axis:

|                    | column parallel                      | row parallel                            |
|--------------------|--------------------------------------|-----------------------------------------|
| weight held        | [out/T, in], rows cut, Shard(0)      | [out, in/T], columns cut, Shard(1)      |
| bias held          | [out/T], Shard(0)                    | [out], replicated                       |
| input              | X    [..., in], the same everywhere  | X_t  [..., in/T]                        |
| output             | Y_t  [..., out/T]                    | Y    [..., out], the same everywhere    |
| forward            | Y_t = X W_t^T + b_t                  | Y = sum_t(X_t W_t^T) + b                |
| backward           | dX = sum_t(dY_t W_t)                 | dX_t = dY W_t                           |
|                    | dW_t = dY_t^T X, db_t = sum(dY_t)    | dW_t = dY^T X_t, db = sum(dY)           |
| communication      | backward: all-reduce of dX           | forward: all-reduce of Y                |

Sums over t are sums, not means: each rank holds a part of one result. Sizes that T does not divide
are cut as `shard_range` says. Source: Shoeybi et al. 2019, Megatron-LM, section 3.

With sequence_parallel what is the same everywhere is cut along dim 0 instead, the sequence: a rank holds
S/T tokens of X before a column-parallel and of Y behind a row-parallel layer, and whatever lies between two
such regions works on these alone (Korthikanti et al. 2022):

|                  | column parallel                      | row parallel                         |
|------------------|--------------------------------------|--------------------------------------|
| input            | X    [S/T, ..., in]                  | X_t  [S, ..., in/T]                  |
| output           | Y_t  [S, ..., out/T]                 | Y    [S/T, ..., out]                 |
| communication    | forward: all-gather of X             | forward: reduce-scatter of Y         |
|                  | backward: all-gather of X again,     | backward: all-gather of dY           |
|                  | reduce-scatter of dX                 |                                      |
| gradient of bias | whole                                | partial: see `GradientSync`          |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paracore import trace
from paracore.errors import UsageError
from paracore.nn.initialization import linear_uniform_
from paracore.ops.linear import column_linear, linear, row_linear
from paracore.parallel.collectives import gather_from, scatter_to
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.overlap import Overlap
from paracore.parallel.placement import ParameterPlacement


class _ParallelLinear(nn.Module):
    """What both cuts share: parameters as their placements say, initialised as torch.nn.Linear."""

    placements: dict[str, ParameterPlacement]
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: MeshAxis,
        placements: dict[str, ParameterPlacement],
        *,
        seed: int,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.tp, self.placements = (
            in_features,
            out_features,
            tp,
            placements,
        )
        for name, placement in placements.items():  # in torch's order
            held = torch.empty(placement.local_shape(tp.rank), device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(held))
        if "bias" not in placements:
            self.register_parameter("bias", None)
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int) -> None:
        """Initialise as torch.nn.Linear does, by the whole layer's fan-in, the same for every tp size.

        Layers with one seed and one shape get equal weights: give each its own seed.
        """
        for name, placement in self.placements.items():
            linear_uniform_(self.get_parameter(name), placement, self.tp.rank, self.in_features, seed, name)

    def extra_repr(self) -> str:
        """Say what the module's repr shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tp={self.tp.rank} of {self.tp.size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are cut over the tp axis (table above).

    gather_output: return the whole output [..., out] on every rank, for a use that is the same on
        every rank (forward all-gather).
    replicas: how many neighbouring ranks hold the same shard (key/value heads fewer than ranks).
    sequence_parallel: the input is this rank's part of the sequence.
    overlap: how its gather, and the reduction of its gradient, run beside the products; None: they do not.
    seed: of the initial weights; see `reset_parameters`.

    Layers that share an input go through `column_parallel`, which gathers it, and reduces dX, once for all.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: MeshAxis,
        *,
        bias: bool = True,
        gather_output: bool = False,
        replicas: int = 1,
        sequence_parallel: bool = False,
        overlap: Overlap | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if gather_output and replicas > 1:
            raise UsageError(
                f"gather_output=True with replicas={replicas}: the output would repeat every shard"
            )
        shapes = {"weight": (out_features, in_features)} | ({"bias": (out_features,)} if bias else {})
        placements = {
            name: ParameterPlacement.shard(shape, tp.size, 0, replicas=replicas)
            for name, shape in shapes.items()
        }
        super().__init__(in_features, out_features, tp, placements, seed=seed, device=device, dtype=dtype)
        require_cut(overlap, sequence_parallel)
        self.gather_output, self.sequence_parallel, self.overlap = gather_output, sequence_parallel, overlap

    def forward(self, x: Tensor, length: int | None = None) -> Tensor:
        """x: [..., in], the same on every rank. Returns [..., out/T], or [..., out] with gather_output.

        With sequence_parallel x is [S/T, ..., in]; see `column_parallel` for `length`.
        """
        return column_parallel(x, self, length=length)[0]


def column_parallel(x: Tensor, *layers: ColumnParallelLinear, length: int | None = None) -> list[Tensor]:
    """Feed one input to several column-parallel layers (Q, K and V; gate and up).

    x: [..., in], the same on every rank, or this rank's [S/T, ..., in] with sequence_parallel. length: S, to
    be given then: no rank can tell it from its own part. Returns each layer's output; x is gathered, and dX
    reduced, once.
    """
    first = layers[0]
    _check_features(x, first.in_features)
    for name in ("sequence_parallel", "overlap"):
        if any(getattr(layer, name) != getattr(first, name) for layer in layers):
            raise UsageError(f"layers that share an input must agree on {name}")
    if not first.sequence_parallel and length not in (None, x.size(0)):
        raise UsageError(f"length={length}: x has {x.size(0)} in dim 0, which is not cut")
    if first.sequence_parallel and first.tp.size > 1 and length is None:
        raise UsageError(
            f"length=None with sequence_parallel: give the length of the whole sequence, of which x holds "
            f"{x.size(0)} on this rank of {first.tp.size}"
        )
    whole = length if first.sequence_parallel else None
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    outputs = column_linear(x, weights, biases, first.tp, length=whole, overlap=first.overlap)
    return [
        gather_from(y, layer.tp, -1, layer.out_features) if layer.gather_output else y
        for y, layer in zip(outputs, layers, strict=True)
    ]


def require_cut(overlap: Overlap | None, sequence_parallel: bool) -> None:
    """Raise UsageError for an overlap where nothing is cut."""
    if overlap is not None and not sequence_parallel:
        raise UsageError(f"{overlap} without sequence_parallel: nothing travels that could overlap")


def _check_features(x: Tensor, features: int) -> None:
    """Refuse a wrong input on every rank alike, before one rank fails and another waits for it."""
    if x.size(-1) != features:
        raise UsageError(f"x has {x.size(-1)} features in its last dim, the layer takes {features}")


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are cut over the tp axis (table above).

    input_is_parallel: the input is this rank's [..., in/T]; otherwise it is the whole [..., in], the
        same on every rank, and each rank takes its part (backward all-gather).
    sequence_parallel: the output is this rank's part of the sequence.
    overlap: how the reduction, and the gather of its gradient, run beside the products; None: they do not.
    seed: of the initial weights; see `reset_parameters`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: MeshAxis,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        overlap: Overlap | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        placements = {"weight": ParameterPlacement.shard((out_features, in_features), tp.size, 1)}
        if bias:
            # Under sequence parallelism a rank adds it to its own tokens only.
            placements["bias"] = ParameterPlacement.replicate(
                (out_features,), tp.size, partial_gradient=sequence_parallel
            )
        super().__init__(in_features, out_features, tp, placements, seed=seed, device=device, dtype=dtype)
        require_cut(overlap, sequence_parallel)
        self.input_is_parallel, self.sequence_parallel, self.overlap = (
            input_is_parallel,
            sequence_parallel,
            overlap,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in/T], or [..., in] unless input_is_parallel. Returns [..., out], everywhere the same.

        With sequence_parallel x is [S, ..., in/T] and this rank's [S/T, ..., out] is returned.
        """
        _check_features(x, self.weight.size(1) if self.input_is_parallel else self.in_features)
        if self.tp.size == 1:
            with trace.range("paracore.row_linear.forward"):
                return linear(x, self.weight, self.bias)
        if not self.input_is_parallel:
            x = scatter_to(x, self.tp, -1)
        y = row_linear(x, self.weight, self.tp, is_cut=self.sequence_parallel, overlap=self.overlap)
        # Added before the reduction it would count T times.
        return y if self.bias is None else y + self.bias.to(y.dtype)
