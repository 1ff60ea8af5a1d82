"""Attention's forward kernels: the running state of `reference_attention` over tiles of keys."""

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
def store_result(
    out,  # the head's first element
    lse,  # the head's first element
    row_max,  # [QUERIES]
    row_sum,  # [QUERIES]
    acc0,  # [QUERIES, V0]
    acc1,  # [QUERIES, V1], unused if V1 is 0
    row,  # [QUERIES]
    Sq,
    out_row,
    DV: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
):
    """End the rows' states: acc / row_sum and ln(2) (row_max + log2(row_sum)), or 0 and -inf."""
    seen = row_sum > 0
    divisor = tl.where(seen, row_sum, 1.0)
    value = 0.6931471805599453 * (row_max + tl.log2(divisor))
    tl.store(lse + row, tl.where(seen, value, float("-inf")), mask=row < Sq)
    at = row[:, None].to(tl.int64) * out_row
    column = tl.arange(0, V0)[None, :]
    inside = row[:, None] < Sq
    result = (acc0 / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + at + column, result, mask=inside & (column < DV))
    if V1 > 0:
        column1 = V0 + tl.arange(0, V1)[None, :]
        result1 = (acc1 / divisor[:, None]).to(out.dtype.element_ty)
        tl.store(out + at + column1, result1, mask=inside & (column1 < DV))


