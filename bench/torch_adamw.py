"""What a user of torch writes for AdamW, of one dtype or mixed, on memory that is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paracore.bench.case import Setting
from paracore.bench.optimizer_inputs import BETAS, EPS, LR, STEPS, WEIGHT_DECAY, parameter_shapes, views
from paracore.errors import UsageError

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def torch_adamw(**how: bool) -> MakeOptimizer:
    """Return what makes torch.optim.AdamW, with fused=True or foreach=True."""

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return torch.optim.AdamW(
                parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **how
            )
        except RuntimeError as error:
            raise UsageError(f"torch refuses: {str(error).splitlines()[0]}") from error

    return make


def deepspeed_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Make DeepSpeed's AdamW for CPUs; it compiles itself when it is first made."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
    except ImportError as error:
        raise UsageError(f"DeepSpeed is not installed: {error}") from error
    if parameters[0].device.type != "cpu":
        raise UsageError("DeepSpeed's CPUAdam takes parameters on the CPU")
    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
        parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True
    )
    return optimizer


class TorchAdamW:
    """Parameters and an optimizer over one copy of the inputs.

    In the mixed case the optimizer has float32 masters of the parameters; an update widens the gradients
    before and rounds the masters after it.
    """

    def __init__(self, make: MakeOptimizer, setting: Setting, arguments: dict[str, Tensor]) -> None:
        shapes = parameter_shapes(setting.variant, setting.shape[0])
        tensors = {name: views(flat, shapes) for name, flat in arguments.items()}
        self.parameters = [nn.Parameter(x) for x in tensors["parameter"]]
        for parameter, gradient in zip(self.parameters, tensors["gradient"], strict=True):
            parameter.grad = gradient
        self.masters: list[nn.Parameter] | None = None
        if "master" in tensors:
            self.masters = [nn.Parameter(x) for x in tensors["master"]]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        self.optimizer = make(self.masters or self.parameters)
        moments = zip(tensors["first_moment"], tensors["second_moment"], strict=True)
        for parameter, (first, second) in zip(self.masters or self.parameters, moments, strict=True):
            self.optimizer.state[parameter] = {
                "step": self._steps(parameter),
                "exp_avg": first,
                "exp_avg_sq": second,
            }

    def _steps(self, parameter: Tensor) -> Any:
        """Return the number of steps taken, in the kind that the optimizer wants it."""
        if not isinstance(self.optimizer, torch.optim.AdamW):
            return STEPS
        fused = self.optimizer.defaults["fused"]
        return torch.tensor(float(STEPS), device=parameter.device if fused else "cpu")

    @torch.no_grad()
    def update(self) -> None:
        """Take a step with the gradients that the parameters have."""
        if self.masters is None:
            self.optimizer.step()
            return
        torch._foreach_copy_(_gradients(self.masters), self.gradients())
        self.optimizer.step()
        torch._foreach_copy_(list[Tensor](self.parameters), list[Tensor](self.masters))

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters."""
        return _gradients(self.parameters)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
