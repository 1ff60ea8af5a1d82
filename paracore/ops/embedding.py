"""Rows of a table by number, with a gradient that has the same bits in every run."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from paracore import trace
from paracore.errors import UsageError
from paracore.ops.implementations import Implementation, Operation, dtype_name


class EmbeddingKernels(Protocol):
    """What a module of kernels offers; `paracore.reference_layers` defines it."""

    def embedding_gradient(self, dy: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
        """Return the weight's gradient."""


OPERATION: Operation[EmbeddingKernels] = Operation(
    "embedding",
    {
        "triton": Implementation(
            "paracore.kernels.embedding", (torch.float32, torch.bfloat16, torch.float16)
        ),
        "native": Implementation("paracore._C", (torch.float32, torch.bfloat16)),
        "reference": Implementation("paracore.reference_layers"),
    },
)


def embedding(tokens: Tensor, weight: Tensor, *, impl: str | None = None) -> Tensor:
    """Return the row of each token, [..., H], zeros for tokens that have none: of another rank's shard.

    tokens: [...] int64; weight: [V, H] float, V may be 0. The weight's gradient is summed in float32 (float64
    for float64) in an order that the tokens alone decide, where torch's adds 16-bit numbers in 16 bits, and
    on a GPU in any order. impl: "triton", "native", "reference" or None; see `paracore.ops.implementations`.
    Raises UsageError for other shapes, dtypes or devices, or when the implementation refuses.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise UsageError(
            f"weight is {dtype_name(weight.dtype)} {list(weight.shape)}, must be a float tensor [V, H]"
        )
    if tokens.dtype != torch.int64 or tokens.device != weight.device:
        raise UsageError(
            f"tokens are {dtype_name(tokens.dtype)} on {tokens.device}, must be int64 on {weight.device}"
        )
    if not torch.compiler.is_compiling():
        OPERATION.choose(impl, weight)  # for the gradient: refuses now, not in backward
    rows: Tensor = _rows(tokens.flatten(), weight, impl)
    return rows.view(*tokens.shape, weight.size(1))


@torch.library.custom_op("paracore::embedding", mutates_args=())
@trace.operation("paracore.embedding.forward")
def _rows(tokens: Tensor, weight: Tensor, impl: str | None) -> Tensor:
    size = weight.size(0)
    if size == 0:
        return weight.new_zeros(len(tokens), weight.size(1))
    outside = (tokens < 0) | (tokens >= size)
    return F.embedding(tokens.clamp(0, size - 1), weight).masked_fill_(outside.unsqueeze(-1), 0.0)


@_rows.register_fake
def _(tokens: Tensor, weight: Tensor, impl: str | None) -> Tensor:
    return weight.new_empty(len(tokens), weight.size(1))


@torch.library.custom_op("paracore::embedding_gradient", mutates_args=())
@trace.operation("paracore.embedding.backward")
def _gradient(dy: Tensor, tokens: Tensor, vocab_size: int, impl: str | None) -> Tensor:
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    return OPERATION.choose(impl, dy).embedding_gradient(dy, tokens, vocab_size)


@_gradient.register_fake
def _(dy: Tensor, tokens: Tensor, vocab_size: int, impl: str | None) -> Tensor:
    return dy.new_empty(vocab_size, dy.size(1))


class _Context(FunctionCtx):
    """What backward finds: the tokens saved, and these."""

    saved_tensors: tuple[Tensor, ...]
    vocab_size: int
    impl: str | None


def _setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor, str | None], output: Tensor) -> None:
    tokens, weight, ctx.impl = inputs
    ctx.vocab_size = weight.size(0)
    ctx.save_for_backward(tokens)


def _differentiate(ctx: _Context, dy: Tensor) -> tuple[None, Tensor, None]:
    (tokens,) = ctx.saved_tensors
    return None, _gradient(dy, tokens, ctx.vocab_size, ctx.impl), None


_rows.register_autograd(_differentiate, setup_context=_setup_context)
