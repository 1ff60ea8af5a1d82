"""Matrix products, by way of float32 where a CPU has no units for 16-bit numbers.

There torch multiplies 16-bit numbers with scalar loops, whose cost depends on which factor is transposed: of
[1024, 512] by [512, 1536] in bfloat16 on a CPU with AVX2, x W^T takes 6 times as long as in float32, dY^T x
6 times, dY W 120 times. To widen the factors, multiply, and round the result once is as exact (torch's loops
sum in float32 too), and costs little beside the product in float32: the widened factors are the smaller part
of the work. It is a block at a time, so that what is widened is small beside the tensors of a model.

Everywhere else, on GPUs, in float32, on CPUs with such units, products are torch's own, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paracore.chunks import equal_ranges

Pair = tuple[Tensor, Tensor]
"""The factors of a product, [n, k] and [k, m]."""

# What is alive at once of the widened factors and of the float32 result. Smaller blocks would be widened more
# often: a block's rows are, for every block of columns.
_BLOCK_BYTES = 16 << 20
# What a product on CUDA with a float32 result may take beyond it.
_CUDA_PART_BYTES = 64 << 20

# The names `torch.cpu.get_capabilities` has for what multiplies such numbers, on x86 and on Arm.
_UNITS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "avx_ne_convert", "fp16_arith"),
}


def slow_dtypes(capabilities: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
    """Return the 16-bit dtypes that a CPU has no units for.

    capabilities: as `torch.cpu.get_capabilities` returns them. Of a CPU that they do not describe, nothing is
    known, and none are returned.
    """
    return tuple(
        dtype
        for dtype, names in _UNITS.items()
        if any(name in capabilities for name in names) and not any(capabilities.get(name) for name in names)
    )


# A constant, because torch.compile cannot trace the question.
SLOW_DTYPES = slow_dtypes(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else ()
"""The dtypes whose products on this CPU go by way of float32."""


def is_widened(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of tensors like these go by way of float32."""
    return device.type == "cpu" and dtype in SLOW_DTYPES


def multiply(a: Tensor, b: Tensor, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return a @ b, plus bias if there is one.

    a: [n, k]; b: [k, m]; bias: [m]; all of one dtype, of any strides. out: [n, m], where the result is
    written. No gradients.
    """
    if is_widened(a.dtype, a.device):
        return _widened([(a, b)], bias, out)
    if bias is None:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b) if out is None else torch.addmm(bias, a, b, out=out)


def sum_of_products(pairs: Sequence[Pair]) -> Tensor:
    """Return the sum of a @ b over the pairs, at least one: all [n, k_i] by [k_i, m]. No gradients."""
    first, *others = pairs
    if is_widened(first[0].dtype, first[0].device):
        return _widened(pairs, None, None)
    total = torch.mm(*first)
    for a, b in others:
        total.addmm_(a, b)
    return total


def add_product(total: Tensor, a: Tensor, b: Tensor, *, starts: bool = False) -> None:
    """Add a @ b to the total [n, m], which is float32 where a and b have 16 bits, else of their dtype.

    starts: write it there instead, whatever the total is.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if starts else 1)
        return
    if starts:
        total.zero_()
    if a.is_cuda and torch.version.hip is None:
        rows = max(1, _CUDA_PART_BYTES // (b.size(1) * total.itemsize))
        for part, of_part in zip(total.split(rows), a.split(rows), strict=True):
            part += torch.mm(of_part, b, out_dtype=total.dtype)
    else:  # no product of 16-bit numbers there has a float32 result
        n, k, m = _block(a.size(0), a.size(1), b.size(1))
        for rows_ in equal_ranges(a.size(0), n):
            for columns in equal_ranges(b.size(1), m):
                for inner in equal_ranges(a.size(1), k):
                    total[rows_, columns].addmm_(_wide(a[rows_, inner]), _wide(b[inner, columns]))


def _widened(pairs: Sequence[Pair], bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return the sum of the products and bias, summed in float32 and rounded once."""
    a, b = pairs[0]
    out = a.new_empty(a.size(0), b.size(1)) if out is None else out
    n, k, m = _block(a.size(0), max(a.size(1) for a, _ in pairs), b.size(1))
    for rows in equal_ranges(a.size(0), n):
        for columns in equal_ranges(b.size(1), m):
            out[rows, columns] = _sum_of_block(pairs, bias, rows, columns, k)
    return out


def _sum_of_block(pairs: Sequence[Pair], bias: Tensor | None, rows: slice, columns: slice, k: int) -> Tensor:
    """Return these rows and columns of the sum, float32, widening at most k of the inner dim at a time."""
    total: Tensor | None = None
    for a, b in pairs:
        # Nothing to sum over gives zeros, and they must be there.
        for inner in list(equal_ranges(a.size(1), k)) or [slice(0, 0)]:
            if total is not None:
                total.addmm_(_wide(a[rows, inner]), _wide(b[inner, columns]))
            elif bias is not None:
                total = torch.addmm(_wide(bias[columns]), _wide(a[rows, inner]), _wide(b[inner, columns]))
            else:
                total = torch.mm(_wide(a[rows, inner]), _wide(b[inner, columns]))
    if total is None:
        raise ValueError("a sum of no products has no shape")
    return total


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32)


def _block(n: int, k: int, m: int) -> tuple[int, int, int]:
    """Return how much of [n, k] by [k, m] to compute at once: as near a cube as the dims allow."""
    sizes = [n, k, m]
    while 4 * (sizes[0] * sizes[1] + sizes[1] * sizes[2] + sizes[0] * sizes[2]) > _BLOCK_BYTES:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return sizes[0], sizes[1], sizes[2]
