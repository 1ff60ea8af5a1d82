"""AdamW over flat memory, and sums of squares: the contract is `paracore.reference_adamw`.

One program takes one piece. Where the piece lies and what its segment's numbers are, it reads from device
memory: the launchers never wait for the device, and can be captured in a graph. Each element is read once
and written once.

Where pieces begin and end is thus not known before the kernel runs, and each program looks: a piece whose
begin and length are multiples of ALIGNED is moved in vectors, another one element by element. ALIGNED
elements of the widest tensor are 16 bytes. Narrower tensors beside it are moved in vectors of as many
elements, hence of 8 bytes: so all tensors are spread over the threads in the same way, and nothing is
exchanged through shared memory (but for random words, which the compiler lets other threads draw). A piece
is worked on BLOCK elements at a time, which takes few registers: some ten programs are resident on a
multiprocessor, and some load while others compute.

All operations are the reference's, in its order, each rounded as IEEE 754 says. The launchers forbid to join
products and sums: which are joined is the compiler's choice, and may differ between the two ways of moving
a piece. So the bits are the same wherever a tensor is cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paracore.reference_adamw import PIECE, Column, Draw

# Tables are read number by number: not worth a compilation for each alignment.
TABLES = ("pieces", "coefficients", "gradient_scale", "draws")

PIECE_SIZE = tl.constexpr(PIECE)
PIECE_COLUMNS = tl.constexpr(3)
COLUMNS = tl.constexpr(len(Column))
ACTIVE = tl.constexpr(int(Column.ACTIVE))
SIGN = tl.constexpr(int(Column.SIGN))
L2 = tl.constexpr(int(Column.L2))
SHRINK = tl.constexpr(int(Column.SHRINK))
ONE_MINUS_BETA1 = tl.constexpr(int(Column.ONE_MINUS_BETA1))
BETA2 = tl.constexpr(int(Column.BETA2))
ONE_MINUS_BETA2 = tl.constexpr(int(Column.ONE_MINUS_BETA2))
STEP_SIZE = tl.constexpr(int(Column.STEP_SIZE))
ROOT_BIAS2 = tl.constexpr(int(Column.ROOT_BIAS2))
EPS = tl.constexpr(int(Column.EPS))
DRAWS = tl.constexpr(len(Draw))
KEY0 = tl.constexpr(int(Draw.KEY0))
KEY1 = tl.constexpr(int(Draw.KEY1))
STEP = tl.constexpr(int(Draw.STEP))
ORIGIN = tl.constexpr(int(Draw.ORIGIN))
INNER = tl.constexpr(int(Draw.INNER))
WHOLE_INNER = tl.constexpr(int(Draw.WHOLE_INNER))
FIRST = tl.constexpr(int(Draw.FIRST))


@triton.jit
def load_piece(pieces):
    """Return begin (int64), length (int32) and segment (int64) of this program's piece."""
    at = pieces + tl.program_id(0).to(tl.int64) * PIECE_COLUMNS
    begin = tl.load(at)
    return begin, (tl.load(at + 1) - begin).to(tl.int32), tl.load(at + 2)


@triton.jit
def load_number(table):
    """As the reference has it: computed in float64, rounded once."""
    return tl.load(table).to(tl.float32)


@triton.jit
def load_coefficients(row):
    """Return what the segment's row holds from `Column.L2` on."""
    l2 = load_number(row + L2)
    shrink = load_number(row + SHRINK)
    one_minus_beta1 = load_number(row + ONE_MINUS_BETA1)
    beta2 = load_number(row + BETA2)
    one_minus_beta2 = load_number(row + ONE_MINUS_BETA2)
    step_size = load_number(row + STEP_SIZE)
    root_bias2 = load_number(row + ROOT_BIAS2)
    eps = load_number(row + EPS)
    return l2, shrink, one_minus_beta1, beta2, one_minus_beta2, step_size, root_bias2, eps


@triton.jit
def join_remainder(parameter, remainder):
    """Return float32; the rule is `reference_adamw.join_remainder`'s."""
    upper = parameter.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return tl.add(upper, remainder.to(tl.int32), sanitize_overflow=False).to(tl.float32, bitcast=True)


