"""Rotary position embedding (Su et al. 2021) of queries and keys; the contract is `reference_layers`'.

One program takes some heads of one token. Its angles' cosines and sines are loaded once for all of them,
and what it loads of q or k it stores before another program could need it, so q and k may be turned in
place. Queries and keys are turned in one launch: the first programs of a token take its queries, the
others its keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from paracore.errors import UsageError
from paracore.kernels.configuration import Configuration, Target, target_of
from paracore.kernels.layer_checks import DTYPES, check

MAX_HEAD_DIM = 1024

# ---------------------------------------------------------------- kernels


@triton.jit
def turn_heads(out, x, first_head, heads, out_stride, stride, cosine, sine, HALF, HALF_BLOCK, HEADS):
    """Turn HEADS heads of the token that begins at x; strides: between heads."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < heads) & (column < HALF)
    at = x + head.to(tl.int64) * stride + column
    first = tl.load(at, mask=inside).to(tl.float32)
    second = tl.load(at + HALF, mask=inside).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    to = out + head.to(tl.int64) * out_stride + column
    tl.store(to, (first * cosine - second * sine).to(dtype), mask=inside)
    tl.store(to + HALF, (second * cosine + first * sine).to(dtype), mask=inside)


# Whether these are 1 or multiples of 16 changes nothing: not worth a compilation.
NUMBERS = ("position_stride_s", "position_stride_b", "B", "query_heads", "key_heads")


@triton.jit(do_not_specialize=NUMBERS)
def rotate_pair_kernel(
    q_out,  # [S, B, query_heads, 2 HALF], as the next three; strides of S, B and heads below
    k_out,
    q,
    k,
    cos,  # [P, HALF] float32
    sin,  # [P, HALF] float32
    positions,  # [S, B] int64
    q_out_stride_s,
    q_out_stride_b,
    q_out_stride_h,
    k_out_stride_s,
    k_out_stride_b,
    k_out_stride_h,
    q_stride_s,
    q_stride_b,
    q_stride_h,
    k_stride_s,
    k_stride_b,
    k_stride_h,
    position_stride_s,
    position_stride_b,
    B,
    query_heads,
    key_heads,
    direction,  # 1.0, or -1.0 to turn back
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,  # the power of two that covers HALF
    HEADS: tl.constexpr,
):
    """HEADS heads of one token per program, all of q or all of k."""
    query_programs = tl.cdiv(query_heads, HEADS)
    programs = query_programs + tl.cdiv(key_heads, HEADS)
    token = tl.program_id(0) // programs
    program = tl.program_id(0) - token * programs
    s = (token // B).to(tl.int64)
    b = (token % B).to(tl.int64)
    position = tl.load(positions + s * position_stride_s + b * position_stride_b)
    column = tl.arange(0, HALF_BLOCK)[None, :]
    cosine = tl.load(cos + position * HALF + column, mask=column < HALF)
    sine = tl.load(sin + position * HALF + column, mask=column < HALF) * direction
    if program < query_programs:
        turn_heads(
            q_out + s * q_out_stride_s + b * q_out_stride_b,
            q + s * q_stride_s + b * q_stride_b,
            program * HEADS,
            query_heads,
            q_out_stride_h,
            q_stride_h,
            cosine,
            sine,
            HALF,
            HALF_BLOCK,
            HEADS,
        )
    else:
        turn_heads(
            k_out + s * k_out_stride_s + b * k_out_stride_b,
            k + s * k_stride_s + b * k_stride_b,
            (program - query_programs) * HEADS,
            key_heads,
            k_out_stride_h,
            k_stride_h,
            cosine,
            sine,
            HALF,
            HALF_BLOCK,
            HEADS,
        )


# ---------------------------------------------------------------- configurations

# Pairs of dims per program, 8 a thread: two vectors of bf16. At the commonest head dim, 128, that is 8 heads,
# which divide what most models have.
PAIRS = 512
THREADS = 64
TENSORS = ("q_out", "k_out", "q", "k")


def _blocks(half: int) -> dict[str, int]:
    half_block = triton.next_power_of_2(half)
    return {"HALF": half, "HALF_BLOCK": half_block, "HEADS": PAIRS // half_block}


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launchers launch on `target`; fp16 differs from bf16 in the conversions alone."""
    strides = [f"{tensor}_stride_{dim}" for tensor in TENSORS for dim in "sbh"]
    for dtype, head_dim, alignment in (
        *(("bf16", head_dim, ":16") for head_dim in (32, 64, 80, 96, 128, 192, 256, MAX_HEAD_DIM)),
        *(("fp32", head_dim, ":16") for head_dim in (64, 128, 256, MAX_HEAD_DIM)),
        ("bf16", 6, ""),
    ):
        yield Configuration(
            kernel=rotate_pair_kernel,
            name=f"{dtype} D={head_dim}{'' if alignment else ' unaligned'}",
            signature=dict.fromkeys(TENSORS, f"*{dtype}:16")
            | {"cos": "*fp32:16", "sin": "*fp32:16", "positions": "*i64:16"}
            | dict.fromkeys(strides, f"i32{alignment}")
            | dict.fromkeys(NUMBERS, "i32")
            | {"direction": "fp32"},
            constants=_blocks(head_dim // 2),
            num_warps=THREADS // target.warp_size,
        )


# ---------------------------------------------------------------- launchers


def rotate_pair(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    inverse: bool,
) -> None:
    """Write q and k, turned by the angles of their positions, to q_out and k_out; see `reference_layers`.

    q: [S, B, Hq, D], k: [S, B, Hk, D], in bf16, fp16 or fp32, D even and at most MAX_HEAD_DIM; q_out and
    k_out likewise, one memory or apart. cos, sin: [P, D/2] float32, contiguous; positions: [S, B] int64, any
    strides. That positions lie in the tables is not checked: that would wait for the device.
    Raises UsageError on any other dtype, shape, layout or device.
    """
    device = q.device
    check("q", q, DTYPES, (None, None, None, None), device)
    S, B, query_heads, D = q.shape
    if D % 2 != 0 or not 2 <= D <= MAX_HEAD_DIM:
        raise UsageError(f"q has shape {list(q.shape)}; expected an even last dim of 2 to {MAX_HEAD_DIM}")
    check("k", k, (q.dtype,), (S, B, None, D), device)
    check("q_out", q_out, (q.dtype,), q.shape, device)
    check("k_out", k_out, (q.dtype,), k.shape, device)
    check("cos", cos, (torch.float32,), (None, D // 2), device, contiguous="all")
    check("sin", sin, (torch.float32,), cos.shape, device, contiguous="all")
    check("positions", positions, (torch.int64,), (S, B), device, contiguous="none")
    blocks = _blocks(D // 2)
    programs = triton.cdiv(query_heads, blocks["HEADS"]) + triton.cdiv(k.size(2), blocks["HEADS"])
    if S * B * programs == 0:
        return
    tensors = (q_out, k_out, q, k)
    with torch.cuda.device_of(q):  # Triton launches on the current device, whatever the tensors' own
        rotate_pair_kernel[(S * B * programs,)](
            *tensors,
            cos,
            sin,
            positions,
            *(stride for tensor in tensors for stride in tensor.stride()[:3]),
            *positions.stride(),
            B,
            query_heads,
            k.size(2),
            -1.0 if inverse else 1.0,
            **blocks,
            num_warps=THREADS // target_of(device).warp_size,
            num_stages=1,
        )
