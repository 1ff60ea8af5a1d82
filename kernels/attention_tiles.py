"""What the attention kernels share: where a program works, how it loads a tile, and what a logit is.

A head dim is cut into two parts whose sizes are powers of two, as Triton's tiles must be: 96 = 64 + 32,
192 = 128 + 64. The second part is absent (size 0) where one power of two is enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that may differ with every call: no kernel is compiled anew for one that happens to divide by 16.
RUN_TIME_NUMBERS = ("drop_threshold", "seed_low", "seed_high", "first_batch", "first_head")
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def place(tiles, heads, units, units_at_once, GROUP: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Return (tile, batch, head) of this program; `units` is batches times key heads.

    Programs that run at the same time share keys: first the tiles of `units_at_once` key heads, GROUP query
    heads each, then those of the next. Among these, all heads of one tile come before the next tile.
    """
    program = tl.program_id(0)
    section = program // (tiles * units_at_once * GROUP)
    within = program - section * (tiles * units_at_once * GROUP)
    first_unit = section * units_at_once
    rows = tl.minimum(units_at_once, units - first_unit) * GROUP  # batches times query heads in this section
    tile = within // rows
    row = first_unit * GROUP + within - tile * rows
    batch = row // heads
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, batch.to(tl.int64), (row - batch * heads).to(tl.int64)


@triton.jit
def load_ranges(ranges, batch, ranges_batch, tile):
    """Return begin, whole_begin, whole_end, end of one tile, see `attention_ranges`."""
    at = ranges + batch * ranges_batch + tile * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def load_tile(pointers, rows, count, columns, width, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """[N, part]: zeros in rows from `count` on if MASK_ROWS, in columns from `width` on if MASK_COLUMNS.

    rows: [N, 1]. columns: [1, part].
    """
    if MASK_ROWS and MASK_COLUMNS:
        x = tl.load(pointers, mask=(rows < count) & (columns < width), other=0.0)
    elif MASK_ROWS:
        x = tl.load(pointers, mask=rows < count, other=0.0)
    elif MASK_COLUMNS:
        x = tl.load(pointers, mask=columns < width, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def load_part(
    tiles,  # descriptor of the tensor [B, H, S, D] in blocks of [1, 1, N, part], or None
    at,  # batch, head, row: where in it the tile starts
    COLUMN: tl.constexpr,  # likewise
    pointers,
    rows,
    count,
    columns,
    width,
    MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
):
    """What `load_tile` loads, through `tiles` if there are any: outside the tensor, they give zeros."""
    if tiles is None:
        return load_tile(pointers, rows, count, columns, width, MASK_ROWS, MASK_COLUMNS)
    else:
        x = tiles.load([at[0], at[1], at[2], COLUMN])
        return x.reshape(x.shape[2], x.shape[3])


@triton.jit
def load_row(pointers, inside, other: tl.constexpr, MASKED: tl.constexpr):
    """The numbers at `pointers`, or `other` where `inside` is false if MASKED."""
    return tl.load(pointers, mask=inside, other=other) if MASKED else tl.load(pointers)


@triton.jit
def length_of(first, end):
    """Keys in each interval, as the unsigned number that `sees` compares with."""
    return tl.maximum(end - first, 0).to(tl.uint32, bitcast=True)


@triton.jit
def sees(index, first, length):
    """Whether first <= index < first + length, in one comparison: below `first` the difference wraps."""
    return (index - first).to(tl.uint32, bitcast=True) < length


@triton.jit
def tanh(x):
    """To about one unit in the last place, from exp2 alone.

    The formula by exponentials cancels near 0: there, the polynomial of Cephes' tanhf (Moshier 1992).
    """
    square = x * x
    small = -5.70498872745e-3 * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = small * square - 3.33332819422e-1
    small = small * square * x + x
    size = tl.abs(x)
    large = 1.0 - 2.0 / (1.0 + tl.exp2(size * 2.885390081777927))  # 2 log2(e)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000  # by its bit: a comparison would take a register more
    large = (large.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(size < 0.625, small, large)


@triton.jit
def logits(
    s,  # products of queries and keys
    factor,  # log2(e) scale, or scale / softcap
    softcap,  # log2(e) softcap, or None
    slope,  # log2(e) times the head's ALiBi slope; used with `distances` alone
    query_position,  # [rows, 1] or [1, columns], or 0
    key_position,  # the other way round
    LINEAR: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Return t, the logit in units of log2, and tanh of the softcap.

    If LINEAR, t is s itself and the caller multiplies with `factor`, in one instruction with a subtraction.
    """
    t = s
    capped = s
    if not LINEAR:
        t = s * factor
        if softcap is not None:
            capped = tanh(t)
            t = capped * softcap
        if ALIBI:
            t -= slope * tl.abs(query_position - key_position).to(tl.float32)
    return t, capped


@triton.jit
def minus_base(t, factor, base, LINEAR: tl.constexpr):
    """t - base, where t is what `logits` returned."""
    if LINEAR:
        return tl.math.fma(t, factor, -base)
    else:
        return t - base


@triton.jit
def keeps(threshold, seed_low, seed_high, key_position, query_position, head, batch):
    """Return where weights are kept; the rule is `reference_attention._drop`'s."""
    low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low
    word, _, _, _ = tl.philox(seed, key_position, query_position, head, batch)
    return word >= threshold.to(tl.uint32, bitcast=True)
