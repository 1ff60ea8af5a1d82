"""Native attention, every instruction set and way to multiply, against its contract in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paracore import _C
from paracore.ops.attention import AttentionKernels
from tests.attention_cases import (
    GRADIENTS,
    MASKS,
    REFERENCE,
    Inputs,
    Results,
    Shape,
    assert_exact,
    causal,
    contender,
    documents,
    fresh_state,
    full,
    keys_between,
    poisoned_like,
    run,
    window,
)
from tests.numerics import all_equal, assert_close, randn, relative_error

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
TILE = _C.attention_key_tile()


def native(capability: str | None = None, products: str | None = None) -> AttentionKernels:
    both: dict[str, Any] = {"capability": capability, "products": products}
    bound = SimpleNamespace(
        attention_forward=partial(_C.attention_forward, **both),
        attention_continue=partial(_C.attention_continue, **both),
        attention_finish=partial(_C.attention_finish, capability=capability),
        attention_delta=partial(_C.attention_delta, capability=capability),
        attention_backward=partial(_C.attention_backward, **both),
    )
    return cast(AttentionKernels, bound)


# Every kernel there is, with the dtype of its inputs.
KERNELS = {
    f"{capability}-{name}": (native(capability, products), dtype)
    for capability in _C.capabilities()
    for name, dtype, products in (
        ("float32", FLOAT32, "float32"),
        ("bfloat16", BFLOAT16, "float32"),
        ("bfloat16-pairs", BFLOAT16, "pairs"),
    )
}
every_kernel = pytest.mark.parametrize(("kernels", "dtype"), KERNELS.values(), ids=KERNELS)


@every_kernel
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_mask(kernels: AttentionKernels, dtype: torch.dtype, mask: Any) -> None:
    given = Inputs.random(Shape(Sq=230, Sk=230), dtype, mask)
    assert_exact(run(kernels, given), given)


@every_kernel
@pytest.mark.parametrize(
    ("Sq", "Sk"), [(1, 1), (7, 7), (63, 65), (65, 127), (127, 257), (257, 63), (1, 257), (192, 96)]
)
def test_odd_lengths(kernels: AttentionKernels, dtype: torch.dtype, Sq: int, Sk: int) -> None:
    """Causal, so that with more queries than keys the first see nothing."""
    given = Inputs.random(Shape(Sq=Sq, Sk=Sk), dtype)
    assert_exact(run(kernels, given), given)


@every_kernel
@pytest.mark.parametrize(
    ("D", "Dv"), [(16, 16), (64, 64), (96, 96), (80, 80), (128, 128), (192, 128), (256, 256), (7, 5), (1, 1)]
)
def test_head_dims(kernels: AttentionKernels, dtype: torch.dtype, D: int, Dv: int) -> None:
    given = Inputs.random(Shape(B=1, Hq=2, Hkv=1, Sq=101, Sk=130, D=D, Dv=Dv), dtype)
    assert_exact(run(kernels, given), given)


@every_kernel
@pytest.mark.parametrize(("Hq", "Hkv"), [(6, 2), (5, 1), (3, 3)])
def test_query_heads_that_share_a_key_head(
    kernels: AttentionKernels, dtype: torch.dtype, Hq: int, Hkv: int
) -> None:
    given = Inputs.random(Shape(Hq=Hq, Hkv=Hkv), dtype)
    assert_exact(run(kernels, given), given)


@every_kernel
@pytest.mark.parametrize("mask", [full, causal])
def test_errors_are_those_of_torchs_own_attention(
    kernels: AttentionKernels, dtype: torch.dtype, mask: Any
) -> None:
    """Without a gradient at lse, so that torch's attention can be the contender; over many tiles."""
    given = Inputs.random(Shape(B=1, Hq=2, Hkv=1, Sq=400, Sk=400, D=64, Dv=64), dtype, mask)
    given = replace(given, dlse=torch.zeros_like(given.dlse))
    assert_exact(run(kernels, given), given)


