"""What the native optimizer refuses before it writes: the argument, its value, what would be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paracore import _C
from tests.adamw_cases import coefficients, draw, scale, table

F, B = torch.ones(8), torch.ones(8).bfloat16()
PIECES, TABLE, DRAWS = torch.tensor([[0, 8, 0]]), table(coefficients()), torch.tensor([draw()])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameter": torch.ones(2, 4)}, r"parameter has shape \[2, 4\], must have one dim"),
        ({"parameter": F.double()}, "parameter is Double, must be float32 or bfloat16"),
        ({"parameter": torch.ones(16)[::2]}, r"parameter has strides \[2\], must be contiguous"),
        ({"parameter": F.to("meta")}, r"parameter is Float \[8\] on meta, must be .* on the CPU"),
        ({"gradient": F.half()}, "gradient is Half, must be float32 or bfloat16"),
        ({"gradient": torch.ones(7)}, r"gradient is Float \[7\] .* must be Float \[8\] on the CPU"),
        ({"first_moment": F.double()}, "first_moment is Double, must be float32 or bfloat16"),
        ({"first_moment": B}, r"second_moment is Float \[8\] .* must be BFloat16 \[8\]"),
        ({"second_moment": torch.ones(9)}, r"second_moment is Float \[9\] .* must be Float \[8\]"),
        ({"max_second_moment": B}, r"max_second_moment is BFloat16 \[8\] .* must be Float \[8\]"),
        ({"max_second_moment": torch.ones(16)[::2]}, "max_second_moment has strides .* must be contiguous"),
        ({"master": F.clone()}, "master is Float, must be None: the parameter is Float and not bfloat16"),
        ({"master": F.short()}, "master is Short, must be None: the parameter is Float and not bfloat16"),
        ({"parameter": B, "master": B}, "master is BFloat16, must be float32 or int16"),
        ({"parameter": B, "master": torch.ones(7)}, r"master is Float \[7\] .* must be Float \[8\]"),
        ({"parameter": B, "master": F.short(), "draws": DRAWS}, "draws is given, must be None with an int16"),
        ({"pieces": torch.tensor([0, 8, 0])}, r"pieces has shape \[3\], must be \[n, 3\]"),
        ({"pieces": PIECES.int()}, r"pieces is Int \[1, 3\] .* must be Long \[1, 3\]"),
        ({"pieces": torch.zeros(2, 4).long()}, r"pieces is Long \[2, 4\] .* must be Long \[2, 3\]"),
        ({"pieces": torch.zeros(3, 2).long().t()}, "pieces has strides .* must be contiguous"),
        ({"pieces": torch.tensor([[0, 2, 0], [5, 9, 0]])}, r"pieces\[1\] is from 5 to 9, .* the 8 elements"),
        ({"pieces": torch.tensor([[-1, 2, 0]])}, r"pieces\[0\] is from -1 to 2, .* the 8 elements"),
        ({"pieces": torch.tensor([[3, 2, 0]])}, r"pieces\[0\] is from 3 to 2, .* the 8 elements"),
        (
            {"pieces": torch.tensor([[0, 2, 1]])},
            r"pieces\[0\] is of segment 1, must be one of the 1 of coeff",
        ),
        ({"pieces": torch.tensor([[0, 2, -1]])}, r"pieces\[0\] is of segment -1"),
        ({"coefficients": TABLE[0]}, r"coefficients has shape \[10\], must be \[segments, 10\]"),
        ({"coefficients": TABLE.float()}, r"coefficients is Float \[1, 10\] .* must be Double \[1, 10\]"),
        ({"coefficients": TABLE[:, :9]}, r"coefficients is Double \[1, 9\] .* must be Double \[1, 10\]"),
        ({"gradient_scale": torch.ones(1)}, r"gradient_scale is Float \[1\] .* must be Double \[1\]"),
        (
            {"gradient_scale": torch.ones(()).double()},
            r"gradient_scale is Double \[\] .* must be Double \[1\]",
        ),
        ({"draws": DRAWS.int()}, r"draws is Int \[1, 7\] .* must be Long \[1, 7\]"),
        ({"draws": DRAWS.repeat(2, 1)}, r"draws is Long \[2, 7\] .* must be Long \[1, 7\]"),
        (
            {"draws": torch.tensor([draw(INNER=0)])},
            r"draws\[0\] has origin 0 and inner 0, must be at least 0 and 1",
        ),
        ({"draws": torch.tensor([draw(ORIGIN=-1)])}, r"draws\[0\] has origin -1 and inner"),
        ({"capability": "sse9"}, "capability=sse9 cannot run here"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "parameter": F.clone(),
        "gradient": F.clone(),
        "first_moment": F.clone(),
        "second_moment": F.clone(),
        "max_second_moment": None,
        "master": None,
        "pieces": PIECES,
        "coefficients": TABLE,
        "gradient_scale": scale(),
        "draws": None,
        "zero_gradient": True,
    }
    given = arguments | change
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    with pytest.raises(ValueError, match=message):
        _C.adamw_(**given)
    assert all(torch.equal(given[name], value) for name, value in before.items() if not value.is_meta)
    _C.adamw_(**arguments)
    assert not torch.equal(arguments["parameter"], F)


def test_pieces_are_limited() -> None:
    long = torch.ones(5000)
    with pytest.raises(ValueError, match=r"pieces\[0\] has 4097 elements, must have at most 4096"):
        _C.sum_of_squares(long, torch.tensor([[0, 4097, 0]]))


@pytest.mark.parametrize(
    ("gradient", "pieces", "message"),
    [
        (torch.ones(2, 4), PIECES, r"gradient has shape \[2, 4\], must have one dim"),
        (F.double(), PIECES, "gradient is Double, must be float32 or bfloat16"),
        (F, PIECES + 1, r"pieces\[0\] is from 1 to 9, must be within the 8 elements"),
        (F, PIECES.float(), r"pieces is Float \[1, 3\] .* must be Long"),
    ],
)
def test_wrong_arguments_of_the_sum_are_named(gradient: Tensor, pieces: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.sum_of_squares(gradient, pieces)
