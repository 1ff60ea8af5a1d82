"""What AdamW needs of those who hold parameters, gradients and state: `FlatParameters`, `FullySharded`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paracore.optim.section import Section
from paracore.optim.statistics import Statistics


class GradientStore(Protocol):
    """Gradients between backward and the step."""

    present: set[int]

    def reduce(self) -> None:
        """Bring the gradients of all ranks, summed, to those who own them; once before each step."""

    def clear(self, *, zeroed: bool) -> None:
        """Forget all gradients. zeroed: whether those that this rank owns are zero already."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keep gradients of backward passes in here on this rank."""


class ParameterStore(Protocol):
    """Parameters, of which this rank updates the `sections`."""

    parameters: list[nn.Parameter]
    sections: list[Section]
    zeroes_gradients: bool  # whether they are to be zeroed in the step

    @property
    def gradients(self) -> GradientStore:
        """The gradients of all parameters."""

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds between steps, by what they are for.

        "parameters", "gradients", "states", and "transfers": buffers that are kept for sums under way.
        """

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the flat tensors of "gradients" and of "states" that this rank keeps."""

    def statistics(self) -> Statistics:
        """Return what sums up the gradients of all sections."""

    def require_in_place(self) -> None:
        """Raise UsageError for parameters that are no longer where they were."""

    def follow_writes(self) -> None:
        """Bring masters up to parameters that somebody has written to."""

    def publish(self, *, overlap: bool) -> None:
        """Let all ranks have the parameters that this one has updated, by the end of `wait` if `overlap`."""

    def wait(self, numbers: Sequence[int] | None = None) -> None:
        """Wait until they have."""

    def wait_in(self, module: nn.Module) -> None:
        """Let submodules wait for their own parameters, before forward and around state dicts."""

    def whole(self, read: Callable[[Section], Tensor | None]) -> Iterator[tuple[int, Tensor]]:
        """Yield what `read` returns of sections, gathered from all ranks: a parameter's index, and flat."""


def follow_writes(sections: Sequence[Section], written: Callable[[int], bool], *, stochastic: bool) -> None:
    """Bring the masters of parameters that were `written` to up to them, say by loading a checkpoint.

    A master that the parameter may have been rounded from stays. So does a remainder: it is less than half a
    unit in the last place of whatever the parameter is now. stochastic: how parameters are rounded.
    """
    for section in sections:
        for part in section.parts:
            master = section.master
            if master is None or not master.is_floating_point() or not written(part.index):
                continue
            now, kept = section.parameter[part.place], master[part.place]
            kept.copy_(kept.where(_is_rounded(now, kept, stochastic), now.float()))


def _is_rounded(parameter: Tensor, master: Tensor, stochastic: bool) -> Tensor:
    """Return where `parameter` is what `master` may have been rounded to."""
    nearest = master.to(parameter.dtype) == parameter
    if not stochastic or parameter.dtype != torch.bfloat16:
        return nearest
    up = parameter.view(torch.int16).int() - (master.view(torch.int32) >> 16)
    return nearest | (up == 0) | (up == 1)
