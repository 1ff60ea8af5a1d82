"""Statistics of logits for cross entropy, and the logits' gradient; the contract is `reference_layers`'.

One program takes one token and walks over its logits, so each logit is read once, and its gradient written
once. Statistics are kept per lane: lane i of BLOCK sees the columns i, i + BLOCK, ..., and has a maximum, a
sum and so on of its own. So the loop exchanges nothing between threads; the lanes are joined behind it, once
per token. Where a lane's maximum rises, what it has summed so far is corrected (Milakov & Gimelshein 2018,
algorithm 3): once for four blocks, whose loads are under way together.

Vectors of 16 bytes must start at multiples of 16 bytes. Vocabularies are often odd (50,257), and then rows
start anywhere: a row's head, up to the first such place, is taken apart from its body. Only the head and the
body's last block are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paracore.errors import UsageError
from paracore.kernels.configuration import Configuration, Target, target_of
from paracore.kernels.layer_checks import DTYPES, check, multiples_of_16

MAX_VOCABULARY = 2**30  # columns are counted in 32 bits, in steps of several blocks
NOTHING = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)

# ---------------------------------------------------------------- kernels


@triton.jit
def split_row(begin, V, ALIGNED: tl.constexpr, VECTOR: tl.constexpr):
    """Return where the body of the row at `begin` starts, a multiple of VECTOR, and the head's length."""
    # The compiler finds the factor VECTOR in the product.
    body = begin if ALIGNED else (begin + (VECTOR - 1)) // VECTOR * VECTOR
    return body, tl.minimum(body - begin, V).to(tl.int32)


@triton.jit
def raise_maximum(maximum, total, off, count, higher):
    """Return total and off as they are from `higher` on; count: each lane's logits so far."""
    # Of no logits, or of -inf alone, total is 0 and off is 0 or -inf, whatever they are taken from.
    rise = tl.where(maximum == NOTHING, 0.0, higher - maximum)
    return total * tl.exp2(-rise * LOG2E), off - rise * count


@triton.jit
def add_logits(x, maximum, total, off):
    """Return total and off with x, one logit per lane."""
    shifted = x - tl.where(maximum == NOTHING, 0.0, maximum)
    return total + tl.exp2(shifted * LOG2E), off + shifted


