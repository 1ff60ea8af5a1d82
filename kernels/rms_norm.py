"""Root-mean-square normalisation with an optional residual addition, forward and backward.

Per row of D elements, all sums in float32 (Zhang & Sennrich 2019, equation 4):

    h = x + residual            rounded to x's dtype, as the next layers will read it
    rstd = 1 / sqrt(mean(h^2) + eps)
    y = h * rstd * weight

and with n = h * rstd the gradients

    dweight = sum over rows of dy * n
    dx = dresidual = rstd * (dy * weight - n * mean(dy * weight * n)) + dh

A row is read once and kept in registers. The weight's gradient is summed without atomics: each
program of a fixed grid sums the rows it walks over, and a second kernel adds the programs' sums in
order, so the same inputs give the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paracore.errors import UsageError
from paracore.kernels.configuration import Configuration, Requirements, Target, target_of

MAX_HIDDEN_SIZE = 16384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# ---------------------------------------------------------------- kernels


@triton.jit
def rms_norm_forward_kernel(
    y,  # [rows, D]
    h,  # [rows, D], written only if there is a residual
    rstd,  # [rows] float32
    x,  # [rows, D], rows x_stride apart
    residual,  # [rows, D], rows residual_stride apart, or None
    weight,  # [D]
    x_stride,
    residual_stride,
    rows,
    D,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least D
):
    """One tile of BLOCK_ROWS rows per program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < rows) & (column < D)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(h + row * D + column, values, mask=inside)
    values = values.to(tl.float32)
    row_rstd = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / D + eps)  # [BLOCK_ROWS, 1]
    tl.store(y + row * D + column, (values * row_rstd * w).to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, row_rstd, mask=row < rows)


@triton.jit
def rms_norm_backward_kernel(
    dx,  # [rows, D]
    dweight,  # [programs, D] float32: each program's sum over the rows it walks over
    dy,  # [rows, D], rows dy_stride apart
    dh,  # [rows, D], rows dh_stride apart, or None
    h,  # [rows, D], rows h_stride apart
    weight,  # [D]
    rstd,  # [rows] float32
    dy_stride,
    dh_stride,
    h_stride,
    rows,
    D,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least D
    REREAD: tl.constexpr,  # the row does not fit in registers beside dweight: read it from cache again
):
    """Program p takes the tiles p, p + programs, p + 2 programs, ... of BLOCK_ROWS rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)[None, :]
    in_row = column < D
    # Summed over the tile's rows after the loop: inside, it would cost an exchange between threads each time.
    dw = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    # The first of two readings says "keep": a hint that also stops the compiler from merging the two.
    keep: tl.constexpr = "evict_last" if REREAD else ""
    if not REREAD:
        w = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    for first in range(program * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        inside = (row < rows) & in_row
        row_rstd = tl.load(rstd + row, mask=row < rows, other=0.0)  # [BLOCK_ROWS, 1]
        h_pointers = h + row * h_stride + column
        dy_pointers = dy + row * dy_stride + column
        n = tl.load(h_pointers, mask=inside, other=0.0, eviction_policy=keep).to(tl.float32) * row_rstd
        g = tl.load(dy_pointers, mask=inside, other=0.0, eviction_policy=keep).to(tl.float32)
        if REREAD:
            w = tl.load(weight + column, mask=in_row, other=0.0, eviction_policy=keep).to(tl.float32)
        along_n = tl.sum(n * g * w, axis=1, keep_dims=True) / D  # [BLOCK_ROWS, 1]
        if REREAD:
            n = tl.load(h_pointers, mask=inside, other=0.0).to(tl.float32) * row_rstd
            g = tl.load(dy_pointers, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
        dw += g * n
        d = (g * w - n * along_n) * row_rstd
        if dh is not None:
            d += tl.load(dh + row * dh_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * D + column, d.to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + program * D + column, tl.sum(dw, axis=0, keep_dims=True), mask=in_row)


@triton.jit
def sum_rows_kernel(
    total,  # [D]
    parts,  # [rows, D] float32
    rows,
    D,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The sum over rows, in an order that depends on the shape alone; BLOCK_D columns per program."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    running = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        running += tl.load(parts + row * D + column, mask=(row < rows) & (column < D), other=0.0)
    summed = tl.sum(running, axis=0, keep_dims=True)
    tl.store(total + column, summed.to(total.dtype.element_ty), mask=column < D)


# ---------------------------------------------------------------- configurations


@dataclass(frozen=True)
class Tile:
    """What one program works on at a time: `rows` rows, spread over `threads` threads."""

    rows: int
    threads: int


# By the power of two that covers a row. 16 elements a thread: two 16-byte loads of bf16 in flight per tensor.
ALIGNED_TILES = {
    64: Tile(32, 128),
    128: Tile(16, 128),
    256: Tile(8, 128),
    512: Tile(4, 128),
    1024: Tile(2, 128),
    2048: Tile(1, 128),
    4096: Tile(1, 256),
    8192: Tile(1, 512),
    16384: Tile(1, 1024),
}
# Rows that do not start at multiples of 16 are read element by element, each under its own
# predicate. That takes more registers, hence fewer elements a thread.
UNALIGNED_TILES = {
    64: Tile(8, 128),
    128: Tile(4, 128),
    256: Tile(4, 128),
    512: Tile(2, 128),
    1024: Tile(1, 128),
    2048: Tile(1, 256),
    4096: Tile(1, 512),
    8192: Tile(1, 512),
    16384: Tile(1, 1024),
}
# Backward's programs per multiprocessor: this many threads, with their 80 to 120 registers, are
# resident at once, so all programs run side by side and each sums as many rows as any other.
BACKWARD_THREADS_PER_MULTIPROCESSOR = 512
SUM_ROWS_TILE = {"BLOCK_ROWS": 32, "BLOCK_D": 64}
SUM_ROWS_WARPS = 4


def _block_d(hidden_size: int) -> int:
    return max(min(ALIGNED_TILES), 1 << (hidden_size - 1).bit_length())


def _rereads(block_d: int) -> bool:
    return block_d > 8192


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launchers launch on `target`; fp16 differs from bf16 in the conversions alone."""
    for dtype, with_residual in (("bf16", True), ("bf16", False), ("fp32", True)):
        for block_d, tile in ALIGNED_TILES.items():
            yield from _both_ways(target, dtype, with_residual, block_d, tile, ":16", Requirements())
    for block_d, tile in UNALIGNED_TILES.items():
        # Wide rows at odd addresses do not fit in the registers of 1024 threads on every target.
        requirements = Requirements(max_spill_bytes=0 if block_d < 8192 else None)
        yield from _both_ways(target, "bf16", True, block_d, tile, "", requirements)
    yield Configuration(
        kernel=sum_rows_kernel,
        name="fp32",
        signature={"total": "*fp32:16", "parts": "*fp32:16", "rows": "i32", "D": "i32:16"},
        constants=SUM_ROWS_TILE,
        num_warps=SUM_ROWS_WARPS,
    )


