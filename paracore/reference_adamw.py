"""What the optimizer's kernels must do, in plain torch: AdamW over flat memory, and sums of squares.

The functions here are the contract of every implementation (`paracore.kernels.adamw`, `paracore._C`). They
work on one-dimensional tensors of equal length, each the part of many parameters that a rank holds:

| tensor | dtype | what |
|---|---|---|
| parameter | any float | what the model reads |
| gradient | any float | zeroed in the same pass if wanted |
| first_moment, second_moment, max_second_moment | any float, one for all | the last for AMSGrad alone |
| master | float32, int16 or None | see below |
| pieces | int64 [n, 3] | begin, end, segment: at most PIECE elements of one segment each, disjoint |
| coefficients | float64 [segments, 10] | columns: `Column` |
| gradient_scale | float64 [1] | factor of every gradient: clipping, loss scale, both |
| draws | int64 [segments, 7] or None | stochastic rounding; columns: `Draw` |

A segment is one parameter's part: its hyperparameters and its number of steps are its own. What no piece
covers (padding) is neither read nor written. With g = sign * gradient_scale * gradient, per element
(Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2; Reddi et al. 2018 for the maximum)

    g += l2 * p            p *= shrink
    m += (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)        vmax = max(vmax, v)
    p -= step_size * m / (sqrt(v or vmax) / root_bias2 + eps)

computed in float32 (float64 for float64 parameters), coefficients rounded to that first. Where `active` is
0, all but the gradient, which is zeroed still, stays as it is, whatever the gradient holds.

`p` is the parameter itself, or its float32 master, from which a bfloat16 parameter is rounded to nearest,
ties to even. An int16 `master` holds what the parameter lacks of it: the parameter is rounded to nearest,
ties away from zero, which is the carry out of the lower 16 bits, and these are kept as a signed number:

    bits(p) = (bits(parameter) << 16) + master

With `draws`, 16-bit numbers are rounded stochastically in place of to nearest: a random number of 16 bits is
added to the float32 below the bits that are kept, which are then cut off. Words 0 to 3 of
Philox(counter = (index, index >> 32, step, 0), key) belong to parameter, first, second and maximal
second moment; their upper 16 bits are added. `index` is the element's in the whole parameter, so the numbers
are the same however it is cut. Rounding does not move numbers that are not finite. Not with an int16 master.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from paracore.counter_random import philox_words
from paracore.reference import accumulation_dtype

PIECE = 4096
"""Most elements of a piece. Sums of squares are taken by pieces: their bits depend on where these begin."""


class Column(enum.IntEnum):
    """The columns of `coefficients`."""

    ACTIVE = 0  # 0 or 1
    SIGN = 1  # -1 to maximize
    L2 = 2  # weight decay through the gradient, or 0
    SHRINK = 3  # 1 - lr * weight decay that is decoupled from the gradient, or 1
    ONE_MINUS_BETA1 = 4
    BETA2 = 5
    ONE_MINUS_BETA2 = 6
    STEP_SIZE = 7  # lr / (1 - beta1^step)
    ROOT_BIAS2 = 8  # sqrt(1 - beta2^step)
    EPS = 9


class Draw(enum.IntEnum):
    """The columns of `draws`.

    Element i of the flat tensors is element e = ORIGIN + i of the rank's tensor (the origin is negative where
    other parameters lie before it), and in the whole parameter e // INNER * WHOLE_INNER + FIRST + e % INNER:
    a shard along a dim is cut from rows of WHOLE_INNER numbers.
    """

    KEY0 = 0  # of paracore.counter_random.key_of, each 32 bits
    KEY1 = 1
    STEP = 2
    ORIGIN = 3
    INNER = 4
    WHOLE_INNER = 5
    FIRST = 6


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    max_second_moment: Tensor | None,
    master: Tensor | None,
    pieces: Tensor,
    coefficients: Tensor,
    gradient_scale: Tensor,
    draws: Tensor | None,
    zero_gradient: bool,
) -> None:
    """Take one step for the elements that `pieces` covers, in place."""
    wide = accumulation_dtype(parameter.dtype)
    table, scale = coefficients.to(wide), gradient_scale.to(wide)
    for begin, end, segment in pieces.tolist():
        row, here = table[segment], slice(begin, end)
        if row[Column.ACTIVE]:
            p = _read(parameter[here], None if master is None else master[here], wide)
            words = None if draws is None else _words(draws[segment], begin, end)
            g = row[Column.SIGN] * scale * gradient[here].to(wide) + row[Column.L2] * p
            m, v = first_moment[here].to(wide), second_moment[here].to(wide)
            m = m + (g - m) * row[Column.ONE_MINUS_BETA1]
            v = v * row[Column.BETA2] + g * g * row[Column.ONE_MINUS_BETA2]
            _write(first_moment[here], m, words and words[1])
            _write(second_moment[here], v, words and words[2])
            if max_second_moment is not None:
                v = torch.maximum(max_second_moment[here].to(wide), v)
                _write(max_second_moment[here], v, words and words[3])
            # By way of float64: torch's float32 roots on CPUs are off by one unit in the last place at times.
            denominator = v.double().sqrt().to(wide) / row[Column.ROOT_BIAS2] + row[Column.EPS]
            p = p * row[Column.SHRINK] - row[Column.STEP_SIZE] * m / denominator
            _write_parameter(parameter[here], None if master is None else master[here], p, words and words[0])
        if zero_gradient:
            gradient[here] = 0


def sum_of_squares(gradient: Tensor, pieces: Tensor) -> Tensor:
    """Return the sum of squares of each piece, float64 [n]: no square of a float32 overflows there.

    The order of additions within a piece depends on its length alone. So the result is finite exactly if
    the gradient is.
    """
    sums = [gradient[begin:end].double().square().sum() for begin, end, _ in pieces.tolist()]
    return torch.stack(sums) if sums else gradient.new_zeros(0, dtype=torch.float64)


def join_remainder(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a bfloat16 parameter and its int16 remainder."""
    return ((parameter.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 parameter, rounded to nearest, ties away from zero, and the int16 remainder."""
    bits = master.view(torch.int32).long()
    carried = torch.where(master.isnan(), bits | 0x400000, bits + 0x8000) >> 16
    return carried.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def _read(parameter: Tensor, master: Tensor | None, wide: torch.dtype) -> Tensor:
    if master is None:
        return parameter.to(wide)
    return master if master.dtype == torch.float32 else join_remainder(parameter, master)


def _write_parameter(parameter: Tensor, master: Tensor | None, value: Tensor, word: Tensor | None) -> None:
    if master is not None and master.dtype == torch.int16:
        high, low = split_master(value)
        parameter.copy_(high)
        master.copy_(low)
        return
    if master is not None:
        master.copy_(value)
    _write(parameter, value, word)


def _write(to: Tensor, value: Tensor, word: Tensor | None) -> None:
    """Round to the dtype of `to`: to nearest, or, for bfloat16 and with random words, stochastically."""
    if word is None or to.dtype != torch.bfloat16:
        to.copy_(value)
        return
    cut = ((value.view(torch.int32).long() + (word >> 16)) >> 16 << 16).to(torch.int32).view(torch.float32)
    to.copy_(torch.where(value.isfinite(), cut, value))


def _words(draw: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    key0, key1, step, origin, inner, whole_inner, first = draw.tolist()
    e = torch.arange(begin, end, device=draw.device) + origin
    index = e // inner * whole_inner + first + e % inner
    mask, zero = 0xFFFFFFFF, torch.zeros_like(index)
    return philox_words(index & mask, index >> 32, zero + (step & mask), zero, (key0, key1))
