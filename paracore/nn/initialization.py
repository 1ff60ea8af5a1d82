"""Initial weights that do not depend on how the model is cut.

Every element is a function of (seed, parameter name, global index): see `paracore.counter_random`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from paracore.counter_random import fill_region_, normal_at, uniform_at
from paracore.parallel.placement import ParameterPlacement


@torch.no_grad()
def linear_uniform_(
    parameter: Tensor, placement: ParameterPlacement, rank: int, fan_in: int, seed: int, name: str
) -> None:
    """Fill as torch.nn.Linear does: uniform in +-1/sqrt(fan_in), fan_in being the whole layer's."""
    bound = fan_in**-0.5 if fan_in else 0.0
    fill_region_(
        parameter,
        placement.region(rank),
        placement.full_shape,
        lambda index: (2.0 * uniform_at(index, seed, name) - 1.0) * bound,
    )


def _scaled_normal(index: Tensor, *, std: float, seed: int, name: str) -> Tensor:
    return std * normal_at(index, seed, name)


@torch.no_grad()
def decoder_normal_(
    model: nn.Module, placements: dict[str, ParameterPlacement], rank: int, std: float, seed: int
) -> None:
    """Fill as Llama and Qwen are: matrices from a normal distribution, norm weights 1, biases 0."""
    for name, parameter in model.named_parameters():
        placement = placements[name]
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            fill_region_(
                parameter,
                placement.region(rank),
                placement.full_shape,
                functools.partial(_scaled_normal, std=std, seed=seed, name=name),
            )


@torch.no_grad()
def perturb_constants_(model: nn.Module, seed: int) -> None:
    """Move norm weights and biases of a dense model off 1 and 0 by about 0.1.

    A bias of zero may be added twice, a norm weight of one left out, and nothing shows.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            index = torch.arange(parameter.numel(), device=parameter.device)
            parameter.add_(0.1 * normal_at(index, seed, f"offset of {name}").to(parameter.dtype))
