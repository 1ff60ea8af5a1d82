"""Attention's backward kernels: one sums dq along the keys of a tile of queries, one dk and dv along queries.

Each computes the weights anew from lse. No two programs write to the same place, so no sum depends on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paracore.kernels.attention_tiles import (
    LOG2_E,
    RUN_TIME_NUMBERS,
    keeps,
    length_of,
    load_part,
    load_ranges,
    load_row,
    load_tile,
    logits,
    minus_base,
    place,
    sees,
)


@triton.jit
def attention_delta_kernel(
    delta,  # [B, Hq, Sq] float32, contiguous
    out,  # [B, Hq, Sq, DV]
    dout,  # [B, Hq, Sq, DV]
    out_batch,  # strides, in elements
    out_head,
    out_row,
    dout_batch,
    dout_head,
    dout_row,
    Hq,
    Sq,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least DV
    QUERIES: tl.constexpr,
):
    """delta = sum(out * dout) along each row."""
    tiles = tl.cdiv(Sq, QUERIES)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # among all batches' heads
    row = (tl.program_id(0) % tiles * QUERIES + tl.arange(0, QUERIES)[:, None]).to(tl.int64)
    column = tl.arange(0, BLOCK_D)[None, :]
    out += head // Hq * out_batch + head % Hq * out_head
    dout += head // Hq * dout_batch + head % Hq * dout_head
    o = load_tile(out + row * out_row + column, row, Sq, column, DV, True, DV < BLOCK_D).to(tl.float32)
    do = load_tile(dout + row * dout_row + column, row, Sq, column, DV, True, DV < BLOCK_D).to(tl.float32)
    tl.store(delta + head * Sq + row, tl.sum(o * do, 1, keep_dims=True), mask=row < Sq)


@triton.jit
def store_gradient(pointers, gradient, inside, ACCUMULATE: tl.constexpr):
    """Write the gradient, or add it to what is there. inside: which elements exist."""
    if ACCUMULATE:
        gradient += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, gradient.to(pointers.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def attention_backward_query_kernel(
    dq,  # [B, Hq, Sq, D]
    dout,  # [B, Hq, Sq, DV]
    q,  # [B, Hq, Sq, D]
    k,  # [B, Hq / GROUP, Sk, D]
    v,  # [B, Hq / GROUP, Sk, DV]
    k_tiles,  # of k's and v's parts, see attention_tiles.load_part
    k_tiles1,
    v_tiles,
    v_tiles1,
    lse,  # [B, Hq, Sq] float32, contiguous
    delta,  # likewise
    ranges,  # [B or 1, query tiles, 4] int32, see attention_ranges
    first,  # [B or 1, Sq] int32
    end,
    slopes,  # [B or 1, Hq] float32, or None
    query_positions,  # [Sq] int32, or None
    key_positions,  # [Sk] int32, or None
    dq_batch,  # strides, in elements
    dq_head,
    dq_row,
    dout_batch,
    dout_head,
    dout_row,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    ranges_batch,  # 0 if all batches see the same
    mask_batch,  # likewise, of first and end
    slopes_batch,
    Hq,
    Sq,
    Sk,
    units,  # batches times key heads
    units_at_once,
    scale,
    factor,  # see attention_tiles.logits
    softcap,  # or None
    keep_inverse,  # 1 / (1 - p), or None
    drop_threshold,
    seed_low,
    seed_high,
    first_batch,
    first_head,
    ACCUMULATE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of queries per program, over all the keys they see."""
    tile, batch, head = place(tl.cdiv(Sq, QUERIES), Hq, units, units_at_once, GROUP, True)
    begin, whole_begin, whole_end, after = load_ranges(ranges, batch, ranges_batch, tile)
    row = tile * QUERIES + tl.arange(0, QUERIES)  # [QUERIES]
    in_q = row < Sq
    query = row[:, None].to(tl.int64)
    column = tl.arange(0, D0)[None, :]
    column1 = D0 + tl.arange(0, D1 if D1 > 0 else 1)[None, :]
    v_column = tl.arange(0, V0)[None, :]
    v_column1 = V0 + tl.arange(0, V1 if V1 > 0 else 1)[None, :]

    q += batch * q_batch + head * q_head
    dout += batch * dout_batch + head * dout_head
    q0 = load_tile(q + query * q_row + column, query, Sq, column, D, True, D < D0)
    if D1 > 0:
        q1 = load_tile(q + query * q_row + column1, query, Sq, column1, D, True, D < D0 + D1)
    do0 = load_tile(dout + query * dout_row + v_column, query, Sq, v_column, DV, True, DV < V0)
    if V1 > 0:
        do1 = load_tile(dout + query * dout_row + v_column1, query, Sq, v_column1, DV, True, DV < V0 + V1)
    statistics = (batch * Hq + head) * Sq + row
    base = tl.load(lse + statistics, mask=in_q, other=float("inf"))[:, None] * LOG2_E
    row_delta = tl.load(delta + statistics, mask=in_q, other=0.0)[:, None]
    row_first = tl.load(first + batch * mask_batch + row, mask=in_q, other=0x7FFFFFFF)[:, None]
    row_end = tl.load(end + batch * mask_batch + row, mask=in_q, other=0)[:, None]
    row_length = length_of(row_first, row_end)
    slope = 0.0
    query_position = 0
    if slopes is not None:
        slope = tl.load(slopes + batch * slopes_batch + head) * LOG2_E
    if query_positions is not None:
        query_position = tl.load(query_positions + row, mask=in_q, other=0)[:, None]

    acc0 = tl.zeros([QUERIES, D0], tl.float32)
    acc1 = tl.zeros([QUERIES, D1], tl.float32) if D1 > 0 else 0.0
    key_row = tl.arange(0, KEYS)[:, None].to(tl.int64)
    k_at, v_at = key_row * k_row + column, key_row * v_row + v_column
    k_at1, v_at1 = key_row * k_row + column1, key_row * v_row + v_column1
    k_step, v_step = KEYS * tl.cast(k_row, tl.int64), KEYS * tl.cast(v_row, tl.int64)
    k += batch * k_batch + (head // GROUP) * k_head + begin * k_step
    v += batch * v_batch + (head // GROUP) * v_head + begin * v_step
    batch32, key_head32 = batch.to(tl.int32), (head // GROUP).to(tl.int32)
    for part in tl.static_range(3):  # tiles at the left edge, tiles that all rows see wholly, the right edge
        from_tile = begin if part == 0 else (whole_begin if part == 1 else whole_end)
        to_tile = whole_begin if part == 0 else (whole_end if part == 1 else after)
        for key_tile in range(from_tile, to_tile):
            start = key_tile * KEYS
            left = Sk - start  # keys from here on
            at = (batch32, key_head32, start)
            k0 = load_part(k_tiles, at, 0, k + k_at, key_row, left, column, D, part != 1, D < D0)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)  # [QUERIES, KEYS]
            if D1 > 0:
                k1 = load_part(k_tiles1, at, D0, k + k_at1, key_row, left, column1, D, part != 1, D < D0 + D1)
                s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
            v0 = load_part(v_tiles, at, 0, v + v_at, key_row, left, v_column, DV, part != 1, DV < V0)
            dp = tl.dot(do0, tl.trans(v0), input_precision=PRECISION)
            if V1 > 0:
                v1 = load_part(
                    v_tiles1, at, V0, v + v_at1, key_row, left, v_column1, DV, part != 1, DV < V0 + V1
                )
                dp = tl.dot(do1, tl.trans(v1), dp, input_precision=PRECISION)
            index = start + tl.arange(0, KEYS)[None, :]
            key_position = index
            if key_positions is not None:
                key_position = load_row(key_positions + index, index < Sk, 0, part != 1)
            t, capped = logits(
                s, factor, softcap, slope, query_position, key_position, LINEAR, slopes is not None
            )
            weights = tl.exp2(minus_base(t, factor, base, LINEAR))
            if part != 1:
                weights = tl.where(sees(index, row_first, row_length), weights, 0.0)
            if keep_inverse is not None:
                at_head, at_batch = (first_head + head).to(tl.int32), (first_batch + batch).to(tl.int32)
                kept = keeps(
                    drop_threshold, seed_low, seed_high, key_position, query_position, at_head, at_batch
                )
                dp = tl.where(kept, dp * keep_inverse, 0.0)
            ds = weights * (dp - row_delta)
            if softcap is not None:
                ds *= 1.0 - capped * capped
            ds = ds.to(k.dtype.element_ty)
            acc0 = tl.dot(ds, k0, acc0, input_precision=PRECISION)
            if D1 > 0:
                acc1 = tl.dot(ds, k1, acc1, input_precision=PRECISION)
            k += k_step
            v += v_step

    dq += batch * dq_batch + head * dq_head + query * dq_row
    store_gradient(dq + column, acc0 * scale, in_q[:, None] & (column < D), ACCUMULATE)
    if D1 > 0:
        store_gradient(dq + column1, acc1 * scale, in_q[:, None] & (column1 < D), ACCUMULATE)


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def attention_backward_key_kernel(
    dk,  # [B, Hq / GROUP, Sk, D]
    dv,  # [B, Hq / GROUP, Sk, DV]
    dout,  # [B, Hq, Sq, DV]
    q,  # [B, Hq, Sq, D]
    k,  # [B, Hq / GROUP, Sk, D]
    v,  # [B, Hq / GROUP, Sk, DV]
    lse,  # [B, Hq, Sq] float32, contiguous
    delta,  # likewise
    ranges,  # [B or 1, key tiles, 4] int32, see attention_ranges
    first,  # [B or 1, Sq] int32
    end,
    slopes,  # [B or 1, Hq] float32, or None
    query_positions,  # [Sq] int32, or None
    key_positions,  # [Sk] int32, or None
    dk_batch,  # strides, in elements
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    dout_batch,
    dout_head,
    dout_row,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    ranges_batch,  # 0 if all batches see the same
    mask_batch,  # likewise, of first and end
    slopes_batch,
    Hq,
    Sq,
    Sk,
    units,  # batches times key heads
    units_at_once,
    scale,
    factor,  # see attention_tiles.logits
    softcap,  # or None
    keep_inverse,  # 1 / (1 - p), or None
    drop_threshold,
    seed_low,
    seed_high,
    first_batch,
    first_head,
    ACCUMULATE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    LINEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of keys per program, over all the queries that see it in all query heads of its group.

    Products are taken transposed, [KEYS, QUERIES], so that weights are an operand as they come.
    """
    tile, batch, key_head = place(tl.cdiv(Sk, KEYS), Hq // GROUP, units, units_at_once, 1, False)
    begin, whole_begin, whole_end, after = load_ranges(ranges, batch, ranges_batch, tile)
    index = tile * KEYS + tl.arange(0, KEYS)[:, None]  # [KEYS, 1]
    key = index.to(tl.int64)
    in_k = index < Sk
    column = tl.arange(0, D0)[None, :]
    column1 = D0 + tl.arange(0, D1 if D1 > 0 else 1)[None, :]
    v_column = tl.arange(0, V0)[None, :]
    v_column1 = V0 + tl.arange(0, V1 if V1 > 0 else 1)[None, :]

    k += batch * k_batch + key_head * k_head
    v += batch * v_batch + key_head * v_head
    k0 = load_tile(k + key * k_row + column, key, Sk, column, D, True, D < D0)
    if D1 > 0:
        k1 = load_tile(k + key * k_row + column1, key, Sk, column1, D, True, D < D0 + D1)
    v0 = load_tile(v + key * v_row + v_column, key, Sk, v_column, DV, True, DV < V0)
    if V1 > 0:
        v1 = load_tile(v + key * v_row + v_column1, key, Sk, v_column1, DV, True, DV < V0 + V1)
    key_position = index
    if key_positions is not None:
        key_position = tl.load(key_positions + index, mask=in_k, other=0)
    first += batch * mask_batch
    end += batch * mask_batch

    dk0 = tl.zeros([KEYS, D0], tl.float32)
    dk1 = tl.zeros([KEYS, D1], tl.float32) if D1 > 0 else 0.0
    dv0 = tl.zeros([KEYS, V0], tl.float32)
    dv1 = tl.zeros([KEYS, V1], tl.float32) if V1 > 0 else 0.0
    query_row = tl.arange(0, QUERIES)[:, None].to(tl.int64)
    q_at, do_at = query_row * q_row + column, query_row * dout_row + v_column
    q_at1, do_at1 = query_row * q_row + column1, query_row * dout_row + v_column1
    q_step, do_step = QUERIES * tl.cast(q_row, tl.int64), QUERIES * tl.cast(dout_row, tl.int64)
    if slopes is not None:
        slopes += batch * slopes_batch
    q_start = q + batch * q_batch + key_head * GROUP * q_head
    do_start = dout + batch * dout_batch + key_head * GROUP * dout_head
    for part in tl.static_range(3):  # tiles at the upper edge, tiles that see all keys, the lower edge
        from_tile = begin if part == 0 else (whole_begin if part == 1 else whole_end)
        to_tile = whole_begin if part == 0 else (whole_end if part == 1 else after)
        # One loop over the tiles of all heads: its copies stay ahead from one head to the next.
        query_tile = from_tile
        head = (key_head * GROUP).to(tl.int32)
        q = q_start + from_tile * q_step
        dout = do_start + from_tile * do_step
        statistics = (batch * Hq + key_head * GROUP) * Sq
        q_jump = q_head - (to_tile - from_tile) * q_step
        do_jump = dout_head - (to_tile - from_tile) * do_step
        for _ in range((to_tile - from_tile) * GROUP):
            start = query_tile * QUERIES
            left = Sq - start  # queries from here on
            row = start + tl.arange(0, QUERIES)[None, :]  # [1, QUERIES]
            q0 = load_tile(q + q_at, query_row, left, column, D, part != 1, D < D0)
            s = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)  # [KEYS, QUERIES]
            if D1 > 0:
                q1 = load_tile(q + q_at1, query_row, left, column1, D, part != 1, D < D0 + D1)
                s = tl.dot(k1, tl.trans(q1), s, input_precision=PRECISION)
            base = load_row(lse + statistics + row, row < Sq, 0.0, part != 1) * LOG2_E
            query_position = 0
            if query_positions is not None:
                query_position = load_row(query_positions + row, row < Sq, 0, part != 1)
            slope = 0.0
            if slopes is not None:
                slope = tl.load(slopes + head) * LOG2_E
            t, capped = logits(
                s, factor, softcap, slope, query_position, key_position, LINEAR, slopes is not None
            )
            weights = tl.exp2(minus_base(t, factor, base, LINEAR))
            if part != 1:
                row_first = tl.load(first + row, mask=row < Sq, other=0x7FFFFFFF)
                row_length = length_of(row_first, tl.load(end + row, mask=row < Sq, other=0))
                weights = tl.where(sees(index, row_first, row_length), weights, 0.0)
            kept_weights = weights
            if keep_inverse is not None:
                at_head, at_batch = (first_head + head).to(tl.int32), (first_batch + batch).to(tl.int32)
                kept = keeps(
                    drop_threshold, seed_low, seed_high, key_position, query_position, at_head, at_batch
                )
                kept_weights = tl.where(kept, weights * keep_inverse, 0.0)
            do0 = load_tile(dout + do_at, query_row, left, v_column, DV, part != 1, DV < V0)
            dv0 = tl.dot(kept_weights.to(v.dtype.element_ty), do0, dv0, input_precision=PRECISION)
            dp = tl.dot(v0, tl.trans(do0), input_precision=PRECISION)
            if V1 > 0:
                do1 = load_tile(dout + do_at1, query_row, left, v_column1, DV, part != 1, DV < V0 + V1)
                dv1 = tl.dot(kept_weights.to(v.dtype.element_ty), do1, dv1, input_precision=PRECISION)
                dp = tl.dot(v1, tl.trans(do1), dp, input_precision=PRECISION)
            if keep_inverse is not None:
                dp = tl.where(kept, dp * keep_inverse, 0.0)
            row_delta = load_row(delta + statistics + row, row < Sq, 0.0, part != 1)
            ds = weights * (dp - row_delta)
            if softcap is not None:
                ds *= 1.0 - capped * capped
            ds = ds.to(k.dtype.element_ty)
            dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
            if D1 > 0:
                dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
            query_tile += 1
            ends_head = query_tile == to_tile
            query_tile = tl.where(ends_head, from_tile, query_tile)
            q += q_step + tl.where(ends_head, q_jump, 0)
            dout += do_step + tl.where(ends_head, do_jump, 0)
            statistics += tl.where(ends_head, Sq, 0)
            head += ends_head.to(tl.int32)

    dk += batch * dk_batch + key_head * dk_head + key * dk_row
    dv += batch * dv_batch + key_head * dv_head + key * dv_row
    store_gradient(dk + column, dk0 * scale, in_k & (column < D), ACCUMULATE)
    store_gradient(dv + v_column, dv0, in_k & (v_column < DV), ACCUMULATE)
    if D1 > 0:
        store_gradient(dk + column1, dk1 * scale, in_k & (column1 < D), ACCUMULATE)
    if V1 > 0:
        store_gradient(dv + v_column1, dv1, in_k & (v_column1 < DV), ACCUMULATE)
