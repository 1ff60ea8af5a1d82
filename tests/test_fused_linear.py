"""Products whose rows travel meanwhile: W ranks as W buffers in one process, on the GPU or interpreted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from paracore.errors import UsageError
from paracore.ops.fused_linear import gather_matmul, matmul_scatter, start_gather
from paracore.ops.linear import column_linear, row_linear
from paracore.parallel import MeshAxis, Overlap
from tests.fused_linear_cases import BF16, DEVICE, F16, F32, Gather, Scatter, make, part
from tests.interpreter import mended
from tests.numerics import assert_as_exact_as, nan_in_fresh_memory
from tests.peer_doubles import TIMEOUT, LocalPeers, LocalWorkspace

pytest.importorskip("triton")

from paracore.kernels import matmul as products
from paracore.kernels import partial_sum as sums
from paracore.kernels.matmul_configurations import Tile

SMALL_TILE = Tile(rows=8, columns=32, depth=16, warps=4, stages=1)


@pytest.fixture(autouse=True)
def every_peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LocalPeers]]:
    """Kernels as on a GPU: fresh memory is NaN, and a product that exchanges data runs beside its caller.

    The interpreter runs one kernel at a time; while one waits, copies go on. Its tiles are small, so that a
    chunk has several.
    """
    made: list[LocalPeers] = []
    with ExitStack() as stack:
        stack.enter_context(nan_in_fresh_memory())
        if DEVICE.type == "cpu":
            stack.enter_context(mended())
            lock, matmul, partial_sum = threading.Lock(), products.matmul, sums.partial_sum

            def alone(kernel, *args, **options):
                with lock:
                    kernel(*args, **options)

            def beside(work, numbers):
                (stream,) = filter(None, (peers.stream_of(numbers) for peers in made))
                stream.product(work)

            def launch(*args, **options):
                work = partial(alone, matmul, *args, **options)
                if "arrivals" in options:
                    beside(work, options["arrivals"].flags)
                elif "completions" in options:
                    beside(work, options["completions"].counters)
                else:
                    work()

            monkeypatch.setattr(products, "rows_per_tile", lambda target, dtype: SMALL_TILE.rows)
            monkeypatch.setattr(products, "choose_tile", lambda *sizes: SMALL_TILE)
            monkeypatch.setattr(products, "matmul", launch)
            monkeypatch.setattr(sums, "partial_sum", partial(alone, partial_sum))
        yield made


@pytest.fixture
def peers(every_peers) -> Iterator:
    """peers(size, **options): a LocalPeers whose threads end with the test."""
    with ExitStack() as stack:
        if DEVICE.type == "cuda":
            pytest.importorskip("paracore._CUDA", reason="the CUDA sources are not built")

        def make(size: int, **options) -> LocalPeers:
            made = LocalPeers(size, DEVICE, **options)
            stack.callback(made.close)
            every_peers.append(made)
            return made

        yield make


# ---------------------------------------------------------------- all-gather and product


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ranks", "shape", "widths", "dtype"),
    [
        (2, (8, 3, 16), (8, 40), F32),
        (3, (10, 1, 17), (33,), BF16),  # parts of 4, 4 and 2
        (3, (10, 1, 17), (33,), F16),
        (4, (5, 2, 16), (16, 8, 12), BF16),  # the last rank has nothing
        (2, (1, 1, 16), (16,), F32),
    ],
    ids=str,
)
def test_a_product_equals_one_behind_a_gather(ranks, shape, widths, dtype, peers):
    case = Gather(ranks, shape, widths, dtype, seed=1)
    for rank, result in enumerate(peers(ranks).run(case.run)):
        case.check(rank, result, ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("arrival", [None, (2, 1, 0), (1, 2, 0)], ids=str)
def test_chunks_may_come_late_and_in_any_order(arrival, peers):
    """Each copy and each flag takes longer than a tile, and the rank's own chunk may be the last."""
    case = Gather(3, (9, 2, 16), (24,), BF16, seed=2)
    late = peers(3, delay=lambda rank, kind: 0.01 * (rank + 1), arrival=arrival)
    for rank, result in enumerate(late.run(case.run)):
        case.check(rank, result, 3)


