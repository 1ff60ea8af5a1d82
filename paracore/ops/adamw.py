"""AdamW over flat memory, and sums of squares of it; `paracore.reference_adamw` has the mathematics."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paracore import trace
from paracore.errors import UsageError
from paracore.ops.implementations import Implementation, Operation


class AdamWKernels(Protocol):
    """What a module of kernels offers: the functions of `paracore.reference_adamw`."""

    def adamw_(
        self,
        parameter: Tensor,
        gradient: Tensor,
        first_moment: Tensor,
        second_moment: Tensor,
        max_second_moment: Tensor | None,
        master: Tensor | None,
        pieces: Tensor,
        coefficients: Tensor,
        gradient_scale: Tensor,
        draws: Tensor | None,
        zero_gradient: bool,
    ) -> None:
        """Take one step in place."""

    def sum_of_squares(self, gradient: Tensor, pieces: Tensor) -> Tensor:
        """Return the sum of squares of each piece, float64 [n]."""


OPERATION: Operation[AdamWKernels] = Operation(
    "adamw",
    {
        "triton": Implementation("paracore.kernels.adamw", (torch.float32, torch.bfloat16, torch.float16)),
        "native": Implementation("paracore._C", (torch.float32, torch.bfloat16)),
        "reference": Implementation("paracore.reference_adamw"),
    },
)


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    max_second_moment: Tensor | None,
    master: Tensor | None,
    pieces: Tensor,
    coefficients: Tensor,
    gradient_scale: Tensor,
    draws: Tensor | None,
    zero_gradient: bool,
    impl: str | None = None,
) -> None:
    """Take one step of AdamW in place, for the elements that `pieces` covers; nothing is recorded.

    Tensors, shapes and dtypes are those of `paracore.reference_adamw.adamw_`. Nothing waits for the device:
    hyperparameters, step counts and the factor of gradients are read there. impl: see
    `paracore.ops.implementations`. Raises UsageError where the implementation refuses, and for tensors that
    require gradients while these are recorded.
    """
    tensors = (parameter, gradient, first_moment, second_moment)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UsageError("a tensor requires a gradient, but nothing here is recorded: use torch.no_grad()")
    _adamw(
        parameter,
        gradient,
        first_moment,
        second_moment,
        max_second_moment,
        master,
        pieces,
        coefficients,
        gradient_scale,
        draws,
        zero_gradient,
        impl,
    )


@torch.library.custom_op(
    "paracore::adamw_",
    mutates_args=(
        "parameter",
        "gradient",
        "first_moment",
        "second_moment",
        "max_second_moment",
        "master",
    ),
)
@trace.operation("paracore.adamw.kernel")
def _adamw(
    parameter: Tensor,
    gradient: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    max_second_moment: Tensor | None,
    master: Tensor | None,
    pieces: Tensor,
    coefficients: Tensor,
    gradient_scale: Tensor,
    draws: Tensor | None,
    zero_gradient: bool,
    impl: str | None,
) -> None:
    OPERATION.choose(impl, parameter).adamw_(
        parameter,
        gradient,
        first_moment,
        second_moment,
        max_second_moment,
        master,
        pieces,
        coefficients,
        gradient_scale,
        draws,
        zero_gradient,
    )


@torch.library.custom_op("paracore::sum_of_squares", mutates_args=())
@trace.operation("paracore.sum_of_squares.forward")
def sum_of_squares(gradient: Tensor, pieces: Tensor, impl: str | None = None) -> Tensor:
    """Return the sum of squares of each piece, float64 [n]; see `paracore.reference_adamw.sum_of_squares`."""
    return OPERATION.choose(impl, gradient).sum_of_squares(gradient, pieces)


@sum_of_squares.register_fake
def _(gradient: Tensor, pieces: Tensor, impl: str | None = None) -> Tensor:
    return gradient.new_empty(pieces.size(0), dtype=torch.float64)
