"""The Triton matrix product waits for chunks of a, and signals those of its result: on a GPU with a side
stream, else under the interpreter, with a thread that plays it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from paracore import reference_matmul as reference
from tests.interpreter import interpreting
from tests.triton_layers_cases import NAN, kernels_device
from tests.triton_matmul_cases import TILE, Copies, chunks_from, eighths, factors, playing, use_tile, words

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError

from paracore.kernels import matmul as kernels
from paracore.kernels.tile_order import TileOrder

BF16, FP32 = torch.bfloat16, torch.float32
DELAY = 0.03  # seconds by which chunks are late: some tiles' time under the interpreter


@pytest.fixture(autouse=True)
def device(monkeypatch):
    use_tile(monkeypatch)
    with kernels_device() as here:
        yield here


def order_of(rows: list[int], first: int, device: torch.device) -> tuple[TileOrder, list[slice]]:
    """The order of these chunks from `first` on, and where the rows of each lie."""
    chunks = chunks_from(rows, first)
    order = kernels.tile_order(chunks, device, TILE.rows)
    return order, [slice(start, start + count) for start, count in chunks]


def signed(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


# ---------------------------------------------------------------- arrivals


def product_of_late_chunks(
    a: Tensor, b: Tensor, rows: list[int], first: int, flags: Tensor, ticket: int, coming: Iterable[int]
) -> Tensor:
    """Return the product of a buffer in which only the first chunk lies, until the others come one by one.

    What has not come is NaN. The first comes when a tile is finished, and the product soon in need of it.
    """
    order, places = order_of(rows, first, a.device)
    counters, counts = words(len(rows), a.device), kernels.expected_counts(order, b.size(0), a.dtype)
    gathered, out = torch.full_like(a, NAN), torch.full((len(a), len(b)), NAN, dtype=a.dtype, device=a.device)
    gathered[places[0]] = a[places[0]]
    flags[0] = signed(ticket)

    def bring(copies: Copies) -> None:
        copies.wait(counters, 0, min(1, counts[0]))
        for chunk in coming:
            time.sleep(DELAY)
            copies.copy(a[places[chunk]], gathered[places[chunk]])
            copies.write(flags, chunk, signed(ticket))

    arrivals, completions = kernels.Arrivals(flags, ticket), kernels.Completions(counters)
    with playing(a.device, bring):
        kernels.matmul(gathered, b, out, order=order, arrivals=arrivals, completions=completions, programs=2)
    assert tuple(counters.tolist()) == counts
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[32, 32, 32], [5, 0, 70], [33, 1, 20, 0]], ids=str)
@pytest.mark.parametrize("arriving", ["in order", "in reverse"])
def test_every_rank_gathers_while_it_multiplies(rows, arriving, device):
    """W ranks as W buffers, own chunk first; the flags are not reset between calls."""
    W = len(rows)
    a, b = eighths(*factors(sum(rows), 40, 20, BF16, device))
    coming = range(1, W) if arriving == "in order" else range(W - 1, 0, -1)
    flags = [words(W, device) for _ in range(W)]
    for ticket in (1, 2):
        a.mul_(-1)
        expected = reference.matmul(a, b)
        for rank in range(W):
            out = product_of_late_chunks(a, b, rows, rank, flags[rank], ticket, coming)
            assert torch.equal(out, expected), (rank, ticket)


@pytest.mark.gpu
@pytest.mark.parametrize("ticket", [2**31 - 1, 2**31, 2**32 - 1, 2**32])
def test_tickets_wrap_around(ticket, device):
    """Beyond 2^31 - 1 they go on at -2^31: that flag has reached the ticket, the one before has not."""
    a, b = eighths(*factors(70, 20, 20, BF16, device))
    flags = words(2, device, signed(ticket - 1))
    out = product_of_late_chunks(a, b, [35, 35], 0, flags, ticket, [1])
    assert torch.equal(out, reference.matmul(a, b))


@pytest.mark.gpu
def test_flags_may_be_ahead(device):
    """A flag with a later ticket has reached the earlier one; nothing waits for empty chunks."""
    a, b = eighths(*factors(40, 20, 20, BF16, device))
    order, _ = order_of([10, 0, 30], 0, device)
    flags, out = words(3, device, 9), torch.empty(40, 20, dtype=BF16, device=device)
    flags[1] = 0
    kernels.matmul(a, b, out, order=order, arrivals=kernels.Arrivals(flags, 7))
    assert torch.equal(out, reference.matmul(a, b))


@pytest.mark.skipif(not interpreting(os.environ), reason="a GPU is of no use afterwards: see the next test")
def test_a_chunk_that_does_not_arrive_ends_the_call_in_an_error(device):
    """What came before it was signalled, nothing of it or after it, and the next call starts afresh."""
    a, b = eighths(*factors(100, 40, 20, BF16, device))
    order, _ = order_of([40, 35, 25], 0, device)
    flags, counters = words(3, device, 1), words(3, device)
    flags[1] = 0
    out = torch.empty(100, 40, dtype=BF16, device=device)
    options: dict[str, Any] = {"order": order, "arrivals": kernels.Arrivals(flags, 1), "programs": 3}
    options |= {"completions": kernels.Completions(counters), "timeout_seconds": 0.05}
    with pytest.raises(InterpreterError, match="a chunk had not arrived when timeout_seconds were over"):
        kernels.matmul(a, b, out, **options)
    first, second, _ = counters.tolist()
    assert 0 < first <= kernels.expected_counts(order, 40, BF16)[0]
    assert second == 0
    flags[1] = 1
    counters.zero_()
    kernels.matmul(a, b, out, **options)
    assert torch.equal(out, reference.matmul(a, b))
    assert tuple(counters.tolist()) == kernels.expected_counts(order, 40, BF16)


TRAP = """
import torch
from paracore.kernels import matmul as kernels
device = torch.device("cuda")
a, b, out = (torch.zeros(256, 256, dtype=torch.bfloat16, device=device) for _ in range(3))
order = kernels.tile_order([(0, 256)], device, kernels.block_rows(a.dtype, device))
arrivals = kernels.Arrivals(torch.zeros(1, dtype=torch.int32, device=device), 1)
kernels.matmul(a, b, out, order=order, arrivals=arrivals, timeout_seconds=0.1)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(interpreting(os.environ), reason="needs a GPU")
def test_on_a_gpu_it_traps_with_a_message():
    ended = subprocess.run(
        [sys.executable, "-c", TRAP], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode != 0
    assert "a chunk had not arrived when timeout_seconds were over" in ended.stderr + ended.stdout


# ---------------------------------------------------------------- completions


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("start", [0, 2**31 - 8])
def test_tiles_are_counted_exactly(start, programs, device):
    """As many as expected in every call, beyond 2^31 - 1 as well; results in float32, for a sum of ranks."""
    a, b = eighths(*factors(100, 70, 20, BF16, device))
    order, _ = order_of([33, 0, 66, 1], 2, device)
    counters, out = words(4, device, start), torch.empty(100, 70, device=device)
    counts = kernels.expected_counts(order, 70, BF16)
    assert counts == (3 * 3, 1 * 3, 2 * 3, 0)
    for call in (1, 2):
        kernels.matmul(a, b, out, order=order, completions=kernels.Completions(counters), programs=programs)
        assert counters.tolist() == [signed(start + call * count) for count in counts]
    assert torch.equal(out, reference.matmul(a, b, dtype=FP32))


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 3])
def test_a_chunk_can_be_taken_as_soon_as_it_is_counted(programs, device):
    """A stream that copies each chunk of the result when its count is complete gets all of it."""
    a, b = eighths(*factors(100, 70, 20, BF16, device))
    order, places = order_of([33, 0, 66, 1], 1, device)
    counters = words(4, device)
    counts = kernels.expected_counts(order, 70, BF16)
    for call in (1, 2):
        a.mul_(-1)
        out, taken = (torch.full((100, 70), NAN, dtype=BF16, device=device) for _ in range(2))

        def take(copies: Copies, out: Tensor = out, taken: Tensor = taken, call: int = call) -> None:
            for chunk, place in enumerate(places):
                copies.wait(counters, chunk, call * counts[chunk])
                copies.copy(out[place], taken[place])

        with playing(device, take):
            kernels.matmul(
                a, b, out, order=order, completions=kernels.Completions(counters), programs=programs
            )
        assert torch.equal(taken, reference.matmul(a, b)), call


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 1])
def test_a_chunk_is_waited_for_when_those_before_it_are_finished(first, device):
    """Each chunk arrives only when the count of the one before is complete: else this would wait in vain."""
    rows = [70, 40, 33]
    a, b = eighths(*factors(143, 70, 20, BF16, device))
    order, places = order_of(rows, first, device)
    flags, counters = words(3, device), words(3, device)
    counts = kernels.expected_counts(order, 70, BF16)
    gathered, out = torch.full_like(a, NAN), torch.empty(143, 70, dtype=BF16, device=device)

    def pass_on(copies: Copies) -> None:
        for chunk, place in enumerate(places):
            copies.copy(a[place], gathered[place])
            copies.write(flags, chunk, 1)
            copies.wait(counters, chunk, counts[chunk])

    with playing(device, pass_on):
        kernels.matmul(
            gathered,
            b,
            out,
            order=order,
            arrivals=kernels.Arrivals(flags, 1),
            completions=kernels.Completions(counters),
            programs=1,
        )
    assert torch.equal(out, reference.matmul(a, b))


