"""Attention's Triton kernels against the float64 reference, on the GPU or under the interpreter."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paracore import reference_attention
from paracore.errors import UsageError
from tests.interpreter import interpreting, mended
from tests.numerics import relative_error
from tests.triton_attention_cases import Case, assert_exact, assert_lse_exact, poisoned, run, run_plain

pytest.importorskip("triton")

from paracore.kernels import attention as kernels
from paracore.kernels.attention_configurations import Blocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Where the kernels run; fresh buffers hold NaN, so that what is not written shows."""
    empty = torch.empty

    def poisoned_empty(*size: Any, **options: Any) -> torch.Tensor:
        x = empty(*size, **options)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    if not interpreting(os.environ):
        yield torch.device("cuda")
        return
    with mended():
        yield torch.device("cpu")


@pytest.fixture
def blocks(monkeypatch):
    """blocks(queries, keys): tiles of this size, so that short sequences cross several."""

    def force(queries: int, keys: int) -> None:
        monkeypatch.setattr(kernels, "choose_blocks", lambda *_: Blocks(queries, keys, warps=4, stages=2))

    return force


# Each value of each column meets most values of the others. The tiles are cut so that all three stretches
# of a range occur: left edge, whole tiles, right edge.
CASES = [
    # mask, B, heads, S, (D, DV), dtype, tile
    ("full", 1, (1, 1), (1, 1), (16, 16), FP32, (16, 16)),
    ("full", 2, (2, 1), (7, 65), (64, 64), BF16, (16, 32)),
    ("causal", 2, (4, 2), (65, 65), (64, 64), FP32, (32, 16)),
    ("causal", 1, (2, 2), (127, 127), (96, 96), BF16, (32, 32)),
    ("causal", 1, (3, 1), (63, 63), (128, 128), FP16, (16, 32)),
    ("causal", 1, (2, 1), (7, 127), (192, 128), FP32, (16, 32)),
    ("causal", 1, (2, 1), (65, 40), (100, 20), BF16, (16, 16)),
    ("window", 1, (2, 1), (257, 257), (128, 128), BF16, (64, 64)),
    ("window", 2, (1, 1), (65, 63), (40, 24), FP32, (16, 16)),
    ("documents", 2, (2, 1), (127, 127), (64, 64), BF16, (32, 16)),
    ("documents", 1, (2, 2), (65, 65), (192, 128), BF16, (32, 32)),
    ("some_nothing", 1, (2, 1), (65, 63), (80, 80), FP16, (16, 16)),
    ("some_nothing", 2, (2, 2), (63, 65), (16, 16), FP32, (16, 32)),
    ("per_batch", 3, (2, 1), (65, 65), (17, 33), FP32, (32, 32)),
    ("random", 2, (2, 1), (63, 65), (64, 16), BF16, (16, 16)),
    ("full", 1, (2, 1), (33, 65), (256, 256), FP32, (32, 32)),
    ("causal", 1, (1, 1), (63, 63), (256, 256), BF16, (32, 32)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "B", "heads", "S", "D", "dtype", "tile"), CASES)
def test_outputs_and_gradients(mask, B, heads, S, D, dtype, tile, device, blocks):
    blocks(*tile)
    given = Case.random(mask, B=B, heads=heads, S=S, D=D[0], DV=D[1], dtype=dtype, device=device)
    assert_exact(run(kernels, given), given)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "D"), [(BF16, 128), (FP32, 64)])
def test_the_shipped_tiles(dtype, D, device):
    given = Case.random("causal", heads=(2, 1), S=(200, 257), D=D, dtype=dtype, device=device)
    assert_exact(run(kernels, given), given)


FEATURES: list[dict[str, Any]] = [
    {"softcap": 1.5, "magnitude": 4.0},
    {"softcap": 30.0, "magnitude": 1e-3},  # tanh of numbers near 0
    {"alibi": True},
    {"sink": True},
    {"dropout_p": 0.3},
    {"scale": -0.4},
    {"scale": 0.0},
    {"softcap": 2.0, "alibi": True, "sink": True, "dropout_p": 0.25, "scale": 0.3},
]


@pytest.mark.gpu
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features))
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_terms_of_a_logit(features, dtype, device, blocks):
    blocks(16, 16)
    mask = "some_nothing" if dtype == BF16 else "window"
    given = Case.random(mask, B=2, heads=(2, 1), S=(33, 40), D=32, dtype=dtype, device=device, **features)
    assert_exact(run(kernels, given), given)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1, 0x80000000_7FFFFFFF, 2**64 - 1])
