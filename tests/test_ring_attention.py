"""Ring attention with its options, on two axes, and inside what torch offers; and what it sends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paracore import attention, masks
from paracore.ops.ring_attention import ring_attention
from paracore.parallel import MeshAxis
from paracore.parallel import layout as layouts
from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask
from paracore.parallel.ring_plan import plan_ring
from tests.conftest import Launch
from tests.numerics import assert_as_exact_as, randn
from tests.ring_cases import (
    BF16,
    F32,
    F64,
    FLOOR,
    LAYOUTS,
    NAMES,
    STRATEGIES,
    Given,
    all_layouts,
    all_masks,
    assert_right,
    cp_and_heads,
    cp_axis,
    dense,
    joined,
    layout_named,
    ring,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    """Up to rounding in float64."""
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


# ---------------------------------------------------------------- options and axes


def with_everything(Hq: int) -> dict[str, Any]:
    """Every option there is; sink and slopes differ from head to head."""
    slopes = torch.arange(1, Hq + 1) / Hq
    numbers = {"softcap": 2.0, "scale": 0.4, "dropout_p": 0.25, "seed": 11, "first_batch": 3, "first_head": 5}
    return {**numbers, "alibi_slopes": slopes, "sink": randn(Hq, seed=8)}


def optional_cases(size: int) -> list[tuple[Mask, Layout, str]]:
    """All masks with all strategies, and each with one of the layouts."""
    ways = itertools.product(enumerate(all_masks(77).values()), enumerate(STRATEGIES))
    return [
        (mask, layout_named(LAYOUTS[(m + s) % 4], 77, size, mask), strategy)
        for (m, mask), (s, strategy) in ways
    ]


def run_with_every_option(size: int) -> list[list[Tensor]]:
    axis, given = cp_axis(), Given.random(77, F64, Hq=2 * size, Hkv=size)
    return [
        ring(given, mask, layout, axis, strategy=strategy, **with_everything(2 * size))
        for mask, layout, strategy in optional_cases(size)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_option_works_as_on_one_device(launch: Launch, size: int) -> None:
    """Kind of fault: window, sink, softcap, ALiBi or dropout ignored, or wrong in backward. In float64."""
    results = launch(size, run_with_every_option, size)
    given = Given.random(77, F64, Hq=2 * size, Hkv=size)
    expected = {mask: dense(given, mask, **with_everything(2 * size)) for mask in all_masks(77).values()}
    for (mask, layout, _), *parts in zip(optional_cases(size), *results, strict=True):
        assert_equal(joined(parts, layout), expected[mask])


def run_on_two_axes(cp: int) -> list[list[Tensor]]:
    """So many ranks of the sequence times two among whom the heads are divided."""
    axis, heads_axis, part = cp_and_heads(cp, 2)
    given = Given.random(77, F64, Hq=8, Hkv=4)
    return [
        ring(given, mask, layout, axis, part, heads_axis=heads_axis, strategy=s, **with_everything(8))
        for mask, layout, s in optional_cases(2 * cp)
        if s != "ulysses"
    ]


@pytest.mark.parametrize("cp", [2, 3])
def test_heads_may_be_divided_over_a_second_axis(launch: Launch, cp: int) -> None:
    results, given = launch(2 * cp, run_on_two_axes, cp), Given.random(77, F64, Hq=8, Hkv=4)
    cases = [case for case in optional_cases(2 * cp) if case[2] != "ulysses"]
    expected = {mask: dense(given, mask, **with_everything(8)) for mask in all_masks(77).values()}
    for (mask, layout, _), *parts in zip(cases, *results, strict=True):
        assert_equal(joined(parts, layout), expected[mask])


def lse_and_its_gradient() -> list[list[Tensor]]:
    axis, results = cp_axis(), []
    layout = layouts.zigzag(20, axis.size)
    for strategy in STRATEGIES:
        q, k, v, _ = Given.random(20, F64, Hq=6, Hkv=3).of_rank(layout, axis.rank)
        out, lse = ring_attention(q, k, v, masks.causal(), layout, axis, strategy=strategy, return_lse=True)
        results.append([lse.detach(), *torch.autograd.grad((out.sum() + lse.sin().sum()), (q, k, v))])
    return results


def test_lse_and_its_gradient(launch: Launch) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in Given.random(20, F64, Hq=6, Hkv=3)[:3])
    out, lse = attention(q, k, v, return_lse=True)
    expected = [lse.detach(), *torch.autograd.grad((out.sum() + lse.sin().sum()), (q, k, v))]
    for parts in zip(*launch(3, lse_and_its_gradient), strict=True):
        for x, y in zip(zip(*parts, strict=True), expected, strict=True):
            torch.testing.assert_close(layouts.zigzag(20, 3).join(x, 2), y)


# ---------------------------------------------------------------- what users do with it


def gradients(given: Given, axis: MeshAxis, *, again: bool, **options: Any) -> tuple[list[Tensor], int]:
    """out, dq, dk and dv of a checkpointed call, or an ordinary one, and the bytes sent in backward."""
    layout, mask = layouts.zigzag(77, axis.size), all_masks(77)["documents"]
    q, k, v, dout = given.of_rank(layout, axis.rank)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        doubled: Tensor = ring_attention(q * 2, k, v, mask, layout, axis, check=False, **options)
        return doubled

    out: Tensor = checkpoint(call, q, k, v, use_reentrant=False) if again else call(q, k, v)
    axis.ledger.take()
    grads = torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))
    return [out.detach(), *grads], sum(row.bytes for row in axis.ledger.take())


def run_checkpointed() -> list[tuple[list[Tensor], bool, bool]]:
    axis, results = cp_axis(), []
    given = Given.random(77, F32, Hq=6, Hkv=3)
    for strategy, low in itertools.product(STRATEGIES, (False, True)):
        with torch.autocast("cpu", BF16, enabled=low):
            once, sent = gradients(given, axis, again=False, strategy=strategy)
            twice, sent_again = gradients(given, axis, again=True, strategy=strategy)
        results.append((once, all(map(torch.equal, once, twice)), sent_again > sent > 0))
    return results


def test_autocast_and_checkpointing(launch: Launch) -> None:
    """Kind of fault: float32 in spite of autocast; a forward that differs when it is repeated."""
    results, given = launch(3, run_checkpointed), Given.random(77, F32, Hq=6, Hkv=3)
    mask = all_masks(77)["documents"]
    for index, (strategy, low) in enumerate(itertools.product(STRATEGIES, (False, True))):
        parts, same, repeated = zip(*(result[index] for result in results), strict=True)
        assert all(same)
        assert any(repeated), "checkpointing must have sent the keys once more"
        ours = joined(list(parts), layouts.zigzag(77, 3))
        with torch.autocast("cpu", BF16, enabled=low):
            plain = doubled(given, mask, impl="reference")
        exact = doubled(given.to(F64), mask)
        assert ours[0].dtype == (BF16 if low else F32)
        for name, x, y, exact_x in zip(NAMES, ours, plain, exact, strict=True):
            assert x.dtype == y.dtype
            label = f"{name}, {strategy}"
            assert_as_exact_as(x, y, exact_x, floor=FLOOR[BF16 if low else F32], name=label)


def doubled(given: Given, mask: Mask, **options: Any) -> list[Tensor]:
    """As `gradients` doubles q, on one device."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    out: Tensor = attention(leaves[0] * 2, leaves[1], leaves[2], mask, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout.to(out.dtype))]


