"""Each collective and its conjugate, over any dim, even and uneven, counted by the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paracore.errors import UsageError
from paracore.parallel import (
    Ledger,
    MeshAxis,
    MeshShape,
    all_gather,
    all_reduce,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
    shard_range,
)
from paracore.parallel.collectives import gather_list, sum_over
from tests.conftest import Launch, tp_axis
from tests.numerics import assert_close, randn

SHAPE = (4, 6, 5)  # dims of different sizes, one of them odd


def shard(x: Tensor, dim: int, size: int, rank: int) -> Tensor:
    indices = shard_range(x.size(dim), size, rank)
    return x.narrow(dim, indices.start, len(indices))


def run_pair(name: str, dims: list[int]) -> list[tuple[Tensor, Tensor, list[tuple[str, int]]]]:
    tp = tp_axis()
    return [run_pair_over(tp, name, dim) for dim in dims]


def run_pair_over(tp: MeshAxis, name: str, dim: int) -> tuple[Tensor, Tensor, list[tuple[str, int]]]:
    """Apply one differentiable collective on this rank's input; return output, dx and what it cost."""
    whole, per_rank = randn(*SHAPE, seed=0), [randn(*SHAPE, seed=1 + r) for r in range(tp.size)]
    total = SHAPE[dim]
    functions: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "copy_to": (lambda x: copy_to(x, tp), whole),
        "reduce_from": (lambda x: reduce_from(x, tp), per_rank[tp.rank]),
        "all_reduce": (lambda x: all_reduce(x, tp), per_rank[tp.rank]),
        "scatter_to": (lambda x: scatter_to(x, tp, dim), whole),
        "gather_from": (lambda x: gather_from(x, tp, dim, total), shard(whole, dim, tp.size, tp.rank)),
        "all_gather": (lambda x: all_gather(x, tp, dim, total), shard(whole, dim, tp.size, tp.rank)),
        "reduce_scatter": (lambda x: reduce_scatter(x, tp, dim), per_rank[tp.rank]),
    }
    function, x = functions[name]
    # A transposed view: a collective that reads raw memory would send the wrong elements.
    x = x.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    before = x.detach().clone()
    y = function(x)
    # What lies in shards has one gradient, cut; what is whole a gradient of this rank's own, or the same.
    same = randn(*SHAPE, seed=100)
    grads = {
        "copy_to": randn(*SHAPE, seed=200 + tp.rank),
        "all_reduce": randn(*SHAPE, seed=200 + tp.rank),
        "all_gather": randn(*SHAPE, seed=200 + tp.rank),
        "reduce_from": same,
        "gather_from": same,
        "scatter_to": shard(same, dim, tp.size, tp.rank),
        "reduce_scatter": shard(same, dim, tp.size, tp.rank),
    }
    forward = tp.ledger.take()
    y.backward(grads[name])
    assert x.grad is not None
    assert torch.equal(x.detach(), before), "a collective must not change its input"
    assert y.is_contiguous() or name == "copy_to"
    return y.detach(), x.grad, [(row.kind, row.count) for row in (*forward, *tp.ledger.take())]


