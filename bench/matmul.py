"""The persistent matrix product against torch's, with and without flags that it waits for."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor

from paracore.bench.case import Case, Contender, Function, Inputs, Setting, Work, random_tensor
from paracore.errors import UsageError

CHUNKS = 8  # as of eight ranks


def _torch(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return torch.mm(x, weight.T, out=out)


def _kernels(setting: Setting) -> Any:
    """Return `paracore.kernels.matmul`; no operation chooses it, layers over peer memory call it."""
    if setting.device.type != "cuda":
        raise UsageError("triton runs on CPUs in its interpreter, whose time says nothing about a GPU's")
    return importlib.import_module("paracore.kernels.matmul")


def _triton(setting: Setting) -> Function:
    kernels = _kernels(setting)

    def product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        kernels.matmul(x, weight, out)
        return out

    return product


def _triton_waiting(setting: Setting) -> Function:
    """All flags are set: what is left is what looking at them costs."""
    kernels = _kernels(setting)
    rows, device = setting.shape[0], setting.device
    parts = [(part[0].item(), len(part)) for part in torch.arange(rows).chunk(CHUNKS)]
    order = kernels.tile_order(parts, device, kernels.block_rows(setting.dtype, device))
    arrivals = kernels.Arrivals(torch.ones(len(parts), dtype=torch.int32, device=device), 1)

    def product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        kernels.matmul(x, weight, out, order=order, arrivals=arrivals)
        return out

    return product


class Matmul(Case):
    """x W^T, to an existing tensor; triton_waiting: in eight chunks of rows, with a flag for each."""

    name = "matmul"
    dims = ("rows", "in", "out")
    # A square; one rank's part of the 70B column and row layers over eight.
    shapes = ((8192, 8192, 8192), (8192, 8192, 7168), (8192, 3584, 8192))
    directions = ("forward",)
    bound = "compute"
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": Contender(lambda _: _torch, output="existing"),
        "triton": Contender(_triton, output="existing"),
        "triton_waiting": Contender(_triton_waiting, output="existing"),
    }

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """x and weight, and a tensor for the result."""
        rows, features, outputs = setting.shape
        x, weight, out = (
            random_tensor(shape, setting, generator)
            for shape in ((rows, features), (outputs, features), (rows, outputs))
        )
        return Inputs({"x": x, "weight": weight.mul_(features**-0.5)}, out=out)

    def work(self, setting: Setting) -> Work:
        """Count the product, and each tensor once."""
        rows, features, outputs = setting.shape
        elements = rows * features + outputs * features + rows * outputs
        return Work(elements * setting.dtype.itemsize, 2 * rows * features * outputs)
