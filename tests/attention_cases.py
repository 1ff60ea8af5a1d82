"""Attention's random inputs and masks, one way to run any implementation, and how its results are judged.

An implementation is any namespace with the five functions of paracore.reference_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from paracore import reference_attention
from paracore.ops.attention import AttentionKernels
from paracore.reference_attention import Terms
from tests.numerics import assert_as_exact_as, randn

# What rounding alone may cost a result, relative to its norm.
FLOOR = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11, torch.float64: 2.0**-51}
GRADIENTS = ("dq", "dk", "dv")


REFERENCE = cast(AttentionKernels, reference_attention)


@dataclass(frozen=True)
class Shape:
    """Sizes by their usual names."""

    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Sq: int = 150
    Sk: int = 150
    D: int = 32
    Dv: int = 32


Mask = Callable[[Shape], tuple[Tensor, Tensor]]  # first and end, int32 [B or 1, Sq]


def _interval(shape: Shape, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Clamp to the keys there are, and write an interval of nothing as the contract wants it."""
    first, end = first.clamp(0, shape.Sk), end.clamp(0, shape.Sk)
    nothing = first >= end
    return first.masked_fill(nothing, shape.Sk).int(), end.masked_fill(nothing, 0).int()


def _positions(shape: Shape) -> Tensor:
    """Positions of the queries among the keys when the last of both coincide, [1, Sq]."""
    return torch.arange(shape.Sq)[None] + shape.Sk - shape.Sq


def full(shape: Shape) -> tuple[Tensor, Tensor]:
    position = _positions(shape)
    return _interval(shape, torch.zeros_like(position), torch.full_like(position, shape.Sk))


def causal(shape: Shape) -> tuple[Tensor, Tensor]:
    """The last query sees all keys; the first ones nothing if there are more queries than keys."""
    position = _positions(shape)
    return _interval(shape, torch.zeros_like(position), position + 1)


def window(shape: Shape) -> tuple[Tensor, Tensor]:
    position = _positions(shape)
    return _interval(shape, position - 36, position + 1)


