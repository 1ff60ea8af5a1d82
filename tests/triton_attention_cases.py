"""Inputs for attention's Triton kernels, and how their results are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paracore import reference, reference_attention
from paracore.counter_random import philox_words
from tests.numerics import assert_as_exact_as, randn

# What rounding a result once costs: half a unit in the last place.
FLOOR = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def intervals(mask: str, B: int, Sq: int, Sk: int) -> tuple[Tensor, Tensor]:
    """first and end, [B or 1, Sq] int32, of a mask by name; the last query is aligned to the last key."""
    query = torch.arange(Sq).unsqueeze(0) + Sk - Sq  # index of the key at each query's own place
    first, end = torch.zeros(1, Sq), torch.full((1, Sq), float(Sk))
    if mask == "causal":
        end = query + 1
    elif mask == "window":
        first, end = query - 19, query + 1
    elif mask == "documents":  # causal within each document; their ends lie inside tiles
        starts = torch.tensor([0, Sk // 5, Sk // 2, Sk // 2 + 1])
        first, end = starts[torch.searchsorted(starts, query.clamp(min=0), right=True) - 1], query + 1
    elif mask == "some_nothing":  # every third query sees nothing, and so do all of the first 20
        end = torch.where((query % 3 == 0) | (query < Sk - Sq + 20), 0, Sk)
    elif mask == "per_batch":
        lengths = torch.arange(1, B + 1).unsqueeze(1) * Sk // B
        first, end = torch.zeros(B, Sq), torch.minimum(lengths, query + 1)
    elif mask == "random":
        bounds = torch.randint(0, Sk + 1, (2, B, Sq), generator=torch.Generator().manual_seed(5))
        first, end = bounds.amin(0), bounds.amax(0)
    else:
        assert mask == "full", mask
    return normalised(first, end, Sk)


def normalised(first: Tensor, end: Tensor, Sk: int) -> tuple[Tensor, Tensor]:
    """Intervals inside the keys, as int32; those that hold nothing are (Sk, 0)."""
    first, end = torch.broadcast_tensors(first.clamp(0, Sk), end.clamp(0, Sk))
    nothing = first >= end
    return (
        first.masked_fill(nothing, Sk).to(torch.int32).contiguous(),
        end.masked_fill(nothing, 0).to(torch.int32).contiguous(),
    )


@dataclass
class Case:
    """Inputs of one call. `terms` is what `reference_attention.Terms` says."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sink: Tensor | None
    terms: dict[str, Any]

    @staticmethod
    def random(
        mask: str = "causal",
        *,
        B: int = 1,
        heads: tuple[int, int] = (2, 1),
        S: tuple[int, int] = (33, 33),
        D: int = 16,
        DV: int | None = None,
        dtype: torch.dtype = torch.float32,
        sink: bool = False,
        alibi: bool = False,
        device: torch.device | None = None,
        magnitude: float = 1.0,
        **terms: Any,
    ) -> Case:
        (Hq, Hkv), (Sq, Sk), DV = heads, S, D if DV is None else DV
        shapes = ([B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, DV], [B, Hq, Sq, DV])
        q, k, v, dout = (randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
        first, end = intervals(mask, B, Sq, Sk)
        slopes = randn(B, Hq, seed=4, dtype=torch.float32).abs() / 4 if alibi else None
        defaults = {
            "first": first,
            "end": end,
            "scale": D**-0.5,
            "softcap": 0.0,
            "alibi_slopes": slopes,
            "dropout_p": 0.0,
            "seed": 0xFEDCBA9876543210,
            "first_batch": 3,
            "first_head": 5,
            "query_positions": torch.arange(Sq, dtype=torch.int32) + 11,
            "key_positions": torch.arange(Sk, dtype=torch.int32) * 2,
        }
        sinks = randn(Hq, seed=6, dtype=torch.float32) if sink else None
        return Case(q * magnitude, k, v, dout, sinks, defaults | terms).map(lambda x: x.to(device or "cpu"))

    def map(self, function: Callable[[Tensor], Tensor]) -> Case:
        """The same with every tensor replaced."""

        def replaced(x: Any) -> Any:
            return function(x) if isinstance(x, Tensor) else x

        q, k, v, dout, sink = (replaced(x) for x in (self.q, self.k, self.v, self.dout, self.sink))
        return Case(q, k, v, dout, sink, {name: replaced(x) for name, x in self.terms.items()})

    def to(self, dtype: torch.dtype) -> Case:
        """The same with q, k, v and dout in `dtype`."""
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        return Case(q, k, v, dout, self.sink, self.terms)

    def hidden(self) -> Tensor:
        """Which keys each query does not see, [B or 1, 1, Sq, Sk]."""
        index = torch.arange(self.k.size(2), device=self.k.device)
        first, end = (self.terms[name].unsqueeze(-1) for name in ("first", "end"))
        hidden: Tensor = (index < first) | (index >= end)
        return hidden.unsqueeze(1)

    def kept(self) -> Tensor | None:
        """What dropout multiplies the weights with, [B, Hq, Sq, Sk]."""
        p, seed = self.terms["dropout_p"], self.terms["seed"]
        if p == 0:
            return None
        B, Hq = self.q.shape[:2]
        query, key = (self.terms[name].long() for name in ("query_positions", "key_positions"))
        batch = (torch.arange(B, device=self.q.device) + self.terms["first_batch"]).view(-1, 1, 1, 1)
        head = (torch.arange(Hq, device=self.q.device) + self.terms["first_head"]).view(-1, 1, 1)
        word, *_ = philox_words(key, query[:, None], head, batch, (seed & 0xFFFFFFFF, seed >> 32))
        kept: Tensor = (word >= round(p * 2**32)) / (1 - p)
        return kept

    def bias(self) -> Tensor | None:
        """ALiBi's addition to the logits, [B or 1, Hq, Sq, Sk]."""
        if self.terms["alibi_slopes"] is None:
            return None
        slopes: Tensor = self.terms["alibi_slopes"]
        query, key = self.terms["query_positions"], self.terms["key_positions"]
        bias: Tensor = -slopes[:, :, None, None] * (query[:, None] - key).abs()
        return bias


Results = dict[str, Tensor]


def poisoned(x: Tensor) -> Tensor:
    """Like x, full of NaN."""
    return torch.full_like(x, float("nan"))


def run(kernels: Any, given: Case, delta: Tensor | None = None) -> Results:
    """Forward and backward by a module that offers what `reference_attention` does."""
    out = poisoned(given.dout)
    lse = kernels.attention_forward(given.q, given.k, given.v, given.sink, out, **given.terms)
    dq, dk, dv = map(poisoned, (given.q, given.k, given.v))
    delta = kernels.attention_delta(out, given.dout) if delta is None else delta
    kernels.attention_backward(
        given.dout, given.q, given.k, given.v, lse, delta, dq, dk, dv, False, **given.terms
    )
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def run_plain(given: Case) -> Results:
    """The same without lse by plain torch and autograd, in the case's dtype."""
    q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    bias, kept = given.bias(), given.kept()
    out = reference.attention(
        q,
        k,
        v,
        hidden=given.hidden(),
        scale=given.terms["scale"],
        softcap=given.terms["softcap"],
        sink=given.sink,
        bias=None if bias is None else bias.to(q.dtype if q.dtype == torch.float64 else torch.float32),
        kept=kept,
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), given.dout)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def assert_exact(results: Results, given: Case) -> None:
    """At most twice the error of plain torch in the same dtype, or the dtype's rounding."""
    plain, exact = run_plain(given), run_plain(given.to(torch.float64))
    for name, expected in exact.items():
        assert results[name].dtype == plain[name].dtype, name
        assert results[name].shape == plain[name].shape, name
        floor = FLOOR[results[name].dtype]
        assert_as_exact_as(results[name], plain[name], expected, floor=floor, name=name)
    assert_lse_exact(results["lse"], given)


def assert_lse_exact(lse: Tensor, given: Case) -> None:
    """-inf exactly where nothing is seen, and float32's rounding elsewhere."""
    double = given.to(torch.float64)
    expected = reference_attention.attention_forward(
        double.q, double.k, double.v, double.sink, poisoned(double.dout), **double.terms
    )
    nothing = expected == float("-inf")
    assert lse.dtype == torch.float32
    assert torch.equal(lse == float("-inf"), nothing)
    torch.testing.assert_close(
        lse.masked_fill(nothing, 0).double(), expected.masked_fill(nothing, 0), rtol=1e-6, atol=2e-6
    )
