"""Random numbers that are a function of (seed, name, global element index).

A rank that holds a part of a tensor draws exactly the numbers that a rank holding all of it would
draw there, so initial weights do not depend on how the model is cut. The generator is Philox4x32-10
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

The normal distribution uses only operations that IEEE 754 rounds exactly (+ - * / sqrt), not the
logarithms and cosines of Box and Muller: those differ in the last bit between vector and scalar
code, hence between cuts, thread counts and devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paracore.errors import UsageError

_CHUNK = 1 << 16  # elements drawn at once: half a MiB for each of a dozen buffers, so that they stay in cache
_MASK = 0xFFFFFFFF


def key_of(seed: int, name: str) -> tuple[int, int]:
    """Return the 64-bit key, as two 32-bit words, of the stream of numbers for `name` under `seed`."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: Tensor, key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of Philox4x32-10 for each 64-bit `counter`, as int64 tensors."""
    zero = torch.zeros_like(counter)
    return philox_words(counter & _MASK, counter >> 32 & _MASK, zero, zero, key)


def philox_words(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words for counters given as four words; int64 tensors that broadcast."""
    k0, k1 = key
    for _ in range(10):
        # A 64-bit product of two 32-bit words may wrap to a negative number: its bits are right.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32 & _MASK) ^ c1 ^ k0, (product0 >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform_at(index: Tensor, seed: int, name: str) -> Tensor:
    """Return float64 numbers in the open interval (0, 1), one for each int64 element of `index`."""
    high, low, _, _ = philox(index, key_of(seed, name))
    # 52 random bits and a half: symmetric about 0.5, never 0 or 1.
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52


def normal_at(index: Tensor, seed: int, name: str) -> Tensor:
    """Return float64 numbers of the standard normal distribution, one for each element of `index`."""
    return _normal_quantile(uniform_at(index, seed, name))


def integers_at(index: Tensor, seed: int, name: str, high: int) -> Tensor:
    """Return int64 numbers in [0, high), one for each element of `index`; `high` up to 2**31."""
    if not 1 <= high <= 1 << 31:
        raise UsageError(f"high={high}: must be from 1 to 2**31")
    word, _, _, _ = philox(index, key_of(seed, name))
    return word * high >> 32


def permute(index: int, length: int, seed: int, name: str) -> int:
    """Return where a random permutation of range(length) sends `index`; nothing is stored.

    A Feistel network permutes the next power of four; numbers beyond `length` are sent on until
    they fall inside (Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half = max(1, (length - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for stage in range(4):
            word, _ = key_of(seed, f"{name}/{stage}/{right}")
            left, right = right, left ^ (word & mask)
        index = left << half | right
        if index < length:
            return index


def fill_region_(
    out: Tensor,
    region: Sequence[range],
    full_shape: Sequence[int],
    draw: Callable[[Tensor], Tensor],
    first_index: int = 0,
) -> None:
    """Fill `out`, which holds `region` of a tensor of `full_shape`, with draw(global linear indices).

    `first_index` is the linear index of the whole tensor's first element. `out` has at least one dim.
    """
    if out.is_meta:
        return
    strides = [math.prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
    if out.dim() > 1 and math.prod(out.shape[1:]) > _CHUNK:  # one row is too much at once
        for row, index in zip(out, region[0], strict=True):
            fill_region_(row, region[1:], full_shape[1:], draw, first_index + index * strides[0])
        return
    rows, *inner = (
        torch.arange(indices.start, indices.stop, device=out.device) * stride
        for indices, stride in zip(region, strides, strict=True)
    )
    rows_at_once = max(1, _CHUNK // max(1, math.prod(out.shape[1:])))
    for start in range(0, len(rows), rows_at_once):
        linear = first_index + rows[start : start + rows_at_once]
        for along in inner:
            linear = linear.unsqueeze(-1) + along
        out[start : start + rows_at_once] = draw(linear)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Evaluate by Horner's rule, highest power first, each operation rounded on its own."""
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive float64 numbers by exactly rounded operations, to about 1e-15."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    s = (mantissa - 0.75) / (mantissa + 0.75)  # log(mantissa / 0.75) = 2 artanh(s), |s| <= 0.2
    series = _polynomial(s * s, [1 / k for k in range(25, 0, -2)])
    return exponent.double() * 0.6931471805599453 - 0.2876820724517809 + 2.0 * s * series


def _normal_quantile(p: Tensor) -> Tensor:
    """Inverse of the normal distribution function: Wichura 1988, algorithm AS 241 (PPND16)."""
    q = p - 0.5
    r = 0.180625 - q * q
    central = q * _polynomial(r, _CENTRAL[0]) / _polynomial(r, _CENTRAL[1])
    tail = torch.sqrt(-_log(torch.minimum(p, 1.0 - p)))
    near = _polynomial(tail - 1.6, _NEAR[0]) / _polynomial(tail - 1.6, _NEAR[1])
    far = _polynomial(tail - 5.0, _FAR[0]) / _polynomial(tail - 5.0, _FAR[1])
    outer = torch.where(tail <= 5.0, near, far)
    return torch.where(q.abs() <= 0.425, central, torch.copysign(outer, q))


# Numerator and denominator of each region of AS 241, highest power first.
_CENTRAL = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_NEAR = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
_FAR = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)
