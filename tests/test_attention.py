"""The attention op: what its arguments mean, what autograd, compilation and autocast make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import paracore
from paracore import Positions, attention, masks, reference, scaled_dot_product_attention
from paracore.errors import UsageError
from paracore.ops import attention as op
from paracore.ops import attention_state as state_op
from paracore.ops.attention_state import AttentionState, start_state
from paracore.ops.attention_terms import PackedTerms, empty_in_order_of, pack_terms
from paracore.parallel.masks import Mask, visible_keys
from tests.interpreter import mended
from tests.numerics import assert_as_exact_as, assert_close, randn

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
IMPLEMENTATIONS = [("reference", F64), ("native", F32), ("native", BF16), ("triton", F32), ("triton", BF16)]
every_implementation = pytest.mark.parametrize(("impl", "dtype"), IMPLEMENTATIONS)
FLOOR = {F64: 2.0**-50, F32: 2.0**-23, BF16: 2.0**-8}

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every fresh buffer starts as NaN, so what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    with mended():
        yield
    torch.use_deterministic_algorithms(False)


def qkv(
    B: int = 2,
    Hq: int = 4,
    Hkv: int = 2,
    Sq: int = 9,
    Sk: int = 9,
    D: int = 16,
    Dv: int = 16,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    q = randn(B, Hq, Sq, D, seed=1, dtype=dtype)
    return q, randn(B, Hkv, Sk, D, seed=2, dtype=dtype), randn(B, Hkv, Sk, Dv, seed=3, dtype=dtype)


def with_gradients(function: Function, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of all inputs under a random one."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, randn(*out.shape, seed=9, dtype=out.dtype))
    return [out.detach(), *gradients]


def assert_exact(function: Function, plain: Function, *inputs: Tensor) -> None:
    """`function` and its gradients are as exact as `plain` in the same dtype; `plain` in float64 judges."""
    ours, theirs = with_gradients(function, *inputs), with_gradients(plain, *inputs)
    exact = with_gradients(plain, *(tensor.double() for tensor in inputs))
    for number, (x, contender, truth) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert x.dtype == contender.dtype
        assert x.shape == contender.shape
        assert_as_exact_as(x, contender, truth, floor=FLOOR[x.dtype], name=f"result {number}")


def hidden(mask: Mask, Sq: int, Sk: int, query_start: int = 0) -> Tensor:
    """[B or 1, 1, Sq, Sk], True where a query does not see a key."""
    device = torch.device("cpu")
    first, end = visible_keys(mask, Positions.contiguous(Sq, query_start), Positions.contiguous(Sk), device)
    index = torch.arange(Sk)
    return ((index < first.unsqueeze(-1)) | (index >= end.unsqueeze(-1))).unsqueeze(1)


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
    torch.testing.assert_close(some, reference.attention(q, k, v, hidden=unseen))


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


# ---------------------------------------------------------------- what torch makes of it


def test_gradients_by_finite_differences() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(B=1, Sq=5, Sk=6, D=3, Dv=2, dtype=F64))
    sink = randn(4, seed=4).requires_grad_()

    def everything(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return attention(
            q,
            k,
            v,
            masks.causal() & masks.sliding_window(3) & masks.key_range(1, 6),
            softcap=1.5,
            sink=sink,
            alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=F64),
            dropout_p=0.25,
            seed=3,
            return_lse=True,
        )

    assert torch.autograd.gradcheck(everything, (q, k, v, sink))


def test_backward_keeps_q_k_v_out_lse_and_nothing_else_of_their_size() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(Sq=100, Sk=100, dtype=BF16))
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out, lse = attention(q, k, v, sink=torch.zeros(4), return_lse=True)
    kept = {tensor.data_ptr() for tensor in (q, k, v, out, lse)}
    assert {tensor.data_ptr() for tensor in saved} >= kept
    rest = [tensor for tensor in saved if tensor.data_ptr() not in kept]
    assert sum(tensor.nbytes for tensor in rest) == 2 * 100 * 4 + 4 * 4  # each query's interval; the sinks


def test_op_is_registered_as_torch_demands() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(dtype=F32))
    sink = torch.zeros(4, requires_grad=True)
    terms = packed(q, k, dropout_p=0.5, seed=1)
    torch.library.opcheck(op._forward, (q, k, v, sink, *terms, None))
    out, lse = attention(q, k, v, return_lse=True)
    detached = [tensor.detach() for tensor in (q, k, v)]
    arguments = (out.detach(), None, *detached, None, out.detach(), lse.detach(), *terms, None)
    torch.library.opcheck(op._backward, arguments)
    state = start_state(detached[0], 16)
    torch.library.opcheck(state_op._continue, (*detached, *state, *terms, None))
    torch.library.opcheck(state_op._finish, (*state, detached[0], None))
    torch.library.opcheck(state_op._delta, (out.detach(), out.detach(), None))
    buffers = [torch.zeros_like(tensor) for tensor in detached]
    rows = (lse.detach(), torch.zeros_like(lse))
    torch.library.opcheck(state_op._backward, (out.detach(), *detached, *rows, *buffers, *terms, None))


def packed(q: Tensor, k: Tensor, mask: Mask | None = None, **changes: Any) -> PackedTerms:
    numbers = {"scale": None, "softcap": 0.0, "alibi_slopes": None, "dropout_p": 0.0, "seed": None}
    numbers |= {"first_batch": 0, "first_head": 0, "query_positions": None, "key_positions": None}
    return pack_terms(q, k, mask or masks.causal(), **(numbers | changes))


@pytest.mark.parametrize("boundaries", [[0, 4, 9], torch.tensor([0, 4, 9])], ids=["numbers", "tensor"])
def test_op_compiles_without_graph_breaks(boundaries: list[int] | Tensor) -> None:
    mask = masks.causal() & masks.documents(boundaries)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, mask, dropout_p=0.1, seed=3).sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs = qkv(dtype=F32)
    assert all(map(torch.equal, with_gradients(compiled, *inputs), with_gradients(step, *inputs)))


def test_compiled_code_sees_documents_that_change() -> None:
    """Kind of fault: stale lengths under compilation. Boundaries are data: nothing is compiled anew."""

    def step(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> Tensor:
        return attention(q, k, v, masks.causal() & masks.documents(boundaries))

    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        q, k, v = qkv(dtype=F32)
        for boundaries in ([0, 4, 9], [0, 2, 9], [0, 8, 9]):
            expected = attention(q, k, v, masks.causal() & masks.documents(boundaries))
            assert torch.equal(compiled(q, k, v, torch.tensor(boundaries)), expected)


def test_compiled_for_any_length() -> None:
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 9, 13):
        q, k, v = qkv(Sq=length, Sk=length, dtype=F32)
        assert torch.equal(compiled(q, k, v), attention(q, k, v))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same(use_reentrant: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout_p=0.5, seed=3)

    q, k, v = (tensor.requires_grad_() for tensor in qkv(dtype=F32))
    out: Tensor = checkpoint(step, q, k, v, use_reentrant=use_reentrant)
    out.backward(randn(*out.shape, seed=9, dtype=F32))
    expected = with_gradients(step, q, k, v)
    assert all(map(torch.equal, [out, *(cast(Tensor, leaf.grad) for leaf in (q, k, v))], expected))


def test_autocast_casts_as_with_torch() -> None:
    q, k, v = qkv(Hkv=4, dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        ours = with_gradients(attention, q, k, v)
        theirs = with_gradients(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v
        )
        mixed = attention(q, k.bfloat16(), v)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs] == [BF16, F32, F32, F32]
    assert torch.equal(ours[0], attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert torch.equal(mixed, ours[0])


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(dtype=F32))
    (dq,) = torch.autograd.grad(attention(q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


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
    q, k, v = qkv(B=1, Sq=512, Sk=512, dtype=dtype)
    dout = randn(1, 4, 512, 16, seed=5, dtype=dtype)
    one, two, many = (in_steps(q, k, v, dout, cuts, impl, mask=mask) for cuts in ([], [256], [128, 256, 384]))
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


# ---------------------------------------------------------------- torch's signature


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dims", [3, 4])
def test_drop_in_for_torch(is_causal: bool, dims: int) -> None:
    q, k, v = (tensor.flatten(0, 4 - dims) for tensor in qkv(Hkv=4, Sk=12, Dv=8, dtype=F64))
    ours = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3)
    assert_close(ours, F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3))


def test_drop_in_takes_dense_masks_of_intervals() -> None:
    q, k, v = qkv(Hkv=4, dtype=F64)
    for visible in (~hidden(masks.sliding_window(2, 3), 9, 9)[0, 0], ~hidden(MASKS["padded left"], 9, 9)):
        theirs = F.scaled_dot_product_attention(q, k, v, visible).nan_to_num(0.0)
        assert_close(scaled_dot_product_attention(q, k, v, visible), theirs)
    ours = scaled_dot_product_attention(q, k, v, masks.chunked(3))
    assert_close(ours, attention(q, k, v, masks.chunked(3)))


def test_drop_in_draws_from_torch_s_generator() -> None:
    q, k, v = qkv(dtype=F32)
    torch.manual_seed(3)
    one, two = (scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(one, scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True))
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_mask": torch.ones(9, 9), "is_causal": False}, "only boolean masks"),
        ({"attn_mask": torch.ones(9, 9, dtype=torch.bool), "is_causal": True}, "both given"),
        ({"attn_mask": torch.ones(2, 4, 9, 9, dtype=torch.bool)}, "must be the same for all heads"),
        ({"enable_gqa": False}, "query has 4 heads and key 2: grouped queries need enable_gqa=True"),
    ],
)
def test_drop_in_refuses_what_it_would_get_wrong(changes: dict[str, Any], message: str) -> None:
    q, k, v = qkv(dtype=F32)
    with pytest.raises(UsageError, match=message):
        scaled_dot_product_attention(q, k, v, **({"enable_gqa": True} | changes))


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
