"""The attention op: what its arguments mean, in every implementation, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import paracore
from paracore import Positions, attention, masks, reference
from paracore.errors import UsageError
from paracore.ops.attention_terms import empty_in_order_of
from paracore.parallel.masks import Mask
from tests.attention_op_cases import (
    BF16,
    F16,
    F32,
    F64,
    FLOOR,
    assert_exact,
    every_implementation,
    hidden,
    poisoned_memory,
    qkv,
    with_gradients,
)
from tests.numerics import randn


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


# ---------------------------------------------------------------- what it computes


MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.sliding_window(3, 1),
    "documents": masks.causal() & masks.documents([0, 4, 5, 9]),
    "prefix": masks.prefix_lm(torch.tensor([0, 4])),
    "chunked": masks.causal() & masks.chunked(4),
    "padded left": masks.causal() & masks.key_range(torch.tensor([0, 5]), 9),
    "nothing for some": masks.sliding_window(2, 2) & masks.key_range(4, 6),
}


@every_implementation
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_every_mask(impl: str, dtype: torch.dtype, mask: Mask) -> None:
    unseen = hidden(mask, 9, 9)
    assert_exact(
        lambda q, k, v: attention(q, k, v, mask, impl=impl),
        lambda q, k, v: reference.attention(q, k, v, hidden=unseen),
        *qkv(dtype=dtype),
    )


@every_implementation
@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (6, 2), (3, 1)])
def test_grouped_queries_and_value_heads_of_another_size(
    impl: str, dtype: torch.dtype, Hq: int, Hkv: int
) -> None:
    assert_exact(
        lambda q, k, v: attention(q, k, v, impl=impl),
        lambda q, k, v: reference.attention(q, k, v, causal=True),
        *qkv(Hq=Hq, Hkv=Hkv, D=24, Dv=16, dtype=dtype),
    )


@every_implementation
def test_scale_softcap_alibi_and_sink_together(impl: str, dtype: torch.dtype) -> None:
    """Kind of fault: one of them ignored, or right in forward and wrong in backward. All in one call."""
    slopes, mask = torch.tensor([0.5, 0.25, 0.125, 1.0]), masks.causal() & masks.sliding_window(5)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    sink = randn(4, seed=4, dtype=dtype)

    def plain(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        bias = -slopes.to(v.dtype if v.dtype == F64 else F32)[:, None, None] * distance
        unseen = hidden(mask, 9, 9)
        return reference.attention(q, k, v, hidden=unseen, scale=0.7, softcap=2.0, sink=sink, bias=bias)

    def fused(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return attention(q, k, v, mask, scale=0.7, softcap=2.0, sink=sink, alibi_slopes=slopes, impl=impl)

    assert_exact(fused, plain, *qkv(dtype=dtype), sink)
    for change in (
        {"scale": None},
        {"softcap": 0.0},
        {"sink": None},
        {"alibi_slopes": None},
        {"mask": masks.full()},
    ):
        arguments = {"mask": mask, "scale": 0.7, "softcap": 2.0, "sink": sink, "alibi_slopes": slopes}
        q, k, v = qkv(dtype=dtype)
        changed: Tensor = cast(Any, attention)(q, k, v, **(arguments | change), impl=impl)
        assert not torch.equal(changed, fused(q, k, v, sink)), change


@every_implementation
def test_alibi_slopes_may_differ_over_the_batch(impl: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    together = attention(q, k, v, alibi_slopes=slopes, impl=impl)
    for b in range(2):
        alone = attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], alibi_slopes=slopes[b], impl=impl)
        torch.testing.assert_close(together[b : b + 1], alone)


@every_implementation
def test_dropout_multiplies_the_weights_in_both_directions(impl: str, dtype: torch.dtype) -> None:
    """Which weights are kept is read off the values' side: with v = 1 at one key only."""
    q, k, _ = qkv(dtype=F64)
    weights = attention(q, k, torch.eye(9, dtype=F64).expand(2, 2, 9, 9), impl="reference")
    dropped = attention(
        q, k, torch.eye(9, dtype=F64).expand(2, 2, 9, 9), dropout_p=0.4, seed=5, impl="reference"
    )
    kept = torch.where(weights > 0, dropped / weights, 0.0)
    assert ((kept == 0) | ((kept - 1 / 0.6).abs() < 1e-12)).all()
    assert 0.5 < (kept > 0).sum() / (weights > 0).sum() < 0.7
    assert_exact(
        lambda q, k, v: attention(q, k, v, dropout_p=0.4, seed=5, impl=impl),
        lambda q, k, v: reference.attention(
            q, k, v, causal=True, kept=kept.to(v.dtype if v.dtype == F64 else F32)
        ),
        *qkv(dtype=dtype),
    )