def test_dropout_drops_the_weights_that_the_reference_drops(seed, device, blocks):
    """With values that form an identity matrix, the output is the weights."""
    blocks(16, 16)
    given = Case.random("full", B=2, S=(40, 32), D=32, device=device, dropout_p=0.5, seed=seed)
    given.v.copy_(torch.eye(32))
    result = run(kernels, given)["out"]
    kept = given.kept()
    assert kept is not None
    assert torch.equal(result != 0, kept != 0)
    assert 0.4 < (result != 0).double().mean() < 0.6


@pytest.mark.gpu
@pytest.mark.parametrize("features", [{}, {"softcap": 2.0, "alibi": True}], ids=["plain", "terms"])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_ten_thousand(sign, features, device, blocks):
    """Rows whose logits are all huge, and rows that see nothing, stay finite in both directions."""
    blocks(16, 16)
    given = Case.random("some_nothing", S=(40, 33), D=16, device=device, scale=1.0, **features)
    given.q.fill_(sign * 25.0).add_(torch.arange(40, device=device)[:, None] / 64)
    given.k.fill_(25.0).add_(torch.arange(33, device=device)[:, None] / 8)
    results, exact = run(kernels, given), run_plain(given.to(torch.float64))
    assert relative_error(results["out"], exact["out"]) < 1e-3
    assert_lse_exact(results["lse"], given)
    # lse has an absolute error of 1e-3 here; gradients of saturated rows are differences of equal numbers.
    sizes = {"dq": given.k.norm(), "dk": given.q.norm(), "dv": 1.0}
    for name, size in sizes.items():
        assert (results[name] - exact[name]).norm() < 2e-3 * given.dout.norm() * size, name


@pytest.mark.gpu
def test_rows_that_see_nothing(device, blocks):
    """Output 0, lse -inf and gradients 0 exactly, though dout is not 0 there, nor is delta."""
    blocks(16, 16)
    given = Case.random("some_nothing", S=(40, 33), D=16, device=device)
    nothing = given.terms["end"][0] == 0
    assert 20 < nothing.sum() < 40
    results = run(kernels, given, delta=torch.ones(1, 2, 40, device=device))
    assert (results["out"][:, :, nothing] == 0).all()
    assert (results["dq"][:, :, nothing] == 0).all()
    assert (results["lse"][:, :, nothing] == float("-inf")).all()
    given.dout[:, :, nothing] = 1e3
    again = run(kernels, given, delta=torch.ones(1, 2, 40, device=device))
    assert torch.equal(results["dk"], again["dk"])
    assert torch.equal(results["dv"], again["dv"])


@pytest.mark.gpu
def test_a_sink_alone_has_an_lse_but_no_output(device, blocks):
    blocks(16, 16)
    given = Case.random("some_nothing", S=(40, 33), D=16, sink=True, device=device)
    results = run(kernels, given)
    assert given.sink is not None
    nothing = given.terms["end"][0] == 0
    expected = given.sink[:, None].expand(2, int(nothing.sum()))
    torch.testing.assert_close(results["lse"][0][:, nothing], expected, rtol=1e-6, atol=1e-6)
    assert (results["out"][:, :, nothing] == 0).all()


# ---------------------------------------------------------------- states


def fresh_state(given: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, device = given.q.shape[:3], given.q.device
    row_max = torch.full(rows, float("-inf"), device=device)
    return row_max, torch.zeros(rows, device=device), torch.zeros(given.dout.shape, device=device)


def backward(
    module: Any,
    given: Case,
    lse: torch.Tensor,
    delta: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    accumulate: bool = False,
) -> None:
    module.attention_backward(
        given.dout, given.q, given.k, given.v, lse, delta, *gradients, accumulate, **given.terms
    )


def piece(given: Case, start: int, stop: int) -> Case:
    """The same queries over the keys start..stop."""
    first, end = (given.terms[name].clamp(start, stop) - start for name in ("first", "end"))
    nothing = first >= end
    terms = given.terms | {
        "first": first.masked_fill(nothing, stop - start),
        "end": end.masked_fill(nothing, 0),
        "key_positions": given.terms["key_positions"][start:stop],
    }
    return Case(given.q, given.k[:, :, start:stop], given.v[:, :, start:stop], given.dout, given.sink, terms)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("mask", "features"),
    [("causal", {}), ("random", {}), ("window", {"softcap": 2.0, "alibi": True, "dropout_p": 0.2})],
    ids=["causal", "random", "terms"],
)
def test_keys_in_pieces_give_the_bits_of_one_pass(mask, features, dtype, device, blocks):
    """Tiles are then masked in one and whole in the other, and rows pass pieces of which they see nothing."""
    blocks(16, 16)
    given = Case.random(mask, heads=(2, 1), S=(55, 55), D=24, dtype=dtype, device=device, **features)
    expected = poisoned(given.dout)
    expected_lse = kernels.attention_forward(given.q, given.k, given.v, None, expected, **given.terms)
    row_max, row_sum, acc = fresh_state(given)
    for start, stop in ((0, 16), (16, 48), (48, 55)):
        part = piece(given, start, stop)
        kernels.attention_continue(part.q, part.k, part.v, row_max, row_sum, acc, **part.terms)
    out = poisoned(given.dout)
    lse = kernels.attention_finish(row_max, row_sum, acc, out)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.gpu
