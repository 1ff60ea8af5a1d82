"""Column- and row-parallel layers equal torch's linear on the whole weight, uneven sizes included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paracore.checkpoint import gather_copies
from paracore.errors import UsageError
from paracore.nn import ColumnParallelLinear, RowParallelLinear, column_parallel
from paracore.parallel import MeshAxis, collect_placements, scatter_to
from tests.conftest import Launch, tp_axis
from tests.numerics import assert_close, randn


def whole(
    layer: torch.nn.Module, tp: MeshAxis, tensors: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    held = tensors or {name: p.detach() for name, p in layer.named_parameters()}
    return {
        name: copies[0]
        for name, copies in gather_copies(held, collect_placements(layer, tp.size), tp).items()
    }


def gradients(layer: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


COLUMN_CASES = [(6, True), (7, True), (7, False), (1, True)]  # out_features, bias
ROW_CASES = [(6, True), (7, True), (7, False), (1, True)]  # in_features, bias


def all_columns(gather_output: bool) -> list[dict[str, Any]]:
    tp = tp_axis()
    return [column(tp, *case, gather_output) for case in COLUMN_CASES]


def column(tp: MeshAxis, out_features: int, bias: bool, gather_output: bool) -> dict[str, Any]:
    layer = ColumnParallelLinear(
        6, out_features, tp, bias=bias, gather_output=gather_output, dtype=torch.float64
    )
    x = randn(3, 2, 6, seed=0).requires_grad_()
    y = layer(x)
    dy = randn(3, 2, out_features, seed=1)
    y.backward(dy if gather_output else scatter_to(dy, tp, -1))
    parameters = whole(layer, tp)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "parameters": parameters,
        "gradients": whole(layer, tp, gradients(layer)),
    }


def expected(
    x: Tensor, dy: Tensor, parameters: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    y = F.linear(x, leaves["weight"], leaves.get("bias"))
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad, {name: p.grad for name, p in leaves.items() if p.grad is not None}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("gather_output", [False, True])
def test_column_parallel(launch: Launch, world_size: int, gather_output: bool) -> None:
    of_ranks = launch(world_size, all_columns, gather_output)
    for (out_features, _), results in zip(COLUMN_CASES, zip(*of_ranks, strict=True), strict=True):
        check_column(results, out_features, gather_output)


def check_column(results: Sequence[Any], out_features: int, gather_output: bool) -> None:
    y, dx, grads = expected(
        randn(3, 2, 6, seed=0), randn(3, 2, out_features, seed=1), results[0]["parameters"]
    )
    for result in results:
        assert_close(result["y"] if gather_output else torch.cat([r["y"] for r in results], -1), y)
        assert_close(result["dx"], dx)
        assert result["gradients"].keys() == grads.keys()
        for name, grad in grads.items():
            assert_close(result["gradients"][name], grad)


def all_rows(input_is_parallel: bool) -> list[dict[str, Any]]:
    tp = tp_axis()
    return [row(tp, *case, input_is_parallel) for case in ROW_CASES]


def row(tp: MeshAxis, in_features: int, bias: bool, input_is_parallel: bool) -> dict[str, Any]:
    layer = RowParallelLinear(
        in_features, 5, tp, bias=bias, input_is_parallel=input_is_parallel, dtype=torch.float64
    )
    x = randn(3, 2, in_features, seed=0)
    x = (scatter_to(x, tp, -1) if input_is_parallel else x).requires_grad_()
    y = layer(x)
    y.backward(randn(3, 2, 5, seed=1))
    return {
        "y": y.detach(),
        "dx": x.grad,
        "parameters": whole(layer, tp),
        "gradients": whole(layer, tp, gradients(layer)),
    }


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("input_is_parallel", [False, True])
def test_row_parallel(launch: Launch, world_size: int, input_is_parallel: bool) -> None:
    of_ranks = launch(world_size, all_rows, input_is_parallel)
    for (in_features, _), results in zip(ROW_CASES, zip(*of_ranks, strict=True), strict=True):
        check_row(results, in_features, input_is_parallel)


def check_row(results: Sequence[Any], in_features: int, input_is_parallel: bool) -> None:
    y, dx, grads = expected(
        randn(3, 2, in_features, seed=0), randn(3, 2, 5, seed=1), results[0]["parameters"]
    )
    for result in results:
        assert_close(result["y"], y)
        assert_close(torch.cat([r["dx"] for r in results], -1) if input_is_parallel else result["dx"], dx)
        for name, grad in grads.items():
            assert_close(result["gradients"][name], grad)


def several_from_one_input() -> tuple[list[tuple[str, int]], Tensor]:
    tp = tp_axis()
    layers = [ColumnParallelLinear(6, out, tp, seed=out, dtype=torch.float64) for out in (8, 4, 4)]
    x = randn(3, 6, seed=0).requires_grad_()
    outputs = column_parallel(x, *layers)
    assert tp.ledger.take() == []
    sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return [(row.kind, row.count) for row in tp.ledger.take()], x.grad


def test_layers_that_share_an_input_reduce_its_gradient_once(launch: Launch) -> None:
    alone = MeshAxis.alone("tp")
    layers = [ColumnParallelLinear(6, out, alone, seed=out, dtype=torch.float64) for out in (8, 4, 4)]
    dx = sum(layer.weight.sum(0) for layer in layers)
    assert isinstance(dx, Tensor)
    for cost, got in launch(2, several_from_one_input):
        assert cost == [("all_reduce", 1)]
        assert_close(got, dx.detach().expand(3, 6))


def initial_weights(world_axis: bool) -> dict[str, Tensor]:
    tp = tp_axis() if world_axis else MeshAxis.alone("tp")
    layers = torch.nn.ModuleDict(
        {"column": ColumnParallelLinear(6, 7, tp, seed=3), "row": RowParallelLinear(7, 5, tp, seed=4)}
    )
    return whole(layers, tp)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_initial_weights_are_bitwise_those_of_the_dense_layer(launch: Launch, world_size: int) -> None:
    dense = initial_weights(False)
    for held in launch(world_size, initial_weights, True):
        assert all(torch.equal(held[name], tensor) for name, tensor in dense.items())


def test_initial_weights_have_the_scale_of_the_whole_fan_in() -> None:
    layer = ColumnParallelLinear(400, 300, MeshAxis.alone("tp"))
    bound = 400**-0.5
    assert layer.weight.abs().max() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


def wrong_features() -> list[str]:
    tp = tp_axis()
    layers = [
        ColumnParallelLinear(6, 4, tp),
        RowParallelLinear(6, 4, tp),
        RowParallelLinear(7, 3, tp, input_is_parallel=False),
    ]
    messages = []
    for layer in layers:
        with pytest.raises(UsageError) as caught:
            layer(torch.ones(2, 8))
        messages.append(str(caught.value))
    return messages


def test_a_wrong_number_of_features_is_refused_on_every_rank(launch: Launch) -> None:
    takes = [6, 3, 7]
    expected = [f"x has 8 features in its last dim, the layer takes {n}" for n in takes]
    assert launch(2, wrong_features) == [expected] * 2


def autocast_dtypes() -> list[torch.dtype]:
    tp = tp_axis()
    layers = [ColumnParallelLinear(6, 4, tp), RowParallelLinear(6, 4, tp, input_is_parallel=False)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [layer(torch.ones(2, 6)).dtype for layer in layers]


def test_under_autocast_outputs_have_the_dtype_of_torch_linear(launch: Launch) -> None:
    assert launch(2, autocast_dtypes) == [[torch.bfloat16] * 2] * 2


def test_over_one_rank_a_layer_is_bitwise_torch_linear() -> None:
    x = randn(5, 64, seed=0, dtype=torch.bfloat16)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(64, 48, MeshAxis.alone("tp"), dtype=torch.bfloat16)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_gathering_replicated_shards_is_refused() -> None:
    tp = MeshAxis("tp", 2, 0, None, MeshAxis.alone("tp").ledger)
    with pytest.raises(UsageError, match="replicas=2"):
        ColumnParallelLinear(4, 4, tp, gather_output=True, replicas=2)
