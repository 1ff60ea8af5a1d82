"""Memory for results that a kernel is about to write."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paracore.ops.implementations import missing


def fresh(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised tensor of `like`'s dtype and device, on a CPU backed by memory at once.

    Otherwise its pages would be faulted in one by one, which takes longer than most kernels do.
    """
    tensor = like.new_empty(shape)
    if tensor.device.type == "cpu" and missing("native", "cpu") is None:
        from paracore import _C

        _C.prefault(tensor)
    return tensor
