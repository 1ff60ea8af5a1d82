"""What a cut sequence costs: collectives and their bytes, what is kept, and what runs beside what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from paracore.nn import ColumnParallelLinear, DecoderConfig, RowParallelLinear, column_parallel
from paracore.nn import linear as layers
from paracore.nn.decoder import DecoderBlock
from paracore.ops import linear as ops
from paracore.parallel import Ledger, MeshAxis, all_gather, shard_range
from paracore.parallel.collectives import take_shard
from tests.conftest import Launch, tp_axis
from tests.numerics import randn
from tests.products import Products

B, IN, OUTS = 2, 6, (8, 4, 3)


def traffic(tp: MeshAxis) -> dict[str, tuple[int, int]]:
    return {row.kind: (row.count, row.bytes) for row in tp.ledger.take()}


# ---------------------------------------------------------------- collectives


def shared_input(tp: MeshAxis, length: int, sequence_parallel: bool) -> tuple[Any, Any]:
    """Traffic of three layers that share an input, forward and backward."""
    three = [ColumnParallelLinear(IN, out, tp, sequence_parallel=sequence_parallel) for out in OUTS]
    x = randn(length, B, IN, seed=0, dtype=torch.float32)
    x = (take_shard(x, tp, 0) if sequence_parallel else x).requires_grad_()
    ys = column_parallel(x, *three, length=length)
    forward = traffic(tp)
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    return forward, traffic(tp)


def row_layer(tp: MeshAxis, length: int, sequence_parallel: bool) -> tuple[Any, Any]:
    """Traffic of a row-parallel layer, forward and backward."""
    layer = RowParallelLinear(IN, 5, tp, sequence_parallel=sequence_parallel)
    x = take_shard(randn(length, B, IN, seed=0, dtype=torch.float32), tp, -1).requires_grad_()
    y = layer(x)
    forward = traffic(tp)
    y.sum().backward()
    return forward, traffic(tp)


def check_traffic() -> None:
    tp = tp_axis()
    for length in (1, 5, 64):
        padded = tp.size * len(shard_range(length, tp.size, 0))  # every rank sends as much as the first
        narrow, wide = padded * B * IN * 4, padded * B * 5 * 4
        assert shared_input(tp, length, True) == (
            {"all_gather": (1, narrow)},
            {"all_gather": (1, narrow), "reduce_scatter": (1, narrow)},
        )
        assert shared_input(tp, length, False) == ({}, {"all_reduce": (1, length * B * IN * 4)})
        assert row_layer(tp, length, True) == ({"reduce_scatter": (1, wide)}, {"all_gather": (1, wide)})
        assert row_layer(tp, length, False) == ({"all_reduce": (1, length * B * 5 * 4)}, {})


@pytest.mark.parametrize("size", [2, 3])
def test_layers_that_share_an_input_gather_it_and_reduce_its_gradient_once(launch: Launch, size: int) -> None:
    launch(size, check_traffic)


# ---------------------------------------------------------------- what is kept for backward

# The model of the tutorial whose figures we compare with, over two ranks.
TUTORIAL = DecoderConfig(
    vocab_size=6400, hidden_size=768, num_layers=1, num_heads=8, num_kv_heads=4, intermediate_size=2432
)
S, BATCH, MIB = 2048, 4, 1 << 20


class Kept:
    """The storages that are saved for backward: of all operations, and of column-parallel layers' inputs.

    parameters: what those save besides.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {StorageWeakRef(p.untyped_storage()) for p in parameters}
        self.all: dict[StorageWeakRef, tuple[tuple[int, ...], int]] = {}
        self.inputs: dict[StorageWeakRef, int] = {}
        self._within = False

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self.all[reference] = (tuple(tensor.shape), storage.nbytes())
        if self._within and reference not in self._parameters:
            self.inputs[reference] = storage.nbytes()
        return tensor

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Take for inputs what `function` saves."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._within = True
            try:
                return function(*args, **kwargs)
            finally:
                self._within = False

        return watched


