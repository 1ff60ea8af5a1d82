"""What attention's kernels must do, in plain torch: one S x S matrix at a time, any float dtype.

The functions here are the contract of every implementation (`paracore.kernels.attention`, `paracore._C`).
With t = log2(e) * (softcap(scale * q k^T) - alibi_slope * |query position - key position|), and t = -inf
where a query does not see a key, a row's running state over the keys walked so far is (Milakov &
Gimelshein 2018; Dao et al. 2022)

    m = max(t)      l = sum of exp2(t - m)      acc = sum of kept * exp2(t - m) * v

in float32 (float64 for float64); m is called row_max and l row_sum. Continuing it with more keys,

    m' = max(m, max(t))      l' = l * exp2(m - m') + sum of exp2(t - m')      acc' likewise

and the end is out = acc / l and lse = ln(2) * (m + log2(l)). A sink is the state m = log2(e) * sink, l = 1,
acc = 0. A row that has seen nothing has m = -inf, l = 0, acc = 0, and ends as out = 0, lse = -inf.

Backward, with p = exp2(t - log2(e) * lse), and delta = sum(out * dout) - dlse per row:

    dv = (kept * p)^T dout      dt = p * (kept * dout v^T - delta)      ds = dt * (1 - (softcap(s) / cap)^2)
    dq = scale * ds k      dk = scale * ds^T q

| tensor | shape | dtype |
|---|---|---|
| q | [B, Hq, Sq, D] | any float |
| k, v | [B, Hkv, Sk, D], [B, Hkv, Sk, Dv], Hkv divides Hq | q's |
| out, dout | [B, Hq, Sq, Dv] | q's |
| row_max, row_sum, lse, delta | [B, Hq, Sq] | float32 |
| acc | [B, Hq, Sq, Dv] | float32 |
| first, end | [B or 1, Sq] | int32 |
| alibi_slopes | [B or 1, Hq] | float32 |
| query_positions, key_positions | [Sq], [Sk] | int32 |
"""

from __future__ import annotations

import math
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from paracore.counter_random import philox_words
from paracore.reference import accumulation_dtype

LOG2_E = math.log2(math.e)


class Terms(TypedDict):
    """Everything that decides a logit and its weight besides q and k.

    first, end: query i sees the keys with first[i] <= index < end[i], indices into k. A query that sees
        nothing has first = Sk and end = 0, so that minima and maxima over a tile need no exception.
    scale: factor of q k^T. softcap: 0 for none.
    alibi_slopes: None for none.
    dropout_p: probability with which a weight is dropped, in [0, 1): where the first word of
        Philox(counter = (key position, query position, head, batch), key = seed) is less than
        `dropout_threshold`. Others are divided by 1 - p.
    seed: 64 bits, the generator's key. first_batch, first_head: global indices of q's first batch and
        head, for the random numbers are functions of global indices alone.
    query_positions, key_positions: global positions, which ALiBi and dropout need; None without these.
    """

    first: Tensor
    end: Tensor
    scale: float
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float
    seed: int
    first_batch: int
    first_head: int
    query_positions: Tensor | None
    key_positions: Tensor | None


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, **terms: Unpack[Terms]
) -> Tensor:
    """Write the attention of all keys to `out`, in one pass from a fresh state. Returns lse.

    sink: [Hq] float32 or None.
    """
    dtype = accumulation_dtype(q.dtype)
    rows = [*q.shape[:3]]
    row_max = torch.full(rows, float("-inf"), dtype=dtype, device=q.device)
    row_sum = torch.zeros(rows, dtype=dtype, device=q.device)
    acc = torch.zeros([*rows, v.size(3)], dtype=dtype, device=q.device)
    if sink is not None:
        row_max.copy_((sink.to(dtype) * LOG2_E).view(1, -1, 1))
        row_sum.fill_(1.0)
    attention_continue(q, k, v, row_max, row_sum, acc, **terms)
    return attention_finish(row_max, row_sum, acc, out)


def attention_continue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    acc: Tensor,
    **terms: Unpack[Terms],
) -> None:
    """Continue the state, in place, with the keys of k."""
    t, _ = _logits(q, k, terms)
    larger = torch.maximum(row_max, t.amax(-1)) if t.size(-1) else row_max.clone()
    base = larger.masked_fill(larger == float("-inf"), 0.0)
    weights = torch.exp2(t - base.unsqueeze(-1))
    rescale = torch.exp2(row_max - base)
    row_sum.mul_(rescale).add_(weights.sum(-1))
    weights = _drop(weights, terms)
    grouped = _product(_fold_group(weights, k.size(1)), v.to(weights.dtype))
    acc.mul_(rescale.unsqueeze(-1)).add_(grouped.view(acc.shape))
    row_max.copy_(larger)