@triton.jit
def load_blocks(pointers, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Return BLOCKS blocks that follow each other, in float32."""
    x = (tl.load(pointers).to(tl.float32),)
    for i in tl.static_range(1, BLOCKS):
        x += (tl.load(pointers + i * BLOCK).to(tl.float32),)  # type: ignore[assignment]
    return x


@triton.jit
def add_some(maximum, total, off, count, pointers, inside):
    """Return the state with one logit in those lanes that are inside."""
    x = tl.load(pointers, mask=inside, other=NOTHING).to(tl.float32)
    higher = tl.maximum(maximum, x, propagate_nan=tl.PropagateNan.ALL)
    total, off = raise_maximum(maximum, total, off, count, higher)
    with_x, off_with_x = add_logits(x, higher, total, off)
    return higher, with_x, tl.where(inside, off_with_x, off), count + tl.where(inside, 1.0, 0.0)


@triton.jit(do_not_specialize=("N",))
def cross_entropy_statistics_kernel(
    statistics,  # [4, N] float32
    logits,  # [N, V], rows stride apart
    labels,  # [N] int64
    stride,
    N,
    V,  # at least 1
    ALIGNED: tl.constexpr,  # all rows begin at multiples of VECTOR
    VECTOR: tl.constexpr,  # logits in 16 bytes
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # taken at a time
):
    """One token per program."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    begin = row * stride
    body, head = split_row(begin, V, ALIGNED, VECTOR)
    pointers = logits + body + lane
    length = V - head
    maximum = tl.full([BLOCK], NOTHING, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    off = tl.zeros([BLOCK], tl.float32)
    whole = length // BLOCK * BLOCK
    steps = length // (BLOCKS * BLOCK) * (BLOCKS * BLOCK)
    count = 0.0
    for at in range(0, steps, BLOCKS * BLOCK):
        x = load_blocks(pointers + at, BLOCK, BLOCKS)
        higher = maximum
        for i in tl.static_range(BLOCKS):
            higher = tl.maximum(higher, x[i], propagate_nan=tl.PropagateNan.ALL)
        total, off = raise_maximum(maximum, total, off, count, higher)
        maximum = higher
        for i in tl.static_range(BLOCKS):
            total, off = add_logits(x[i], maximum, total, off)
        count += BLOCKS
    for at in range(steps, whole, BLOCK):
        x = tl.load(pointers + at).to(tl.float32)
        higher = tl.maximum(maximum, x, propagate_nan=tl.PropagateNan.ALL)
        total, off = raise_maximum(maximum, total, off, count, higher)
        maximum = higher
        total, off = add_logits(x, maximum, total, off)
        count += 1.0
    counts = tl.zeros([BLOCK], tl.float32) + count
    maximum, total, off, counts = add_some(
        maximum, total, off, counts, pointers + whole, lane < length - whole
    )
    if not ALIGNED:
        maximum, total, off, counts = add_some(
            maximum, total, off, counts, logits + begin + lane, lane < head
        )
    # Reductions pass over NaN, hence over a lane whose maximum it is.
    is_number = tl.max((maximum != maximum).to(tl.int32), axis=0) == 0
    highest = tl.where(is_number, tl.max(maximum, axis=0), float("nan"))
    total, off = raise_maximum(maximum, total, off, counts, highest)
    label = tl.load(labels + row)
    at_label = tl.load(logits + begin + label, mask=(label >= 0) & (label < V), other=0.0)
    at = statistics + row
    tl.store(at, highest)
    tl.store(at + N, tl.sum(total, axis=0))
    tl.store(at + N + N, at_label.to(tl.float32))
    tl.store(at + N + N + N, tl.sum(off, axis=0))


@triton.jit
def write_gradient(dlogits, logits, numbers, lane, label, inside, unused):
    """Write the gradients of the logits at the pointers `logits` to `dlogits`; label: its lane, if any."""
    maximum, log_sum, softmax, at_label, everywhere = numbers
    if unused:
        tl.store(dlogits, tl.zeros(lane.shape, dlogits.dtype.element_ty), mask=inside)
    else:
        x = tl.load(logits, mask=inside).to(tl.float32)
        x = softmax * tl.exp2(((x - maximum) - log_sum) * LOG2E)
        x = x - tl.where(lane == label, at_label, 0.0) - everywhere
        tl.store(dlogits, x.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("N",))
def cross_entropy_gradient_kernel(
    dlogits,  # [N, V], rows dlogits_stride apart; may be logits
    logits,  # [N, V], rows stride apart
    labels,  # [N] int64
    maximum,  # [N] float32
    log_sum,  # [N] float32
    coefficients,  # [3, N] float32
    dlogits_stride,
    stride,
    N,
    V,  # at least 1
    SAME_STRIDE: tl.constexpr,  # rows begin at the same places in both
    ALIGNED: tl.constexpr,  # all rows begin at multiples of VECTOR
    VECTOR: tl.constexpr,  # logits in 16 bytes
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # taken at a time
):
    """One token per program."""
    row = tl.program_id(0).to(tl.int64)
    softmax = tl.load(coefficients + row)
    at_label = tl.load(coefficients + row + N)
    everywhere = tl.load(coefficients + row + N + N)
    unused = (softmax == 0) & (at_label == 0) & (everywhere == 0)
    label = tl.load(labels + row)
    label = tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)  # no lane's anywhere
    numbers = (tl.load(maximum + row), tl.load(log_sum + row), softmax, at_label, everywhere)
    begin, d_begin = row * stride, row * dlogits_stride
    body, head = split_row(begin, V, ALIGNED, VECTOR)
    d_body = d_begin + head
    if SAME_STRIDE:
        d_begin, d_body = begin, body
    length = V - head
    whole = length // (BLOCKS * BLOCK) * (BLOCKS * BLOCK)
    logits_body, dlogits_body = logits + body, dlogits + d_body
    wide, lane = tl.arange(0, BLOCKS * BLOCK), tl.arange(0, BLOCK)
    for at in range(0, whole, BLOCKS * BLOCK):
        x, dx = logits_body + (at + wide), dlogits_body + (at + wide)
        write_gradient(dx, x, numbers, wide, label - head - at, None, unused)
    for at in range(whole, length, BLOCK):
        x, dx = logits_body + (at + lane), dlogits_body + (at + lane)
        write_gradient(dx, x, numbers, lane, label - head - at, lane < length - at, unused)
    if not ALIGNED:
        few = tl.arange(0, VECTOR)
        write_gradient(dlogits + d_begin + few, logits + begin + few, numbers, few, label, few < head, unused)


# ---------------------------------------------------------------- configurations


@dataclass(frozen=True)
class Rows:
    """How rows of up to `longest` logits are walked over.

    A block is 16 bytes for each of `threads` threads. `blocks` are loaded at a time for statistics, and
    GRADIENT_BLOCKS for the gradient.
    """

    longest: int
    threads: int
    blocks: int


# The more blocks, the more bytes are under way, and the rarer the corrections where a maximum rises: on
# sm_90 all takes 11.3 instructions per logit of bf16 with three blocks, and 9 with eight. Those eight are
# 32 KiB, which a shorter row does not have. With four blocks for 128 threads ptxas spills for sm_100.
ROWS = (Rows(8192, 128, 3), Rows(MAX_VOCABULARY, 256, 8))
GRADIENT_BLOCKS = 4


def _rows(V: int) -> Rows:
    return next(rows for rows in ROWS if rows.longest >= V)


def _vector(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launchers launch on `target`; fp16 differs from bf16 in the conversions alone."""
    per_token = {"labels": "*i64", "stride": "i32", "N": "i32", "V": "i32"}
    for lengths, rows in zip(("V<=8192", "V>8192"), ROWS, strict=True):
        for dtype, vector in (("bf16", 8), ("fp32", 4)):
            for aligned in (True, False):
                size = "i32:16" if aligned else "i32"
                data, sizes = f"*{dtype}:16", {"stride": size, "V": size}
                name = f"{dtype} {lengths}{'' if aligned else ' unaligned'}"
                constants = {"ALIGNED": aligned, "VECTOR": vector}
                block, num_warps = rows.threads * vector, rows.threads // target.warp_size
                yield Configuration(
                    kernel=cross_entropy_statistics_kernel,
                    name=name,
                    signature={"statistics": "*fp32:16", "logits": data} | per_token | sizes,
                    constants=constants | {"BLOCK": block, "BLOCKS": rows.blocks},
                    num_warps=num_warps,
                )
                numbers = dict.fromkeys(("maximum", "log_sum", "coefficients"), "*fp32")
                yield Configuration(
                    kernel=cross_entropy_gradient_kernel,
                    name=name,
                    signature={"dlogits": data, "logits": data, "dlogits_stride": size}
                    | per_token
                    | numbers
                    | sizes,
                    constants=constants | {"SAME_STRIDE": True, "BLOCK": block, "BLOCKS": GRADIENT_BLOCKS},
                    num_warps=num_warps,
                )


# ---------------------------------------------------------------- launchers


def cross_entropy_statistics(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the maximum, sum of exponentials, label's logit and sum of differences; see `reference_layers`.

    logits: [N, V] in bf16, fp16 or fp32, V at most MAX_VOCABULARY; labels: [N] int64. Returns [4, N] float32.
    Raises UsageError on any other dtype, shape, layout or device.
    """
    N, V = _check_logits(logits, labels)
    statistics = torch.empty(4, N, dtype=torch.float32, device=logits.device)
    if V == 0:
        statistics.zero_()[0].fill_(float("-inf"))
    if N == 0 or V == 0:
        return statistics
    vector, rows = _vector(logits.dtype), _rows(V)
    with torch.cuda.device_of(logits):  # Triton launches on the current device, whatever the tensors' own
        cross_entropy_statistics_kernel[(N,)](
            statistics,
            logits,
            labels,
            logits.stride(0),
            N,
            V,
            ALIGNED=multiples_of_16(V, logits.stride(0)),
            VECTOR=vector,
            BLOCK=rows.threads * vector,
            BLOCKS=rows.blocks,
            num_warps=rows.threads // target_of(logits.device).warp_size,
            num_stages=1,
        )
    return statistics


def cross_entropy_gradient(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    coefficients: Tensor,
    dlogits: Tensor,
) -> None:
    """Write a * softmax - b * onehot(label) - c to dlogits; see `reference_layers`.

    logits, dlogits: [N, V] in bf16, fp16 or fp32, V at most MAX_VOCABULARY, one memory or apart; labels: [N]
    int64; maximum, log_sum: [N] float32; coefficients: [3, N] float32.
    Raises UsageError on any other dtype, shape, layout or device.
    """
    N, V = _check_logits(logits, labels)
    device, float32 = logits.device, (torch.float32,)
    check("maximum", maximum, float32, (N,), device)
    check("log_sum", log_sum, float32, (N,), device)
    check("coefficients", coefficients, float32, (3, N), device, contiguous="all")
    check("dlogits", dlogits, (logits.dtype,), (N, V), device)
    if N == 0 or V == 0:
        return
    stride, d_stride = logits.stride(0), dlogits.stride(0)
    vector, rows = _vector(logits.dtype), _rows(V)
    with torch.cuda.device_of(logits):
        cross_entropy_gradient_kernel[(N,)](
            dlogits,
            logits,
            labels,
            maximum,
            log_sum,
            coefficients,
            d_stride,
            stride,
            N,
            V,
            SAME_STRIDE=d_stride == stride,
            ALIGNED=multiples_of_16(V, stride, d_stride),
            VECTOR=vector,
            BLOCK=rows.threads * vector,
            BLOCKS=GRADIENT_BLOCKS,
            num_warps=rows.threads // target_of(device).warp_size,
            num_stages=1,
        )


def _check_logits(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """Return N and V."""
    check("logits", logits, DTYPES, (None, None), logits.device)
    N, V = logits.shape
    if V > MAX_VOCABULARY:
        raise UsageError(f"logits has shape {[N, V]}; expected at most {MAX_VOCABULARY} columns")
    check("labels", labels, (torch.int64,), (N,), logits.device)
    return N, V
