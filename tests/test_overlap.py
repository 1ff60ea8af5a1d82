"""Messages of sub-chunks beside products: the same bits, in the right order, however late each of them comes.

That outputs and gradients are exact for any chunks is in test_sequence_parallel.py.
"""

from __future__ import annotations

import copy
import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paracore.cli.main import main
from paracore.cli.validate import report_lines
from paracore.errors import UsageError
from paracore.nn import ColumnParallelLinear, Decoder, DecoderConfig, RowParallelLinear, column_parallel
from paracore.ops import linear
from paracore.parallel import Ledger, MeshAxis, overlap, shard_range
from paracore.parallel.collectives import take_shard
from paracore.parallel.messages import Exchange
from paracore.parallel.overlap import ChunkedGather, Overlap, start_sum_of_products
from paracore.validation import ValidationSettings, validate
from tests.conftest import Launch, tp_axis, training_axes
from tests.numerics import nan_in_fresh_memory, randn
from tests.products import Products

F32, BF16 = torch.float32, torch.bfloat16

# ---------------------------------------------------------------- which chunks

TWO, FOUR = (MeshAxis("tp", size, 0, None, Ledger()) for size in (2, 4))


@pytest.mark.parametrize(
    ("shape", "dtype", "axis", "chunks"),
    [
        ((4096, 4, 1024), F32, TWO, 8),  # no more than the most
        ((2048, 1, 1024), F32, TWO, 4),
        ((1280, 2, 1024), F32, TWO, 5),  # 256 rows in each
        ((1024, 1, 4096), F32, TWO, 4),  # 128 rows in each
        ((1022, 1, 4096), F32, TWO, 0),
        ((1024, 1, 4096), F32, FOUR, 0),
        ((8192, 1, 64), F32, TWO, 8),  # 128 KiB in each
        ((8192, 1, 40), F32, TWO, 5),
        ((8192, 1, 32), BF16, TWO, 0),
        ((8192, 1, 4096), F32, MeshAxis.alone("tp"), 0),
        ((0, 1, 4096), F32, TWO, 0),
    ],
)
def test_by_default_shapes_decide_into_how_many_chunks(
    shape: tuple[int, ...], dtype: torch.dtype, axis: MeshAxis, chunks: int
) -> None:
    assert Overlap().chunks_of(shape, dtype, axis) == chunks
    assert Overlap(3).chunks_of(shape, dtype, axis) == (0 if axis.size == 1 else 3)


@pytest.mark.parametrize("chunks", [0, -1])
def test_fewer_than_one_chunk_are_refused(chunks: int) -> None:
    with pytest.raises(UsageError, match=f"chunks={chunks}: must be at least 1"):
        Overlap(chunks)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_without_a_cut_sequence_there_is_nothing_to_overlap(kind: Any) -> None:
    with pytest.raises(UsageError, match=r"Overlap\(chunks=None.*\) without sequence_parallel"):
        kind(8, 8, TWO, overlap=Overlap())


