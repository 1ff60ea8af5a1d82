"""Matrix products whose rows arrive, and are handed on, in chunks: the function is `reference_matmul`'s.

Under tensor parallelism a is gathered from all ranks, or the result is summed over them and scattered. Both
are overlapped with the product without a kernel that talks to other GPUs: copies on another stream bring a's
chunks and set a flag behind each, for which the tiles of that chunk wait; and every finished tile counts, so
that another stream can take a chunk of the result as soon as its count is complete. Each element is computed
by one program in an order that K alone decides: chunks, flags and the number of programs change no bit.

| file | holds |
|---|---|
| tile_order | which rows are computed in which order |
| matmul_kernels | the kernel |
| flags | waiting and signalling |
| matmul_configurations | sizes of tiles, per architecture |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paracore.errors import UsageError
from paracore.kernels.configuration import target_of
from paracore.kernels.flags import fail_if_late_kernel
from paracore.kernels.layer_checks import DTYPES, check, multiples_of_16
from paracore.kernels.matmul_configurations import (
    Tile,
    choose_tile,
    configurations,
    for_single_elements,
    rows_per_tile,
    tile_constants,
)
from paracore.kernels.matmul_kernels import matmul_kernel
from paracore.kernels.tile_order import TileOrder, tile_order
from paracore.reference_matmul import ACTIVATIONS, Activation

__all__ = [
    "Arrivals",
    "Completions",
    "TileOrder",
    "block_rows",
    "configurations",
    "expected_counts",
    "matmul",
    "max_programs",
    "tile_order",
]

MAX_TIMEOUT = 2000.0  # seconds, whose microseconds fit in 31 bits
# Where there is no clock to read, time is counted in polls, of which there are hardly more in a second.
POLLS_PER_SECOND = {"cuda": 1_000_000, "cpu": 500}


@dataclass(frozen=True)
class Arrivals:
    """a's chunk c may be read once flags[c] has reached `ticket`.

    flags: [chunks] int32, written with release semantics, or by a copy or a stream operation that follows
    the chunk's copy in its stream. ticket: grows by one with every use of the flags, which start at 0 and are
    never reset: the first ticket is 1. Numbers are compared cyclically, as `cuStreamWaitValue32` does, and
    tickets taken modulo 2^32, so that they go on for ever.
    """

    flags: Tensor
    ticket: int


@dataclass(frozen=True)
class Completions:
    """counters[c] grows by one with every finished tile of chunk c, by `expected_counts` in one call.

    counters: [chunks] int32, never reset; they wrap around, and are to be compared as `Arrivals`' flags.
    Whoever acquires a count, from another stream, the CPU or another GPU, can read the tiles that it counts.
    """

    counters: Tensor


def block_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of a, in `dtype`, a tile covers at most: what `tile_order` is to be given."""
    return rows_per_tile(target_of(device), dtype)


def max_programs(device: torch.device) -> int:
    """Return how many programs are resident on `device` at one time: one per multiprocessor."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return target_of(device).multiprocessors


def expected_counts(order: TileOrder, N: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return by how much each chunk's counter grows in one call with a and b in `dtype` and N columns."""
    columns = triton.cdiv(N, _tile(dtype, order.table.device, order.table.size(0), N).columns)
    return tuple(row_tiles * columns for row_tiles in order.tiles_per_chunk)


def matmul(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation = "none",
    order: TileOrder | None = None,
    arrivals: Arrivals | None = None,
    completions: Completions | None = None,
    programs: int | None = None,
    timeout_seconds: float = 30.0,
) -> None:
    """Write activation(a b^T + bias) to out; see `reference_matmul`.

    a: [M, K] with contiguous rows, b: [N, K] with contiguous rows or columns (the transpose of a contiguous
    [K, N]), of one dtype: bf16, fp16 or fp32, whose products are IEEE's unless torch allows TF32. out: [M, N]
    with contiguous rows, in that dtype or fp32, apart from a and b. bias: [N] in that dtype or fp32. Sums and
    all that follows are taken in float32, and rounded once.

    order: the rows that are computed, and their chunks; all of them, as one chunk, if it is None. arrivals,
    completions: see there; they need an order.

    programs: how many run at the same time, at most `max_programs`, the default; each waits only for a's
    chunks, never for another program. Leave multiprocessors to copies that are kernels, and start nothing
    that the copies depend on behind this in its stream. If a chunk has not arrived timeout_seconds after a
    program began to wait for it, nothing more is signalled, and the device fails with a message (a device
    assert); without a clock (AMD, the interpreter) that time is counted roughly, in polls.

    Raises UsageError on any other dtype, shape, layout, device or number.
    """
    M, N, K = _check_tensors(a, b, out, bias)
    if activation not in ACTIVATIONS:
        raise UsageError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    _check_chunks(order, arrivals, completions, a)
    programs = _check_programs(programs, a.device)
    patience = _patience(timeout_seconds, a.device)
    row_tiles = triton.cdiv(M, block_rows(a.dtype, a.device)) if order is None else order.table.size(0)
    tile = _tile(a.dtype, a.device, row_tiles, N)
    tiles = row_tiles * triton.cdiv(N, tile.columns)
    if tiles == 0:
        return
    late = None if order is None or arrivals is None else order.late
    arguments = {
        "out": out,
        "bias": bias,
        "row_tiles": None if order is None else order.table,
        "groups": None if order is None else order.groups,
        "late": late,
        "flags": None if arrivals is None else arrivals.flags,
        "counters": None if completions is None else completions.counters,
        "ticket": 0 if arrivals is None else _signed(arrivals.ticket),
        "patience": patience,
        "M": M,
        "N": N,
        "K": K,
        "row_tile_count": row_tiles,
        "out_stride": out.stride(0),
        "ACTIVATION": activation,
        "PRECISION": _precision(a.dtype, a.device),
        "ASSEMBLY": _has_clock(a.device),
    }
    factors, tile = _factors(a, b, tile)
    arguments |= factors | tile_constants(tile)
    with torch.cuda.device_of(a):  # Triton launches on the current device, whatever the tensors' own
        matmul_kernel[(min(programs, tiles),)](**arguments, num_warps=tile.warps, num_stages=tile.stages)
        if late is not None:
            fail_if_late_kernel[(1,)](late, num_warps=1, debug=True)


