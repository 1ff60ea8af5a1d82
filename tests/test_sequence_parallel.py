"""With the sequence cut over tp, column- and row-parallel layers are torch's linear on the whole sequence."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paracore.checkpoint import gather_copies
from paracore.errors import UsageError
from paracore.nn import ColumnParallelLinear, RowParallelLinear, column_parallel
from paracore.parallel import GradientSync, Ledger, MeshAxis, collect_placements, gather_from, scatter_to
from paracore.parallel.collectives import gather_shards, take_shard
from paracore.parallel.overlap import Overlap
from tests.conftest import Launch, tp_axis
from tests.numerics import all_equal, assert_as_exact_as, nan_in_fresh_memory, randn

IN = 6
OUTS = (8, 3, 1)  # over four ranks the second leaves the last with nothing, the third all but the first
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Case:
    """dims: of x, [S, in] or [S, B, in]. outs: the output features of layers that share it.

    chunks: sub-chunks of each shard, where products overlap with communication.
    """

    length: int
    dims: int
    bias: bool
    dtype: torch.dtype
    sequence_parallel: bool = True
    outs: tuple[int, ...] = OUTS
    whole: bool = False  # gather_output, or not input_is_parallel
    chunks: int | None = None

    @property
    def cut(self) -> dict[str, Any]:
        overlap = None if self.chunks is None else Overlap(self.chunks)
        return {"sequence_parallel": self.sequence_parallel, "overlap": overlap}

    def randn(self, features: int, seed: int) -> Tensor:
        batch = (2,) * (self.dims - 2)
        return randn(self.length, *batch, features, seed=seed, dtype=self.dtype)


CASES = [
    *(Case(*which) for which in itertools.product((1, 5, 64), (2, 3), (True, False), DTYPES)),
    *(Case(5, 3, True, dtype, whole=True) for dtype in DTYPES),
    *(Case(5, 3, True, dtype, sequence_parallel=False) for dtype in DTYPES),
    Case(5, 3, True, torch.float64, sequence_parallel=False, whole=True),
    *(Case(21, 3, True, torch.float32, chunks=chunks) for chunks in range(1, 9)),
    *(Case(length, 2, False, dtype, chunks=4) for length in (1, 5, 64) for dtype in DTYPES),
    Case(5, 3, True, torch.bfloat16, whole=True, chunks=2),
]


def floor(dtype: torch.dtype) -> float:
    """In float64 nothing but rounding is left; below it one eps is always allowed, as in `validate`."""
    return 1e-14 if dtype == torch.float64 else torch.finfo(dtype).eps


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def whole_parameters(module: nn.Module, tp: MeshAxis, *, gradients: bool = False) -> dict[str, Tensor]:
    """Return them, or their gradients, rebuilt; every replica must hold the same bits."""
    held = {name: gradient(p) if gradients else p.detach() for name, p in module.named_parameters()}
    copies = gather_copies(held, collect_placements(module, tp.size), tp)
    assert all(all_equal(of_ranks) for of_ranks in copies.values())
    return {name: of_ranks[0] for name, of_ranks in copies.items()}


def dense(
    x: Tensor, dys: list[Tensor], parameters: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs and gradients of torch's linear over the whole, layer by layer, in `dtype`."""
    x = leaf(x.to(dtype))
    leaves = {name: leaf(p.to(dtype)) for name, p in parameters.items()}
    ys = [F.linear(x, leaves[f"{i}.weight"], leaves.get(f"{i}.bias")) for i in range(len(dys))]
    torch.autograd.backward(ys, [dy.to(dtype) for dy in dys])
    found = {f"y{i}": y.detach() for i, y in enumerate(ys)} | {"dx": gradient(x)}
    return found | {name: gradient(p) for name, p in leaves.items()}


def judge(case: Case, got: dict[str, Tensor], x: Tensor, dys: list[Tensor], parameters: Any) -> None:
    exact = dense(x, dys, parameters, torch.float64)
    ours = dense(x, dys, parameters, case.dtype)
    assert got.keys() == exact.keys()
    for name, tensor in got.items():
        assert tensor.shape == exact[name].shape, (case, name)
        assert tensor.dtype == case.dtype, (case, name)
        assert_as_exact_as(tensor, ours[name], exact[name], floor=floor(case.dtype), name=f"{case}: {name}")