def test_a_state_means_what_the_reference_means_by_it(device, blocks):
    """Either may continue what the other began; the sink is a state as well."""
    blocks(16, 16)
    given = Case.random("random", S=(40, 48), D=20, DV=36, sink=True, device=device)
    assert given.sink is not None
    results = []
    for steps in ((kernels, reference_attention, kernels), (reference_attention, kernels, kernels)):
        row_max, row_sum, acc = fresh_state(given)
        row_max.copy_(given.sink[:, None] / math.log(2))
        row_sum.fill_(1)
        for module, bounds in zip(steps, ((0, 10), (10, 37), (37, 48)), strict=True):
            part = piece(given, *bounds)
            module.attention_continue(part.q, part.k, part.v, row_max, row_sum, acc, **part.terms)
        out = poisoned(given.dout)
        lse = kernels.attention_finish(row_max, row_sum, acc, out)
        assert_lse_exact(lse, given)
        results.append(out)
    expected = poisoned(given.dout)
    reference_attention.attention_forward(given.q, given.k, given.v, given.sink, expected, **given.terms)
    for out in results:
        torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
def test_backward_takes_lse_and_delta_as_given(device, blocks):
    """As for a gradient that arrives at lse, and for keys that are only a piece of what lse covers."""
    blocks(16, 16)
    given = Case.random("window", S=(40, 48), D=20, DV=36, device=device)
    lse = torch.full((1, 2, 40), 2.0, device=device)
    delta = torch.linspace(-1, 1, 80, device=device).view(1, 2, 40)
    gradients = {}
    for module in (kernels, reference_attention):
        gradients[module] = [poisoned(x) for x in (given.q, given.k, given.v)]
        backward(module, given, lse, delta, gradients[module])
    for ours, expected in zip(gradients[kernels], gradients[reference_attention], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_dtype", [BF16, FP32], ids=str)
def test_gradients_are_added_to_what_is_there(buffer_dtype, device, blocks):
    """In float32 until they are written, whatever the buffers' dtype."""
    blocks(16, 16)
    given = Case.random("causal", heads=(2, 1), S=(33, 40), D=20, dtype=BF16, device=device)
    out = poisoned(given.dout)
    lse = kernels.attention_forward(given.q, given.k, given.v, None, out, **given.terms)
    delta = kernels.attention_delta(out, given.dout)

    def gradients(dtype, accumulate, start):
        buffers = [torch.full_like(x, start, dtype=dtype) for x in (given.q, given.k, given.v)]
        backward(kernels, given, lse, delta, buffers, accumulate)
        return buffers

    written = gradients(FP32, False, float("nan"))
    added = gradients(buffer_dtype, True, 3.0)
    for sum_, gradient in zip(added, written, strict=True):
        assert gradient.isfinite().all()
        assert torch.equal(sum_, (gradient + 3.0).to(buffer_dtype))


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits(device, blocks):
    blocks(16, 16)
    given = Case.random("random", heads=(4, 2), S=(20, 33), D=16, dtype=BF16, dropout_p=0.1, device=device)
    first, second = run(kernels, given), run(kernels, given)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------- layouts


@pytest.mark.gpu
def test_tensors_may_lie_anywhere(device, blocks):
    """Sequence-first and interleaved tensors give the bits of contiguous ones, and are written so, too."""
    blocks(16, 16)
    B, S, D = 2, 33, 16
    given = Case.random("per_batch", B=B, heads=(2, 2), S=(S, S), D=D, alibi=True, device=device)
    expected = run(kernels, given)

    def sequence_first(x):
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    packed = torch.stack([given.q, given.k, given.v], 3)  # [B, H, S, 3, D]
    q, k, v = packed.unbind(3)
    terms = given.terms | {
        name: torch.stack([given.terms[name]] * 2, -1)[..., 0]  # numbers two apart
        for name in ("first", "end", "alibi_slopes", "query_positions", "key_positions")
    }
    strided = Case(q, k, v, sequence_first(given.dout), None, terms)
    results = run(kernels, strided)
    assert results["out"].stride() == strided.dout.stride()
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    row_max, row_sum, acc = fresh_state(given)
    acc = sequence_first(acc)
    kernels.attention_continue(q, k, v, row_max, row_sum, acc, **terms)
    out = sequence_first(poisoned(given.dout))
    kernels.attention_finish(row_max, row_sum, acc, out)
    assert torch.equal(out, expected["out"])


@pytest.mark.gpu
def test_rows_of_a_state_may_be_part_of_a_longer_one(device, blocks):
    blocks(16, 16)
    given = Case.random("full", B=2, S=(20, 33), D=16, device=device)
    expected = run(kernels, given)
    whole = [torch.full((2, 2, 50, *rest), 7.0, device=device) for rest in ((), (), (16,))]
    row_max, row_sum, acc = (x[:, :, 10:30] for x in whole)
    for x, start in ((row_max, float("-inf")), (row_sum, 0.0), (acc, 0.0)):
        x.fill_(start)
    kernels.attention_continue(given.q, given.k, given.v, row_max, row_sum, acc, **given.terms)
    out = poisoned(given.dout)
    kernels.attention_finish(row_max, row_sum, acc, out)
    assert torch.equal(out, expected["out"])
    for x in whole:
        assert (x[:, :, :10] == 7).all()
        assert (x[:, :, 30:] == 7).all()


@pytest.mark.gpu
def test_heads_that_do_not_fit_in_the_cache_together(device, blocks, monkeypatch):
    """The order of the programs changes, not a bit of the results."""
    blocks(16, 16)
    given = Case.random("causal", B=3, heads=(4, 2), S=(17, 16), D=16, device=device)
    expected = run(kernels, given)
    for heads_at_once in (1, 4):  # of 6: the last group is smaller
        monkeypatch.setattr(kernels, "CACHE_BYTES", heads_at_once * 16 * 2 * 16 * 4)
        results = run(kernels, given)
        assert all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.gpu
@pytest.mark.parametrize("empty", ["B", "H", "Sq", "Sk"])
def test_empty_tensors(empty, device):
    B, heads, S = (0 if empty == "B" else 2), ((0, 0) if empty == "H" else (2, 1)), [5, 6]
    if empty in ("Sq", "Sk"):
        S[empty == "Sk"] = 0
    given = Case.random("full", B=B, heads=heads, S=(S[0], S[1]), D=16, device=device)
    results = run(kernels, given)
    assert results["lse"].shape == given.q.shape[:3]
    assert (results["out"] == 0).all()
    assert (results["lse"] == float("-inf")).all()
    for name in ("dq", "dk", "dv"):
        assert (results[name] == 0).all(), name
    state = fresh_state(given)
    kernels.attention_continue(given.q, given.k, given.v, *state, **given.terms)
    assert all(torch.equal(x, y) for x, y in zip(state, fresh_state(given), strict=True))
    started = [torch.ones_like(x) for x in (given.q, given.k, given.v)]
    backward(kernels, given, results["lse"], results["lse"].clamp(min=0), started, True)
    assert all((x == 1).all() for x in started)


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31(device, blocks):
    """The second key starts at element 2^31, though neither its index nor the stride needs 64 bits."""
    blocks(16, 16)
    given = Case.random("full", heads=(1, 1), S=(3, 3), D=16, dtype=BF16, device=device)
    # Reserved, for the most part never touched.
    storage = torch.UntypedStorage(2 * (2**31 + 16), device=device)
    k = torch.tensor([], dtype=BF16, device=device).set_(storage, 0, (1, 1, 3, 16), (0, 0, 2**30, 1))
    k.copy_(given.k)
    far = Case(given.q, k, k, given.dout, None, given.terms)
    near = Case(given.q, given.k, given.k, given.dout, None, given.terms)
    expected = run(kernels, near)
    out = poisoned(given.dout)
    lse = kernels.attention_forward(far.q, far.k, far.v, None, out, **far.terms)
    assert torch.equal(out, expected["out"])
    gradients = [poisoned(x) for x in (given.q, given.k, given.v)]
    delta = kernels.attention_delta(out, given.dout)
    backward(kernels, far, lse, delta, gradients)
    assert all(torch.equal(x, expected[n]) for x, n in zip(gradients, ("dq", "dk", "dv"), strict=True))


def test_float32_products_are_rounded_to_tf32_only_where_torch_may(monkeypatch):
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.version, "hip", None)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        assert kernels._precision(on_gpu) == "ieee"
        matmul.fp32_precision = "tf32"
        assert kernels._precision(on_gpu) == "tf32"
        assert kernels._precision(torch.zeros(1)) == "ieee"
    finally:
        matmul.fp32_precision = before


