"""The casts of torch.autocast, for operations that autocast does not know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which torch's own linear and attention take x: its own where nothing is cast."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Cast float tensors as autocast casts those of torch's own linear and attention; None stays None.

    Nothing is cast where autocast is off for x's device, or x is float64.
    """
    tensors = (x, *others)
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return tensors
    dtype = autocast_dtype(x)
    return tuple(t if t is None or not t.is_floating_point() else t.to(dtype) for t in tensors)
