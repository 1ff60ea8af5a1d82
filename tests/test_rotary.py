"""Rotary embedding of q and k: exact at any position, nothing kept but the tables, gradients turned back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paracore import chunks, reference
from paracore.errors import UsageError
from paracore.ops import rotary as op
from paracore.ops.rotary import OPERATION, rotary_embedding
from tests.impl_cases import (
    BF16,
    F32,
    F64,
    FLOOR,
    every_impl,
    fast_impls,
    impls_and_dtypes,
    mended_if_interpreted,
)
from tests.numerics import assert_as_exact_as, assert_close, kept_for_backward, nan_in_fresh_memory, randn

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 11  # of the tables
S, B, D = 5, 3, 8


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, and an incomplete one, of tensors of a few elements."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * B * 4 * D * 4)


def tables(rows: int = ROWS, half: int = D // 2, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** (-torch.arange(half).double() / max(1, half))
    cos, sin = reference.rotary_tables(torch.arange(rows), frequencies)
    return cos.to(dtype), sin.to(dtype)


def pair(dtype: torch.dtype, Hq: int = 4, Hk: int = 2, D: int = D) -> tuple[Tensor, Tensor]:
    return randn(S, B, Hq, D, seed=1, dtype=dtype), randn(S, B, Hk, D, seed=2, dtype=dtype)


def positions_of(kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(3)
    if kind == "default":
        return None
    if kind == "shared":
        return torch.randint(ROWS, (S,), generator=generator)
    return torch.randint(ROWS, (B, S), generator=generator).T  # of each sequence its own, not contiguous


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """`reference.rotate` in `dtype` (default: x's) of each token at its position."""
    positions = torch.arange(len(x)) if positions is None else positions
    positions = positions if positions.dim() == 2 else positions[:, None]
    c, s = (table[positions.expand(x.shape[:2])].unsqueeze(2) for table in (cos, sin))
    return reference.rotate(x if dtype is None else x.to(dtype), c, s)


def differentiate(function: Any, q: Tensor, k: Tensor) -> list[Tensor]:
    """Both results and both gradients, under seeded gradients of their dtype."""
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    results = function(*leaves)
    arriving = [randn(*x.shape, seed=5, dtype=q.dtype).to(x.dtype) for x in leaves]
    gradients = torch.autograd.grad(
        results, leaves, [g.to(y.dtype) for g, y in zip(arriving, results, strict=True)]
    )
    return [*(y.detach() for y in results), *gradients]


def assert_exact(q: Tensor, k: Tensor, positions: Tensor | None, impl: str, half: int = D // 2) -> None:
    cos, sin = tables(half=half)
    dtype = reference.accumulation_dtype(q.dtype)
    with mended_if_interpreted(impl):
        ours = differentiate(
            lambda q, k: rotary_embedding(q, k, cos.to(dtype), sin.to(dtype), positions, impl=impl), q, k
        )
    contenders = differentiate(
        lambda q, k: [rotated(x, cos.to(dtype), sin.to(dtype), positions) for x in (q, k)], q, k
    )
    exact = differentiate(lambda q, k: [rotated(x, cos, sin, positions, F64) for x in (q, k)], q, k)
    for name, x, contender, ref in zip(("q", "k", "dq", "dk"), ours, contenders, exact, strict=True):
        assert (x.shape, x.dtype) == (contender.shape, contender.dtype)
        # The exact gradient leaves as float64's cast does: in q's dtype, rounded once more.
        floor = FLOOR[q.dtype] + (2.0**-9 if q.dtype == BF16 and name[0] == "d" else 0.0)
        assert_as_exact_as(x, contender, ref, floor=floor, name=name)


@impls_and_dtypes(OPERATION, interpreted=True)
@pytest.mark.parametrize("kind", ["default", "shared", "per sequence"])
def test_as_exact_as_the_definition(impl: str, dtype: torch.dtype, kind: str) -> None:
    assert_exact(*pair(dtype), positions_of(kind), impl)


@impls_and_dtypes(OPERATION)
@pytest.mark.parametrize(("Hq", "Hk", "size"), [(1, 1, 2), (3, 1, 6), (2, 5, 34), (4, 4, 128)])
def test_any_heads_and_any_even_size(impl: str, dtype: torch.dtype, Hq: int, Hk: int, size: int) -> None:
    assert_exact(*pair(dtype, Hq, Hk, size), positions_of("per sequence"), impl, half=size // 2)


@impls_and_dtypes(OPERATION, interpreted=True)
def test_views_of_a_fused_projection_and_other_strides(impl: str, dtype: torch.dtype) -> None:
    fused = randn(S, B, 6, D + 2, seed=1, dtype=dtype)[..., 1:-1]
    assert_exact(fused[:, :, :4], fused[:, :, 4:], positions_of("shared"), impl)
    batch_first = randn(B, 4, S, D, seed=1, dtype=dtype).permute(2, 0, 1, 3)
    last_dim_strided = randn(S, B, D, 2, seed=2, dtype=dtype).mT
    assert_exact(batch_first, last_dim_strided, positions_of("per sequence"), impl)
    assert_exact(batch_first[:, :, :1].expand(S, B, 4, D), last_dim_strided, None, impl)


@every_impl
def test_the_gradient_is_turned_back(impl: str) -> None:
    q, k = pair(F32)
    cos, sin = tables(dtype=F32)
    leaves = q.requires_grad_(), k.requires_grad_()
    with mended_if_interpreted(impl):
        results = rotary_embedding(*leaves, cos, sin, impl=impl)
        back = torch.autograd.grad(results, leaves, [y.detach() for y in results])
        inverse = rotary_embedding(results[0].detach(), results[1].detach(), cos, -sin, impl=impl)
    for x, gradient, turned in zip(leaves, back, inverse, strict=True):
        assert torch.equal(gradient, turned)
        assert_close(gradient, x.detach(), eps=1e-6)


@fast_impls
def test_gradients_that_do_not_arrive_or_are_expanded(impl: str) -> None:
    (q, k), (cos, sin) = pair(F32), tables(dtype=F32)
    leaves = q.requires_grad_(), k.requires_grad_()
    dq, dk = torch.autograd.grad(rotary_embedding(*leaves, cos, sin, impl=impl)[0].sum(), leaves)
    ones = torch.ones_like(q), torch.ones_like(k)
    expected, _ = rotary_embedding(*ones, cos, -sin, impl=impl)
    assert torch.equal(dq, expected)
    assert not dk.any()


@fast_impls
def test_position_one_million_is_as_exact_as_position_one(impl: str) -> None:
    """By float64 tables; angles computed in float32 would be off by tens of milliradians there."""
    at = torch.tensor([1_000_000, 999_999, 1, 0, 123_456])
    frequencies = 10_000.0 ** (-torch.arange(4).double() / 4)
    exact = reference.rotary_tables(at, frequencies)
    q, k = pair(F32)
    turned = rotary_embedding(q, k, *(table.float() for table in exact), impl=impl)
    for x, y in zip((q, k), turned, strict=True):
        assert_close(y.double(), rotated(x, *exact, None, F64), eps=1e-7)
        angles = at.float().unsqueeze(-1) * frequencies.float()
        assert (rotated(x, angles.cos(), angles.sin(), None) - y).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["default", "per sequence"])
def test_gradients_by_finite_differences(kind: str) -> None:
    (q, k), (cos, sin) = pair(F64, 2, 1, 4), tables(half=2)
    function = lambda q, k: rotary_embedding(q, k, cos, sin, positions_of(kind), impl="reference")  # noqa: E731
    assert torch.autograd.gradcheck(function, (q.requires_grad_(), k.requires_grad_()))


@every_impl
@pytest.mark.parametrize("shape", [(0, 3), (5, 0)])
def test_no_tokens(impl: str, shape: tuple[int, int]) -> None:
    q, k = torch.zeros(*shape, 4, D), torch.zeros(*shape, 2, D)
    assert [y.shape for y in rotary_embedding(q, k, *tables(dtype=F32), impl=impl)] == [q.shape, k.shape]


@fast_impls
def test_inputs_are_left_alone_and_results_are_new(impl: str) -> None:
    q, k = pair(F32)
    before = q.clone(), k.clone()
    results = rotary_embedding(q, k, *tables(dtype=F32), impl=impl)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert {y.data_ptr() for y in results}.isdisjoint({q.data_ptr(), k.data_ptr()})


@impls_and_dtypes(OPERATION, interpreted=True)
@pytest.mark.parametrize("kind", ["default", "per sequence"])
def test_in_place_it_gives_the_same_bits_in_the_same_memory(impl: str, dtype: torch.dtype, kind: str) -> None:
    of_positions = tables(dtype=reference.accumulation_dtype(dtype))
    memory = []

    def step(in_place: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        given = q.clone(), k.clone()  # no leaves
        turned = rotary_embedding(
            *given, *of_positions, positions_of(kind), may_overwrite=in_place, impl=impl
        )
        memory.append([x.data_ptr() == y.data_ptr() for x, y in zip(given, turned, strict=True)])
        return turned

    with mended_if_interpreted(impl):
        apart, in_place = (differentiate(functools.partial(step, how), *pair(dtype)) for how in (False, True))
    assert all(map(torch.equal, apart, in_place))
    assert memory == [[False, False], [True, True]]


def test_in_place_autograd_sees_that_a_tensor_has_changed() -> None:
    (q, k), (cos, sin) = pair(F32), tables(dtype=F32)
    own = q.requires_grad_() * 2
    kept = own.square()  # needs `own` as it was
    rotary_embedding(own, k, cos, sin, may_overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


@pytest.mark.parametrize(
    "given",
    [
        lambda q, k: (q.requires_grad_(), k),  # a leaf
        lambda q, k: (q.requires_grad_().clone()[:], k),  # a view
        lambda q, k: (q[:, :, :1].expand(S, B, 4, D), k),
        lambda q, k: (q.mT.contiguous().mT, k),
        lambda q, k: (q, q),
        lambda q, k: (
            q.flatten()[: 2 * S * B * D].view(S, B, 2, D),
            q.flatten()[S * B * D :].view(S, B, 3, D),
        ),
    ],
)
def test_what_must_not_be_overwritten_is_left_alone(given: Any) -> None:
    q, k = given(*pair(F32))
    before = q.detach().clone(), k.detach().clone()
    turned = rotary_embedding(q, k, *tables(dtype=F32), may_overwrite=True)
    assert all(map(torch.equal, (q, k), before))
    assert all(map(torch.equal, turned, rotary_embedding(*before, *tables(dtype=F32))))


@fast_impls
@pytest.mark.parametrize("kind", ["default", "shared", "per sequence"])
def test_backward_keeps_tables_and_positions_alone(impl: str, kind: str) -> None:
    q, k = (x.requires_grad_() for x in pair(BF16, 16, 8))
    cos, sin = tables(dtype=F32)
    with kept_for_backward() as kept:
        rotary_embedding(q, k, cos, sin, positions_of(kind), impl=impl)
    assert [tuple(tensor.shape) for tensor in kept] == [(ROWS, D // 2)] * 2 + [(S, B)]
    assert {tensor.data_ptr() for tensor in kept} >= {cos.data_ptr(), sin.data_ptr()}
    assert kept[2].untyped_storage().nbytes() <= S * B * 8


@fast_impls
def test_autocast_changes_nothing(impl: str) -> None:
    arguments = *pair(F32), *tables(dtype=F32)
    expected = rotary_embedding(*arguments, impl=impl)
    with torch.autocast("cpu", dtype=BF16):
        assert all(map(torch.equal, rotary_embedding(*arguments, impl=impl), expected))


@fast_impls
@pytest.mark.parametrize("in_place", [False, True])
def test_it_compiles_to_one_graph(impl: str, in_place: bool) -> None:
    (q, k), (cos, sin), positions = pair(F32), tables(dtype=F32), positions_of("shared")

    def step(q: Tensor, k: Tensor) -> Tensor:
        q, k = rotary_embedding(q * 2, k * 2, cos, sin, positions, may_overwrite=in_place, impl=impl)
        return q.sin().sum() + k.cos().sum()

    leaves = q.requires_grad_(), k.requires_grad_()
    expected = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(*leaves), leaves), expected))


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_op_is_registered_as_torch_demands(dtype: torch.dtype) -> None:
    q, k = (x.requires_grad_() for x in pair(dtype))
    positions = torch.arange(S)[:, None].expand(S, B)
    cos, sin = tables(dtype=reference.accumulation_dtype(dtype))
    torch.library.opcheck(op._rotate, (q, k, cos, sin, positions, False, "reference"))
    torch.library.opcheck(op._rotate_, (q.detach(), k.detach(), cos, sin, positions, False, "reference"))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k = torch.empty(S, B, 4, D, requires_grad=True), torch.empty(S, B, 2, D)
        turned, _ = rotary_embedding(q, k, torch.empty(ROWS, D // 2), torch.empty(ROWS, D // 2))
        (dq,) = torch.autograd.grad(turned.sum(), q)
    assert turned.shape == dq.shape == q.shape


Q, K = torch.zeros(S, B, 4, D), torch.zeros(S, B, 2, D)
COS = torch.zeros(ROWS, D // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(S, B, 4, 7)}, r"q is float32 \[5, 3, 4, 7\], must be .* with an even D"),
        ({"q": torch.zeros(S, B, D)}, r"q is float32 \[5, 3, 8\], must be a float tensor \[S, B, Hq, D\]"),
        ({"q": Q.long()}, "q is int64"),
        (
            {"k": torch.zeros(S, B, 2, 6)},
            r"k is float32 \[5, 3, 2, 6\] on cpu, must be float32 \[5, 3, Hk, 8\]",
        ),
        (
            {"k": torch.zeros(S, 2, 2, D)},
            r"k is float32 \[5, 2, 2, 8\] on cpu, must be float32 \[5, 3, Hk, 8\]",
        ),
        ({"k": K.to(BF16)}, r"k is bfloat16 .* must be float32"),
        ({"k": K.to("meta")}, r"k is .* on meta, must be .* on cpu"),
        (
            {"cos": torch.zeros(ROWS, D)},
            r"cos is float32 \[11, 8\] on cpu, must be float32 or float64 \[P, 4\]",
        ),
        ({"sin": COS[1:]}, r"sin is float32 \[10, 4\] on cpu, must be .* alike"),
        ({"cos": COS.to(BF16)}, r"cos is bfloat16 \[11, 4\] on cpu, must be float32 or float64"),
        ({"cos": COS.to("meta")}, r"cos is float32 \[11, 4\] on meta, must be .* on cpu"),
        ({"cos": COS[:4], "sin": COS[:4]}, "cos has 4 rows, must have at least S=5 where positions are None"),
        ({"positions": torch.arange(4)}, r"positions is int64 \[4\] on cpu, must be int64 \[5\] or \[5, 3\]"),
        ({"positions": torch.arange(S).int()}, r"positions is int32 \[5\]"),
        (
            {"positions": torch.zeros(B, S).long()},
            r"positions is int64 \[3, 5\] .* must be int64 \[5\] or \[5, 3\]",
        ),
        ({"positions": torch.arange(S).to("meta")}, r"positions is int64 \[5\] on meta, must be .* on cpu"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "cos": COS, "sin": COS} | change
    with pytest.raises(UsageError, match=message):
        rotary_embedding(**arguments)


@pytest.mark.parametrize("position", [-1, ROWS])
def test_positions_beyond_the_tables_are_refused(position: int) -> None:
    with pytest.raises(RuntimeError, match="positions must be from 0 to 10, the rows of cos and sin"):
        rotary_embedding(Q, K, COS, COS, torch.full((S,), position))