def _both_ways(
    target: Target,
    dtype: str,
    with_residual: bool,
    block_d: int,
    tile: Tile,
    alignment: str,
    requirements: Requirements,
) -> Iterator[Configuration]:
    """Forward's and backward's configuration of one row of the tables."""
    name = f"{dtype} D<={block_d}{'' if alignment else ' unaligned'}{' residual' if with_residual else ''}"
    data, size = f"*{dtype}:16", f"i32{alignment}"
    forward = {"y": data, "h": data, "x": data, "x_stride": size, "residual_stride": size, "eps": "fp32"}
    backward = {"dx": data, "dweight": "*fp32:16", "dy": data, "h": data}
    backward |= {"dy_stride": size, "dh_stride": size, "h_stride": size}
    both = {"weight": data, "rstd": "*fp32:16", "rows": "i32", "D": size}
    tile_constants = {"BLOCK_ROWS": tile.rows, "BLOCK_D": block_d}
    for kernel, optional, signature, constants in (
        (rms_norm_forward_kernel, "residual", forward, tile_constants),
        (rms_norm_backward_kernel, "dh", backward, tile_constants | {"REREAD": _rereads(block_d)}),
    ):
        yield Configuration(
            kernel=kernel,
            name=name,
            signature=signature | both | ({optional: data} if with_residual else {}),
            constants=constants | ({} if with_residual else {optional: None}),
            num_warps=tile.threads // target.warp_size,
            requirements=requirements,
        )


# ---------------------------------------------------------------- launchers