def attention_finish(row_max: Tensor, row_sum: Tensor, acc: Tensor, out: Tensor) -> Tensor:
    """Write acc / row_sum to `out`. Returns lse."""
    seen = row_sum > 0
    out.copy_(acc / torch.where(seen, row_sum, 1.0).unsqueeze(-1))
    return torch.where(seen, (row_max + torch.log2(row_sum)) / LOG2_E, float("-inf"))


def attention_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Return sum(out * dout) over the last dim, [B, Hq, Sq]."""
    dtype = accumulation_dtype(out.dtype)
    return (out.to(dtype) * dout.to(dtype)).sum(-1)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
    **terms: Unpack[Terms],
) -> None:
    """Write the gradients to dq, dk, dv, or add them if `accumulate`.

    dq, dk, dv: shaped as q, k, v; in q's dtype, or float32 (each sum is rounded once: when it is written).
    """
    Hkv = k.size(1)
    t, softcap_slope = _logits(q, k, terms)
    dtype = t.dtype
    seen = t != float("-inf")
    base = (lse.to(dtype) * LOG2_E).unsqueeze(-1)
    p = torch.exp2(torch.where(seen, t - base, float("-inf")))  # lse is -inf where nothing is seen
    rows = _fold_group(dout.to(dtype), Hkv)
    dp = _product(rows, v.to(dtype).mT).view(p.shape)
    ds = p * (_drop(dp, terms) - delta.to(dtype).unsqueeze(-1)) * softcap_slope * terms["scale"]
    folded_ds = _fold_group(ds, Hkv)
    gradients = (
        (dq, _product(folded_ds, k.to(dtype)).view(q.shape)),
        (dk, _product(folded_ds.mT, _fold_group(q.to(dtype), Hkv))),
        (dv, _product(_fold_group(_drop(p, terms), Hkv).mT, rows)),
    )
    for buffer, gradient in gradients:
        buffer.add_(gradient) if accumulate else buffer.copy_(gradient)


def _product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # it would round to 16 bits
        return a @ b


def _fold_group(x: Tensor, heads: int) -> Tensor:
    """[B, Hq, S, N] -> [B, heads, Hq/heads * S, N]: the rows that share a key head, one below another."""
    return (
        x.reshape(x.size(0), heads, -1, x.size(3))
        if x.numel()
        else x.new_zeros(x.size(0), heads, x.size(1) // heads * x.size(2), x.size(3))
    )


def _logits(q: Tensor, k: Tensor, terms: Terms) -> tuple[Tensor, Tensor | float]:
    """Return t [B, Hq, Sq, Sk] and the derivative of the softcap."""
    dtype = accumulation_dtype(q.dtype)
    folded = _fold_group(q.to(dtype) * terms["scale"], k.size(1))
    s = _product(folded, k.to(dtype).mT).view(*q.shape[:3], k.size(2))
    slope: Tensor | float = 1.0
    if terms["softcap"] > 0:
        capped = torch.tanh(s / terms["softcap"])
        s, slope = terms["softcap"] * capped, 1.0 - capped.square()
    if terms["alibi_slopes"] is not None:
        query, key = _positions(terms)
        distance = (query.unsqueeze(-1) - key).abs().to(dtype)  # [Sq, Sk]
        s = s - terms["alibi_slopes"].to(dtype)[:, :, None, None] * distance
    index = torch.arange(k.size(2), device=q.device)
    seen = (terms["first"].unsqueeze(-1) <= index) & (index < terms["end"].unsqueeze(-1))  # [B or 1, Sq, Sk]
    return (s * LOG2_E).masked_fill(~seen.unsqueeze(1), float("-inf")), slope


def _drop(x: Tensor, terms: Terms) -> Tensor:
    """x [B, Hq, Sq, Sk] where its weight is kept, divided by the probability of that; else 0."""
    if terms["dropout_p"] == 0:
        return x
    query, key = _positions(terms)
    B, Hq = x.shape[:2]
    batch = torch.arange(terms["first_batch"], terms["first_batch"] + B, device=x.device)
    head = torch.arange(terms["first_head"], terms["first_head"] + Hq, device=x.device)
    seed = terms["seed"] & 0xFFFFFFFFFFFFFFFF
    word, _, _, _ = philox_words(
        key, query[:, None], head[:, None, None], batch[:, None, None, None], (seed & 0xFFFFFFFF, seed >> 32)
    )
    kept = word >= dropout_threshold(terms["dropout_p"])
    return torch.where(kept, x / (1 - terms["dropout_p"]), 0.0)


def dropout_threshold(dropout_p: float) -> int:
    """Return the number below which a 32-bit random word means: dropped."""
    return min(round(dropout_p * 2.0**32), 0xFFFFFFFF)


def _positions(terms: Terms) -> tuple[Tensor, Tensor]:
    query, key = terms["query_positions"], terms["key_positions"]
    if query is None or key is None:
        raise ValueError("ALiBi and dropout need query_positions and key_positions")
    return query.long(), key.long()