@triton.jit
def attention_finish_kernel(
    out,  # [B, Hq, Sq, DV]
    lse,  # [B, Hq, Sq] float32, contiguous
    row_max,  # [B, Hq, Sq] float32
    row_sum,  # strides as row_max
    acc,  # [B, Hq, Sq, DV] float32
    out_batch,  # strides, in elements
    out_head,
    out_row,
    state_batch,
    state_head,
    acc_batch,
    acc_head,
    acc_row,
    Hq,
    Sq,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least DV
    QUERIES: tl.constexpr,
):
    """One tile of queries per program: end the state."""
    tiles = tl.cdiv(Sq, QUERIES)
    head = (tl.program_id(0) // tiles).to(tl.int64)  # among all batches' heads
    row = tl.program_id(0) % tiles * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, BLOCK_D)[None, :]
    at = row[:, None].to(tl.int64)
    state = head // Hq * state_batch + head % Hq * state_head + row
    acc += head // Hq * acc_batch + head % Hq * acc_head
    out += head // Hq * out_batch + head % Hq * out_head
    running_max = tl.load(row_max + state, mask=row < Sq, other=0.0)
    running_sum = tl.load(row_sum + state, mask=row < Sq, other=0.0)
    rows = load_tile(acc + at * acc_row + column, at, Sq, column, DV, True, DV < BLOCK_D)
    store_result(out, lse + head * Sq, running_max, running_sum, rows, 0.0, row, Sq, out_row, DV, BLOCK_D, 0)


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def attention_forward_kernel(
    out,  # [B, Hq, Sq, DV]; out and lse are None where a state is continued
    lse,  # [B, Hq, Sq] float32, contiguous
    row_max,  # [B, Hq, Sq] float32; the state is None where it starts here and ends here
    row_sum,  # strides as row_max
    acc,  # [B, Hq, Sq, DV] float32
    q,  # [B, Hq, Sq, D]
    k,  # [B, Hq / GROUP, Sk, D]
    v,  # [B, Hq / GROUP, Sk, DV]
    k_tiles,  # of k's and v's parts, see attention_tiles.load_part
    k_tiles1,
    v_tiles,
    v_tiles1,
    sink,  # [Hq] float32, or None
    ranges,  # [B or 1, query tiles, 4] int32, see attention_ranges
    first,  # [B or 1, Sq] int32
    end,
    slopes,  # [B or 1, Hq] float32, or None
    query_positions,  # [Sq] int32, or None
    key_positions,  # [Sk] int32, or None
    out_batch,  # strides, in elements
    out_head,
    out_row,
    state_batch,
    state_head,
    acc_batch,
    acc_head,
    acc_row,
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
    factor,  # see attention_tiles.logits
    softcap,  # or None
    keep_inverse,  # 1 / (1 - p), or None
    drop_threshold,
    seed_low,
    seed_high,
    first_batch,
    first_head,
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
    """One tile of queries per program, over all the keys they see.

    Masked and unmasked tiles compute the same bits, and a row that sees nothing of a tile keeps its state.
    """
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
    q0 = load_tile(q + query * q_row + column, query, Sq, column, D, True, D < D0)
    if D1 > 0:
        q1 = load_tile(q + query * q_row + column1, query, Sq, column1, D, True, D < D0 + D1)
    row_first = tl.load(first + batch * mask_batch + row, mask=in_q, other=0x7FFFFFFF)[:, None]
    row_end = tl.load(end + batch * mask_batch + row, mask=in_q, other=0)[:, None]
    row_length = length_of(row_first, row_end)

    running_max = tl.full([QUERIES], float("-inf"), tl.float32)
    running_sum = tl.zeros([QUERIES], tl.float32)
    acc0 = tl.zeros([QUERIES, V0], tl.float32)
    acc1 = tl.zeros([QUERIES, V1], tl.float32) if V1 > 0 else 0.0
    if sink is not None:
        running_max = tl.zeros([QUERIES], tl.float32) + tl.load(sink + head) * LOG2_E
        running_sum += 1.0
    if acc is not None:
        state = batch * state_batch + head * state_head + row
        acc += batch * acc_batch + head * acc_head
        acc_at = query * acc_row
        running_max = tl.load(row_max + state, mask=in_q, other=0.0)
        running_sum = tl.load(row_sum + state, mask=in_q, other=0.0)
        acc0 = load_tile(acc + acc_at + v_column, query, Sq, v_column, DV, True, DV < V0)
        if V1 > 0:
            acc1 = load_tile(acc + acc_at + v_column1, query, Sq, v_column1, DV, True, DV < V0 + V1)

    slope = 0.0
    query_position = 0
    if slopes is not None:
        slope = tl.load(slopes + batch * slopes_batch + head) * LOG2_E
    if query_positions is not None:
        query_position = tl.load(query_positions + row, mask=in_q, other=0)[:, None]

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
            at = (batch32, key_head32, start)
            k0 = load_part(k_tiles, at, 0, k + k_at, key_row, Sk - start, column, D, part != 1, D < D0)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)  # [QUERIES, KEYS]
            if D1 > 0:
                k1 = load_part(
                    k_tiles1, at, D0, k + k_at1, key_row, Sk - start, column1, D, part != 1, D < D0 + D1
                )
                s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
            index = start + tl.arange(0, KEYS)[None, :]
            key_position = index
            if key_positions is not None:
                key_position = load_row(key_positions + index, index < Sk, 0, part != 1)
            t, _ = logits(s, factor, softcap, slope, query_position, key_position, LINEAR, slopes is not None)
            if part != 1:
                t = tl.where(sees(index, row_first, row_length), t, float("-inf"))
            tile_max = tl.max(t, 1)
            larger = tl.maximum(running_max, tile_max * factor if LINEAR else tile_max)
            base = larger
            if part != 1:
                base = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf would be no number
            weights = tl.exp2(minus_base(t, factor, base[:, None], LINEAR))
            rescale = tl.exp2(running_max - base)
            running_max = larger
            running_sum = running_sum * rescale + tl.sum(weights, 1)
            if keep_inverse is not None:
                at_head, at_batch = (first_head + head).to(tl.int32), (first_batch + batch).to(tl.int32)
                kept = keeps(
                    drop_threshold, seed_low, seed_high, key_position, query_position, at_head, at_batch
                )
                weights = tl.where(kept, weights * keep_inverse, 0.0)
            weights = weights.to(v.dtype.element_ty)
            v0 = load_part(v_tiles, at, 0, v + v_at, key_row, Sk - start, v_column, DV, part != 1, DV < V0)
            acc0 = tl.dot(weights, v0, acc0 * rescale[:, None], input_precision=PRECISION)
            if V1 > 0:
                v1 = load_part(
                    v_tiles1, at, V0, v + v_at1, key_row, Sk - start, v_column1, DV, part != 1, DV < V0 + V1
                )
                acc1 = tl.dot(weights, v1, acc1 * rescale[:, None], input_precision=PRECISION)
            k += k_step
            v += v_step

    if acc is None:
        out += batch * out_batch + head * out_head
        lse += (batch * Hq + head) * Sq
        store_result(out, lse, running_max, running_sum, acc0, acc1, row, Sq, out_row, DV, V0, V1)
    else:
        tl.store(row_max + state, running_max, mask=in_q)
        tl.store(row_sum + state, running_sum, mask=in_q)
        tl.store(acc + acc_at + v_column, acc0, mask=in_q[:, None] & (v_column < DV))
        if V1 > 0:
            tl.store(acc + acc_at + v_column1, acc1, mask=in_q[:, None] & (v_column1 < DV))