@pytest.mark.gpu
def test_nothing_is_reset_or_overwritten_between_calls(peers):
    """One rank pulls so slowly that the others are at the next call before it is done with this one."""
    cases = [Gather(3, (6, 1, 16), (16,), F32, seed=10 * call) for call in range(3)]
    slow = peers(3, delay=lambda rank, kind: 0.1 if rank == 1 else 0.0)
    results = slow.run(lambda workspace: [case.run(workspace) for case in cases])
    for rank, calls in enumerate(results):
        for case, result in zip(cases, calls, strict=True):
            case.check(rank, result, 3)


@pytest.mark.gpu
def test_calls_of_different_sizes_share_a_workspace(peers):
    """Both halves of what is pulled from stay where they are whatever a call needs of them."""
    shapes = [(8, 2, 32), (4, 1, 16), (8, 2, 32), (2, 1, 16)]
    cases = [Gather(2, shape, (16,), BF16, seed=20 + call) for call, shape in enumerate(shapes)]
    slow = peers(2, delay=lambda rank, kind: 0.1 if rank == 1 else 0.0)
    results = slow.run(lambda workspace: [case.run(workspace) for case in cases])
    for rank, calls in enumerate(results):
        for case, result in zip(cases, calls, strict=True):
            case.check(rank, result, 2)


def test_a_chunk_that_never_comes_is_an_error(peers):
    case = Gather(2, (4, 1, 16), (16,), F32, seed=3)
    over = threading.Event()

    def hold_copies(rank: int, kind: str) -> float:
        if kind == "copy":
            over.wait(TIMEOUT)
        return 0.0

    lost = peers(2, delay=hold_copies, timeout_seconds=0.05)
    with pytest.raises(Exception, match="chunk had not arrived"):
        lost.run(case.run)
    over.set()


@pytest.mark.gpu
def test_a_part_may_have_any_strides(peers):
    case = Gather(2, (4, 4, 4), (16,), F32, seed=4)  # equal sizes: a swapped dim would keep the shape

    def run(workspace: LocalWorkspace):
        shard = part(case.x, workspace)
        strided = shard.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        assert not strided.is_contiguous()
        weights = [weight.T.contiguous().T for weight in case.weights[workspace.axis.rank]]
        biases = case.biases[workspace.axis.rank]
        return gather_matmul(strided, weights, biases, workspace.axis, 4, workspace)

    for rank, result in enumerate(peers(2).run(run)):
        case.check(rank, result, 2)


# ---------------------------------------------------------------- product and reduce-scatter


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ranks", "shape", "inner", "out", "dtype"),
    [
        (2, (8, 3), (16,), 24, F32),
        (3, (10, 1), (17, 16), 33, BF16),  # parts of 4, 4 and 2
        (3, (10, 1), (17, 16), 33, F16),
        (4, (5, 2), (16, 8, 8), 20, BF16),  # the last rank gets nothing
        (2, (1, 1), (16,), 16, F32),
    ],
    ids=str,
)
def test_parts_are_those_of_the_sum_over_ranks(ranks, shape, inner, out, dtype, peers):
    case = Scatter(ranks, shape, inner, out, dtype, seed=1)
    case.check(peers(ranks).run(case.run))


@pytest.mark.gpu
def test_sums_may_travel_in_float32(peers):
    case = Scatter(3, (7, 2), (16, 16), 24, BF16, seed=2)
    results = peers(3).run(lambda workspace: case.run(workspace, F32))
    case.check(results, F32)
    assert not torch.equal(torch.cat(results), torch.cat(peers(3).run(case.run)))


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["weight", "transposed weight"])
def test_factors_are_read_by_their_strides(transposed, peers):
    """A weight [out, in] serves row-parallel layers as W^T, and gradients as it is; K equals out here."""
    case = Scatter(2, (4, 4), (16,), 16, F32, seed=3)
    if transposed:
        case.factors = [[(a, b.T.contiguous().T)] for ((a, b),) in case.factors]
    case.factors = [[(a.permute(2, 0, 1).contiguous().permute(1, 2, 0), b)] for ((a, b),) in case.factors]
    case.check(peers(2).run(case.run))