@triton.jit
def split_master(master):
    """Return bfloat16 and int16; the rule is `reference_adamw.split_master`'s."""
    bits = master.to(tl.int32, bitcast=True)
    carried = tl.where(master != master, bits | 0x400000, tl.add(bits, 0x8000, sanitize_overflow=False))
    return (carried >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), bits.to(tl.int16)


@triton.jit
def narrow(x, word, dtype: tl.constexpr, DRAWN: tl.constexpr):
    """Round float32 to `dtype`: to nearest, or, for bfloat16 and if DRAWN, by the random `word`."""
    if DRAWN and dtype == tl.bfloat16:
        bits = tl.add(x.to(tl.uint32, bitcast=True), word >> 16, sanitize_overflow=False)
        cut = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < float("inf"), cut, x)
    return x.to(dtype)


@triton.jit
def load_draw(draw, begin):
    """Return what `random_words` takes, for the piece that starts at `begin`.

    The one division of 64 bits is done here. All that follows lies within PIECE_SIZE elements of `begin`:
    rows that are longer than that may as well be that long.
    """
    inner, whole_inner = tl.load(draw + INNER), tl.load(draw + WHOLE_INNER)
    e = tl.load(draw + ORIGIN) + begin
    row = e // inner
    column = e - row * inner
    index = row * whole_inner + tl.load(draw + FIRST) + column
    first_row = tl.minimum(inner - column, PIECE_SIZE).to(tl.int32)  # elements of it from `begin` on
    rows_per_element = 1.0 / tl.minimum(inner, PIECE_SIZE).to(tl.float32)
    key = tl.load(draw + KEY1) << 32 | tl.load(draw + KEY0)
    return index, first_row, rows_per_element, whole_inner - inner, key, tl.load(draw + STEP).to(tl.uint32)


@triton.jit
def random_words(index, first_row, rows_per_element, jump, key, step, o):
    """Return four words for each element; o: int32, distance from the piece's begin.

    Rows are counted at the middle of an element, which is half an element from any row's end. With at most
    PIECE_SIZE elements, and rows of at most as many, float32 is wrong by less than a hundredth of that.
    """
    beyond = (o - first_row).to(tl.float32) + 0.5
    rows_ended = tl.where(o < first_row, 0, (beyond * rows_per_element).to(tl.int32) + 1)
    index = index + o + rows_ended.to(tl.int64) * jump
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    return tl.philox(key, low, high, zero + step, zero)


@triton.jit
def step_piece(
    parameter,  # tensors as in `adamw_kernel`
    gradient,
    first_moment,
    second_moment,
    max_second_moment,
    master,
    row,  # the segment's of coefficients
    gradient_scale,
    draw,  # the segment's, or None
    begin,
    length,
    ZERO_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,  # elements at a time
):
    """Take the step for one piece."""
    DRAWN: tl.constexpr = draw is not None
    REMAINDER: tl.constexpr = master is not None and master.dtype.element_ty == tl.int16
    moment: tl.constexpr = first_moment.dtype.element_ty
    factor = load_number(row + SIGN) * load_number(gradient_scale)
    l2, shrink, one_minus_beta1, beta2, one_minus_beta2, step_size, root_bias2, eps = load_coefficients(row)
    if DRAWN:
        index, first_row, rows_per_element, jump, key, step = load_draw(draw, begin)
    for start in range(0, length, BLOCK):
        o = start + tl.arange(0, BLOCK)
        inside = o < length
        at = begin + o
        if master is None or REMAINDER:
            p = tl.load(parameter + at, mask=inside)
        if REMAINDER:
            p = join_remainder(p, tl.load(master + at, mask=inside))
        elif master is not None:
            p = tl.load(master + at, mask=inside)
        p = p.to(tl.float32)
        g = tl.load(gradient + at, mask=inside).to(tl.float32)
        m = tl.load(first_moment + at, mask=inside).to(tl.float32)
        v = tl.load(second_moment + at, mask=inside).to(tl.float32)
        if max_second_moment is not None:  # before anything is stored: no load is moved ahead of a store
            largest = tl.load(max_second_moment + at, mask=inside).to(tl.float32)
        word0, word1, word2, word3 = 0, 0, 0, 0
        if DRAWN:
            word0, word1, word2, word3 = random_words(index, first_row, rows_per_element, jump, key, step, o)
        g = factor * g + l2 * p
        m = m + (g - m) * one_minus_beta1
        v = v * beta2 + g * g * one_minus_beta2
        tl.store(first_moment + at, narrow(m, word1, moment, DRAWN), mask=inside)
        tl.store(second_moment + at, narrow(v, word2, moment, DRAWN), mask=inside)
        if max_second_moment is not None:
            v = tl.maximum(largest, v, propagate_nan=tl.PropagateNan.ALL)
            tl.store(max_second_moment + at, narrow(v, word3, moment, DRAWN), mask=inside)
        denominator = tl.div_rn(tl.sqrt_rn(v), root_bias2) + eps
        p = p * shrink - tl.div_rn(step_size * m, denominator)
        if REMAINDER:
            upper, lower = split_master(p)
            tl.store(parameter + at, upper, mask=inside)
            tl.store(master + at, lower, mask=inside)
        else:
            if master is not None:
                tl.store(master + at, p, mask=inside)
            tl.store(parameter + at, narrow(p, word0, parameter.dtype.element_ty, DRAWN), mask=inside)
        if ZERO_GRADIENT:
            tl.store(gradient + at, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=inside)