@every_kernel
@pytest.mark.parametrize(
    "terms",
    [
        {"softcap": 1.5},
        {"softcap": 300.0},  # logits far below the cap, where tanh must not cancel
        {"alibi": True},
        {"sink": True},
        {"dropout_p": 0.3},
        {"scale": -0.5},
        {"scale": 0.0},
        {"softcap": 2.0, "alibi": True, "sink": True, "dropout_p": 0.2, "strided": True},
    ],
    ids=str,
)
def test_every_term(kernels: AttentionKernels, dtype: torch.dtype, terms: dict[str, Any]) -> None:
    given = Inputs.random(Shape(Hq=2, Hkv=1), dtype, window, **terms)
    assert_exact(run(kernels, given), given)


@every_kernel
def test_any_strides(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    given = Inputs.random(Shape(D=24, Dv=40), dtype, strided=True)
    results = run(kernels, given, strided=True)
    contiguous = run(kernels, Inputs.random(Shape(D=24, Dv=40), dtype))
    assert not results["dq"].is_contiguous()
    for name, result in results.items():
        assert torch.equal(result, contiguous[name]), name


@every_kernel
def test_large_logits(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    """Of +-1e4: with one weight near 1 in each row, nothing may overflow or vanish."""
    given = Inputs.random(Shape(D=16, Dv=16), dtype, magnitude=60.0)
    results = run(kernels, given)
    assert results["lse"].abs().max() > 1e4
    assert_exact(results, given)


@every_kernel
def test_dropped_weights_are_the_references_to_the_bit(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    """With the identity as v, out is the weights: zero exactly where one is dropped."""
    shape = Shape(Sq=60, Sk=250, Dv=250)
    given = Inputs.random(shape, dtype, full, dropout_p=0.4, seed=-2)
    given = replace(given, v=torch.eye(250, dtype=dtype).expand(shape.B, shape.Hkv, 250, 250))
    dropped, expected = (run(which, given)["out"] == 0 for which in (kernels, REFERENCE))
    assert torch.equal(dropped, expected)
    assert 0.3 < dropped.float().mean() < 0.5


@every_kernel
def test_a_part_of_the_heads_and_batches_is_the_same_part_of_the_whole(
    kernels: AttentionKernels, dtype: torch.dtype
) -> None:
    given = Inputs.random(Shape(B=3), dtype, documents, dropout_p=0.3, alibi=True)
    slopes = cast(Tensor, given.terms["alibi_slopes"])
    terms = given.terms | {"first_batch": 3 + 2, "first_head": 5 + 2, "alibi_slopes": slopes[2:, 2:]}
    part = {name: getattr(given, name)[2:, 2:] for name in ("q", "dout", "dlse")}
    part |= {name: getattr(given, name)[2:, 1:] for name in ("k", "v")}
    whole, alone = run(kernels, given), run(kernels, replace(given, **part, terms=terms))
    for name, result in alone.items():
        assert torch.equal(result, whole[name][2:, (1 if name in ("dk", "dv") else 2) :]), name


@every_kernel
@pytest.mark.parametrize("mask", [causal, window, MASKS["blind"]])
def test_pieces_of_keys_in_turn_give_the_bits_of_one_pass(
    kernels: AttentionKernels, dtype: torch.dtype, mask: Any
) -> None:
    """Cut between tiles: a state that is continued has lost nothing."""
    given = Inputs.random(Shape(Sq=250, Sk=3 * TILE + 17), dtype, mask, dropout_p=0.1)
    state = fresh_state(given)
    for begin, end in ((0, TILE), (TILE, TILE), (TILE, 3 * TILE), (3 * TILE, given.k.size(2))):
        k, v, terms = keys_between(given, begin, end)
        kernels.attention_continue(given.q, k, v, *state, **terms)
    out = poisoned_like(given.dout)
    lse = kernels.attention_finish(*state, out)
    whole = run(kernels, given)
    assert torch.equal(out, whole["out"])
    assert torch.equal(lse, whole["lse"])


@every_kernel
def test_pieces_cut_anywhere_agree_with_the_reference(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    given = Inputs.random(Shape(), dtype, alibi=True)
    states = {"native": fresh_state(given), "reference": fresh_state(given)}
    for begin, end in ((0, 5), (5, 100), (100, 150)):
        k, v, terms = keys_between(given, begin, end)
        kernels.attention_continue(given.q, k, v, *states["native"], **terms)
        REFERENCE.attention_continue(given.q, k, v, *states["reference"], **terms)
    for ours, reference in zip(*states.values(), strict=True):
        assert relative_error(ours, reference) < (1e-6 if dtype == FLOAT32 else 4e-3)


@every_kernel
def test_a_query_that_sees_nothing_leaves_its_state_alone(
    kernels: AttentionKernels, dtype: torch.dtype
) -> None:
    given = Inputs.random(Shape(), dtype, MASKS["blind"])
    state = fresh_state(given)
    for tensor, seed in zip(state, (1, 2, 3), strict=True):
        tensor.copy_(randn(*tensor.shape, seed=seed).abs())
    for tensor, value in zip(state, (float("-inf"), 0.0, 0.0), strict=True):
        tensor[:, :, ::5] = value  # rows that have seen nothing before either
    before = [tensor.clone() for tensor in state]
    kernels.attention_continue(given.q, given.k, given.v, *state, **given.terms)
    nothing = (given.terms["first"] >= given.terms["end"])[0]
    for now, then in zip(state, before, strict=True):
        assert torch.equal(now[:, :, nothing].view(torch.int32), then[:, :, nothing].view(torch.int32))
        assert not torch.equal(now[:, :, ~nothing], then[:, :, ~nothing])


@every_kernel
def test_a_query_that_sees_nothing_however_written(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    """Any first >= end: out and gradients are zero, lse -inf, and no key's gradient knows of it."""
    given = Inputs.random(Shape(), dtype)
    first, end = given.terms["first"].clone(), given.terms["end"].clone()
    for query, (low, high) in {3: (150, 0), 50: (7, 7), 51: (90, 20), 149: (2**31 - 1, -5)}.items():
        first[:, query], end[:, query] = low, high
    blind = [3, 50, 51, 149]
    terms = given.terms | {"first": first, "end": end}
    results = run(kernels, replace(given, terms=terms))
    assert not results["out"][:, :, blind].any()
    assert not results["dq"][:, :, blind].any()
    assert (results["lse"][:, :, blind] == float("-inf")).all()
    dout = given.dout.clone()
    dout[:, :, blind] = 1e6
    others = run(kernels, replace(given, terms=terms, dout=dout))
    for name in ("dk", "dv"):
        assert torch.equal(results[name], others[name])


@every_kernel
def test_tiles_that_no_query_sees_are_not_read(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    """NaN lies there; between what the first and the second half of a tile of queries see, too."""
    shape = Shape(Sq=TILE, Sk=6 * TILE)
    given = Inputs.random(shape, dtype, full)
    half = torch.arange(TILE)[None] < TILE // 2
    first = torch.where(half, TILE, 4 * TILE).int()
    terms = given.terms | {"first": first, "end": first + TILE}
    k, v = given.k.clone(), given.v.clone()
    for tile in (0, 2, 3, 5):
        k[:, :, tile * TILE : (tile + 1) * TILE] = float("nan")
        v[:, :, tile * TILE : (tile + 1) * TILE] = float("nan")
    clean, poisoned = (
        run(kernels, x) for x in (replace(given, terms=terms), replace(given, k=k, v=v, terms=terms))
    )
    for name, result in poisoned.items():
        assert torch.equal(result, clean[name]), name


@every_kernel
def test_what_is_not_a_number_shows(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    """A NaN in k is in the output of every query that sees it, and of no other."""
    given = Inputs.random(Shape(), dtype)
    k = given.k.clone()
    k[0, 0, 100, 3] = float("nan")
    clean, results = run(kernels, given), run(kernels, replace(given, k=k))
    seeing = torch.zeros_like(clean["lse"], dtype=torch.bool)
    seeing[0, :2, 100:] = True
    assert torch.equal(results["lse"].isnan(), seeing)
    assert torch.equal(results["out"].isnan().any(-1), seeing)
    assert torch.equal(results["out"][~seeing], clean["out"][~seeing])


@every_kernel
def test_results_do_not_depend_on_the_number_of_threads(
    kernels: AttentionKernels, dtype: torch.dtype
) -> None:
    """One thread takes a key head's whole backward; more split it, and take products in another order."""
    given = Inputs.random(Shape(B=1, Hq=4, Hkv=2, Sq=1000, Sk=300, D=16, Dv=16), dtype, dropout_p=0.1)
    before = torch.get_num_threads()
    results: list[Results] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(kernels, given))
    finally:
        torch.set_num_threads(before)
    for name in results[0]:
        assert all_equal([each[name] for each in results]), name


@every_kernel
def test_gradients_are_added_to_what_is_there(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    given = Inputs.random(Shape(), dtype)
    for gradient_dtype in {FLOAT32, dtype}:
        exact = run(kernels, given, gradient_dtype=FLOAT32)
        inputs = (given.q, given.k, given.v)
        gradients = [randn(*x.shape, seed=9, dtype=gradient_dtype) for x in inputs]
        expected = [
            there.double() + exact[name].double() for there, name in zip(gradients, GRADIENTS, strict=True)
        ]
        delta = kernels.attention_delta(exact["out"], given.dout) - given.dlse
        dq, dk, dv = gradients
        kernels.attention_backward(given.dout, *inputs, exact["lse"], delta, dq, dk, dv, True, **given.terms)
        for gradient, sum_ in zip(gradients, expected, strict=True):
            assert_close(gradient, sum_, eps=1e-6 if gradient_dtype == FLOAT32 else 2.0**-9)


@every_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_each_gradient_is_rounded_once(kernels: AttentionKernels, dtype: torch.dtype, threads: int) -> None:
    """The float32 gradient, rounded, is the gradient in the inputs' dtype, in both ways to split the work."""
    given = Inputs.random(Shape(Hq=2, Hkv=1, B=1), dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide, own = (run(kernels, given, gradient_dtype=each) for each in (FLOAT32, dtype))
    finally:
        torch.set_num_threads(before)
    for name in GRADIENTS:
        assert own[name].dtype == dtype
        assert torch.equal(wide[name].to(dtype), own[name]), name


@every_kernel
@pytest.mark.parametrize("empty", [{"Sq": 0}, {"Sk": 0}, {"B": 0}, {"Hq": 0}, {"Hq": 0, "Hkv": 0}], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_to_attend(
    kernels: AttentionKernels, dtype: torch.dtype, empty: dict[str, int], threads: int
) -> None:
    given = Inputs.random(replace(Shape(B=1), **empty), dtype, full)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = run(kernels, given)
        state = fresh_state(given)
        kernels.attention_continue(given.q, given.k, given.v, *state, **given.terms)
        finished = kernels.attention_finish(*state, poisoned_like(given.dout))
    finally:
        torch.set_num_threads(before)
    for lse in (results.pop("lse"), finished):
        assert lse.shape == given.dlse.shape
        assert (lse == float("-inf")).all()
    for name, result in results.items():
        assert torch.equal(result, torch.zeros_like(result)), name


def test_pairs_round_weights_and_float32_does_not() -> None:
    given = Inputs.random(Shape(), BFLOAT16)
    exact = run(REFERENCE, given, gradient_dtype=FLOAT32)
    wide = run(native(products="float32"), given, gradient_dtype=FLOAT32)
    pairs = run(native(products="pairs"), given, gradient_dtype=FLOAT32)
    assert relative_error(wide["dv"], exact["dv"]) < 1e-5
    assert 1e-4 < relative_error(pairs["dv"], exact["dv"]) < 4e-3


def test_judges_know_a_wrong_result() -> None:
    """An error of a few units in the last place fails: assert_exact is not content with anything."""
    given = Inputs.random(Shape(), FLOAT32)
    for name in ("out", "lse", *GRADIENTS):
        results = contender(given)
        results[name] = results[name] * (1 + 3e-6)
        with pytest.raises(AssertionError, match=f"{name}: error"):
            assert_exact(results, given)
