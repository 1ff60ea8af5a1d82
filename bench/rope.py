"""Rotary position embedding of queries and keys against the same in eager torch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from paracore.bench.case import (
    Case,
    Contender,
    Function,
    Inputs,
    Setting,
    Work,
    implementation,
    random_tensor,
)
from paracore.nn.rope import rope_frequencies
from paracore.ops.rotary import OPERATION, rotary_embedding
from paracore.reference import rotary_tables

_THETA = 1e6


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As models in eager torch have it, in the dtype of q and k."""
    cos, sin = (torch.cat([table, table], -1).to(q.dtype)[:, None, None] for table in (cos, sin))
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _native_existing(setting: Setting) -> Function:
    """The kernel alone: the public op is functional, hence has no output to give."""
    OPERATION.choose("native", torch.empty(0, dtype=setting.dtype, device=setting.device))
    from paracore import _C

    S, B, *_ = setting.shape
    positions = torch.arange(S)[:, None].expand(S, B)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        q_out, k_out = out[: q.numel()].view(q.shape), out[q.numel() :].view(k.shape)
        _C.rotate_pair(q, k, cos, sin, positions, q_out, k_out, False)
        return q_out, k_out

    return rope


class _Own(torch.autograd.Function):
    """Stands for what computed q: a tensor that is no leaf, in the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _native_in_place(setting: Setting) -> Function:
    OPERATION.choose("native", torch.empty(0, dtype=setting.dtype, device=setting.device))

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (_Own.apply(x) if x.requires_grad else x for x in (q, k))
        return rotary_embedding(q, k, cos, sin, may_overwrite=True, impl="native")

    return rope


class Rope(Case):
    """q and k of B sequences of S tokens, turned by their positions, the tables being there already."""

    name = "rope"
    dims = ("S", "B", "Hq", "Hk", "D")
    shapes = ((2048, 4, 8, 4, 96), (4096, 1, 32, 8, 128))  # the tutorial's; an 8B model's
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": Contender(lambda _: _torch),
        "native": implementation("native", rotary_embedding),
        "native_in_place": Contender(_native_in_place),
        "native_existing": Contender(_native_existing, output="existing"),
        "triton": implementation("triton", rotary_embedding),
        "reference": implementation("reference", rotary_embedding),
    }

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """q, k and tables; the gradients of both results, or a tensor for both to be written to."""
        S, B, query_heads, key_heads, D = setting.shape
        shapes = {"q": (S, B, query_heads, D), "k": (S, B, key_heads, D)}
        arguments = {
            name: random_tensor(shape, setting, generator, requires_grad=setting.needs_gradients)
            for name, shape in shapes.items()
        }
        frequencies, _ = rope_frequencies(D, _THETA)
        cos, sin = rotary_tables(torch.arange(S), frequencies)
        arguments |= {name: t.float().to(setting.device) for name, t in (("cos", cos), ("sin", sin))}
        if setting.needs_gradients:
            return Inputs(
                arguments, tuple(random_tensor(shape, setting, generator) for shape in shapes.values())
            )
        room = (S * B * (query_heads + key_heads) * D,)
        return Inputs(arguments, out=random_tensor(room, setting, generator))

    def work(self, setting: Setting) -> Work:
        """Count q and k read and written, forward and backward, and the tables; 3 operations per element."""
        S, B, query_heads, key_heads, D = setting.shape
        elements, passes = S * B * (query_heads + key_heads) * D, 1 + setting.needs_gradients
        tables = S * D * torch.float32.itemsize
        return Work(passes * (2 * elements * setting.dtype.itemsize + tables), passes * 3 * elements)
