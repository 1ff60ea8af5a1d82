"""Parameters, gradients and states for the benchmarks of optimizers: flat, with torch's tensors as views.

All contenders of a setting work on the same memory where they can. Its values go on from call to call, as an
optimizer's do; the time does not depend on them.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from paracore.bench.case import Inputs, Setting, random_tensor
from paracore.reference import accumulation_dtype

SMALL = 400  # parameters of the variant "small"
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
STEPS = 100  # that the states have behind them

Shapes = list[tuple[int, ...]]


def parameter_shapes(variant: str, elements: int) -> Shapes:
    """Return the shapes of parameters that have `elements` together.

    flat: one; small: up to SMALL of about equal size; decoder: see `decoder_shapes`.
    """
    if variant == "decoder":
        return decoder_shapes(elements)
    count = min(SMALL, elements) if variant == "small" else 1
    return [(elements * (i + 1) // count - elements * i // count,) for i in range(count)]


def decoder_shapes(elements: int) -> Shapes:
    """Return the shapes of a decoder: two thirds in blocks, the rest in the embedding and the head.

    A block of width h has projections of q and out [h, h], of k and v [h/4, h], three of the MLP with 8h/3,
    and two norms. What does not fill rows of h is one more vector.
    """
    width = max(4, 2 ** round(math.log2(math.sqrt(elements / 200) + 1)))
    inner = 8 * width // 3
    block: Shapes = [(width,), (width, width), *[(width // 4, width)] * 2, (width, width), (width,)]
    block += [(inner, width), (inner, width), (width, inner)]
    of_block = sum(map(math.prod, block))
    blocks = 2 * elements // 3 // of_block
    rows, rest = divmod(elements - blocks * of_block, width)
    shapes = [(rows - rows // 2, width), *block * blocks, (rows // 2, width), (rest,)]
    return [shape for shape in shapes if math.prod(shape)]


def views(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    """Return `flat` as tensors of `shapes`."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def is_mixed(setting: Setting) -> bool:
    """Whether parameters are 16 bits wide, and so have a float32 master."""
    return accumulation_dtype(setting.dtype) != setting.dtype


def state(setting: Setting, generator: torch.Generator) -> Inputs:
    """Return parameter, gradient and moments, flat, and a master if the setting is mixed."""
    (elements,) = setting.shape
    wide = dataclasses.replace(setting, dtype=accumulation_dtype(setting.dtype))
    whole, first, second = (random_tensor((elements,), wide, generator) for _ in range(3))
    arguments = {
        "parameter": whole.to(setting.dtype),
        "gradient": random_tensor((elements,), setting, generator),
        "first_moment": first.mul_(0.1),
        "second_moment": second.square_(),
    }
    if is_mixed(setting):
        arguments["master"] = whole
    return Inputs(arguments)