# ---------------------------------------------------------------- at full size


@pytest.mark.gpu
@pytest.mark.skipif(interpreting(os.environ), reason="needs a GPU")
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_shipped_tiles_wait_and_signal(transposed, device, monkeypatch):
    """As under tensor parallelism: descriptors and all multiprocessors but a few, and copies both ways."""
    monkeypatch.undo()
    rows, N, K = [1000, 3000, 0, 2000, 192], 4096, 1024
    a, b = eighths(*factors(sum(rows), N, K, BF16, device, transposed=transposed, gap=8))
    order = kernels.tile_order(chunks_from(rows, 3), device, kernels.block_rows(BF16, device))
    places = [slice(first, first + count) for first, count in chunks_from(rows, 3)]
    flags, counters, counts = words(5, device), words(5, device), kernels.expected_counts(order, N, BF16)
    expected = torch.empty(sum(rows), N, dtype=BF16, device=device)
    kernels.matmul(a, b, expected)
    assert torch.equal(expected, a @ b.T)
    for call in range(1, 6):
        gathered, out, taken = (
            torch.full_like(a, NAN),
            torch.full_like(expected, NAN),
            torch.empty_like(expected),
        )
        torch.cuda.synchronize()

        def exchange(copies: Copies, gathered=gathered, out=out, taken=taken, call=call) -> None:
            for chunk, place in enumerate(places):
                copies.copy(a[place], gathered[place])
                copies.write(flags, chunk, call)
            for chunk, place in enumerate(places):
                copies.wait(counters, chunk, call * counts[chunk])
                copies.copy(out[place], taken[place])

        with playing(device, exchange):
            kernels.matmul(
                gathered,
                b,
                out,
                order=order,
                arrivals=kernels.Arrivals(flags, call),
                completions=kernels.Completions(counters),
                programs=kernels.max_programs(device) - 8,
            )
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert torch.equal(taken, expected)