@triton.jit
def zero_piece(x, begin, length, BLOCK: tl.constexpr):
    """Write zeros, and read nothing."""
    for start in range(0, length, BLOCK):
        o = start + tl.arange(0, BLOCK)
        tl.store(x + begin + o, tl.zeros([BLOCK], x.dtype.element_ty), mask=o < length)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def adamw_kernel(
    parameter,  # all tensors as the reference has them
    gradient,
    first_moment,
    second_moment,
    max_second_moment,  # or None
    master,  # or None
    pieces,
    coefficients,
    gradient_scale,
    draws,  # or None
    ZERO_GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALARS: tl.constexpr,
):
    """One piece per program."""
    begin, length, segment = load_piece(pieces)
    row = coefficients + segment * COLUMNS
    draw = draws
    if draws is not None:
        draw = draws + segment * DRAWS
    if tl.load(row + ACTIVE) == 0:
        if ZERO_GRADIENT:
            zero_piece(gradient, begin, length, SCALARS)
    elif (begin % ALIGNED == 0) & (length % ALIGNED == 0):
        # The compiler finds the factor ALIGNED in the product.
        step_piece(
            parameter,
            gradient,
            first_moment,
            second_moment,
            max_second_moment,
            master,
            row,
            gradient_scale,
            draw,
            begin // ALIGNED * ALIGNED,
            length // ALIGNED * ALIGNED,
            ZERO_GRADIENT,
            BLOCK,
        )
    else:
        step_piece(
            parameter,
            gradient,
            first_moment,
            second_moment,
            max_second_moment,
            master,
            row,
            gradient_scale,
            draw,
            begin,
            length,
            ZERO_GRADIENT,
            SCALARS,
        )


@triton.jit
def add_squares(gradient, begin, length, BLOCK: tl.constexpr):
    """Return [BLOCK] float64: sums of the squares BLOCK elements apart."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, length, BLOCK):
        o = start + tl.arange(0, BLOCK)
        x = tl.load(gradient + begin + o, mask=o < length, other=0.0).to(tl.float64)
        sums += x * x
    return sums


@triton.jit(do_not_specialize_on_alignment=TABLES)
def sum_of_squares_kernel(
    sums,  # [n] float64
    gradient,
    pieces,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One piece per program, in an order of additions that is the same however threads share the work."""
    begin, length, _ = load_piece(pieces)
    if (begin % ALIGNED == 0) & (length % ALIGNED == 0):
        x = add_squares(gradient, begin // ALIGNED * ALIGNED, length // ALIGNED * ALIGNED, BLOCK)
    else:
        x = add_squares(gradient, begin, length, BLOCK)
    # By halves: a sum of two has but one order.
    halvings: tl.constexpr = BLOCK.bit_length() - 1
    for _ in tl.static_range(halvings):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), axis=0)
    tl.store(sums + tl.program_id(0) + tl.arange(0, 1), x)
