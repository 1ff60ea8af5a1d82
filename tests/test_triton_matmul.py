"""The Triton matrix product against `reference_matmul`, on the GPU or under the interpreter.

That it waits for chunks and signals them is in test_triton_matmul_chunks.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paracore import reference_matmul as reference
from paracore.errors import UsageError
from paracore.inspection.report import missed_requirements
from paracore.inspection.worker import Job, inspect
from tests.numerics import randn
from tests.triton_layers_cases import DTYPES, FLOOR, INFINITY, NAN, judge, kernels_device
from tests.triton_matmul_cases import TILE, chunks_from, eighths, factors, use_tile

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from paracore.kernels import matmul as kernels
from paracore.kernels.configuration import TARGETS
from paracore.kernels.matmul_configurations import GROUP, TILES, choose_tile

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def device():
    with kernels_device() as here:
        yield here


@pytest.fixture
def small_tiles(monkeypatch):
    use_tile(monkeypatch)


def product(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    out = torch.empty(a.size(0), b.size(0), dtype=options.pop("dtype", a.dtype), device=a.device)
    kernels.matmul(a, b, out, **options)
    return out


# ---------------------------------------------------------------- values


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 100), (17, 100, 33), (100, 1, 17), (70, 40, 16)])
def test_product(shape, transposed, dtype, device):
    """Sizes that are no multiples of a tile's, with NaN behind the ends of rows and between them."""
    M, N, K = shape
    a, b = factors(M, N, K, dtype, device, transposed=transposed)
    judge([product(a, b, programs=2)], reference.matmul, [a, b], FLOOR[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_product_in_the_shipped_tiles(transposed, device):
    a, b = factors(130, 270, 100, BF16, device, transposed=transposed)
    judge([product(a, b)], reference.matmul, [a, b], FLOOR[BF16])


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("bias", [None, BF16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_epilogue(dtype, bias, activation, device):
    """A bias, an activation, and float32 results of bf16 factors, which are rounded nowhere."""
    a, b = factors(20, 45, 24, BF16, device)
    bias = None if bias is None else randn(45, seed=5).to(device, bias)
    ours = product(a, b, bias=bias, activation=activation, dtype=dtype)
    judge([ours], reference.matmul, [a, b, bias, activation, dtype], FLOOR[dtype])


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_of_large_numbers_and_nan(activation, device):
    values = torch.tensor([[0.0, -1e4, -90.0, -5.0, 5.0, 90.0, 1e4, NAN, INFINITY]], device=device)
    one = torch.ones(1, 1, device=device)
    ours = product(one, values.T.contiguous(), activation=activation)
    expected = reference.matmul(one.cpu().double(), values.T.cpu().double(), None, activation).float()
    torch.testing.assert_close(ours.cpu(), expected, equal_nan=True, atol=1e-8, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", [(0, 5, 4), (5, 0, 4), (5, 4, 0)])
def test_sizes_of_zero(shape, device):
    """An empty sum is 0, and has a bias and an activation like any other."""
    M, N, K = shape
    bias = randn(N, seed=0).to(device, FP32)
    a, b = torch.empty(M, K, device=device), torch.empty(N, K, device=device)
    expected = torch.nn.functional.relu(bias).expand(M, N)
    assert torch.equal(product(a, b, bias=bias, activation="relu"), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_offsets_beyond_2_to_the_31(transposed, device):
    """Rows 2^30 elements apart; hardly any of the memory is touched."""

    def far(x: Tensor) -> Tensor:
        storage = torch.UntypedStorage(2 * (2**31 + 64), device=device)
        return torch.tensor([], dtype=BF16, device=device).set_(storage, 0, x.shape, (2**30, 1)).copy_(x)

    a, b = randn(3, 16, seed=0).to(device, BF16), randn(3, 16, seed=1).to(device, BF16)
    if transposed:
        a, b = a[:, :3], b.T  # b is [16, 3], and [3, 16] in memory
        distant = far(b.T).T
    else:
        distant = far(b)
    expected = product(a, b)
    out = far(torch.zeros_like(expected))
    kernels.matmul(far(a), distant, out)
    assert torch.equal(out, expected)


# ---------------------------------------------------------------- order


@pytest.mark.gpu
@pytest.mark.parametrize("group", [GROUP, 2])
def test_neither_programs_nor_chunks_change_a_bit(group, device, monkeypatch):
    use_tile(monkeypatch)
    monkeypatch.setattr("paracore.kernels.tile_order.GROUP", group)
    a, b = eighths(*factors(140, 70, 20, BF16, device))
    expected = reference.matmul(a, b)
    for programs in (1, 3):
        assert torch.equal(product(a, b, programs=programs), expected)
    for chunks in ([(0, 140)], [(101, 39), (0, 1), (1, 0), (1, 97), (98, 3)]):
        order = kernels.tile_order(chunks, device, TILE.rows)
        assert torch.equal(product(a, b, order=order, programs=3), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
def test_rows_in_no_chunk_are_left_alone(device):
    a, b = eighths(*factors(60, 10, 8, FP32, device))
    out = torch.full((60, 10), 77.0, device=device)
    kernels.matmul(a, b, out, order=kernels.tile_order([(50, 5), (3, 40)], device, 16))
    covered = torch.tensor([3 <= row < 43 or 50 <= row < 55 for row in range(60)], device=device)
    assert torch.equal(out[covered], reference.matmul(a, b)[covered])
    assert (out[~covered] == 77).all()


@pytest.mark.parametrize("rows", [[], [0], [1], [700, 0, 1, 16, 17, 335]])
def test_tiles_and_groups_stay_within_chunks(rows):
    """Every row is in one tile, of its chunk; groups are consecutive, of one chunk, and of even sizes."""
    chunks = chunks_from(rows, len(rows) // 2) if rows else []
    order = kernels.tile_order(chunks, torch.device("cpu"), 16)
    table, groups = order.table.tolist(), order.groups.tolist()
    covered = [(row, chunk) for first, count, chunk in table for row in range(first, first + count)]
    assert covered == [
        (row, c) for c, (first, count) in enumerate(chunks) for row in range(first, first + count)
    ]
    assert max((count for _, count, _ in table), default=0) <= 16
    assert order.tiles_per_chunk == tuple(-(-count // 16) for _, count in chunks)
    assert order.end == sum(rows)
    for row_tile, (first, size) in enumerate(groups):
        assert first <= row_tile < first + size
        assert groups[first : first + size] == [[first, size]] * size
        assert len({table[other][2] for other in range(first, first + size)}) == 1
    sizes = [size for row_tile, (first, size) in enumerate(groups) if row_tile == first]
    # 16 rows, 17 and 335 from the middle on; then 700 in 44 tiles, and 1
    assert sizes == ([1, 2, 10, 11, 14, 15, 15, 1] if len(rows) > 1 else [1] * sum(rows))


# ---------------------------------------------------------------- tiles


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_descriptors_load_what_pointers_load(parts, transposed, device, monkeypatch):
    """Bit for bit, at the ends of all three sizes and of chunks; results in parts are the same, too."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs sm_90")
    a, b = eighths(*factors(77, 72, 40, BF16, device, transposed=transposed, gap=8))
    order = kernels.tile_order([(40, 37), (0, 40)], device, TILE.rows)
    use_tile(monkeypatch)
    expected = product(a, b, order=order)
    made = []

    def describe(*arguments: Any) -> TensorDescriptor:
        made.append(arguments[-1])
        return TensorDescriptor(*arguments)

    monkeypatch.setattr(kernels, "TensorDescriptor", describe)
    use_tile(monkeypatch, replace(TILE, columns=64, descriptors=True, parts=parts))
    assert torch.equal(product(a, b, order=order), expected)
    assert made == [[32, 16], [16, 64] if transposed else [64, 16]]


def test_what_descriptors_do_not_allow_is_loaded_through_pointers(device):
    """float32, an address or a stride that is no multiple of 16 bytes, a stride of 0, an empty tensor."""
    even = torch.zeros(4, 32, dtype=BF16, device=device)
    tile = replace(TILE, descriptors=True)
    odd_address = torch.zeros(129, dtype=BF16, device=device)[1:].view(4, 32)
    odd_stride = torch.zeros(4, 36, dtype=BF16, device=device)[:, :32]
    assert kernels._factors(even, even, tile)[0]["a"] is None
    for odd in (even.float(), odd_address, odd_stride, even[:1].expand(4, 32), even[:0], even[:, :0]):
        for a, b in ((even, odd), (odd, even)):
            assert kernels._factors(a, b, tile)[0]["a_tiles"] is None


def test_what_is_not_aligned_is_loaded_in_shallow_tiles(device):
    even = torch.zeros(16, 48, dtype=BF16, device=device)
    odd = torch.zeros(16, 50, dtype=BF16, device=device)[:, :48]
    narrow = torch.zeros(48, 16, dtype=BF16, device=device)[:, :9]
    deep = replace(TILE, depth=64)
    assert kernels._factors(even, even, deep)[1] == deep
    assert kernels._factors(odd.float(), even.float(), deep)[1] == deep
    for a, b in ((odd, even), (even, odd), (even[:, :40], even[:, :40]), (even, narrow.T)):
        assert kernels._factors(a, b, deep)[1].depth == 16


def test_small_results_take_small_tiles_of_the_same_rows():
    for name, target in TARGETS.items():
        large, small = TILES[name]
        assert (large.rows, large.depth) == (small.rows, small.depth)
        enough = large.columns * (target.multiprocessors // 4 - 1) + 1
        assert choose_tile(target, BF16, "ieee", 4, enough) == large
        assert choose_tile(target, BF16, "ieee", 4, enough - 1) == small


def test_the_kernel_meets_its_requirements_on_every_target():
    """While it waits; on sm_90 plain, too: both overlap their wgmma. `paracore kernels` compiles the rest."""
    names = {"sm_80": ["bf16 arrivals"], "gfx942": ["bf16 arrivals"], "sm_100": ["bf16 arrivals descriptors"]}
    names["sm_90"] = ["bf16 descriptors", "bf16 arrivals descriptors"]
    jobs = {
        Job(name, entry.kernel_name, entry.name): entry.requirements
        for name, target in TARGETS.items()
        for entry in kernels.configurations(target)
        if entry.name in names[name]
    }
    assert [job.target for job, needed in jobs.items() if needed.max_loop_instructions] == ["sm_90"] * 2
    assert len(jobs) == 5
    for result in inspect(list(jobs), workers=2, cache=None):
        assert result.measurement is not None, result.error
        assert not missed_requirements(result.measurement, jobs[result.job]), result.job


# ---------------------------------------------------------------- refusals


def test_refusals_of_tensors(device):
    a, b, out = (torch.zeros(4, 4, device=device) for _ in range(3))
    holes = torch.zeros(8, 8, device=device)[::2, ::2]
    for pattern, arguments, options in (
        (r"b is torch\.float16 .*; expected torch\.float32", (a, b.half(), out), {}),
        (r"b is .* shape \[4, 3\].*; expected .* \[n, 4\]", (a, b[:, :3], out), {}),
        (r"a is torch\.float64", (a.double(), b, out), {}),
        (r"a has strides \(1, 4\); expected a contiguous last dim", (a.T, b, out), {}),
        (r"b has strides \(16, 2\); expected 1 in one", (a, holes, out), {}),
        (r"out is .*; expected .* shape \[4, 4\]", (a, b, out[:3]), {}),
        (r"out is torch\.bfloat16 .*; expected torch\.float32", (a, b, out.bfloat16()), {}),
        (r"bias is .*; expected .* shape \[4\]", (a, b, out), {"bias": a[:3, 0]}),
        (r"bias has strides \(4,\); expected a contiguous", (a, b, out), {"bias": a[:, 0]}),
        (r"activation is 'tanh'; expected one of none, relu", (a, b, out), {"activation": "tanh"}),
        (r"programs is 0; expected 1 to \d+", (a, b, out), {"programs": 0}),
        (r"programs is 100000; expected 1 to \d+", (a, b, out), {"programs": 100_000}),
        (r"timeout_seconds is 0; expected more than 0", (a, b, out), {"timeout_seconds": 0}),
        (r"timeout_seconds is 2001", (a, b, out), {"timeout_seconds": 2001}),
    ):
        with pytest.raises(UsageError, match=pattern):
            kernels.matmul(*arguments, **options)


def test_refusals_of_chunks(device):
    a, b, out = (torch.zeros(4, 4, device=device) for _ in range(3))
    words = torch.zeros(2, dtype=torch.int32, device=device)
    order = kernels.tile_order([(0, 3), (3, 1)], device, 16)
    arrivals, completions = kernels.Arrivals(words, 1), kernels.Completions(words)
    long_words = kernels.Arrivals(words.long(), 1)
    for pattern, options in (
        ("order is None; arrivals.flags need", {"arrivals": arrivals}),
        ("order is None; completions.counters need", {"completions": completions}),
        (r"arrivals.flags is .* shape \[1\]", {"order": order, "arrivals": kernels.Arrivals(words[:1], 1)}),
        (r"arrivals.flags is torch.int64", {"order": order, "arrivals": long_words}),
        (r"counters is .* shape \[1\]", {"order": order, "completions": kernels.Completions(words[:1])}),
        ("order covers rows up to 5", {"order": kernels.tile_order([(0, 5)], device, 16)}),
        ("order has tiles of 4096 rows", {"order": kernels.tile_order([(0, 4)], device, 4096)}),
        ("order.table is .*on meta", {"order": replace(order, table=order.table.to("meta"))}),
    ):
        with pytest.raises(UsageError, match=pattern):
            kernels.matmul(a, b, out, **options)


@pytest.mark.parametrize(
    ("chunks", "block_rows", "pattern"),
    [
        ([(0, 5), (4, 1)], 16, r"chunks has \(0, 5\) and \(4, 1\), which overlap"),
        ([(-1, 5)], 16, r"chunks has \(-1, 5\)"),
        ([(1, -5)], 16, r"chunks has \(1, -5\)"),
        ([(2**31 - 1, 1)], 16, r"chunks has \(2147483647, 1\)"),
        ([(0, 1)], 0, "block_rows is 0; expected at least 1"),
    ],
)
def test_refusals_of_orders(chunks, block_rows, pattern):
    with pytest.raises(UsageError, match=pattern):
        kernels.tile_order(chunks, torch.device("cpu"), block_rows)
