"""SwiGLU, the gated activation of the feed-forward part of Llama-like models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paracore.chunks import chunks
from paracore.errors import UsageError
from paracore.ops.implementations import dtype_name
from paracore.reference import accumulation_dtype


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), elementwise, in gate's dtype.

    gate, up: of one shape and device, in any float dtypes and strides; nothing is broadcast. Computed in
    float32 (float64 where gate is float64), a piece at a time; each gradient is in its input's dtype.
    Backward keeps gate and up as they came and nothing else. Autocast changes nothing. Raises UsageError
    for other shapes, dtypes or devices.
    """
    for name, tensor in (("gate", gate), ("up", up)):
        if not tensor.is_floating_point():
            raise UsageError(f"{name} is {dtype_name(tensor.dtype)}, must be a float tensor")
    if up.shape != gate.shape or up.device != gate.device:
        raise UsageError(
            f"up is {list(up.shape)} on {up.device}, must be as gate: {list(gate.shape)} on {gate.device}"
        )
    y: Tensor = _SwiGLU.apply(gate, up)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y, dtype = torch.empty_like(gate), accumulation_dtype(gate.dtype)
        for index in chunks(gate.shape, dtype.itemsize):
            y[index].copy_(F.silu(gate[index].to(dtype)).mul_(up[index].to(dtype)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        dgate, dup = (
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip((gate, up), ctx.needs_input_grad, strict=True)
        )
        dtype = accumulation_dtype(gate.dtype)
        for index in chunks(gate.shape, dtype.itemsize):
            g, u, d = (tensor[index].to(dtype) for tensor in (gate, up, dy))
            s = torch.sigmoid(g)
            if dgate is not None:
                dgate[index].copy_(d * u * s * (1 + g * (1 - s)))
            if dup is not None:
                dup[index].copy_(d * g * s)
        return dgate, dup