@every_implementation
def test_dropout_depends_on_global_indices_alone(impl: str, dtype: torch.dtype) -> None:
    """Kind of fault: dropout that differs on ranks where it must be equal. A part draws as the whole does."""
    q, k, v = qkv(Hkv=4, dtype=dtype)
    whole = attention(q, k, v, masks.causal(), dropout_p=0.5, seed=1 << 40, impl=impl)
    part = attention(
        q[1:, 2:, 4:],
        k[1:, 2:],
        v[1:, 2:],
        masks.causal(),
        dropout_p=0.5,
        seed=1 << 40,
        first_batch=1,
        first_head=2,
        query_positions=Positions.contiguous(5, start=4),
        impl=impl,
    )
    torch.testing.assert_close(part, whole[1:, 2:, 4:])
    assert not torch.equal(whole, attention(q, k, v, dropout_p=0.5, seed=(1 << 40) + 1, impl=impl))
    assert not torch.equal(whole, attention(q, k, v, dropout_p=0.5, seed=0, impl=impl))


@every_implementation
def test_queries_may_sit_anywhere_among_the_keys(impl: str, dtype: torch.dtype) -> None:
    """Decoding and chunked prefill: the last rows of the whole, and keys that a rank holds in two pieces."""
    q, k, v = qkv(dtype=dtype)
    whole = attention(q, k, v, impl=impl)
    last = attention(q[:, :, 7:], k, v, query_positions=Positions.contiguous(2, start=7), impl=impl)
    torch.testing.assert_close(last, whole[:, :, 7:])
    by_tensor = attention(q[:, :, 7:], k, v, query_positions=torch.tensor([7, 8]), impl=impl)
    assert torch.equal(by_tensor, last)
    held = Positions(((0, 2), (6, 3)))
    index = held.tensor()
    some = attention(q, k[:, :, index], v[:, :, index], key_positions=held, impl=impl)
    unseen = hidden(masks.causal(), 9, 9).clone()
    unseen[..., 2:6] = True
    expected = reference.attention(q.double(), k.double(), v.double(), hidden=unseen)
    torch.testing.assert_close(some.double(), expected, rtol=0, atol=4 * FLOOR[dtype])


@every_implementation
def test_a_query_that_sees_nothing_gets_zero(impl: str, dtype: torch.dtype) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(dtype=dtype))
    out, lse = attention(q, k, v, masks.key_range(torch.tensor([9, 0]), 9), return_lse=True, impl=impl)
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()
    out.sum().backward()
    assert q.grad is not None
    for leaf in (q, k, v):
        assert leaf.grad is not None
        assert (leaf.grad[0] == 0).all()
        assert leaf.grad[1].isfinite().all()


@every_implementation
@pytest.mark.parametrize(("Sq", "Sk"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(impl: str, dtype: torch.dtype, Sq: int, Sk: int) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(Sq=Sq, Sk=Sk, dtype=dtype))
    out, lse = attention(q, k, v, return_lse=True, impl=impl)
    assert out.shape == (2, 4, Sq, 16)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    out.sum().backward()
    for leaf in (q, k, v):
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()


@every_implementation
def test_huge_logits_neither_overflow_nor_lose_the_largest(impl: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    results = with_gradients(lambda q, k, v: attention(q, k, v, scale=2e3, impl=impl), q, k, v)
    assert all(result.isfinite().all() for result in results)
    logits = (q.double() * 2e3) @ k.double().repeat_interleave(2, 1).mT
    assert logits.abs().max() > 1e4
    largest = logits.masked_fill(hidden(masks.causal(), 9, 9), float("-inf")).argmax(-1)
    picked = v.repeat_interleave(2, 1).gather(2, largest.unsqueeze(-1).expand(-1, -1, -1, 16))
    torch.testing.assert_close(results[0], picked)


@every_implementation
def test_lse_is_differentiable(impl: str, dtype: torch.dtype) -> None:
    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v, return_lse=True, impl=impl)
        return torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], dim=-1)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = F64 if q.dtype == F64 else F32
        logits = q.to(wide) @ k.to(wide).repeat_interleave(2, 1).mT / 4
        lse = logits.masked_fill(hidden(masks.causal(), 9, 9), float("-inf")).logsumexp(-1, keepdim=True)
        return torch.cat([reference.attention(q, k, v, causal=True).to(wide), lse], dim=-1)

    assert_exact(fused, plain, *qkv(dtype=dtype))
    q, k, v = (tensor.requires_grad_() for tensor in qkv(dtype=dtype))
    _, lse = attention(q, k, v, return_lse=True, impl=impl)
    dv = torch.autograd.grad(lse.sum(), v)[0]
    assert (dv == 0).all()


@every_implementation
@pytest.mark.parametrize("order", [(2, 0, 1, 3), (0, 2, 1, 3), (3, 1, 0, 2)], ids=str)
def test_any_strides(impl: str, dtype: torch.dtype, order: tuple[int, ...]) -> None:
    """Kind of fault: transposed inputs read as if contiguous. Most sizes are equal, which would hide it."""

    def laid_out(tensor: Tensor) -> Tensor:
        inverse = sorted(range(4), key=order.__getitem__)
        return tensor.permute(order).contiguous().permute(inverse)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(laid_out(q), laid_out(k), laid_out(v), impl=impl)

    inputs = qkv(B=4, Hq=4, Hkv=4, Sq=4, Sk=4, dtype=dtype)
    expected = with_gradients(lambda q, k, v: attention(q, k, v, impl=impl), *inputs)
    for strided, contiguous in zip(with_gradients(fused, *inputs), expected, strict=True):
        torch.testing.assert_close(strided, contiguous)


