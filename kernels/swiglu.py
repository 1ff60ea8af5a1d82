"""SwiGLU, the gated activation (Shazeer 2020), forward and backward; the contract is `reference_layers`'.

Elementwise, so all that counts is that memory is moved in vectors. Tensors whose rows follow each other
without gaps are taken as one long row, in which only the end can be odd. Halves of [N, 2 I], as one linear
layer for gate and up yields them, have rows 2 I apart: a program takes a block of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paracore.kernels.configuration import Configuration, Target, target_of
from paracore.kernels.layer_checks import DTYPES, check

LOG2E = tl.constexpr(1.4426950408889634)

# ---------------------------------------------------------------- kernels


@triton.jit
def sigmoid(x):
    """In float32, from exp2 alone; 0 where exp(-x) overflows."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def block_of_row(blocks, BLOCK: tl.constexpr):
    """Return this program's row and its columns, both in 64 bits: a long row has more than 2^31."""
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) - row * blocks
    return row.to(tl.int64), block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit(do_not_specialize=("blocks",))
def swiglu_forward_kernel(
    y,  # [N, I], rows y_stride apart
    gate,  # [N, I], rows gate_stride apart
    up,  # [N, I], rows up_stride apart
    y_stride,
    gate_stride,
    up_stride,
    I,  # noqa: E741
    blocks,  # of a row
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one row per program."""
    row, column = block_of_row(blocks, BLOCK)
    inside = column < I
    g = tl.load(gate + row * gate_stride + column, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside).to(tl.float32)
    tl.store(y + row * y_stride + column, (g * sigmoid(g) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("blocks",))
def swiglu_backward_kernel(
    dgate,  # all [N, I], rows their strides apart
    dup,
    dy,
    gate,
    up,
    dgate_stride,
    dup_stride,
    dy_stride,
    gate_stride,
    up_stride,
    I,  # noqa: E741
    blocks,  # of a row
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one row per program."""
    row, column = block_of_row(blocks, BLOCK)
    inside = column < I
    g = tl.load(gate + row * gate_stride + column, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside).to(tl.float32)
    d = tl.load(dy + row * dy_stride + column, mask=inside).to(tl.float32)
    s = sigmoid(g)
    dg = d * u * s * (1.0 + g * (1.0 - s))
    du = d * g * s
    tl.store(dgate + row * dgate_stride + column, dg.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + row * dup_stride + column, du.to(dup.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- configurations

# 8 elements a thread: a vector of bf16 per tensor, two of fp32. That takes few registers, so programs are
# many, and it is they that keep loads under way.
BLOCK = 1024
THREADS = 128


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launchers launch on `target`; fp16 differs from bf16 in the conversions alone."""
    for name, dtype, size in (
        ("bf16", "bf16", "i32:16"),
        ("bf16 I>=2^31", "bf16", "i64:16"),
        ("bf16 unaligned", "bf16", "i32"),
        ("fp32", "fp32", "i32:16"),
    ):
        for kernel, tensors in (
            (swiglu_forward_kernel, ("y", "gate", "up")),
            (swiglu_backward_kernel, ("dgate", "dup", "dy", "gate", "up")),
        ):
            sizes = [*(f"{tensor}_stride" for tensor in tensors), "I"]
            yield Configuration(
                kernel=kernel,
                name=name,
                signature=dict.fromkeys(tensors, f"*{dtype}:16")
                | dict.fromkeys(sizes, size)
                | {"blocks": "i32"},
                constants={"BLOCK": BLOCK},
                num_warps=THREADS // target.warp_size,
            )


# ---------------------------------------------------------------- launchers


def swiglu_forward(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, [N, I] contiguous; see `reference_layers`.

    gate, up: [N, I] in bf16, fp16 or fp32. out: where to write the result instead, [N, I] with any distance
    between rows; it may be gate or up.
    Raises UsageError on any other dtype, shape, layout or device.
    """
    check("gate", gate, DTYPES, (None, None), gate.device)
    _check_like(gate, up=up)
    y = _fresh(gate) if out is None else out
    _check_like(gate, out=y)
    _launch(swiglu_forward_kernel, [y, gate, up])
    return y


def swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return dgate and dup, [N, I] contiguous; see `reference_layers`.

    dy, gate, up: [N, I] in bf16, fp16 or fp32. out: where to write dgate and dup instead, each [N, I] with
    any distance between rows, the halves of [N, 2 I] for instance; they may be two of dy, gate and up.
    Raises UsageError on any other dtype, shape, layout or device.
    """
    check("gate", gate, DTYPES, (None, None), gate.device)
    _check_like(gate, dy=dy, up=up)
    dgate, dup = (_fresh(gate), _fresh(gate)) if out is None else out
    _check_like(gate, dgate=dgate, dup=dup)
    _launch(swiglu_backward_kernel, [dgate, dup, dy, gate, up])
    return dgate, dup


def _launch(kernel, tensors: Sequence[Tensor]) -> None:
    """Launch on tensors of [N, I], all of one shape."""
    N, I = tensors[0].shape  # noqa: E741
    if N == 0 or I == 0:
        return
    strides = [tensor.stride(0) for tensor in tensors]
    if N == 1 or all(stride == I for stride in strides):
        N, I, strides = 1, N * I, [0] * len(tensors)  # noqa: E741
    blocks = triton.cdiv(I, BLOCK)
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, whatever the tensors' own
        kernel[(N * blocks,)](
            *tensors,
            *strides,
            I,
            blocks,
            BLOCK=BLOCK,
            num_warps=THREADS // target_of(tensors[0].device).warp_size,
            num_stages=1,
        )


def _fresh(gate: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _check_like(gate: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        check(name, tensor, (gate.dtype,), gate.shape, gate.device)