@pytest.mark.gpu
@pytest.mark.parametrize("slow_at", ["copy", "sum"])
def test_nothing_is_pushed_before_the_last_sum_is_taken(slow_at, peers, monkeypatch):
    """One rank is late with its chunks, or with adding up, while the others are at the next call."""
    cases = [Scatter(3, (6, 1), (16,), 16, F32, seed=10 * call) for call in range(3)]
    slow = peers(3, delay=lambda rank, kind: 0.1 if rank == 1 and kind == slow_at else 0.0)
    partial_sum = sums.partial_sum

    def late(out, own, received, own_rank):
        if slow_at == "sum" and own_rank == 1 and DEVICE.type == "cpu":
            time.sleep(0.2)
        partial_sum(out, own, received, own_rank)

    monkeypatch.setattr(sums, "partial_sum", late)
    results = slow.run(lambda workspace: [case.run(workspace) for case in cases])
    for call, case in enumerate(cases):
        case.check([calls[call] for calls in results])


@pytest.mark.gpu
@pytest.mark.parametrize("finished", ["at once", "behind a sum", "behind the next gather"])
def test_a_gather_goes_on_beside_other_calls(finished, peers):
    """As in backward: x is needed by the last product only. One rank pulls slowly."""
    xs = [make(6, 2, 16, seed=call, dtype=BF16) for call in range(4)]
    scatter = Scatter(2, (6, 1), (16,), 16, BF16, seed=6)

    def run(workspace: LocalWorkspace):
        starts = [partial(start_gather, part(x, workspace), workspace.axis, 6, workspace) for x in xs]
        if finished == "at once":
            return [start()() for start in starts], scatter.run(workspace)
        if finished == "behind a sum":
            pairs = [(start(), scatter.run(workspace)) for start in starts]
            return [pending() for pending, _ in pairs], pairs[-1][1]
        pending = [start() for start in starts]
        return [finish() for finish in pending], scatter.run(workspace)

    results = peers(2, delay=lambda rank, kind: 0.05 if rank == 1 and kind == "copy" else 0.0).run(run)
    for wholes, _ in results:
        assert all(torch.equal(whole, x) for whole, x in zip(wholes, xs, strict=True))
    scatter.check([total for _, total in results])


@pytest.mark.gpu
def test_gathers_and_sums_share_a_workspace(peers):
    gather, scatter = Gather(2, (6, 1, 16), (16,), BF16, seed=5), Scatter(2, (6, 1), (16,), 16, BF16, seed=6)
    results = peers(2).run(
        lambda workspace: [run(workspace) for run in (gather.run, scatter.run, gather.run, scatter.run)]
    )
    for rank, calls in enumerate(results):
        gather.check(rank, calls[0], 2)
        gather.check(rank, calls[2], 2)
    scatter.check([calls[1] for calls in results])
    scatter.check([calls[3] for calls in results])


# ---------------------------------------------------------------- layers


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_layers_whose_ranks_reach_each_other_use_it_forward_and_backward(dtype, peers):
    """X [9, 2, 16] over 2 ranks, 24 and 8 features each; then 24 back to 16."""
    ranks, S, B, IN, outs = 2, 9, 2, 16, (24, 8)
    x, dy = make(S, B, IN, seed=0, dtype=dtype), make(S, B, IN, seed=1, dtype=dtype)
    weights = [[make(n, IN, seed=10 * r + n, dtype=dtype) for n in outs] for r in range(ranks)]
    back = [make(IN, outs[0], seed=50 + r, dtype=dtype) for r in range(ranks)]

    def run(workspace: LocalWorkspace):
        rank, axis, overlap = workspace.axis.rank, workspace.axis, Overlap(1, workspace)
        leaves = [t.clone().requires_grad_() for t in (part(x, workspace), *weights[rank], back[rank])]
        shard, *own, last = leaves
        first, second = column_linear(shard, own, [None, None], axis, length=S, overlap=overlap)
        y = row_linear(first, last, axis, overlap=overlap)
        torch.autograd.backward([y, second], [part(dy, workspace), torch.ones_like(second)])
        kinds = [(row.kind, row.count) for row in axis.ledger.take()]
        return y.detach(), [leaf.grad for leaf in leaves], kinds

    def dense(to: torch.dtype):
        given = (x, *(w for of_rank in weights for w in of_rank), *back)
        leaves = [t.to(to, copy=True).requires_grad_() for t in given]
        whole, *rest = leaves
        hidden = [whole @ w.T for w in rest[: 2 * ranks]]
        y = torch.stack([h @ m.T for h, m in zip(hidden[::2], rest[2 * ranks :], strict=True)]).sum(0)
        ones = [torch.ones_like(h) for h in hidden[1::2]]
        torch.autograd.backward([y, *hidden[1::2]], [dy.to(to), *ones])
        return y.detach(), [leaf.grad for leaf in leaves]

    results = peers(ranks).run(run)
    got = [torch.cat([result[0] for result in results]), torch.cat([result[1][0] for result in results])]
    got += [gradient for result in results for gradient in result[1][1:-1]]
    got += [result[1][-1] for result in results]
    (y, gradients), (exact_y, exact) = dense(dtype), dense(torch.float64)
    for ours, plain, reference in zip(got, [y, *gradients], [exact_y, *exact], strict=True):
        assert_as_exact_as(ours, plain, reference, floor=torch.finfo(dtype).eps)
    for _, _, kinds in results:  # no messages; the second gather of each kind is backward's
        assert kinds == [("all_gather", 3), ("reduce_scatter", 2)]


