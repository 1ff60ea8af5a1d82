"""SwiGLU against the same in eager torch."""

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
    Setting,
    Work,
    implementation,
    random_tensor,
)
from paracore.ops.swiglu import OPERATION, swiglu


def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _native_existing(setting: Setting) -> Function:
    """The kernel alone: the public op is functional, hence has no output to give."""
    OPERATION.choose("native", torch.empty(0, dtype=setting.dtype, device=setting.device))
    from paracore import _C

    return _C.swiglu_forward


class SwiGLU(Case):
    """silu(gate) * up, elementwise over rows of `features`."""

    name = "swiglu"
    dims = ("rows", "features")
    shapes = ((8192, 2432), (4096, 11008), (64, 1024))  # the tutorial's; a 7B model's; within a cache
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": Contender(lambda _: _torch),
        "native": implementation("native", swiglu),
        "native_existing": Contender(_native_existing, output="existing"),
        "triton": implementation("triton", swiglu),
        "reference": implementation("reference", swiglu),
    }

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """Gate and up; the gradient of y, or a tensor for y to be written to."""
        random = functools.partial(random_tensor, setting.shape, setting, generator)
        arguments = {name: random(requires_grad=setting.needs_gradients) for name in ("gate", "up")}
        return Inputs(arguments, (random(),)) if setting.needs_gradients else Inputs(arguments, out=random())

    def work(self, setting: Setting) -> Work:
        """Count whole tensors: forward reads two and writes one, backward reads three and writes two.

        Operations per element, an exponential as one: sigmoid 3, silu 1, product 1; backward sigmoid 3 and
        8 more.
        """
        elements, backward = math.prod(setting.shape), setting.needs_gradients
        return Work((3 + 5 * backward) * elements * setting.dtype.itemsize, (5 + 11 * backward) * elements)
