"""What native attention refuses before it computes: the argument, its value, what would be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paracore import _C
from tests.attention_cases import Inputs, Shape, fresh_state

FLOAT32 = torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(2, 4, 8)}, r"q has shape \[2, 4, 8\], must be \[B, Hq, Sq, D\]"),
        ({"q": torch.ones(1, 2, 3, 8).double()}, "q is Double, must be float32 or bfloat16"),
        ({"q": torch.ones(1, 2, 3, 257)}, "q has head dim 257, must be from 1 to 256"),
        (
            {"q": torch.ones(1, 2, 8, 3).mT},
            r"q of shape \[1, 2, 3, 8\] has strides .* last dim must be contig",
        ),
        ({"q": torch.ones(1, 2, 3, 8, device="meta")}, "q is Float .* on meta, must be .* on the CPU"),
        ({"k": torch.ones(1, 2, 5, 7)}, r"k is Float \[1, 2, 5, 7\].* must be Float \[1, 2, 5, 8\]"),
        (
            {"k": torch.ones(1, 3, 5, 8), "v": torch.ones(1, 3, 5, 8)},
            "k has 3 heads, which must divide the 2 of q",
        ),
        ({"k": torch.ones(1, 2, 5, 8).bfloat16()}, "k is BFloat16 .* must be Float"),
        ({"v": torch.ones(1, 2, 6, 8)}, r"v is Float \[1, 2, 6, 8\].* must be Float \[1, 2, 5, 8\]"),
        ({"out": torch.ones(1, 2, 3, 9)}, r"out is Float \[1, 2, 3, 9\].* must be Float \[1, 2, 3, 8\]"),
        ({"out": torch.ones(1, 1, 3, 8).expand(1, 2, 3, 8)}, "out of shape .* must not be expanded"),
        ({"sink": torch.ones(3)}, r"sink is Float \[3\].* must be Float \[2\]"),
        ({"first": torch.zeros(1, 4).int()}, r"first is Int \[1, 4\].* must be Int \[1 or 1, 3\]"),
        ({"end": torch.zeros(1, 3)}, r"end is Float \[1, 3\].* must be Int"),
        ({"scale": float("inf")}, "scale=inf must be finite"),
        ({"softcap": -1.0}, "softcap=-1 must be finite and positive, or 0 for none"),
        ({"dropout_p": 1.0}, r"dropout_p=1 must be in \[0, 1\)"),
        ({"dropout_p": 0.5}, "query_positions is None; ALiBi and dropout need"),
        ({"alibi_slopes": torch.ones(1, 2), "query_positions": torch.ones(3).int()}, "key_positions is None"),
        ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes is Float \[2\].* must be Float \[1 or 1, 2\]"),
        ({"capability": "sse9"}, "capability=sse9 cannot run here"),
        ({"products": "triples"}, "products=triples must be float32 or pairs"),
        ({"products": "pairs"}, "products=pairs multiplies bfloat16, but q is Float"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.ones(1, 2, 3, 8),
        "k": torch.ones(1, 2, 5, 8),
        "v": torch.ones(1, 2, 5, 8),
        "sink": None,
        "out": torch.ones(1, 2, 3, 8),
        "first": torch.zeros(1, 3).int(),
        "end": torch.full((1, 3), 5).int(),
        "scale": 1.0,
        "softcap": 0.0,
        "alibi_slopes": None,
        "dropout_p": 0.0,
        "seed": 0,
        "first_batch": 0,
        "first_head": 0,
        "query_positions": None,
        "key_positions": None,
    }
    _C.attention_forward(**arguments)
    with pytest.raises(ValueError, match=message):
        _C.attention_forward(**arguments | change)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("dout", torch.ones(2, 4, 150, 31), r"dout is .* must be Float \[2, 4, 150, 32\]"),
        ("lse", torch.ones(2, 4, 149), r"lse is .* must be Float \[2, 4, 150\]"),
        ("delta", torch.ones(2, 4, 150).double(), "delta is Double .* must be Float"),
        ("dq", torch.ones(2, 4, 150, 32).bfloat16(), "dq is BFloat16 .* must be Float"),
        ("dk", torch.ones(2, 1, 150, 32).expand(2, 2, 150, 32), "dk of shape .* must not be expanded"),
        ("dv", torch.ones(2, 2, 32, 150).mT, "dv of shape .* last dim must be contiguous"),
    ],
)
def test_wrong_arguments_of_backward_are_named(name: str, wrong: Tensor, message: str) -> None:
    given = Inputs.random(Shape(), FLOAT32)
    arguments: dict[str, Any] = {
        "dout": given.dout,
        "q": given.q,
        "k": given.k,
        "v": given.v,
        "lse": given.dlse,
    }
    arguments |= {"delta": given.dlse, "dq": given.q.clone(), "dk": given.k.clone(), "dv": given.v.clone()}
    with pytest.raises(ValueError, match=message):
        _C.attention_backward(**arguments | {name: wrong}, accumulate=False, **given.terms)


def test_wrong_states_are_named() -> None:
    given = Inputs.random(Shape(), FLOAT32)
    row_max, row_sum, acc = fresh_state(given)
    out = torch.empty_like(given.dout)
    with pytest.raises(ValueError, match=r"row_max is .* must be Float \[2, 4, 150\]"):
        _C.attention_continue(given.q, given.k, given.v, row_max[:, :3], row_sum, acc, **given.terms)
    with pytest.raises(ValueError, match=r"acc is Double .* must be Float"):
        _C.attention_continue(given.q, given.k, given.v, row_max, row_sum, acc.double(), **given.terms)
    with pytest.raises(ValueError, match=r"row_sum is .* must be Float \[2, 4, 150\]"):
        _C.attention_finish(row_max, row_sum[:1], acc, out)
    with pytest.raises(ValueError, match=r"out is .* must be Float \[2, 4, 150, 32\]"):
        _C.attention_finish(row_max, row_sum, acc, out[..., :16])
    with pytest.raises(ValueError, match=r"dout is .* must be Float \[2, 4, 150, 32\]"):
        _C.attention_delta(out, given.q[:, :2])
