"""From param_groups and step counts to the numbers that kernels take, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.reference_adamw import Column

Group = Mapping[str, Any]
_LR, _BETA1, _BETA2, _EPS, _WEIGHT_DECAY, _DECOUPLED, _SIGN = range(7)


def require_valid(group: Group) -> None:
    """Raise UsageError for hyperparameters that have no meaning."""
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise UsageError(f"lr is a tensor {list(lr.shape)}, must have one element")
    elif not 0 <= lr < math.inf:
        raise UsageError(f"lr={lr}: must be 0 or more, and finite")
    if len(betas) != 2 or not all(isinstance(b, float | int) and 0 <= b < 1 for b in betas):
        raise UsageError(f"betas={betas}: must be two numbers, each at least 0 and less than 1")
    for name in ("eps", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise UsageError(f"{name}={group[name]}: must be 0 or more, and finite")


def send(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Return numbers on the device, float64, without waiting for it."""
    host = torch.tensor(numbers, dtype=torch.float64)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class Hyperparameters:
    """The values of every group, on the device; sent there only when they change.

    group_of: the group of each parameter.
    """

    def __init__(self, group_of: Sequence[int], device: torch.device) -> None:
        self._group_of = torch.tensor(group_of, dtype=torch.int64, device=device)
        self._device = device
        self._sent: list[list[float]] = []
        self._values = torch.empty(0, dtype=torch.float64, device=device)

    def coefficients(self, groups: Sequence[Group], steps: Tensor, active: Tensor) -> Tensor:
        """Return the table of `paracore.reference_adamw`, float64 [parameters, 10].

        steps: int64 [parameters], this step counted. active: float64 [parameters], 0 or 1.
        """
        row = self._read(groups)[self._group_of]  # [parameters, 7]
        lr, beta1, beta2, decoupled = row[:, _LR], row[:, _BETA1], row[:, _BETA2], row[:, _DECOUPLED]
        count = steps.clamp(min=1).double()  # those that are not active may have none
        columns = {
            Column.ACTIVE: active,
            Column.SIGN: row[:, _SIGN],
            Column.L2: row[:, _WEIGHT_DECAY] * (1 - decoupled),
            Column.SHRINK: 1 - lr * row[:, _WEIGHT_DECAY] * decoupled,
            Column.ONE_MINUS_BETA1: 1 - beta1,
            Column.BETA2: beta2,
            Column.ONE_MINUS_BETA2: 1 - beta2,
            Column.STEP_SIZE: lr / (1 - beta1**count),
            Column.ROOT_BIAS2: (1 - beta2**count).sqrt(),
            Column.EPS: row[:, _EPS],
        }
        return torch.stack([columns[column] for column in Column], dim=1)

    def _read(self, groups: Sequence[Group]) -> Tensor:
        """Return the groups' values, float64 [groups, 7]."""
        values = []
        for group in groups:
            require_valid(group)
            # No float lr is negative: one that takes the place of a tensor is seen to differ.
            lr = -1.0 if isinstance(group["lr"], Tensor) else float(group["lr"])
            others = (group["eps"], group["weight_decay"], group["decoupled_weight_decay"])
            values.append([lr, *map(float, (*group["betas"], *others)), -1.0 if group["maximize"] else 1.0])
        if values != self._sent:
            self._values, self._sent = send(values, self._device), values
        for index, group in enumerate(groups):
            if isinstance(group["lr"], Tensor):
                self._values[index, _LR] = group["lr"].detach().reshape(())
        return self._values