def test_an_expanded_gradient_and_a_slice_of_fused_projections() -> None:
    projected = randn(7, 2, 3 * 4 * 16, seed=0, dtype=F32).requires_grad_()  # [S, B, 3 * H * D]
    q, k, v = projected.unflatten(-1, (3, 4, 16)).permute(2, 1, 3, 0, 4)  # each [B, H, S, D]
    out = attention(q, k, v)
    assert out.permute(2, 0, 1, 3).is_contiguous()  # [S, B, H, D], as the output projection wants it
    (gradient,) = torch.autograd.grad(out.sum(), projected)
    plain = reference.attention(q, k, v, causal=True)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), projected)[0])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1)])
def test_outputs_lie_in_memory_as_the_query_does(order: tuple[int, int, int]) -> None:
    x = torch.empty(2, 3, 4, 5).permute(*order, 3)
    like = empty_in_order_of(x, 7)
    assert like.shape == (*x.shape[:3], 7)
    assert sorted(range(3), key=like.stride) == sorted(range(3), key=x.stride)
    assert sorted(like.stride())[0] == 1
    assert like.untyped_storage().nbytes() == like.nbytes


# ---------------------------------------------------------------- what is refused


def change(**changes: Any) -> dict[str, Any]:
    return changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (change(q=torch.ones(4, 9, 16)), r"q is float32 \[4, 9, 16\], must be float \[B, H, S, D\]"),
        (change(q=torch.ones(2, 4, 9, 16, dtype=torch.int64)), r"q is int64 .*must be float"),
        (change(k=torch.ones(2, 2, 9, 16, dtype=BF16)), "k is bfloat16 on cpu, must be as q: float32 on cpu"),
        (
            change(v=torch.ones(2, 2, 9, 16, device="meta")),
            "v is float32 on meta, must be as q: float32 on cpu",
        ),
        (change(k=torch.ones(2, 2, 9, 8)), r"k is \[2, 2, 9, 8\], must be \[2, Hkv, Sk, 16\]"),
        (change(k=torch.ones(1, 2, 9, 16)), r"k is \[1, 2, 9, 16\], must be \[2, Hkv, Sk, 16\]"),
        (change(v=torch.ones(2, 2, 8, 16)), r"v is \[2, 2, 8, 16\], must be \[2, 2, 9\] and Dv >= 1, as k"),
        (
            change(k=torch.ones(2, 3, 9, 16), v=torch.ones(2, 3, 9, 16)),
            "q has 4 heads, must have a multiple of the 3",
        ),
        (
            change(mask=masks.key_range(0, torch.tensor([1, 2, 3]))),
            "mask is for a batch of 3, but q has a batch of 2",
        ),
        (change(softcap=-1.0), "softcap=-1.0: must be 0, for none, or more"),
        (change(softcap=float("inf")), "softcap=inf: must be .* finite"),
        (change(scale=float("nan")), "scale=nan: must be finite"),
        (change(sink=torch.ones(3)), r"sink is .* \[3\] on cpu, must be float \[4\], one per query head"),
        (
            change(alibi_slopes=torch.ones(3)),
            r"alibi_slopes is float32 \[3\] on cpu, must be float \[4\] or \[2, 4\]",
        ),
        (change(alibi_slopes=torch.ones(4, requires_grad=True)), "alibi_slopes requires a gradient"),
        (change(dropout_p=1.0, seed=0), "dropout_p=1.0: must be at least 0 and less than 1"),
        (change(dropout_p=0.5), "dropout_p=0.5 needs a seed"),
        (change(dropout_p=0.5, seed=1 << 63), "must be a signed 64-bit integer"),
        (change(query_positions=Positions.contiguous(8)), "query_positions has 8 positions, must have 9"),
        (
            change(key_positions=torch.ones(9)),
            r"key_positions is float32 \[9\] on cpu, must be integers \[9\]",
        ),
        (change(key_positions=torch.zeros(9, dtype=torch.int64)), "key positions must increase"),
        (change(mask=masks.documents([0, 5])), "boundaries end at 5, must end at 9 or beyond"),
        (
            change(impl="native", q=torch.ones(2, 4, 9, 300), k=torch.ones(2, 2, 9, 300)),
            "must be at most 256",
        ),
        (
            change(impl="triton", q=torch.ones(2, 4, 9, 300), k=torch.ones(2, 2, 9, 300)),
            "must be at most 256",
        ),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    q, k, v = qkv(dtype=F32)
    with pytest.raises(UsageError, match=message):
        attention(**({"q": q, "k": k, "v": v} | changes))


def test_half_precision_on_a_cpu_takes_the_reference() -> None:
    q, k, v = qkv(dtype=F16)
    assert torch.equal(attention(q, k, v), attention(q, k, v, impl="reference"))
    with pytest.raises(UsageError, match=r"implementation 'native' .*float16"):
        attention(q, k, v, impl="native")


def test_the_package_offers_it() -> None:
    assert paracore.attention is attention
    assert set(paracore.__all__) <= set(dir(paracore))