def views() -> dict[str, Any]:
    """Ways in which the memory of [B, H, S, D] may lie, as views of leaves that want gradients."""
    return {
        "as it is": lambda x: (leaf := x.clone().requires_grad_(), leaf),
        "transposed": lambda x: (
            leaf := x.transpose(1, 2).contiguous().requires_grad_(),
            leaf.transpose(1, 2),
        ),
        "part": lambda x: (leaf := torch.cat([x, x], 1).requires_grad_(), leaf[:, : x.size(1)]),
        "every other": lambda x: (leaf := x.repeat_interleave(2, -1).requires_grad_(), leaf[..., ::2]),
    }


def run_views() -> list[tuple[torch.dtype, str, str, bool]]:
    axis = cp_axis()
    layout, mask = layouts.zigzag(77, axis.size), all_masks(77)["both ways"]
    results = []
    for dtype, strategy in itertools.product((F32, BF16), STRATEGIES):
        whole = Given.random(77, dtype, Hq=6, Hkv=3)
        expected: list[Tensor] = []
        for name, view in views().items():
            held = [view(layout.shard(tensor, axis.rank, 2)) for tensor in whole]
            q, k, v, dout = (seen for _, seen in held)
            assert name == "as it is" or not q.is_contiguous()
            out = ring_attention(q, k, v, mask, layout, axis, strategy=strategy, check=False)
            torch.autograd.backward(out, dout.detach())
            ours = [out.detach()] + [seen_gradient(name, leaf.grad, q) for leaf, _ in held[:3]]
            expected = expected or ours
            results.append((dtype, strategy, name, all(map(torch.equal, ours, expected))))
    return results


