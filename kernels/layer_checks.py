"""What the launchers of the kernels of `paracore.reference_layers` ask of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from paracore.errors import UsageError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(
    name: str,
    x: Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
    *,
    contiguous: Literal["all", "last", "none"] = "last",
) -> None:
    """Raise UsageError unless x is as expected; `contiguous` says which dims must be.

    None in `shape` is any size.
    """
    fits = len(shape) == x.dim() and all(
        size in (None, have) for size, have in zip(shape, x.shape, strict=True)
    )
    if not fits or x.dtype not in dtypes or x.device != device:
        kinds = " or ".join(map(str, dtypes))
        sizes = ", ".join("n" if size is None else str(size) for size in shape)
        raise UsageError(
            f"{name} is {x.dtype} of shape {list(x.shape)} on {x.device}; "
            f"expected {kinds} of shape [{sizes}] on {device}"
        )
    if x.numel() == 0 or x.is_contiguous() or contiguous == "none":
        return
    if contiguous == "all":
        raise UsageError(f"{name} has strides {x.stride()}; expected a contiguous tensor")
    if x.size(-1) > 1 and x.stride(-1) != 1:
        raise UsageError(f"{name} has strides {x.stride()}; expected a contiguous last dim")


def multiples_of_16(*sizes: int) -> bool:
    """Whether the compiler is told that all are: it then moves vectors of 16 bytes."""
    return all(size % 16 == 0 for size in sizes)