def check_columns(case: Case, tp: MeshAxis) -> None:
    options: dict[str, Any] = {"dtype": case.dtype, **case.cut}
    layers = nn.ModuleList(
        ColumnParallelLinear(IN, out, tp, bias=case.bias, gather_output=case.whole, seed=seed, **options)
        for seed, out in enumerate(case.outs)
    )
    whole, dys = case.randn(IN, 0), [case.randn(out, 1 + i) for i, out in enumerate(case.outs)]
    x = leaf(take_shard(whole, tp, 0) if case.sequence_parallel else whole)
    ys = column_parallel(x, *layers, length=case.length)
    torch.autograd.backward(ys, [dy if case.whole else take_shard(dy, tp, -1) for dy in dys])
    dx = gradient(x)
    got = {
        f"y{i}": y if case.whole else gather_from(y, tp, -1, out)
        for i, (y, out) in enumerate(zip(ys, case.outs, strict=True))
    }
    got["dx"] = gather_shards(dx, tp, 0, case.length) if case.sequence_parallel else dx
    got |= whole_parameters(layers, tp, gradients=True)
    judge(case, got, whole, dys, whole_parameters(layers, tp))


def check_row(case: Case, tp: MeshAxis, features: int) -> None:
    layer = RowParallelLinear(
        features,
        5,
        tp,
        bias=case.bias,
        input_is_parallel=not case.whole,
        dtype=case.dtype,
        **case.cut,
    )
    layers = nn.ModuleList([layer])
    sync = GradientSync(layers, tp)
    whole, dy = case.randn(features, 0), case.randn(5, 1)
    x = leaf(whole if case.whole else take_shard(whole, tp, -1))
    y = layer(x)
    y.backward(take_shard(dy, tp, 0) if case.sequence_parallel else dy)
    sync()
    dx = gradient(x)
    got = {
        "y0": gather_shards(y, tp, 0, case.length) if case.sequence_parallel else y,
        "dx": dx if case.whole else gather_shards(dx, tp, -1, features),
    }
    got |= whole_parameters(layers, tp, gradients=True)
    judge(case, got, whole, [dy], whole_parameters(layers, tp))


def check_all() -> None:
    tp = tp_axis()
    with nan_in_fresh_memory():
        for case in CASES:
            check_columns(case, tp)
            for features in (8, 3) if case.length == 5 else (7,):
                check_row(case, tp, features)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_outputs_and_every_gradient_are_those_of_the_whole(launch: Launch, size: int) -> None:
    launch(size, check_all)


# ---------------------------------------------------------------- what needs a gradient


def frozen() -> None:
    """What is frozen costs nothing, and what is not stays right."""
    tp = tp_axis()
    names = ("weight", "bias", "x")
    for needed in itertools.product((True, False), repeat=len(names)):
        if not any(needed):
            continue
        needs = dict(zip(names, needed, strict=True))
        layer = ColumnParallelLinear(IN, 7, tp, sequence_parallel=True, dtype=torch.float64)
        whole, dy = randn(5, 2, IN, seed=0), randn(5, 2, 7, seed=1)
        for name in ("weight", "bias"):
            layer.get_parameter(name).requires_grad_(needs[name])
        x = take_shard(whole, tp, 0).requires_grad_(needs["x"])
        y = layer(x, 5)
        tp.ledger.take()
        y.backward(take_shard(dy, tp, -1))
        assert [(row.kind, row.count) for row in tp.ledger.take()] == (
            [("all_gather", 1)] * needs["weight"] + [("reduce_scatter", 1)] * needs["x"]
        ), needs
        expected = dense(
            whole, [dy], {f"0.{name}": p for name, p in whole_parameters(layer, tp).items()}, torch.float64
        )
        shards = {
            "weight": (expected["0.weight"], 0),
            "bias": (expected["0.bias"], 0),
            "x": (expected["dx"], 0),
        }
        for name, tensor in (("weight", layer.weight), ("bias", layer.get_parameter("bias")), ("x", x)):
            assert (tensor.grad is not None) == needs[name], needs
            if needs[name]:
                exact, dim = shards[name]
                torch.testing.assert_close(tensor.grad, take_shard(exact, tp, dim), rtol=1e-12, atol=1e-13)


def test_what_needs_no_gradient_costs_no_communication(launch: Launch) -> None:
    launch(2, frozen)


# ---------------------------------------------------------------- autocast


