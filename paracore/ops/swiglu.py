"""SwiGLU, the gated activation of the feed-forward part of Llama-like models."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from paracore import trace
from paracore.errors import UsageError
from paracore.ops.implementations import Implementation, Operation, dtype_name
from paracore.ops.tokens import TokenOrder


class SwiGLUKernels(Protocol):
    """What a module of kernels offers; `paracore.reference_layers` defines it."""

    def swiglu_forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up."""

    def swiglu_backward(self, dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return dgate and dup."""


OPERATION: Operation[SwiGLUKernels] = Operation(
    "swiglu",
    {
        "triton": Implementation("paracore.kernels.swiglu", (torch.float32, torch.bfloat16, torch.float16)),
        "native": Implementation("paracore._C", (torch.float32, torch.bfloat16)),
        "reference": Implementation("paracore.reference_layers"),
    },
)


def swiglu(gate: Tensor, up: Tensor, *, impl: str | None = None) -> Tensor:
    """silu(gate) * up (Shazeer 2020), elementwise, in their dtype.

    gate, up: of one shape, dtype and device, any strides; nothing is broadcast. Computed in float32 (float64
    for float64). Backward keeps gate and up and nothing else, as they came where both are matrices in gate's
    order. Autocast changes nothing. impl: "triton", "native", "reference" or None; see
    `paracore.ops.implementations`. Raises UsageError for other shapes, dtypes or devices, or when the
    implementation refuses.
    """
    if not gate.is_floating_point():
        raise UsageError(f"gate is {dtype_name(gate.dtype)}, must be a float tensor")
    if up.shape != gate.shape or up.device != gate.device or up.dtype != gate.dtype:
        raise UsageError(
            f"up is {dtype_name(up.dtype)} {list(up.shape)} on {up.device}, must be as gate: "
            f"{dtype_name(gate.dtype)} {list(gate.shape)} on {gate.device}"
        )
    shape = gate.shape
    if gate.dim() == 0:
        gate, up = gate.unsqueeze(0), up.unsqueeze(0)
    order = TokenOrder(gate)
    y = order.restore(_forward(order.matrix(gate), order.matrix(up), impl))
    return y.view(shape)


@torch.library.custom_op("paracore::swiglu", mutates_args=())
@trace.operation("paracore.swiglu.forward")
def _forward(gate: Tensor, up: Tensor, impl: str | None) -> Tensor:
    return OPERATION.choose(impl, gate).swiglu_forward(gate, up)


@_forward.register_fake
def _(gate: Tensor, up: Tensor, impl: str | None) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("paracore::swiglu_backward", mutates_args=())
@trace.operation("paracore.swiglu.backward")
def _backward(dy: Tensor, gate: Tensor, up: Tensor, impl: str | None) -> tuple[Tensor, Tensor]:
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    return OPERATION.choose(impl, gate).swiglu_backward(dy, gate, up)


@_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, impl: str | None) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


class _Context(FunctionCtx):
    """What backward finds: gate and up saved, and this."""

    saved_tensors: tuple[Tensor, ...]
    impl: str | None


def _setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor, str | None], output: Tensor) -> None:
    gate, up, ctx.impl = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: _Context, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_backward(dy, *ctx.saved_tensors, ctx.impl), None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
