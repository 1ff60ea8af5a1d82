"""The bare update of AdamW over given memory, against torch.optim.AdamW."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from paracore.bench.case import Case, Contender, Function, Inputs, Outputs, Setting, Work, refuse_interpreter
from paracore.bench.optimizer_inputs import (
    BETAS,
    EPS,
    LR,
    STEPS,
    WEIGHT_DECAY,
    is_mixed,
    parameter_shapes,
    state,
)
from paracore.bench.streams import Kind, move
from paracore.bench.torch_adamw import MakeOptimizer, TorchAdamW, deepspeed_adamw, torch_adamw
from paracore.errors import UsageError
from paracore.ops.adamw import adamw_
from paracore.optim.flat import cut_pieces, pieces_tensor
from paracore.optim.hyperparameters import Hyperparameters
from paracore.reference import accumulation_dtype

# The reference takes one piece of 4096 elements at a time: more of them take minutes.
MAX_REFERENCE_ELEMENTS = 1 << 20


class _Torch:
    """An optimizer of torch for each copy of the inputs."""

    def __init__(self, make: MakeOptimizer, setting: Setting) -> None:
        self._make, self._setting = make, setting
        self._held: dict[int, TorchAdamW] = {}  # by the address of the parameter

    def prepare(self, **arguments: Tensor) -> None:
        address = arguments["parameter"].data_ptr()
        if address not in self._held:
            self._held[address] = TorchAdamW(self._make, self._setting, arguments)

    def __call__(self, **arguments: Tensor) -> Outputs:
        self._held[arguments["parameter"].data_ptr()].update()
        return arguments["parameter"]


def _torch(make: MakeOptimizer) -> Contender:
    return Contender(functools.partial(_Torch, make))


def require_measurable(implementation: str, setting: Setting) -> None:
    """Raise UsageError where a time would say nothing, or take too long."""
    refuse_interpreter(implementation, setting)
    if implementation == "reference" and math.prod(setting.shape) > MAX_REFERENCE_ELEMENTS:
        raise UsageError(f"it takes a piece at a time: over {MAX_REFERENCE_ELEMENTS} elements take too long")


def _paracore(implementation: str) -> Callable[[Setting], Function]:
    def build(setting: Setting) -> Function:
        require_measurable(implementation, setting)
        sizes = [math.prod(shape) for shape in parameter_shapes(setting.variant, setting.shape[0])]
        borders = itertools.pairwise([0, *itertools.accumulate(sizes)])
        pieces = pieces_tensor(
            [(*piece, i) for i, border in enumerate(borders) for piece in cut_pieces(*border)], setting.device
        )
        table = _coefficients(len(sizes), setting.device)
        scale = torch.ones(1, dtype=torch.float64, device=setting.device)

        def update(
            parameter: Tensor,
            gradient: Tensor,
            first_moment: Tensor,
            second_moment: Tensor,
            master: Tensor | None = None,
        ) -> Tensor:
            moments = (first_moment, second_moment, None)
            adamw_(
                parameter, gradient, *moments, master, pieces, table, scale, None, False, impl=implementation
            )
            return parameter

        return update

    return build


def _coefficients(parameters: int, device: torch.device) -> Tensor:
    group = {
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
        "decoupled_weight_decay": True,
        "maximize": False,
    }
    steps = torch.full((parameters,), STEPS + 1, dtype=torch.int64, device=device)
    active = torch.ones(parameters, dtype=torch.float64, device=device)
    return Hyperparameters([0] * parameters, device).coefficients([group], steps, active)


def _streams(setting: Setting) -> Function:
    def streams(
        parameter: Tensor,
        gradient: Tensor,
        first_moment: Tensor,
        second_moment: Tensor,
        master: Tensor | None = None,
    ) -> Tensor:
        move([(gradient, "read"), *updated(parameter, first_moment, second_moment, master)])
        return parameter

    return streams


def updated(
    parameter: Tensor, first_moment: Tensor, second_moment: Tensor, master: Tensor | None
) -> list[tuple[Tensor, Kind]]:
    """Return what an update does with all memory but the gradient: 16-bit parameters are only written."""
    moments: list[tuple[Tensor, Kind]] = [(first_moment, "rewrite"), (second_moment, "rewrite")]
    if master is None:
        return [(parameter, "rewrite"), *moments]
    return [(parameter, "overwrite"), (master, "rewrite"), *moments]


class AdamW(Case):
    """The update of all parameters, without clipping and zeroing.

    float32: everything is. bfloat16: parameters and gradients are, moments and a master are float32; torch
    has no such optimizer, so its contenders update masters, with gradients widened before and parameters
    rounded after. flat: one parameter; small: SMALL of them. Only torch takes these as tensors one by one.
    The limit is the same memory read and written without arithmetic.
    """

    name = "adamw"
    dims = ("elements",)
    shapes = ((10_000_000,),)
    directions = ("forward",)
    variants = ("flat", "small")
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": _torch(torch_adamw(fused=True)),
        "torch_foreach": _torch(torch_adamw(foreach=True)),
        "deepspeed": _torch(deepspeed_adamw),
        "native": Contender(_paracore("native")),
        "triton": Contender(_paracore("triton")),
        "reference": Contender(_paracore("reference")),
    }
    limit = ("streams", Contender(_streams, elsewhere=True))

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """Parameter, gradient, moments, and the master of 16-bit parameters."""
        return state(setting, generator)

    def work(self, setting: Setting) -> Work:
        """Count 28 bytes per parameter, of float32 and mixed.

        float32: parameter and both moments are read and written, the gradient is read. Mixed: the master in
        place of the parameter, which is only written.

        Operations: first moment 3, second 4, denominator 3, parameter 4.
        """
        (elements,) = setting.shape
        narrow, wide = setting.dtype.itemsize, accumulation_dtype(setting.dtype).itemsize
        gradient, rounded = narrow, narrow if is_mixed(setting) else 0
        return Work(bytes=elements * (6 * wide + gradient + rounded), flops=elements * 14)
