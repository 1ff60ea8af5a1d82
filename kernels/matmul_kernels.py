"""The persistent matrix product: programs compute tile after tile, and may wait and signal in between."""

from __future__ import annotations

import triton
import triton.language as tl

from paracore.kernels.flags import signal, wait
from paracore.kernels.swiglu import sigmoid

# Numbers that may differ with every call: no kernel is compiled anew for one that happens to divide by 16.
RUN_TIME_NUMBERS = ("ticket", "patience", "M", "row_tile_count")


@triton.jit
def place(
    tile,  # among all tiles, in the order in which they are computed
    row_tiles,  # [row_tile_count, 3] int32, see tile_order; None where tiles simply follow each other
    groups,  # [row_tile_count, 2] int32, likewise
    M,
    row_tile_count,
    columns,  # tiles beside each other
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,  # row tiles of a group, where there is no table
):
    """Return the tile's first row, number of rows, chunk and column.

    Within a group of row tiles, all tiles of one column come before the next column: programs that run side
    by side then share rows of a and of b, which the cache holds.
    """
    row_tile = tile // columns  # of the same group as the one sought
    if groups is None:
        first = row_tile // GROUP * GROUP
        size = tl.minimum(row_tile_count - first, GROUP)
    else:
        first = tl.load(groups + 2 * row_tile)
        size = tl.load(groups + 2 * row_tile + 1)
    within = tile - first * columns
    column = within // size
    row_tile = first + within - column * size
    if row_tiles is None:
        first_row = row_tile * BLOCK_M
        return first_row, tl.minimum(M - first_row, BLOCK_M), 0, column
    else:
        at = row_tiles + 3 * row_tile
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), column