# ---------------------------------------------------------------- what is counted, what is refused


def test_traffic_is_entered_as_that_of_collectives(peers):
    gather = Gather(2, (6, 1, 16), (8, 8), F32, seed=7)
    scatter = Scatter(2, (6, 1), (16, 16), 8, BF16, seed=8)

    def run(workspace: LocalWorkspace):
        gather.run(workspace)
        scatter.run(workspace)
        scatter.run(workspace, F32)
        return [(row.kind, row.count, row.bytes) for row in workspace.axis.ledger.take()]

    expected = [("all_gather", 1, 6 * 16 * 4), ("reduce_scatter", 2, 6 * 8 * (2 + 4))]
    assert peers(2).run(run) == [expected, expected]


def test_refusals_come_before_any_communication(peers):
    """No other rank takes part: what communicated would wait for it."""
    workspace = peers(2).workspaces[0]
    axis, x, weight = workspace.axis, make(3, 1, 8, seed=0, dtype=F32), make(4, 8, seed=1, dtype=F32)

    def gather(shard=x, weights=(weight,), biases=(None,), axis=axis, length=6):
        gather_matmul(shard, weights, biases, axis, length, workspace)

    refusals: list[tuple[str, dict[str, Any]]] = [
        (r"x_shard has shape \[3, 1, 8\], must be \[4, ..., in\].*length=7", {"length": 7}),
        (r"0 weights and 0 biases", {"weights": (), "biases": ()}),
        (r"1 weights and 2 biases", {"biases": (None, None)}),
        (r"weights\[0\] has shape \[8, 4\], must be \[out, 8\]", {"weights": (weight.T,)}),
        (r"biases\[0\] has shape \[3\], must be \[4\]", {"biases": (weight[0, :3],)}),
        (r"weights\[0\] is torch.bfloat16", {"weights": (weight.bfloat16(),)}),
        (r"x_shard is torch.float64", {"shard": x.double(), "weights": (weight.double(),)}),
        (r"x_shard is torch.float32 on meta", {"shard": x.to("meta")}),
        (r"weights\[0\] requires a gradient", {"weights": (weight.clone().requires_grad_(),)}),
        (r"axis tp has one rank", {"axis": MeshAxis.alone("tp")}),
        (r"workspace is over axis tp \(rank 0 of 2\)", {"axis": MeshAxis("cp", 2, 0, None, axis.ledger)}),
    ]
    for message, options in refusals:
        with pytest.raises(UsageError, match=message):
            gather(**options)
    for message, factors, dtype in [
        ("factors is empty", [], None),
        (r"factors\[0\] have shapes \[3, 1, 8\] and \[4, 8\]", [(x, weight)], None),
        (r"factors\[1\] have shapes \[2, 1, 8\]", [(x, weight.T), (x[:2], weight.T)], None),
        (r"factors\[1\] have .* \[8, 3\]", [(x, weight.T), (x, weight.T[:, :3])], None),
        ("partial_dtype is torch.float16", [(x, weight.T)], F16),
        (r"factors' B\[0\] is torch.float16", [(x, weight.T.half())], None),
    ]:
        with pytest.raises(UsageError, match=message):
            matmul_scatter(factors, axis, workspace, partial_dtype=dtype)
    assert axis.ledger.take() == []
