"""The attention op under autograd, compilation, autocast and checkpointing, and in torch's signature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paracore import attention, masks, scaled_dot_product_attention
from paracore.errors import UsageError
from paracore.ops import attention as op
from paracore.ops import attention_state as state_op
from paracore.ops.attention_state import start_state
from tests.attention_op_cases import (
    BF16,
    F32,
    F64,
    hidden,
    packed,
    poisoned_memory,
    qkv,
    with_gradients,
)
from tests.numerics import assert_close, randn


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


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
    torch.library.opcheck(op.forward_once, (q, k, v, sink, *terms, None))
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


# ---------------------------------------------------------------- torch's signature


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dims", [3, 4])
def test_drop_in_for_torch(is_causal: bool, dims: int) -> None:
    q, k, v = (tensor.flatten(0, 4 - dims) for tensor in qkv(Hkv=4, Sk=12, Dv=8, dtype=F64))
    ours = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3)
    assert_close(ours, F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3))


def test_drop_in_takes_dense_masks_of_intervals() -> None:
    q, k, v = qkv(Hkv=4, dtype=F64)
    padded = masks.causal() & masks.key_range(torch.tensor([0, 5]), 9)
    for visible in (~hidden(masks.sliding_window(2, 3), 9, 9)[0, 0], ~hidden(padded, 9, 9)):
        theirs = F.scaled_dot_product_attention(q, k, v, visible).nan_to_num(0.0)
        assert_close(scaled_dot_product_attention(q, k, v, visible), theirs)
    lengths = torch.arange(9) < torch.tensor([[4], [9]])  # the usual padding mask, [B, Sk]
    theirs = F.scaled_dot_product_attention(q, k, v, lengths[:, None, None])
    assert_close(scaled_dot_product_attention(q, k, v, lengths[:, None, None]), theirs)
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
