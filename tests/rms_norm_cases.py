"""RMSNorm's implementations under one signature, and how the results of any of them are judged."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from paracore import _C, reference
from paracore.ops import implementations
from paracore.ops.rms_norm import OPERATION, RMSNormKernels
from tests.interpreter import mended
from tests.numerics import assert_as_exact_as, randn

EPS = 1e-6
# Half a unit in the last place of the dtype: what rounding the result alone can cost.
FLOOR = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11, torch.float64: 2.0**-51}


def kernels() -> dict[str, RMSNormKernels]:
    """Every implementation that can run on this machine's CPU, native once per instruction set."""
    found: dict[str, RMSNormKernels] = {"reference": cast(RMSNormKernels, reference)}
    for capability in _C.capabilities():
        found[f"native-{capability}"] = native(capability)
    if implementations.missing("triton", "cpu") is None:
        module = importlib.import_module(OPERATION.implementations["triton"].module)
        found["triton"] = cast(RMSNormKernels, module)
    return found


def native(capability: str) -> RMSNormKernels:
    bound = SimpleNamespace(
        rms_norm_forward=partial(_C.rms_norm_forward, capability=capability),
        rms_norm_backward=partial(_C.rms_norm_backward, capability=capability),
    )
    return cast(RMSNormKernels, bound)


@dataclass(frozen=True)
class Inputs:
    """Inputs of forward and the gradients that arrive: dh is None exactly if residual is."""

    x: Tensor  # [rows, D]
    weight: Tensor  # [D]
    residual: Tensor | None  # [rows, D]
    dy: Tensor  # [rows, D]
    dh: Tensor | None  # [rows, D]

    @staticmethod
    def random(
        rows: int,
        D: int,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        *,
        residual: bool,
        scale: float = 1.0,
        padding: int = 0,
    ) -> Inputs:
        """Random numbers; `padding` columns lie between the rows of every tensor, and hold NaN."""

        def tensor(seed: int, scale: float) -> Tensor:
            wide = torch.full((rows, D + padding), float("nan"), dtype=dtype)
            view = wide[:, :D]
            view.copy_(randn(rows, D, seed=seed) * scale)
            return view

        return Inputs(
            x=tensor(1, scale),
            weight=(1 + 0.5 * randn(D, seed=2)).to(weight_dtype),
            residual=tensor(3, 3 * scale) if residual else None,
            dy=tensor(4, 1.0),
            dh=tensor(5, 2.0) if residual else None,
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with every tensor replaced."""
        return replace(self, **{name: function(t) for name, t in vars(self).items() if t is not None})


Results = dict[str, Tensor]


def run(implementation: RMSNormKernels, given: Inputs) -> Results:
    """Forward, and backward from what forward returned."""
    with mended():  # what Triton's interpreter gets wrong in bfloat16; nothing else looks at it
        y, h, rstd = implementation.rms_norm_forward(given.x, given.weight, given.residual, EPS)
        dx, dweight = implementation.rms_norm_backward(given.dy, given.dh, h, given.weight, rstd)
    return {"y": y, "h": h, "dx": dx, "dweight": dweight}


def run_torch(given: Inputs) -> Results:
    """The same in plain torch: F.rms_norm and autograd."""
    x, weight = given.x.detach().requires_grad_(), given.weight.detach().requires_grad_()
    h = x if given.residual is None else x + given.residual
    y = F.rms_norm(h, (h.size(-1),), weight, EPS)
    outputs = [(y, given.dy)] if given.dh is None else [(y, given.dy), (h, given.dh)]
    tensors, gradients = zip(*outputs, strict=True)
    dx, dweight = torch.autograd.grad(tensors, (x, weight), gradients)
    return {"y": y.detach(), "h": h.detach(), "dx": dx, "dweight": dweight}


def assert_exact(results: Results, given: Inputs) -> None:
    """Every result has torch's shape and dtype, and an error at most twice torch's, or rounding's."""
    plain, exact = run_torch(given), run_torch(given.map(Tensor.double))
    for name, result in results.items():
        assert result.shape == plain[name].shape, name
        assert result.dtype == plain[name].dtype, name
        floor = FLOOR[result.dtype]
        assert_as_exact_as(result, plain[name], exact[name], floor=floor, name=name)