COST = {
    "copy_to": ["all_reduce"],
    "reduce_from": ["all_reduce"],
    "all_reduce": ["all_reduce", "all_reduce"],
    "scatter_to": ["all_gather"],
    "gather_from": ["all_gather"],
    "all_gather": ["all_gather", "reduce_scatter"],
    "reduce_scatter": ["reduce_scatter", "all_gather"],
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", COST)
def test_forward_and_backward_are_conjugate(launch: Launch, name: str, world_size: int) -> None:
    dims = [0, 1, 2, -1]
    results = launch(world_size, run_pair, name, dims)
    for dim, of_ranks in zip(dims, zip(*results, strict=True), strict=True):
        check_pair(name, dim, world_size, of_ranks)


def check_pair(name: str, dim: int, world_size: int, results: Sequence[Any]) -> None:
    whole = randn(*SHAPE, seed=0)
    summed = sum(randn(*SHAPE, seed=1 + r) for r in range(world_size))
    same = randn(*SHAPE, seed=100)
    summed_grad = sum(randn(*SHAPE, seed=200 + r) for r in range(world_size))
    assert isinstance(summed, Tensor)
    assert isinstance(summed_grad, Tensor)
    for rank, (y, dx, cost) in enumerate(results):

        def own(x: Tensor, rank: int = rank) -> Tensor:
            return shard(x, dim, world_size, rank)

        expected = {
            "copy_to": (whole, summed_grad),
            "reduce_from": (summed, same),
            "all_reduce": (summed, summed_grad),
            "scatter_to": (own(whole), same),
            "gather_from": (whole, own(same)),
            "all_gather": (whole, own(summed_grad)),
            "reduce_scatter": (own(summed), same),
        }[name]
        assert_close(y, expected[0])
        assert_close(dx, expected[1])
        assert cost == [(kind, 1) for kind in COST[name]]


def test_uneven_and_empty_shards(launch: Launch) -> None:
    totals = [0, 1, 2, 3, 7]
    for results in launch(4, gather_and_scatter_all, totals):
        for total, (gathered, scattered) in zip(totals, results, strict=True):
            assert torch.equal(gathered, torch.arange(total * 2.0).view(total, 2))
            assert torch.equal(scattered, 4 * torch.arange(total * 2.0).view(total, 2))


def gather_and_scatter_all(totals: list[int]) -> list[tuple[Tensor, Tensor]]:
    tp = tp_axis()
    return [gather_and_scatter(tp, total) for total in totals]


def gather_and_scatter(tp: MeshAxis, total: int) -> tuple[Tensor, Tensor]:
    whole = torch.arange(total * 2.0).view(total, 2)
    gathered = all_gather(shard(whole, 0, tp.size, tp.rank), tp, 0, total)
    return gathered, all_gather(reduce_scatter(whole, tp, 0), tp, 0, total)


def bytes_of_each_kind() -> list[tuple[str, str, int, int]]:
    tp = tp_axis()
    x = torch.ones(4, 3, dtype=torch.bfloat16)
    sum_over(x, tp)
    gather_list(x, tp, [4] * tp.size, 0)
    reduce_scatter(x, tp, 0)
    reduce_scatter(x, tp, 0)
    rows = [(row.kind, row.axis, row.count, row.bytes) for row in tp.ledger.take()]
    assert tp.ledger.take() == []
    return rows


def test_ledger_counts_collectives_and_bytes_of_whole_tensors(launch: Launch) -> None:
    nbytes = 4 * 3 * 2
    expected = [
        ("all_gather", "tp", 1, 2 * nbytes),
        ("all_reduce", "tp", 1, nbytes),
        ("reduce_scatter", "tp", 2, 2 * nbytes),
    ]
    assert launch(2, bytes_of_each_kind) == [expected] * 2


def test_an_axis_of_one_rank_never_communicates() -> None:
    alone = MeshAxis.alone("tp")  # there is no process group in this process
    x = randn(3, 4, seed=0).requires_grad_()
    for function in (copy_to, reduce_from, all_reduce):
        assert function(x, alone) is x
    for cut in (scatter_to, gather_from, all_gather, reduce_scatter):
        assert cut(x, alone, 0) is x
    assert alone.ledger.take() == []


@pytest.mark.parametrize("total", range(12))
@pytest.mark.parametrize("parts", range(1, 6))
def test_shards_are_those_of_torch_chunk(total: int, parts: int) -> None:
    pieces = [shard_range(total, parts, index) for index in range(parts)]
    assert [i for piece in pieces for i in piece] == list(range(total))
    chunks = [chunk.tolist() for chunk in torch.arange(total).chunk(parts)] if total else []
    assert [list(piece) for piece in pieces if piece] == chunks


def wrong_length() -> str:
    tp = tp_axis()
    with pytest.raises(UsageError) as caught:
        gather_list(torch.ones(3), tp, [2, 2], 0)
    return str(caught.value)


def test_a_shard_of_the_wrong_length_is_refused(launch: Launch) -> None:
    assert launch(2, wrong_length)[1] == "rank 1 holds 3 along dim 0, expected 2"


def subgroup_sums() -> tuple[str, float, float]:
    tp = tp_axis()
    pair = tp.neighbours(2)
    value = torch.tensor([float(tp.rank)])
    return pair.name, sum_over(value, pair).item(), sum_over(value, tp.neighbours(1)).item()


def test_neighbours_form_subgroups(launch: Launch) -> None:
    results = launch(4, subgroup_sums)
    assert results == [("tp[2]", 1.0, 0.0), ("tp[2]", 1.0, 1.0), ("tp[2]", 5.0, 2.0), ("tp[2]", 5.0, 3.0)]


def subgroups_beside_data_parallelism() -> tuple[int, int, bool]:
    mesh = MeshShape(dp=2, tp=2).build("cpu")
    tp, dp = (MeshAxis.of(mesh, name, Ledger()) for name in ("tp", "dp"))
    value = torch.tensor([1 << dist.get_rank()])
    pair = dp.neighbours(2)
    assert pair is dp
    return int(sum_over(value, tp)), int(sum_over(value, dp)), tp.neighbours(1) is tp.neighbours(1)


def test_axes_of_a_mesh_sum_over_their_own_ranks(launch: Launch) -> None:
    results = launch(4, subgroups_beside_data_parallelism)
    assert results == [(3, 5, True), (3, 10, True), (12, 5, True), (12, 10, True)]


def pairs_within_fours() -> tuple[int, bool]:
    mesh = MeshShape(dp=2, tp=4).build("cpu")
    tp = MeshAxis.of(mesh, "tp", Ledger())
    pair = tp.neighbours(2)
    return int(sum_over(torch.tensor([1 << dist.get_rank()]), pair)), tp.neighbours(2) is pair


def test_subgroups_beside_data_parallelism(launch: Launch) -> None:
    pairs = [0b11, 0b1100, 0b110000, 0b11000000]
    assert launch(8, pairs_within_fours) == [(pair, True) for pair in pairs for _ in range(2)]


def test_mesh_refuses_a_world_that_is_not_its_product() -> None:
    with pytest.raises(UsageError, match=r"world size 3 .* pp=1 \* dp=2 \* cp=1 \* tp=2 = 4"):
        MeshShape(dp=2, tp=2).require_world_size(3)
    with pytest.raises(UsageError, match="tp=0"):
        MeshShape(tp=0)