def test_layers_that_share_an_input_must_agree() -> None:
    layers = [
        ColumnParallelLinear(6, 8, TWO, sequence_parallel=True, overlap=how) for how in (None, Overlap())
    ]
    with pytest.raises(UsageError, match="must agree on overlap"):
        column_parallel(torch.ones(3, 6), *layers, length=6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--overlap"], "--overlap needs --sequence-parallel"),
        (
            ["--sequence-parallel", "--overlap", "0"],
            "--overlap 0: must be a number of sub-chunks, at least 1",
        ),
        (["--sequence-parallel", "--overlap", "x"], "--overlap x: must be"),
    ],
)
@pytest.mark.parametrize("command", ["validate", "train"])
def test_flags_that_cannot_be_served_are_refused(
    command: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--tp", "2", *flags]) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- the same bits

ROWS = 64  # of a chunk: of fewer the matrix library may add in another order


def same_bits() -> None:
    """Forward of a column-parallel layer, and both gradients of a row-parallel one."""
    tp = tp_axis()
    for chunks in (1, 4):
        tokens = tp.size * chunks * ROWS
        results = []
        for how in (None, Overlap(chunks)):
            column = ColumnParallelLinear(96, 160, tp, sequence_parallel=True, overlap=how)
            row = RowParallelLinear(160, 96, tp, sequence_parallel=True, overlap=how)
            x = take_shard(randn(tokens, 96, seed=0, dtype=F32), tp, 0)
            between = column(x, tokens)
            hidden = between.detach().requires_grad_()
            y = row(hidden)
            y.backward(take_shard(randn(tokens, 96, seed=1, dtype=F32), tp, 0))
            results.append([between, hidden.grad, row.weight.grad])
        assert all(map(torch.equal, *results)), chunks


@pytest.mark.parametrize("size", [3])
def test_gathered_products_are_bitwise_those_of_a_gather_before_one_product(
    launch: Launch, size: int
) -> None:
    launch(size, same_bits)


def delayed(longest: float, generator: random.Random) -> Any:
    """Let messages start and arrive late, by up to so many seconds, on this rank."""

    def late(method: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        def call(exchange: Exchange) -> None:
            if generator.random() < 0.1:
                time.sleep(generator.random() * longest)
            method(exchange)

        return call

    return mock.patch.multiple(Exchange, start=late(Exchange.start), wait=late(Exchange.wait))


def copied_rows(x: Tensor, rows: slice) -> Tensor:
    return x[rows].clone()


ROUNDS = 1000
FEATURES = 3


def many_rounds() -> None:
    """Both directions, all sizes, several under way at once; every sum bitwise that of the ranks in order."""
    tp = tp_axis()
    generator = random.Random(tp.rank)  # each rank is late at other times
    with delayed(0.002, generator), nan_in_fresh_memory():
        for number in range(ROUNDS):
            total, chunks = 1 + number * 7 % 23, 1 + number % 8
            parts = [randn(total, FEATURES, seed=number + rank, dtype=BF16) for rank in range(tp.size)]
            own = shard_range(total, tp.size, tp.rank)
            part = parts[tp.rank]
            gather = ChunkedGather(parts[0][own.start : own.stop], tp, total, chunks)
            pending = start_sum_of_products(functools.partial(copied_rows, part), part, tp, chunks)
            assert torch.equal(gather.finish(), parts[0])
            exact = sum((p.float() for p in parts[1:]), parts[0].float()).to(BF16)
            assert torch.equal(pending(), exact[own.start : own.stop]), number
    tp.ledger.take()


@pytest.mark.parametrize("size", [3])
def test_a_thousand_rounds_with_random_delays(launch: Launch, size: int) -> None:
    launch(size, many_rounds)


def sixteen_bit_sums() -> Tensor:
    tp = tp_axis()
    part = torch.full((tp.size, 1), 1.0 if tp.rank == 0 else 2.0**-8, dtype=BF16)
    return start_sum_of_products(functools.partial(copied_rows, part), part, tp, 1)()


def test_sums_of_sixteen_bits_are_rounded_once(launch: Launch) -> None:
    """1 + 2^-8 + 2^-8 + 2^-8: each of the small ones alone is lost in bfloat16."""
    for total in launch(4, sixteen_bit_sums):
        assert total.item() == torch.tensor(1 + 3 * 2.0**-8).to(BF16).item() > 1


# ---------------------------------------------------------------- what runs beside what, and what it costs


def events_of(run: Callable[[], object]) -> list[str]:
    """What happens when: messages started and waited for, and products."""
    events: list[str] = []
    start, wait = Exchange.start, Exchange.wait

    def started(exchange: Exchange) -> None:
        events.append("send")
        start(exchange)

    def waited(exchange: Exchange) -> None:
        events.append("wait")
        wait(exchange)

    with (
        mock.patch.multiple(Exchange, start=started, wait=waited),
        Products(events, lambda y: f"product {len(y)}"),
    ):
        run()
    return events


def order() -> tuple[dict[str, list[str]], list[tuple[str, int, int]]]:
    """Over two ranks, 8 tokens each, four sub-chunks of 2; 6 features in, 10 between."""
    tp = tp_axis()
    options: dict[str, Any] = {"bias": False, "sequence_parallel": True, "overlap": Overlap(4)}
    column, row = ColumnParallelLinear(6, 20, tp, **options), RowParallelLinear(20, 6, tp, **options)
    x = take_shard(randn(16, 6, seed=0, dtype=F32), tp, 0).requires_grad_()
    found, results = {}, []
    found["column"] = events_of(lambda: results.append(column(x, 16)))
    traffic = [(row.kind, row.count, row.bytes) for row in tp.ledger.take()]
    hidden = results[0].detach().requires_grad_()
    found["row"] = events_of(lambda: results.append(row(hidden)))
    found["row backward"] = events_of(results[1].sum().backward)
    found["column backward"] = events_of(results[0].sum().backward)
    return found, traffic


def test_every_message_has_products_beside_it(launch: Launch) -> None:
    gathered = ["send"] * 4 + ["product 8"] + ["wait", "product 2"] * 4  # its own shard first
    summed = ["product 2", "send"] * 4 + ["product 8"]  # and last
    for found, traffic in launch(2, order):
        assert found["column"] == gathered
        assert found["row"] == summed + ["wait"] * 4
        assert found["row backward"] == [*gathered, "product 6"]  # dX_t with each sub-chunk of dY, then dW_t
        # X is gathered behind dX's products, and dX's parts travel behind dW.
        assert (
            found["column backward"] == ["send"] * 4 + summed + ["wait"] * 4 + ["product 10"] + ["wait"] * 4
        )
        assert traffic == [("send", 4, 8 * 6 * 4)]


def sent_where_nothing_is_needed() -> list[tuple[str, int]]:
    tp = tp_axis()
    column = ColumnParallelLinear(6, 8, tp, sequence_parallel=True, overlap=Overlap(2))
    column.weight.requires_grad_(False)
    y = column(take_shard(randn(8, 6, seed=0, dtype=F32), tp, 0), 8)
    tp.ledger.take()
    y.sum().backward()
    return [(row.kind, row.count) for row in tp.ledger.take()]


def test_frozen_weights_and_inputs_cost_no_communication(launch: Launch) -> None:
    assert launch(2, sent_where_nothing_is_needed) == [[], []]


# ---------------------------------------------------------------- models

CONFIG = DecoderConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48
)


def of_a_decoder() -> tuple[list[Tensor], list[dict[str, int]]]:
    tp = tp_axis()
    gradients, counts = [], []
    tokens = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))
    for how in (None, Overlap(4)):
        model = Decoder(CONFIG, tp, sequence_parallel=True, vocab_parallel=True, overlap=how)
        model.loss(tokens, tokens.roll(-1, 1)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        counts.append({row.kind: row.count for row in tp.ledger.take()})
    return gradients, counts


def test_a_decoder_overlaps_all_its_linear_layers(launch: Launch) -> None:
    for gradients, (plain, overlapped) in launch(2, of_a_decoder):
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
        # A block has 6 all-gathers and 4 reduce-scatters; two blocks, four messages for each.
        assert overlapped == {
            "all_gather": plain["all_gather"] - 2 * 6,
            "reduce_scatter": plain["reduce_scatter"] - 2 * 4,
            "send": 2 * (6 + 4) * 4,
        }


# ---------------------------------------------------------------- in other surroundings


def surroundings() -> None:
    """Under checkpointing, autocast, inference mode and torch.compile, and after an error."""
    tp = tp_axis()
    options: dict[str, Any] = {"sequence_parallel": True, "overlap": Overlap(3)}
    column, row = ColumnParallelLinear(6, 20, tp, **options), RowParallelLinear(20, 6, tp, **options)
    x = take_shard(randn(9, 2, 6, seed=0, dtype=F32), tp, 0)

    def layers(x: Tensor) -> Tensor:
        y: Tensor = row(column(x, 9).sin())
        return y

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.float().square().sum().backward()
        found = [y.detach().float(), leaf.grad, column.weight.grad, row.weight.grad]
        for layer in (column, row):
            layer.zero_grad()
        return [tensor for tensor in found if tensor is not None]

    expected = gradients(layers)
    checkpointed = gradients(lambda x: checkpoint(layers, x, use_reentrant=False))
    assert all(map(torch.equal, checkpointed, expected))
    with torch.inference_mode():
        assert torch.equal(layers(x), expected[0])
    copied = copy.deepcopy(column)
    assert torch.equal(row(copied(x, 9).sin()), expected[0])
    with torch.autocast("cpu", dtype=BF16):
        for ours, exact in zip(gradients(layers), expected, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0.05, atol=0.05)
    for wrong in (x.bfloat16(), x.double()):
        with pytest.raises(UsageError, match=r"must be as x: torch\.(bfloat16|float64)"):
            column(wrong, 9)
    with mock.patch.object(linear, "_multiply", fail_once()), pytest.raises(RuntimeError, match="once"):
        column(x, 9)
    assert torch.equal(layers(x), expected[0])  # no message of the call that failed is taken for one of this
    with pytest.raises(Exception, match="cannot be compiled"):
        torch.compile(layers, backend="eager", fullgraph=True)(x)
    assert torch.equal(layers(x), expected[0])


def fail_once() -> Callable[..., None]:
    original, calls = linear._multiply, []

    def multiply(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("once")
        original(*args)

    return multiply


def test_layers_overlap_in_other_surroundings(launch: Launch) -> None:
    launch(2, surroundings)


# ---------------------------------------------------------------- validate


def reports(sizes: dict[str, int], runs: list[ValidationSettings]) -> list[dict[str, Any] | None]:
    axes = training_axes(**sizes)
    return [validate(chosen, axes, torch.device("cpu")) for chosen in runs]


def settings(**changes: Any) -> ValidationSettings:
    chosen: dict[str, Any] = {
        "seq_len": 31,
        "steps": 2,
        "log_every": 2,
        "sequence_parallel": True,
        "overlap": Overlap(3),
    }
    return ValidationSettings(CONFIG, **chosen | changes)


def test_validate_passes(launch: Launch) -> None:
    runs = [settings(zero=2), settings(dtype=BF16, vocab_parallel=True, steps=0, mask="packed")]
    for report in launch(4, reports, {"tp": 2, "cp": 2}, runs)[0]:
        assert report["failures"] == []
        assert "overlap (3 sub-chunks on each rank)" in next(report_lines(report))
        assert {row["kind"] for row in report["comm"] if row["axis"] == "tp"} >= {"send"}


def read_too_early() -> Any:
    """Products take what lies in memory before all has arrived there."""

    def broken(gather: ChunkedGather) -> Iterator[slice]:
        yield slice(0, len(gather.whole))
        for exchange, _ in gather._under_way:
            exchange.wait()

    return mock.patch.object(ChunkedGather, "arrivals", broken)


def a_part_left_out() -> Any:
    """The sum is that of all ranks but the last."""
    original = overlap._sum
    return mock.patch.object(overlap, "_sum", lambda parts: original([*parts[:-1], parts[0] * 0]))


def sub_chunks_exchanged() -> Any:
    """What arrives is laid where the next sub-chunk belongs."""
    original = overlap._sub_chunks

    def broken(total: int, axis: MeshAxis, rank: int, chunks: int) -> list[slice]:
        right = original(total, axis, rank, chunks)
        return right if rank == axis.rank else [right[1], right[0], *right[2:]]

    return mock.patch.object(overlap, "_sub_chunks", broken)


def failures_with(fault: Callable[[], Any]) -> list[str] | None:
    with fault(), nan_in_fresh_memory():
        (report,) = reports({"tp": 2}, [settings(steps=0)])
    return None if report is None else report["failures"]


@pytest.mark.parametrize("fault", [read_too_early, a_part_left_out, sub_chunks_exchanged])
def test_validate_fails_for_every_fault(launch: Launch, fault: Callable[[], Any]) -> None:
    failures, _ = launch(2, failures_with, fault)
    assert "logits" in failures[0]
