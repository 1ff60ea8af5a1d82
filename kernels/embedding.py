"""The gradient of an embedding's weight; the contract is `reference_layers`'.

Tokens are sorted, stably, so that equal ones follow each other as they came. One program takes one row of
the weight and a block of its columns, and adds up that row's *run*: the gradients of its tokens, in their
order. Nothing is added atomically, and nothing waits for the device.

A token that stands for padding may be half of all tokens, and one program that adds 10,000 rows takes
milliseconds. So a run is cut into pieces of PIECE tokens, counted from its own beginning. The row's program
adds up the first piece; other programs have added up the others, and it adds their sums, in order. The
order of additions thus depends on the run alone, and runs of up to PIECE tokens are summed as they came.
For the pieces' programs the sorted tokens are divided into windows of PIECE. As all that matters is longer
than a window, at most one second or later piece of a run begins in each.
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
from paracore.kernels.layer_checks import DTYPES, check

# ---------------------------------------------------------------- kernels


@triton.jit
def add_rows(total, dy, order, begin, end, stride, column, inside):
    """Return total plus the rows of dy that order[begin:end] names, in this order."""
    # Unrolled, so that several rows are under way.
    for i in tl.range(begin, end, loop_unroll_factor=4):
        row = tl.load(order + i)
        total += tl.load(dy + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=("V",))
def sum_pieces_kernel(
    sums,  # [windows, H] float32
    dy,  # [N, H], rows stride apart
    order,  # [N] int64: the rows of dy by token
    tokens,  # [N], sorted
    starts,  # [V + 1] int64: where in `order` each token's run starts
    stride,
    H,
    V,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The second or later piece that begins in one window, if one does, and BLOCK columns, per program."""
    window = tl.program_id(0)
    here = window.to(tl.int64) * PIECE
    token = tl.load(tokens + here)
    if token < V:
        start = tl.load(starts + token)
        end = tl.load(starts + token + 1)
        begin = start + (here - start + (PIECE - 1)) // PIECE * PIECE
        if (start < here) & (begin < end):
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = column < H
            total = tl.zeros([BLOCK], tl.float32)
            total = add_rows(total, dy, order, begin, tl.minimum(begin + PIECE, end), stride, column, inside)
            tl.store(sums + window.to(tl.int64) * H + column, total, mask=inside)


@triton.jit
def sum_runs_kernel(
    dweight,  # [V, H]
    sums,  # [windows, H] float32: what sum_pieces_kernel wrote
    dy,  # [N, H], rows stride apart
    order,  # [N] int64
    starts,  # [V + 1] int64
    stride,
    H,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of the weight and BLOCK columns per program."""
    token = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + token)
    end = tl.load(starts + token + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros([BLOCK], tl.float32)
    total = add_rows(total, dy, order, start, tl.minimum(start + PIECE, end), stride, column, inside)
    first_window = start // PIECE
    pieces = (end - start + (PIECE - 1)) // PIECE
    for piece in tl.range(1, pieces, loop_unroll_factor=4):
        total += tl.load(sums + (first_window + piece) * H + column, mask=inside, other=0.0)
    tl.store(dweight + token * H + column, total.to(dweight.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- configurations


@dataclass(frozen=True)
class Tile:
    """BLOCK columns, spread over `threads` threads: 8 each, a vector of bf16 or two of fp32."""

    block: int
    threads: int


# By the longest row they are used for. Most rows of a weight have no tokens, and their programs have nothing
# to do but to write zeros: of longer rows they write more each, so that they are not many more.
MAX_HIDDEN_SIZE = 2**26
TILES = {512: Tile(512, 64), 2048: Tile(1024, 128), MAX_HIDDEN_SIZE: Tile(2048, 256)}
# A run of n tokens takes as long as PIECE + n / PIECE rows: least for 16,384 of a kind, which is when it
# matters.
PIECE = 128


def _tile(H: int) -> Tile:
    return next(tile for longest, tile in TILES.items() if longest >= H)


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launchers launch on `target`; fp16 differs from bf16 in the conversions alone."""
    for lengths, tile in zip(("H<=512", "H<=2048", "H>2048"), TILES.values(), strict=True):
        for dtype, alignment in (("bf16", ":16"), ("fp32", ":16"), ("bf16", "")):
            size = f"i32{alignment}"
            signature = {"sums": "*fp32:16", "dy": f"*{dtype}:16", "order": "*i64:16", "starts": "*i64:16"}
            signature |= {"stride": size, "H": size}
            for kernel, more in (
                (sum_pieces_kernel, {"tokens": "*i32:16", "V": "i32"}),
                (sum_runs_kernel, {"dweight": f"*{dtype}:16"}),
            ):
                yield Configuration(
                    kernel=kernel,
                    name=f"{dtype} {lengths}{'' if alignment else ' unaligned'}",
                    signature=signature | more,
                    constants={"PIECE": PIECE, "BLOCK": tile.block},
                    num_warps=tile.threads // target.warp_size,
                )


# ---------------------------------------------------------------- launchers


def embedding_gradient(dy: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the gradient of an embedding's weight, [vocab_size, H] in dy's dtype; see `reference_layers`.

    dy: [N, H] in bf16, fp16 or fp32; tokens: [N] int64. Beside the result this takes 4 H / PIECE bytes and 28
    or so per token, and 8 per row of the weight.
    Raises UsageError on any other dtype, shape, layout or device.
    """
    check("dy", dy, DTYPES, (None, None), dy.device)
    N, H = dy.shape
    check("tokens", tokens, (torch.int64,), (N,), dy.device)
    if H > MAX_HIDDEN_SIZE:
        raise UsageError(f"dy has shape {[N, H]}; expected at most {MAX_HIDDEN_SIZE} columns")
    if not 0 <= vocab_size < 2**31 - 1:
        raise UsageError(f"vocab_size is {vocab_size}; expected 0 to {2**31 - 2}")
    dweight = torch.empty(vocab_size, H, dtype=dy.dtype, device=dy.device)
    if N == 0 or dweight.numel() == 0:
        return dweight.zero_()
    # The tokens outside become the last. 32 bits are sorted in half the passes of 64.
    keys = torch.where((tokens >= 0) & (tokens < vocab_size), tokens, vocab_size).to(torch.int32)
    keys, order = keys.sort(stable=True)
    rows = torch.arange(vocab_size + 1, dtype=torch.int32, device=dy.device)
    starts = torch.searchsorted(keys, rows)
    tile, windows = _tile(H), triton.cdiv(N, PIECE)
    blocks = triton.cdiv(H, tile.block)
    sums = torch.empty(windows, H, dtype=torch.float32, device=dy.device)
    constants = {"PIECE": PIECE, "BLOCK": tile.block}
    options = {"num_warps": tile.threads // target_of(dy.device).warp_size, "num_stages": 1}
    stride = dy.stride(0)
    with torch.cuda.device_of(dy):  # Triton launches on the current device, whatever the tensors' own
        if windows > 1:  # otherwise no run is longer than a piece
            sum_pieces_kernel[(windows, blocks)](
                sums, dy, order, keys, starts, stride, H, vocab_size, **constants, **options
            )
        sum_runs_kernel[(vocab_size, blocks)](
            dweight, sums, dy, order, starts, stride, H, **constants, **options
        )
    return dweight