@triton.jit
def multiply(
    a,
    b,
    a_stride,
    b_stride,
    first_row,
    rows,
    first_column,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the tile's products, [BLOCK_M, BLOCK_N] float32, loaded through pointers.

    Rows beyond the tile's are its last row again, so that nothing of another chunk is read.
    """
    row = first_row + tl.minimum(tl.arange(0, BLOCK_M), rows - 1)
    column = first_column + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    a_at = a + row[:, None].to(tl.int64) * a_stride + k[None, :]
    if TRANSPOSED:
        b_at = b + column + k[:, None].to(tl.int64) * b_stride
        b_step = BLOCK_K * tl.cast(b_stride, tl.int64)
    else:
        b_at = b + tl.minimum(column, N - 1).to(tl.int64) * b_stride + k[:, None]
        b_step = BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(a_at, mask=k[None, :] < K - start, other=0.0)
        if TRANSPOSED:
            y = tl.load(b_at, mask=(k[:, None] < K - start) & (column < N), other=0.0)
        else:
            y = tl.load(b_at, mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
        a_at += BLOCK_K
        b_at += b_step
    return acc


@triton.jit
def multiply_described(
    a_tiles,
    b_tiles,
    first_row,
    first_column,
    K,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return what `multiply` returns, of the tile's rows, loaded through descriptors.

    Beyond these, rows are those of the next chunk, which may not have arrived: they change no other row.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = a_tiles.load([first_row, start])
        y = b_tiles.load([start, first_column]) if TRANSPOSED else b_tiles.load([first_column, start]).T
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The functions of `reference_matmul`, in float32."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)  # a maximum would hide NaN
    elif ACTIVATION == "gelu":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), which does not cancel; 2 sqrt(2 / pi) = 1.596
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        return x * sigmoid(x)
    else:
        return x


@triton.jit
def store(out, acc, bias, out_stride, first_row, rows, first_column, N, ACTIVATION: tl.constexpr):
    """Write activation(acc + bias) to the tile of `out` that begins at first_row and first_column."""
    row = tl.arange(0, acc.shape[0])[:, None]
    column = first_column + tl.arange(0, acc.shape[1])[None, :]
    if bias is not None:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
    result = activate(acc, ACTIVATION).to(out.dtype.element_ty)
    at = out + (first_row + row).to(tl.int64) * out_stride + column
    tl.store(at, result, mask=(row < rows) & (column < N))


@triton.jit
def halves(x):
    """Return the left and the right columns of x."""
    half: tl.constexpr = x.shape[1] // 2
    return x.reshape(x.shape[0], 2, half).permute(0, 2, 1).split()


@triton.jit
def store_halves(out, acc, bias, out_stride, first_row, rows, first_column, N, ACTIVATION: tl.constexpr):
    """What `store` does, first the left half, then the right."""
    left, right = halves(acc)
    right_column = first_column + left.shape[1]
    store(out, left, bias, out_stride, first_row, rows, first_column, N, ACTIVATION)
    store(out, right, bias, out_stride, first_row, rows, right_column, N, ACTIVATION)


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def matmul_kernel(
    out,  # [M, N]
    a,  # [M, K]; a and b are None where there are descriptors
    b,  # [N, K]
    a_tiles,  # descriptor of a in blocks of [BLOCK_M, BLOCK_K], or None
    b_tiles,  # descriptor of b in blocks of [BLOCK_N, BLOCK_K], if TRANSPOSED of b's transpose, or None
    bias,  # [N], or None
    row_tiles,  # see `place`
    groups,
    late,  # see `flags.wait`; None without flags
    flags,  # [chunks] int32: a's chunk may be read once its flag has reached `ticket`; or None
    counters,  # [chunks] int32: each counts the finished tiles of its chunk; or None
    ticket,
    patience,
    M,
    N,
    K,
    row_tile_count,
    out_stride,  # between rows, in elements; so are the next two
    a_stride,
    b_stride,  # if TRANSPOSED between columns, whose elements then follow each other
    TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PARTS: tl.constexpr,  # in which results are written, 1, 2 or 4: more take fewer registers
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Every program takes the tiles that are num_programs apart, in order: chunk after chunk."""
    columns = tl.cdiv(N, BLOCK_N)
    tiles = row_tile_count * columns
    step = tl.num_programs(0)
    first_row, rows, chunk, column = place(
        tl.program_id(0), row_tiles, groups, M, row_tile_count, columns, BLOCK_M, GROUP
    )
    known = -1
    missing = 0
    if flags is not None:
        missing = tl.load(late)  # programs need not all wait in vain
    for tile in tl.range(tl.program_id(0), tiles, step):
        # Looked up now: the product hides how long it takes.
        next_first_row, next_rows, next_chunk, next_column = place(
            tl.minimum(tile + step, tiles - 1), row_tiles, groups, M, row_tile_count, columns, BLOCK_M, GROUP
        )
        if flags is not None:
            waited = (chunk == known) | (missing != 0)
            missing |= wait(flags + chunk, ticket, late, patience, waited, ASSEMBLY, TMA=a_tiles is not None)
            known = chunk
        first_column = column * BLOCK_N
        if a_tiles is None:
            acc = multiply(
                a,
                b,
                a_stride,
                b_stride,
                first_row,
                rows,
                first_column,
                N,
                K,
                TRANSPOSED,
                PRECISION,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
        else:
            acc = multiply_described(
                a_tiles, b_tiles, first_row, first_column, K, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
            )
        if PARTS == 4:
            left, right = halves(acc)
            right_column = first_column + BLOCK_N // 2
            store_halves(out, left, bias, out_stride, first_row, rows, first_column, N, ACTIVATION)
            store_halves(out, right, bias, out_stride, first_row, rows, right_column, N, ACTIVATION)
        elif PARTS == 2:
            store_halves(out, acc, bias, out_stride, first_row, rows, first_column, N, ACTIVATION)
        else:
            store(out, acc, bias, out_stride, first_row, rows, first_column, N, ACTIVATION)
        if counters is not None:
            signal(counters + chunk, missing == 0)
        first_row, rows, chunk, column = next_first_row, next_rows, next_chunk, next_column