def gathers_for_each(
    x: Tensor, weights: Any, biases: Any, tp: MeshAxis, *, length: int, overlap: None
) -> tuple[Tensor, ...]:
    """What `column_linear` saves: an input for each projection, gathered, kept by torch's linear."""
    return tuple(F.linear(all_gather(x, tp, 0, length), w, b) for w, b in zip(weights, biases, strict=True))


def kept_by_a_block() -> tuple[dict[str, list[int]], int]:
    """The inputs kept by each way to compute a block's projections; and how many whole ones ours keeps."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    tp = MeshAxis("tp", 2, 0, dist.group.WORLD, Ledger())
    torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be cast in place
    with FakeTensorMode():
        block = DecoderBlock(TUTORIAL, tp, sequence_parallel=True)
        kept = {name: Kept(block.parameters()) for name in ("ours", "for each")}
        x = torch.empty(S // 2, BATCH, 768, dtype=torch.bfloat16, requires_grad=True)
        cos = torch.empty(S, 48, dtype=torch.float32)
        for name, kinds in kept.items():
            function = ops.column_linear if name == "ours" else gathers_for_each
            with (
                mock.patch.object(layers, "column_linear", kinds.watch(function)),
                torch.autograd.graph.saved_tensors_hooks(kinds.pack, lambda tensor: tensor),
            ):
                y = block(x, cos, cos)
        assert y.shape == x.shape
    whole = [shape for shape, _ in kept["ours"].all.values() if shape in ((S, BATCH, 768), (S * BATCH, 768))]
    return {name: list(kinds.inputs.values()) for name, kinds in kept.items()}, len(whole)


def test_a_block_keeps_two_shards_of_its_projections_inputs(launch: Launch) -> None:
    [(inputs, whole)] = launch(1, kept_by_a_block)
    assert inputs["ours"] == [6 * MIB] * 2  # for Q, K and V together, and for gate and up
    assert inputs["for each"] == [12 * MIB] * 5
    assert whole == 0


# ---------------------------------------------------------------- what runs beside what

ROWS, WIDTH = 10, 6  # of dX; no weight has that shape


def which(result: Tensor) -> str:
    """What a product of backward computes."""
    return "dX" if result.shape == (ROWS, WIDTH) else "dW"


@contextlib.contextmanager
def recorded_collectives(events: list[str]) -> Iterator[None]:
    """Append to `events` when each collective of backward starts, and when it is waited for."""

    def recording(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any) -> Callable[[], Tensor]:
            finish = start(*args)
            events.append(f"start {name}")

            def finished() -> Tensor:
                events.append(f"finish {name}")
                result: Tensor = finish()
                return result

            return finished

        return started

    names = {"start_gather": "gather", "start_sum_to_shards": "sum", "start_sum_in_place": "sum"}
    with contextlib.ExitStack() as stack:
        for function, name in names.items():
            start = recording(name, getattr(ops, function))
            stack.enter_context(mock.patch.object(ops, function, start))
        yield


def order_of_backward() -> dict[bool, list[str]]:
    tp, found = tp_axis(), {}
    for sequence_parallel in (True, False):
        three = [
            ColumnParallelLinear(WIDTH, out, tp, bias=False, sequence_parallel=sequence_parallel)
            for out in OUTS
        ]
        x = randn(5, 2, WIDTH, seed=0, dtype=torch.float32)
        x = (take_shard(x, tp, 0) if sequence_parallel else x).requires_grad_()
        ys = column_parallel(x, *three, length=5)
        events: list[str] = []
        with recorded_collectives(events), Products(events, which):
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        found[sequence_parallel] = events
    return found


def test_in_backward_every_transfer_has_products_beside_it(launch: Launch) -> None:
    for events in launch(2, order_of_backward):
        assert events[True][:4] == ["start gather", "dX", "dX", "dX"]  # X is under way while dX is computed
        assert set(events[True][4:6]) == {"start sum", "finish gather"}
        assert events[True][6:] == ["dW", "dW", "dW", "finish sum"]  # and dX while dW is
        assert events[False] == ["dX", "dX", "dX", "start sum", "dW", "dW", "dW", "finish sum"]