def under_autocast() -> None:
    tp = tp_axis()
    column = ColumnParallelLinear(IN, 8, tp, sequence_parallel=True)
    row = RowParallelLinear(8, IN, tp, sequence_parallel=True)
    whole = randn(5, 2, IN, seed=0, dtype=torch.float32)
    x = take_shard(whole, tp, 0).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = column(x, 5)
        y = row(hidden)
    assert hidden.dtype == y.dtype == torch.bfloat16
    # Two bytes an element, where float32 would take four; 5 tokens travel padded to 3 for each of 2 ranks.
    assert [(row.kind, row.bytes) for row in tp.ledger.take()] == [
        ("all_gather", 6 * 2 * IN * 2),
        ("reduce_scatter", 6 * 2 * IN * 2),
    ]
    y.float().square().sum().backward()
    assert [(row.kind, row.count, row.bytes) for row in tp.ledger.take()] == [
        ("all_gather", 2, 2 * 6 * 2 * IN * 2),
        ("reduce_scatter", 1, 6 * 2 * IN * 2),
    ]
    for tensor in (x, *column.parameters(), *row.parameters()):
        assert gradient(tensor).dtype == torch.float32

    layers = nn.ModuleDict({"column": column, "row": row})
    GradientSync(layers, tp)()
    leaves = {name: leaf(p) for name, p in whole_parameters(layers, tp).items()}
    plain = leaf(whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = F.linear(plain, leaves["column.weight"], leaves["column.bias"])
        expected = F.linear(hidden, leaves["row.weight"], leaves["row.bias"])
    expected.float().square().sum().backward()
    close: dict[str, Any] = {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(gather_shards(y, tp, 0, 5), expected.detach(), **close)
    torch.testing.assert_close(gather_shards(gradient(x), tp, 0, 5), gradient(plain), **close)
    for name, got in whole_parameters(layers, tp, gradients=True).items():
        torch.testing.assert_close(got, gradient(leaves[name]), **close)


def test_under_autocast_sixteen_bits_travel_and_gradients_are_those_of_parameters(launch: Launch) -> None:
    launch(2, under_autocast)


# ---------------------------------------------------------------- refusals


def axis_of(size: int, rank: int = 0) -> MeshAxis:
    """An axis that cannot communicate: what would is an error of another kind."""
    return MeshAxis("tp", size, rank, None, Ledger())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_of_another_length_is_refused_on_each_rank_before_communication(rank: int) -> None:
    layer = ColumnParallelLinear(IN, 8, axis_of(2, rank), sequence_parallel=True)
    held = (4, 3)[rank]
    with pytest.raises(UsageError, match=f"rank {rank} holds 2 along dim 0, expected {held}"):
        layer(torch.ones(2, IN), 7)


@pytest.mark.parametrize("size", [1, 2])
def test_a_length_that_is_not_that_of_an_uncut_input_is_refused(size: int) -> None:
    layer = ColumnParallelLinear(IN, 8, axis_of(size))
    with pytest.raises(UsageError, match="length=6: x has 3 in dim 0, which is not cut"):
        layer(torch.ones(3, IN), 6)
    assert layer(torch.ones(3, IN), 3).shape == (3, 8 // size)


def test_a_cut_input_without_its_length_is_refused() -> None:
    layer = ColumnParallelLinear(4, 4, MeshAxis("tp", 2, 1, None, Ledger()), sequence_parallel=True)
    with pytest.raises(UsageError, match=r"length=None .*of which x holds 3 on this rank of 2"):
        layer(torch.ones(3, 4))


def test_over_one_rank_too_a_wrong_length_is_refused() -> None:
    layer = ColumnParallelLinear(IN, 8, axis_of(1), sequence_parallel=True)
    with pytest.raises(UsageError, match="rank 0 holds 3 along dim 0, expected 6"):
        layer(torch.ones(3, IN), 6)
    assert layer(torch.ones(3, IN), 3).shape == layer(torch.ones(3, IN)).shape == (3, 8)


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_layers_that_disagree_on_what_is_cut_are_refused(order: tuple[bool, bool]) -> None:
    layers = [ColumnParallelLinear(IN, 8, axis_of(2), sequence_parallel=cut) for cut in order]
    with pytest.raises(UsageError, match="layers that share an input must agree on sequence_parallel"):
        column_parallel(torch.ones(3, IN), *layers)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_wrong_features_are_refused_before_anything_is_gathered(sequence_parallel: bool) -> None:
    column = ColumnParallelLinear(IN, 8, axis_of(2), sequence_parallel=sequence_parallel)
    row = RowParallelLinear(IN, 8, axis_of(2), sequence_parallel=sequence_parallel)
    for layer, takes in ((column, IN), (row, IN // 2)):
        with pytest.raises(UsageError, match=f"x has 8 features in its last dim, the layer takes {takes}"):
            layer(torch.ones(3, 8))


# ---------------------------------------------------------------- one rank


@pytest.mark.parametrize("dtype", DTYPES)
def test_over_one_rank_a_cut_layer_is_bitwise_torch_linear(dtype: torch.dtype) -> None:
    x = randn(5, 2, IN, seed=0, dtype=dtype)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(IN, 7, MeshAxis.alone("tp"), sequence_parallel=True, dtype=dtype)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert not any(p.partial_gradient for p in layer.placements.values())
    assert scatter_to(x, MeshAxis.alone("tp"), 0) is x
