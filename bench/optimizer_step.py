"""A whole optimizer step, clipping and zeroing included: paracore.optim.AdamW against what torch offers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paracore.bench.adamw import require_measurable, updated
from paracore.bench.case import Case, Contender, Function, Inputs, Outputs, Setting, Work
from paracore.bench.optimizer_inputs import (
    BETAS,
    EPS,
    LR,
    WEIGHT_DECAY,
    is_mixed,
    parameter_shapes,
    state,
    views,
)
from paracore.bench.streams import move
from paracore.bench.timers import REST
from paracore.bench.torch_adamw import TorchAdamW, torch_adamw
from paracore.optim import AdamW
from paracore.reference import accumulation_dtype

MAX_NORM = 1.0  # far less than the norm of the gradients here: they are clipped in every step


class _Step:
    """A step that gets new gradients before each call, as from a backward pass.

    They come through autograd: it adds to gradients that were zeroed, and makes those that were taken away.
    """

    def __init__(self, setting: Setting) -> None:
        self._shapes = parameter_shapes(setting.variant, setting.shape[0])
        self._setting = setting
        self._held: dict[
            int, tuple[list[nn.Parameter], Callable[[], None]]
        ] = {}  # by the parameter's address

    def start(self, arguments: dict[str, Tensor]) -> tuple[list[nn.Parameter], Callable[[], None]]:
        """Return the parameters of one copy of the inputs, and what a call does."""
        raise NotImplementedError

    def prepare(self, source: Tensor, **arguments: Tensor) -> None:
        address = arguments["parameter"].data_ptr()
        if address not in self._held:
            self._held[address] = self.start(arguments)
        torch.autograd.backward(self._held[address][0], views(source, self._shapes))

    def __call__(self, parameter: Tensor, **_: Tensor) -> Outputs:
        parameters, step = self._held[parameter.data_ptr()]
        step()
        return tuple(parameters)


class _Torch(_Step):
    def __init__(self, set_to_none: bool, setting: Setting) -> None:
        super().__init__(setting)
        self._set_to_none = set_to_none

    def start(self, arguments: dict[str, Tensor]) -> tuple[list[nn.Parameter], Callable[[], None]]:
        held = TorchAdamW(torch_adamw(fused=True), self._setting, arguments)
        if self._set_to_none:
            for parameter in held.parameters:
                parameter.grad = None

        def step() -> None:
            nn.utils.clip_grad_norm_(held.parameters, MAX_NORM)
            held.update()
            if self._set_to_none:
                for parameter in held.parameters:
                    parameter.grad = None
            else:
                torch._foreach_zero_(held.gradients())

        return held.parameters, step


class _Paracore(_Step):
    def __init__(self, implementation: str, setting: Setting) -> None:
        require_measurable(implementation, setting)
        super().__init__(setting)
        self._implementation = implementation

    def start(self, arguments: dict[str, Tensor]) -> tuple[list[nn.Parameter], Callable[[], None]]:
        """It lays out parameters and states in memory of its own."""
        theirs = TorchAdamW(torch_adamw(), self._setting, arguments)
        parameters = [nn.Parameter(parameter.detach().clone()) for parameter in theirs.parameters]
        optimizer = AdamW(
            parameters,
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            max_norm=MAX_NORM,
            impl=self._implementation,
        )
        saved: dict[str, Any] = theirs.optimizer.state_dict()
        for index, master in enumerate(theirs.masters or ()):
            saved["state"][index]["master"] = master.detach()
        optimizer.load_state_dict(saved)

        def step() -> None:
            optimizer.step()

        return parameters, step


class _Streams:
    """Two passes: one reads gradients, the other reads all and writes all, gradients as zeros."""

    def __init__(self, setting: Setting) -> None:
        pass

    def prepare(self, source: Tensor, gradient: Tensor, **_: Tensor) -> None:
        gradient.copy_(source)
        time.sleep(REST)  # this has woken torch's threads again

    def __call__(
        self,
        parameter: Tensor,
        gradient: Tensor,
        first_moment: Tensor,
        second_moment: Tensor,
        source: Tensor,
        master: Tensor | None = None,
    ) -> Outputs:
        move([(gradient, "read")])
        move([(gradient, "clear"), *updated(parameter, first_moment, second_moment, master)])
        return parameter


def _torch(*, set_to_none: bool) -> Callable[[Setting], Function]:
    return functools.partial(_Torch, set_to_none)


def _paracore(implementation: str) -> Callable[[Setting], Function]:
    return functools.partial(_Paracore, implementation)


class OptimizerStep(Case):
    """Norm, clipping, update and zeroing, over a list of parameters.

    float32 and bfloat16 as in the case adamw. decoder: parameters of a decoder's shapes; small: 400 of equal
    size. torch: clip_grad_norm_, AdamW(fused=True), then gradients are zeroed in place; torch_set_to_none:
    they are given up instead, and backward, which is not timed, has to fetch memory for them again.
    """

    name = "optimizer_step"
    dims = ("elements",)
    shapes = ((50_000_000,),)
    directions = ("forward",)
    variants = ("decoder", "small")
    baseline = "torch"
    contenders: ClassVar[dict[str, Contender]] = {
        "torch": Contender(_torch(set_to_none=False)),
        "torch_set_to_none": Contender(_torch(set_to_none=True)),
        "native": Contender(_paracore("native")),
        "triton": Contender(_paracore("triton")),
        "reference": Contender(_paracore("reference")),
    }
    limit = ("streams", Contender(_Streams, elsewhere=True))

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """The state, gradients of zero, and a source of gradients, from which they come before each call."""
        arguments = state(setting, generator).arguments
        arguments["source"], arguments["gradient"] = (
            arguments["gradient"],
            torch.zeros_like(arguments["gradient"]),
        )
        return Inputs(arguments)

    def work(self, setting: Setting) -> Work:
        """Count 36 bytes per float32 parameter, 32 per mixed one.

        The gradient is read for the norm, read again, and written as zero; the rest is as in the case adamw.
        Operations: square and sum (2), clipping (1), and those 14.
        """
        (elements,) = setting.shape
        narrow, wide = setting.dtype.itemsize, accumulation_dtype(setting.dtype).itemsize
        rounded = narrow if is_mixed(setting) else 0
        return Work(bytes=elements * (6 * wide + 3 * narrow + rounded), flops=elements * 17)