def documents(shape: Shape) -> tuple[Tensor, Tensor]:
    """Causal within documents of 41 positions."""
    position = _positions(shape)
    return _interval(shape, position // 41 * 41, position + 1)


def blind(shape: Shape) -> tuple[Tensor, Tensor]:
    """Every third query, and 100 in a row, see nothing; the others a dozen keys here and there."""
    position = _positions(shape)
    nothing = (position % 3 == 0) | (position < 100)
    first = (position * 7).remainder(max(1, shape.Sk))
    return _interval(shape, first, torch.where(nothing, 0, first + 12))


def per_batch(shape: Shape) -> tuple[Tensor, Tensor]:
    """Batch 0 sees keys before the query, batch 1 after it, and so on."""
    position = _positions(shape).expand(shape.B, -1)
    odd = torch.arange(shape.B)[:, None] % 2 == 1
    first = torch.where(odd, position, torch.zeros_like(position))
    end = torch.where(odd, torch.full_like(position, shape.Sk), position + 1)
    return _interval(shape, first, end)


MASKS: dict[str, Mask] = {mask.__name__: mask for mask in (full, causal, window, documents, blind, per_batch)}


@dataclass(frozen=True)
class Inputs:
    """Inputs of forward, and the gradients that arrive at out and at lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    dout: Tensor
    dlse: Tensor
    terms: Terms

    @staticmethod
    def random(
        shape: Shape,
        dtype: torch.dtype,
        mask: Mask = causal,
        *,
        magnitude: float = 1.0,
        strided: bool = False,
        sink: bool = False,
        alibi: bool = False,
        **terms: Any,
    ) -> Inputs:
        """Normal random numbers; q and k times `magnitude`, so that logits go with its square.

        strided: [B, S, H, D] in memory, with NaN between the rows. terms: replaces some of Terms.
        """
        s = shape
        first, end = mask(s)
        generator = torch.Generator().manual_seed(s.Sq + s.Sk)
        everything: dict[str, Any] = {
            "first": first,
            "end": end,
            "scale": s.D**-0.5,
            "softcap": 0.0,
            "alibi_slopes": 0.1 * torch.rand(s.B, s.Hq, generator=generator) if alibi else None,
            "dropout_p": 0.0,
            "seed": 0x9E3779B97F4A7C15,
            "first_batch": 3,
            "first_head": 5,
            "query_positions": torch.randint(0, 500, (s.Sq,), generator=generator).int(),
            "key_positions": torch.randint(0, 500, (s.Sk,), generator=generator).int(),
        }
        return Inputs(
            q=_tensor(s.B, s.Hq, s.Sq, s.D, seed=1, dtype=dtype, scale=magnitude, strided=strided),
            k=_tensor(s.B, s.Hkv, s.Sk, s.D, seed=2, dtype=dtype, scale=magnitude, strided=strided),
            v=_tensor(s.B, s.Hkv, s.Sk, s.Dv, seed=3, dtype=dtype, strided=strided),
            sink=randn(s.Hq, seed=4, dtype=torch.float32) if sink else None,
            dout=_tensor(s.B, s.Hq, s.Sq, s.Dv, seed=5, dtype=dtype, strided=strided),
            dlse=randn(s.B, s.Hq, s.Sq, seed=6, dtype=torch.float32),
            terms=cast(Terms, everything | terms),
        )

    def double(self) -> Inputs:
        """The same numbers in float64."""
        tensors: dict[str, Any] = {
            name: x.double() for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **tensors)


def _tensor(
    B: int,
    H: int,
    S: int,
    D: int,
    *,
    seed: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    strided: bool = False,
) -> Tensor:
    values = (randn(B, H, S, D, seed=seed) * scale).to(dtype)
    return poisoned_like(values, strided=True).copy_(values) if strided else values


def poisoned_like(x: Tensor, *, strided: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """NaN in x's shape, contiguous or as [B, S, H, D] with a gap after each row."""
    B, H, S, D = x.shape
    if not strided:
        return torch.full((B, H, S, D), float("nan"), dtype=dtype or x.dtype)
    memory = torch.full((B, S, H, D + 3), float("nan"), dtype=dtype or x.dtype)
    return memory[..., :D].transpose(1, 2)


Results = dict[str, Tensor]


def run(
    kernels: AttentionKernels,
    given: Inputs,
    *,
    strided: bool = False,
    gradient_dtype: torch.dtype | None = None,
) -> Results:
    """Forward, and backward from what forward returned, into buffers full of NaN."""
    out = poisoned_like(given.dout, strided=strided)
    lse = kernels.attention_forward(given.q, given.k, given.v, given.sink, out, **given.terms)
    delta = kernels.attention_delta(out, given.dout) - given.dlse
    dq, dk, dv = (
        poisoned_like(x, strided=strided, dtype=gradient_dtype) for x in (given.q, given.k, given.v)
    )
    kernels.attention_backward(
        given.dout, given.q, given.k, given.v, lse, delta, dq, dk, dv, False, **given.terms
    )
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def fresh_state(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """row_max, row_sum and acc before the first key; no sink."""
    rows = given.q.shape[:3]
    acc = torch.zeros(*rows, given.v.size(3))
    return torch.full(rows, float("-inf")), torch.zeros(rows), acc


def keys_between(given: Inputs, begin: int, end: int) -> tuple[Tensor, Tensor, Terms]:
    """k, v and the terms of the keys [begin, end) alone."""
    terms = given.terms.copy()
    low, high = terms["first"].clamp(begin, end) - begin, terms["end"].clamp(begin, end) - begin
    nothing = low >= high
    terms["first"], terms["end"] = low.masked_fill(nothing, end - begin), high.masked_fill(nothing, 0)
    if terms["key_positions"] is not None:
        terms["key_positions"] = terms["key_positions"][begin:end]
    return given.k[:, :, begin:end], given.v[:, :, begin:end], terms


def _scaled_dot_product(given: Inputs) -> Results:
    """torch's own attention where it has the terms for it: a boolean mask and a scale."""
    index = torch.arange(given.k.size(2))
    terms = given.terms
    seen = (terms["first"].unsqueeze(-1) <= index) & (index < terms["end"].unsqueeze(-1))
    q, k, v = (x.detach().contiguous().requires_grad_() for x in (given.q, given.k, given.v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen.unsqueeze(1), scale=terms["scale"], enable_gqa=True
    )
    gradients = torch.autograd.grad(out, (q, k, v), given.dout)
    return {"out": out.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


def contender(given: Inputs) -> Results:
    """Plain torch in the inputs' dtype: its own attention, or the contract's formulas for terms it lacks."""
    plain = run(REFERENCE, given)
    terms = given.terms
    extra = (
        terms["softcap"] or terms["dropout_p"] or terms["alibi_slopes"] is not None or given.sink is not None
    )
    every_query_sees = bool((terms["first"] < terms["end"]).all())
    if not extra and every_query_sees and not given.dlse.any():
        plain |= _scaled_dot_product(given)
    return plain


def assert_exact(results: Results, given: Inputs) -> None:
    """Every result has an error to float64 at most twice plain torch's in the same dtype, or rounding's.

    lse is -inf exactly where the reference's is.
    """
    plain, exact = contender(given), run(REFERENCE, given.double())
    nothing = exact["lse"] == float("-inf")
    assert torch.equal(results["lse"] == float("-inf"), nothing)
    for side in (results, plain, exact):
        side["lse"] = side["lse"].masked_fill(nothing, 0.0)
    for name, result in results.items():
        assert result.shape == exact[name].shape, name
        assert not result.isnan().any(), name
        assert_as_exact_as(result, plain[name], exact[name], floor=FLOOR[result.dtype], name=name)
