"""Attention in steps: a state that continues, and gradients that add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from paracore import _C, Positions, attention, masks
from paracore.errors import UsageError
from paracore.ops import attention_state as state_op
from paracore.ops.attention_state import AttentionState, start_state
from paracore.parallel.masks import Mask
from tests.attention_op_cases import (
    BF16,
    F32,
    F64,
    FLOOR,
    every_implementation,
    packed,
    poisoned_memory,
    qkv,
    with_gradients,
)
from tests.numerics import assert_as_exact_as, randn


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


# ---------------------------------------------------------------- in steps


def in_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    cuts: list[int],
    impl: str,
    sink: Tensor | None = None,
    **terms: Any,
) -> list[Tensor]:
    """out, lse, dq, dk, dv from one step for the keys between two cuts."""
    pieces = [slice(begin, end) for begin, end in zip([0, *cuts], [*cuts, k.size(2)], strict=True)]
    packs = [
        packed(
            q,
            k[:, :, piece],
            key_positions=Positions.contiguous(piece.stop - piece.start, piece.start),
            **terms,
        )
        for piece in pieces
    ]
    state = start_state(q, v.size(-1), sink)
    for piece, pack in zip(pieces, packs, strict=True):
        state_op.continue_(state, q, k[:, :, piece], v[:, :, piece], pack, impl)
    out, lse = state_op.finish(state, q, impl)
    delta = state_op.row_delta(out, dout, impl)
    wide = torch.promote_types(q.dtype, F32)
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=wide) for tensor in (q, k, v))
    for piece, pack in zip(pieces, packs, strict=True):
        keys, values = k[:, :, piece], v[:, :, piece]
        dk_piece, dv_piece = dk[:, :, piece], dv[:, :, piece]
        state_op.backward_(dout, q, keys, values, lse, delta, dq, dk_piece, dv_piece, pack, impl)
    return [out, lse, dq, dk, dv]


@every_implementation
@pytest.mark.parametrize("cuts", [[], [4], [1, 4, 4, 8]])
def test_keys_may_come_in_pieces(impl: str, dtype: torch.dtype, cuts: list[int]) -> None:
    """With every term at once: the pieces see what the whole sees, by global position."""
    q, k, v = qkv(dtype=dtype)
    dout, sink = randn(2, 4, 9, 16, seed=5, dtype=dtype), randn(4, seed=6, dtype=dtype)
    terms: dict[str, Any] = {
        "softcap": 2.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]),
        "dropout_p": 0.3,
        "seed": 7,
    }
    mask = masks.causal() & masks.documents([0, 2, 9])

    def whole(dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out, lse = attention(
            leaves[0],
            leaves[1],
            leaves[2],
            mask,
            sink=sink,
            return_lse=True,
            impl="reference",
            **terms,
        )
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    ours = in_steps(q, k, v, dout, cuts, impl, sink, mask=mask, **terms)
    for x, plain, exact in zip(ours, whole(dtype), whole(F64), strict=True):
        assert_as_exact_as(x, plain, exact, floor=FLOOR[dtype])


@pytest.mark.parametrize(("impl", "dtype"), [("native", F32), ("native", BF16)])
@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.sliding_window(100, 30), masks.documents([0, 77, 512])]
)
def test_pieces_cut_between_tiles_give_the_same_bits(impl: str, dtype: torch.dtype, mask: Mask) -> None:
    """Kind of fault: an error that grows with the ring. However many pieces, the state loses nothing."""
    tile = _C.attention_key_tile()
    q, k, v = qkv(B=1, Sq=512, Sk=512, dtype=dtype)
    dout = randn(1, 4, 512, 16, seed=5, dtype=dtype)
    cuts: tuple[list[int], ...] = ([], [2 * tile], [tile, 3 * tile, 4 * tile])
    one, two, many = (in_steps(q, k, v, dout, where, impl, mask=mask) for where in cuts)
    assert all(map(torch.equal, one, two))
    assert all(map(torch.equal, one, many))
    out, lse = attention(q, k, v, mask, return_lse=True, impl=impl)
    assert torch.equal(out, one[0])
    assert torch.equal(lse, one[1])


def test_the_ring_compiles_without_graph_breaks() -> None:
    """Ops that update states are called within an autograd.Function, which full graphs may contain."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            state = start_state(q, v.size(-1))
            state_op.continue_(state, q, k, v, packed(q, k))
            out, lse = state_op.finish(state, q)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
            delta = state_op.row_delta(out, dout)
            state_op.backward_(dout, q, k, v, lse, delta, dq, dk, dv, packed(q, k))
            return dq, dk, dv

    compiled = torch.compile(Attention.apply, fullgraph=True, backend="aot_eager")
    inputs = qkv(dtype=F32)
    assert all(map(torch.equal, with_gradients(compiled, *inputs), with_gradients(attention, *inputs)))


def test_updating_a_state_refuses_tensors_that_require_gradients() -> None:
    """Kind of fault: an operator that mutates, without autograd, gives silently wrong gradients."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv(dtype=F32))
    state = start_state(q.detach(), 16)
    with pytest.raises(UsageError, match=r"requires a gradient, but nothing here is recorded"):
        state_op.continue_(state, q, k, v, packed(q, k))
    with torch.no_grad():
        state_op.continue_(state, q, k, v, packed(q, k))
    assert (state.row_sum > 0).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "row_max",
            torch.zeros(2, 4, 8),
            r"row_max is float32 \[2, 4, 8\], must be contiguous float32 \[2, 4, 9\]",
        ),
        ("row_sum", torch.zeros(2, 4, 9, dtype=F64), r"row_sum is float64 \[2, 4, 9\], must be .* float32"),
        ("acc", torch.zeros(2, 4, 9, 32)[..., ::2], r"acc is float32 \[2, 4, 9, 16\], must be contiguous"),
    ],
)
def test_a_state_that_does_not_fit_is_named(name: str, change: Tensor, message: str) -> None:
    q, k, v = qkv(dtype=F32)
    state = AttentionState(**(start_state(q, 16)._asdict() | {name: change}))
    with pytest.raises(UsageError, match=message):
        state_op.continue_(state, q, k, v, packed(q, k))


def test_gradient_buffers_that_do_not_fit_are_named() -> None:
    q, k, v = qkv(dtype=BF16)
    rows = torch.zeros(2, 4, 9)
    good = [torch.zeros(tensor.shape) for tensor in (q, k, v)]
    for bad in (
        torch.zeros(k.shape, dtype=BF16),
        torch.zeros(2, 2, 9, 32)[..., ::2],
        torch.zeros(2, 2, 8, 16),
    ):
        with pytest.raises(UsageError, match=r"dk is .* must be float32 \[2, 2, 9, 16\]"):
            state_op.backward_(q, q, k, v, rows, rows, good[0], bad, good[2], packed(q, k))
    with pytest.raises(UsageError, match=r"dout is float32 \[2, 4, 9, 16\], must be as out: bfloat16"):
        state_op.row_delta(q, q.float())
