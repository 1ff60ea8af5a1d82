"""RMSNorm, with and without the addition of a residual, against torch.nn.functional.rms_norm."""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paracore.bench.case import (
    Case,
    Contender,
    Function,
    Inputs,
    Outputs,
    Setting,
    Work,
    implementation,
    random_tensor,
)
from paracore.errors import UsageError
from paracore.ops.rms_norm import OPERATION, rms_norm

EPS = 1e-6
_rms_norm = functools.partial(rms_norm, eps=EPS)


def _torch(setting: Setting) -> Function:
    def rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Outputs:
        if residual is None:
            return F.rms_norm(x, weight.shape, weight, EPS)
        hidden = x + residual
        return F.rms_norm(hidden, weight.shape, weight, EPS), hidden

    return rms_norm


def _native_existing(setting: Setting) -> Function:
    """The kernel alone: the public op is functional, hence has no output to give."""
    if setting.variant == "residual":
        raise UsageError("the native kernel takes an existing tensor for y, but none for h")
    OPERATION.choose("native", torch.empty(setting.shape, dtype=setting.dtype, device=setting.device))
    from paracore import _C

    def existing(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return _C.rms_norm_forward(x, weight, None, EPS, out=out)[0]

    return existing


class RMSNorm(Case):
    """y = weight * h / sqrt(mean(h^2) + eps) over rows of `features`.

    plain: h = x, returns y. residual: h = x + residual, returns (y, h), as decoder blocks need both.
    """

    name = "rms_norm"
    dims = ("rows", "features")
    shapes = ((8192, 4096), (64, 1024), (1023, 4097))  # large; within a cache; odd
    variants = ("plain", "residual")
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": Contender(_torch),
        "native": implementation("native", _rms_norm),
        "native_existing": Contender(_native_existing, output="existing"),
        "triton": implementation("triton", _rms_norm),
        "reference": implementation("reference", _rms_norm),
    }

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """x, weight and residual; the gradients of y and h, or a tensor for y to be written to."""

        def random(*shape: int, requires_grad: bool = setting.needs_gradients) -> Tensor:
            return random_tensor(shape, setting, generator, requires_grad=requires_grad)

        arguments = {"x": random(*setting.shape), "weight": random(setting.shape[-1])}
        if setting.variant == "residual":
            arguments["residual"] = random(*setting.shape)
        if not setting.needs_gradients:
            return Inputs(arguments, out=random(*setting.shape))
        outputs = 2 if setting.variant == "residual" else 1
        return Inputs(arguments, tuple(random(*setting.shape, requires_grad=False) for _ in range(outputs)))

    def work(self, setting: Setting) -> Work:
        """Count whole tensors of x's size, and weights.

        Forward reads x and the weight and writes y; backward reads dy, h and the weight and writes dx
        and dweight. With a residual, forward reads it and writes h too, and backward reads dh too: dx
        is also the residual's gradient. A row's statistics are few and not counted.

        Operations per element, forward: square and add (2), times 1/rms, times the weight. Backward:
        h/rms, dy * weight, their product summed (2), the projection subtracted (2), times 1/rms, dy *
        h/rms summed into dweight (2). A residual adds one to each.
        """
        elements = math.prod(setting.shape)
        residual, backward = setting.variant == "residual", setting.needs_gradients
        tensors = (2 + 2 * residual) + (3 + residual) * backward
        weights = 1 + 2 * backward
        flops = (4 + residual) + (9 + residual) * backward
        bytes_ = (tensors * elements + weights * setting.shape[-1]) * setting.dtype.itemsize
        return Work(bytes=bytes_, flops=flops * elements)