# ---------------------------------------------------------------- launching


def _tile(dtype: torch.dtype, device: torch.device, row_tiles: int, N: int) -> Tile:
    return choose_tile(target_of(device), dtype, _precision(dtype, device), row_tiles, N)


def _precision(dtype: torch.dtype, device: torch.device) -> str:
    allowed = device.type == "cuda" and torch.version.hip is None and dtype == torch.float32
    return "tf32" if allowed and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _factors(a: Tensor, b: Tensor, tile: Tile) -> tuple[dict[str, Any], Tile]:
    """a and b as the kernel takes them, and the tile for that; where it and they allow, as descriptors."""
    transposed = not _has_rows(b)
    rows = b.T if transposed else b
    factors: dict[str, Any] = {"a_stride": a.stride(0), "b_stride": rows.stride(0), "TRANSPOSED": transposed}
    if tile.descriptors and _describable(a) and _describable(rows):
        block = [tile.depth, tile.columns] if transposed else [tile.columns, tile.depth]
        tiles = {"a_tiles": _descriptor(a, [tile.rows, tile.depth]), "b_tiles": _descriptor(rows, block)}
        return factors | tiles | {"a": None, "b": None}, tile
    sizes = (a.data_ptr(), b.data_ptr(), *a.shape[1:], *rows.shape[1:], a.stride(0), rows.stride(0))
    pointers = {"a": a, "b": b, "a_tiles": None, "b_tiles": None}
    return factors | pointers, tile if multiples_of_16(*sizes) else for_single_elements(tile, a.dtype)


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def _describable(x: Tensor) -> bool:
    """Whether a tensor map can describe x: CUDA driver API, cuTensorMapEncodeTiled. 16-bit dtypes only.

    It wants an address and a stride that are multiples of 16 bytes, a stride below 2^40 bytes; no dim empty.
    """
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and 0 < x.stride(0) < 2**39
    return x.element_size() == 2 and aligned and x.numel() > 0


def _has_rows(x: Tensor) -> bool:
    """Whether the elements of a row follow each other."""
    return x.stride(1) == 1 or x.size(1) <= 1


def _has_clock(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _signed(word: int) -> int:
    """The lowest 32 bits of `word` as a signed number."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


# ---------------------------------------------------------------- checks


def _check_tensors(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    """Return M, N and K. Raise UsageError unless the tensors fit together."""
    check("a", a, DTYPES, (None, None), a.device)
    M, K = a.shape
    check("b", b, (a.dtype,), (None, K), a.device, contiguous="none")
    N = b.size(0)
    if b.numel() and not (_has_rows(b) or _has_rows(b.T)):
        raise UsageError(f"b has strides {b.stride()}; expected 1 in one of the dims")
    result_dtypes = tuple(dict.fromkeys((a.dtype, torch.float32)))
    check("out", out, result_dtypes, (M, N), a.device)
    if bias is not None:
        check("bias", bias, result_dtypes, (N,), a.device, contiguous="all")
    for name, size in (("M", M), ("N", N), ("K", K)):
        if size >= 2**31 - 256:
            raise UsageError(f"{name} is {size}; expected less than 2^31 - 256")
    return M, N, K


def _check_chunks(
    order: TileOrder | None, arrivals: Arrivals | None, completions: Completions | None, a: Tensor
) -> None:
    words = {
        name: tensor
        for name, tensor in (
            ("arrivals.flags", None if arrivals is None else arrivals.flags),
            ("completions.counters", None if completions is None else completions.counters),
        )
        if tensor is not None
    }
    if order is None:
        if words:
            raise UsageError(f"order is None; {' and '.join(words)} need the order that says what chunks are")
        return
    if order.end > a.size(0):
        raise UsageError(f"order covers rows up to {order.end}; expected at most a's {a.size(0)}")
    limit = block_rows(a.dtype, a.device)
    if order.block_rows > limit:
        raise UsageError(
            f"order has tiles of {order.block_rows} rows; expected at most {limit} for {a.dtype}"
        )
    check("order.table", order.table, (torch.int32,), (None, 3), a.device, contiguous="all")
    for name, tensor in words.items():
        check(name, tensor, (torch.int32,), (len(order.tiles_per_chunk),), a.device, contiguous="all")


def _check_programs(programs: int | None, device: torch.device) -> int:
    limit = max_programs(device)
    if programs is not None and not 1 <= programs <= limit:
        raise UsageError(
            f"programs is {programs}; expected 1 to {limit}, as many as {device} has multiprocessors"
        )
    return limit if programs is None else programs


def _patience(timeout_seconds: float, device: torch.device) -> int:
    """What `flags.wait` takes."""
    if not 0 < timeout_seconds <= MAX_TIMEOUT:
        raise UsageError(f"timeout_seconds is {timeout_seconds}; expected more than 0, at most {MAX_TIMEOUT}")
    per_second = 1_000_000 if _has_clock(device) else POLLS_PER_SECOND[device.type]
    return max(1, int(timeout_seconds * per_second))