# ---------------------------------------------------------------- refusals


def test_refusals_name_the_argument_and_what_would_be_right(device):
    given = Case.random("full", B=2, heads=(4, 2), S=(5, 6), D=16, alibi=True, device=device)
    q, k, v, terms = given.q, given.k, given.v, given.terms
    out, state = poisoned(given.dout), fresh_state(given)

    def refuses(match, q=q, k=k, v=v, out=out, sink=None, **changed):
        with pytest.raises(UsageError, match=match):
            kernels.attention_forward(q, k, v, sink, out, **(terms | changed))

    refuses(r"q is torch\.float64", q=q.double())
    refuses(r"k is torch\.float16 .*; expected torch\.float32", k=k.half())
    refuses(r"q has 4 heads and k has 3", k=k[:, :1].expand(2, 3, 6, 16), v=v[:, :1].expand(2, 3, 6, 16))
    refuses(r"v is .*\[2, 2, 5, 16\].*; expected .*\[2, 2, 6, 16\]", v=v[:, :, :5])
    refuses(r"k has strides .*; expected 1 in the last dim", k=k.mT.contiguous().mT)
    refuses(r"q has head dim 257; expected 1 to 256", q=torch.zeros(2, 4, 5, 257, device=device))
    refuses(r"out is .*\[2, 4, 4, 16\]", out=out[:, :, :4])
    refuses(r"out has strides", out=out.mT.contiguous().mT)
    refuses(r"sink is .*\[3\].*; expected torch\.float32 of shape \[4\]", sink=torch.zeros(3, device=device))
    refuses(r"first is torch\.int64", first=terms["first"].long())
    refuses(r"end is .*\[1, 4\].*; expected .*\[1, 5\]", end=terms["end"][:, :4])
    refuses(r"first is .*\[2, 5\].* and end .*\[1, 5\]", first=terms["first"].expand(2, 5))
    refuses(r"alibi_slopes is .*\[2, 3\]", alibi_slopes=terms["alibi_slopes"][:, :3])
    refuses(r"query_positions is None; ALiBi and dropout need it", query_positions=None)
    refuses(r"key_positions is .*\[5\].*; expected .*\[6\]", key_positions=terms["key_positions"][:5])
    refuses(r"dropout_p is 1\.0; expected a number in \[0, 1\)", dropout_p=1.0)
    refuses(r"softcap is -1\.0", softcap=-1.0)
    with pytest.raises(UsageError, match=r"row_max is torch\.float64"):
        kernels.attention_continue(q, k, v, state[0].double(), *state[1:], **terms)
    wide = torch.zeros(2, 4, 9, device=device)[:, :, :5]
    with pytest.raises(UsageError, match=r"row_sum has strides .*; expected row_max's"):
        kernels.attention_continue(q, k, v, state[0], wide, state[2], **terms)
    with pytest.raises(UsageError, match=r"acc is .*\[2, 4, 5, 15\].*; expected .*\[2, 4, 5, 16\]"):
        kernels.attention_finish(*state[:2], state[2][..., :15], out)
    with pytest.raises(UsageError, match=r"dout is .*\[2, 4, 4, 16\]"):
        kernels.attention_delta(out, out[:, :, :4])
    rows = torch.zeros(2, 4, 5, device=device)
    for name, gradients in (("dq", (q.half(), k, v)), ("dk", (q, k[:1], v)), ("dv", (q, k, v.mT))):
        with pytest.raises(UsageError, match=rf"{name} is "):
            kernels.attention_backward(out, q, k, v, rows, rows, *gradients, False, **terms)
    with pytest.raises(UsageError, match=r"delta is .*\[2, 4, 4\]"):
        kernels.attention_backward(out, q, k, v, rows, rows[:, :, :4], q, k, v, False, **terms)