def seen_gradient(name: str, gradient: Tensor, q: Tensor) -> Tensor:
    """The gradient of a leaf, as that of its view; the rest of it must be zero."""
    if name == "transposed":
        return gradient.transpose(1, 2)
    if name == "as it is":
        return gradient
    used, rest = gradient.chunk(2, 1) if name == "part" else (gradient[..., ::2], gradient[..., 1::2])
    assert not rest.any()
    return used


def test_tensors_may_lie_in_memory_as_they_like(launch: Launch) -> None:
    """Kind of fault: strides ignored. Not by one bit."""
    for results in launch(3, run_views):
        assert len(results) == 24
        assert [result for result in results if not result[-1]] == []


LARGE = list(itertools.product((F32, BF16), (0.0, 20.0), ("causal", "both ways", "documents"), STRATEGIES))


def with_large_logits(dtype: torch.dtype) -> Given:
    """Logits of some hundreds."""
    given = Given.random(77, F64, Hq=6, Hkv=3)
    return Given(given.q * 30, given.k * 3, given.v, given.dout).to(dtype)


def run_large() -> list[list[Tensor]]:
    axis = cp_axis()
    layout = layouts.zigzag(77, axis.size)
    return [
        ring(
            with_large_logits(dtype),
            all_masks(77)[mask],
            layout,
            axis,
            strategy=strategy,
            softcap=softcap,
            check=False,
        )
        for dtype, softcap, mask, strategy in LARGE
    ]


def test_large_logits(launch: Launch) -> None:
    """Kind of fault: a running maximum that overflows or is forgotten between steps of the ring."""
    results = launch(3, run_large)
    expected = {}
    for dtype, softcap, mask, _ in LARGE:
        given, key = with_large_logits(dtype), (dtype, softcap, mask)
        if key not in expected:
            plain = dense(given, all_masks(77)[mask], impl="reference", softcap=softcap)
            expected[key] = plain, dense(given.to(F64), all_masks(77)[mask], softcap=softcap)
    for (dtype, softcap, mask, strategy), *parts in zip(LARGE, *results, strict=True):
        label = f"{mask}, {strategy}, softcap={softcap}"
        ours = joined(parts, layouts.zigzag(77, 3))
        assert_right(ours, *expected[dtype, softcap, mask], with_large_logits(dtype), label)


# ---------------------------------------------------------------- what moves


def bytes_sent() -> dict[str, list[int]]:
    """Forward and backward, of every mask and layout."""
    axis, sent = cp_axis(), {}
    for strategy in ("ring", "all_gather"):
        sent[strategy] = list[int]()
        for mask in all_masks(127).values():
            for layout in all_layouts(127, axis.size, mask).values():
                q, k, v, _ = Given.random(127, BF16).of_rank(layout, axis.rank)
                axis.ledger.take()
                out = ring_attention(q, k, v, mask, layout, axis, strategy=strategy, check=False)
                sent[strategy].append(sum(row.bytes for row in axis.ledger.take()))
                out.sum().backward()
                sent[strategy].append(sum(row.bytes for row in axis.ledger.take()))
    return sent


def test_the_plan_knows_every_byte_beforehand(launch: Launch) -> None:
    """Keys are sent as they are, for the key heads alone, and gradients in float32."""
    key = 2 * 2 * (16 + 8)  # B * Hkv * (D + Dv)
    for rank, sent in enumerate(launch(3, bytes_sent)):
        for strategy, total in sent.items():
            expected: list[int] = []
            for mask in all_masks(127).values():
                for layout in all_layouts(127, 3, mask).values():
                    keys, gradients = plan_ring(mask, layout).keys_sent(rank, strategy)
                    expected += [2 * key * keys, 2 * key * keys + 4 * key * gradients]
            assert total == expected
            assert any(total)