def rms_norm_forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x + residual over the last dim; the formula is at the top of this file.

    x, residual: [..., D], bf16, fp16 or fp32, D at most 16384. Rows may lie any distance apart; a
    tensor whose last dim is not contiguous, or whose leading dims are not evenly spaced, is copied.
    weight: [D], in x's dtype or fp32.
    Returns y and h, both [..., D] in x's dtype, and rstd, [rows] fp32. h is x itself if residual is None.
    Raises UsageError on any other dtype, shape or device.
    """
    _check_input("x", x, weight)
    if residual is not None:
        _check_like("residual", residual, x)
    hidden_size = x.size(-1)
    x_rows = _as_rows(x)  # [rows, D]
    residual_rows = None if residual is None else _as_rows(residual)
    rows = x_rows.size(0)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = x if residual is None else torch.empty_like(y)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows == 0:
        return y, h, rstd
    target = target_of(x.device)
    block_d = _block_d(hidden_size)
    tile = _tile(block_d, hidden_size, x_rows, residual_rows)
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever the tensors' own
        rms_norm_forward_kernel[(triton.cdiv(rows, tile.rows),)](
            y,
            h,
            rstd,
            x_rows,
            residual_rows,
            weight.contiguous(),
            x_rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            rows,
            hidden_size,
            eps,
            BLOCK_ROWS=tile.rows,
            BLOCK_D=block_d,
            num_warps=tile.threads // target.warp_size,
            num_stages=1,
        )
    return y, h, rstd


def rms_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm_forward`, the same bits on every run.

    dy, dh: gradients that arrive at y and at h, [..., D] in h's dtype; dh is None if h is not used.
    h, rstd: as forward returned them. Strides as in forward.
    Returns dx, [..., D] in h's dtype, the gradient of x and of the residual alike with dh added, and
    dweight, [D] in weight's dtype, summed in fp32.
    Raises UsageError on any other dtype, shape or device.
    """
    _check_input("h", h, weight)
    _check_like("dy", dy, h)
    if dh is not None:
        _check_like("dh", dh, h)
    hidden_size = h.size(-1)
    h_rows, dy_rows = _as_rows(h), _as_rows(dy)  # [rows, D]
    dh_rows = None if dh is None else _as_rows(dh)
    rows = h_rows.size(0)
    if rstd.shape != (rows,) or rstd.dtype != torch.float32 or rstd.device != h.device:
        raise UsageError(
            f"rstd is {_describe(rstd)}; expected forward's result, float32 of shape [{rows}] on {h.device}"
        )
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    if rows == 0:
        return dx, torch.zeros_like(weight, memory_format=torch.contiguous_format)
    target = target_of(h.device)
    block_d = _block_d(hidden_size)
    tile = _tile(block_d, hidden_size, h_rows, dy_rows, dh_rows)
    resident = target.multiprocessors * max(1, BACKWARD_THREADS_PER_MULTIPROCESSOR // tile.threads)
    programs = min(resident, triton.cdiv(rows, tile.rows))
    parts = torch.empty(programs, hidden_size, dtype=torch.float32, device=h.device)
    dweight = torch.empty(hidden_size, dtype=weight.dtype, device=h.device)
    with torch.cuda.device_of(h):
        rms_norm_backward_kernel[(programs,)](
            dx,
            parts,
            dy_rows,
            dh_rows,
            h_rows,
            weight.contiguous(),
            rstd.contiguous(),
            dy_rows.stride(0),
            0 if dh_rows is None else dh_rows.stride(0),
            h_rows.stride(0),
            rows,
            hidden_size,
            BLOCK_ROWS=tile.rows,
            BLOCK_D=block_d,
            REREAD=_rereads(block_d),
            num_warps=tile.threads // target.warp_size,
            num_stages=1,
        )
        sum_rows_kernel[(triton.cdiv(hidden_size, SUM_ROWS_TILE["BLOCK_D"]),)](
            dweight, parts, programs, hidden_size, **SUM_ROWS_TILE, num_warps=SUM_ROWS_WARPS, num_stages=1
        )
    return dx, dweight


def _tile(block_d: int, hidden_size: int, *tensors: Tensor | None) -> Tile:
    """Choose the tile: the aligned one if every row starts at a multiple of 16 elements."""
    strides = [tensor.stride(0) for tensor in tensors if tensor is not None]
    aligned = all(size % 16 == 0 for size in (hidden_size, *strides))
    return (ALIGNED_TILES if aligned else UNALIGNED_TILES)[block_d]


def _as_rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D] with a contiguous last dim: a view where strides allow, else a copy."""
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _check_input(name: str, x: Tensor, weight: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise UsageError(f"{name} is {x.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    if x.dim() == 0 or not 1 <= x.size(-1) <= MAX_HIDDEN_SIZE:
        raise UsageError(
            f"{name} has shape {list(x.shape)}; expected [..., D] with D from 1 to {MAX_HIDDEN_SIZE}"
        )
    if weight.shape != x.shape[-1:] or weight.dtype not in (x.dtype, torch.float32):
        raise UsageError(
            f"weight is {_describe(weight)}; expected shape [{x.size(-1)}] in {x.dtype} or torch.float32"
        )
    if weight.device != x.device:
        raise UsageError(f"weight is on {weight.device}; expected it where {name} is, on {x.device}")


def _check_like(name: str, given: Tensor, model: Tensor) -> None:
    if (given.shape, given.dtype, given.device) != (model.shape, model.dtype, model.device):
        raise UsageError(f"{name} is {_describe(given)}; expected {_describe(model)}")


def _describe(x: Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)} on {x.device}"
