"""The native AdamW: the reference's bits, whatever the dtypes, pieces, threads and instructions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from paracore import _C, reference_adamw
from paracore.reference_adamw import join_remainder, split_master
from tests import native_adamw_cases as cases
from tests.native_adamw_cases import BFLOAT16, FLOAT32, INT16, Dtypes, State, coefficients, draw, scale, table
from tests.numerics import assert_as_exact_as, randn

MIXED = Dtypes(BFLOAT16, BFLOAT16, FLOAT32, FLOAT32)
# Hyperparameters of the four segments: plain; decay through the gradient; maximized; inactive.
SEGMENTS = table(
    coefficients(),
    coefficients(L2=0.01, SHRINK=1, STEP_SIZE=0.1),
    coefficients(SIGN=-1, L2=0.1, ONE_MINUS_BETA1=1, EPS=1e-3),
    coefficients(ACTIVE=0),
)
DRAWS = torch.tensor(
    [
        draw(),
        draw(INNER=3, WHOLE_INNER=11, FIRST=5, ORIGIN=2**33 + 1),
        draw(KEY0=0xFFFFFFFF, STEP=2**32 + 7, INNER=64, WHOLE_INNER=2**30, FIRST=2**20),
        draw(INNER=1, WHOLE_INNER=1),
    ]
)


def step(
    state: State,
    pieces: Tensor,
    table: Tensor,
    draws: Tensor | None,
    zero: bool,
    capability: str | None = None,
) -> State:
    """What the native kernel makes of a copy of the state."""
    after = state.clone()
    _C.adamw_(*after.tensors(), pieces, table, scale(), draws, zero, capability=capability)
    return after


def reference_step(state: State, pieces: Tensor, table: Tensor, draws: Tensor | None, zero: bool) -> State:
    after = state.clone()
    reference_adamw.adamw_(*after.tensors(), pieces, table, scale(), draws, zero)
    return after


def inactive_gradient_not_a_number(state: State, pieces: Tensor) -> State:
    gradient = state.gradient.clone()
    for begin, end, segment in pieces.tolist():
        if segment == 3:
            gradient[begin:end] = float("nan")
    return state.with_gradient(gradient)


@pytest.mark.parametrize("capability", _C.capabilities())
@pytest.mark.parametrize("dtypes", Dtypes.all(), ids=str)
def test_bits_are_the_references(dtypes: Dtypes, capability: str) -> None:
    """Also of the padding, which is NaN and stays, and of what is inactive, whose gradient is NaN."""
    pieces, size = cases.odd_pieces()
    drawn = (None,) if dtypes.master == INT16 else (None, DRAWS)
    for amsgrad, zero, draws in product((False, True), (False, True), drawn):
        state = State.random(size, dtypes, amsgrad=amsgrad)
        state = inactive_gradient_not_a_number(state.poisoned(pieces), pieces)
        expected = reference_step(state, pieces, SEGMENTS, draws, zero)
        cases.assert_same_bits(step(state, pieces, SEGMENTS, draws, zero, capability=capability), expected)


def test_what_is_inactive_keeps_all_but_its_gradient() -> None:
    state = State.random(100, MIXED).with_gradient(torch.full((100,), float("nan")))
    pieces = torch.tensor([[0, 51, 0], [60, 100, 0]])
    after = step(state, pieces, table(coefficients(ACTIVE=0)), None, True)
    assert not after.gradient[:51].any()
    assert after.gradient[51:60].isnan().all()
    assert not after.gradient[60:].any()
    cases.assert_same_bits(after.with_gradient(state.gradient), state)


@pytest.mark.parametrize("capability", _C.capabilities())
@pytest.mark.parametrize("dtypes", [Dtypes(FLOAT32, FLOAT32, FLOAT32, None), MIXED], ids=str)
def test_errors_to_float64_are_no_larger_than_the_references(dtypes: Dtypes, capability: str) -> None:
    """Over some steps; the numbers that are updated, not what is rounded from them."""
    size, pieces = 1003, torch.tensor([[0, 1003, 0]])
    native = State.random(size, dtypes, amsgrad=True)
    in_float32 = native.clone()
    exact = native.each(Tensor.double)
    exact = replace(exact, parameter=exact.parameter if exact.master is None else exact.master, master=None)
    row = table(coefficients(L2=0.01))
    for seed in range(10):
        gradient = randn(size, seed=100 + seed, dtype=dtypes.gradient)
        for state in (native, in_float32, exact):
            state.gradient.copy_(gradient)
        _C.adamw_(*native.tensors(), pieces, row, scale(), None, False, capability=capability)
        for state in (in_float32, exact):
            reference_adamw.adamw_(*state.tensors(), pieces, row, scale(), None, False)
    for name in ("parameter", "first_moment", "second_moment", "max_second_moment"):
        updated = "master" if name == "parameter" and dtypes.master is not None else name
        one, other = getattr(native, updated), getattr(in_float32, updated)
        assert_as_exact_as(one, other, getattr(exact, name), floor=2.0**-24, name=name)


@pytest.mark.parametrize("dtypes", Dtypes.all(), ids=str)
def test_bits_do_not_depend_on_threads(dtypes: Dtypes) -> None:
    size = 200_003
    begins = torch.arange(0, size, 4096)
    pieces = torch.stack([begins, (begins + 4096).clamp(max=size), torch.arange(len(begins)) % 3], 1)
    state, before = State.random(size, dtypes), torch.get_num_threads()
    draws = None if dtypes.master == INT16 else DRAWS
    results, sums = [], []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(step(state, pieces, SEGMENTS, draws, True))
            sums.append(_C.sum_of_squares(state.gradient, pieces))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        cases.assert_same_bits(result, results[0])
    assert all(torch.equal(each, sums[0]) for each in sums)


@pytest.mark.parametrize("dtypes", [Dtypes(FLOAT32, FLOAT32, FLOAT32, None), MIXED], ids=str)
def test_bits_do_not_depend_on_where_pieces_begin(dtypes: Dtypes) -> None:
    state, row = State.random(3000, dtypes), table(coefficients())
    whole = step(state, torch.tensor([[0, 3000, 0]]), row, None, False)
    for cuts in ([0, 1, 2, 5, 12, 139, 1139, 3000], list(range(0, 3001, 250))):
        pieces = torch.tensor([[begin, end, 0] for begin, end in pairwise(cuts)])
        cases.assert_same_bits(step(state, pieces, row, None, False), whole)


@pytest.mark.parametrize("gradient_dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_remainder_is_as_good_as_a_master(gradient_dtype: torch.dtype) -> None:
    """Bitwise, over 1,000 steps."""
    size, pieces = 333, torch.tensor([[0, 100, 0], [100, 333, 1]])
    first = State.random(size, Dtypes(BFLOAT16, gradient_dtype, FLOAT32, FLOAT32), amsgrad=True)
    assert first.master is not None
    high, low = split_master(first.master)
    with_remainder = replace(first.clone(), parameter=high, master=low)
    for seed in range(1000):
        gradient = randn(size, seed=seed, dtype=gradient_dtype)
        for state in (first, with_remainder):
            state.gradient.copy_(gradient)
            _C.adamw_(*state.tensors(), pieces, SEGMENTS, scale(), None, False)
        assert torch.equal(join_remainder(with_remainder.parameter, low), first.master)
    high, low = split_master(first.master)
    cases.assert_same_bits(with_remainder, replace(first, parameter=high, master=low))
    assert torch.equal(first.parameter, first.master.bfloat16())


def test_a_remainder_holds_what_is_not_finite_or_nearly_so() -> None:
    master = torch.tensor(
        [float("inf"), float("-inf"), float("nan"), 3.4028e38, -3.4028e38, 0.0, -0.0, 1e-40]
    )
    high, low = split_master(master)
    zeros, pieces = torch.zeros(len(master)), torch.tensor([[0, len(master), 0]])
    state = State(high, zeros, zeros.clone(), zeros.clone(), None, low)
    after, expected = (
        take(state, pieces, table(coefficients(SHRINK=1)), None, False) for take in (step, reference_step)
    )
    assert after.master is not None
    assert expected.master is not None
    joined = join_remainder(after.parameter, after.master)
    assert torch.equal(joined[3:], master[3:])
    assert joined[:3].isnan().all()  # 0 * inf, as L2 is 0
    assert join_remainder(expected.parameter, expected.master)[:3].isnan().all()


def cut(rows: range, columns: range, whole_inner: int) -> list[int]:
    """The row of draws of the part [rows, columns] of a matrix with `whole_inner` columns."""
    first = rows.start * whole_inner + columns.start
    return draw(INNER=len(columns), WHOLE_INNER=whole_inner, FIRST=first)


def test_offsets_beyond_2_to_the_31() -> None:
    """A piece across element 2^31. The tensors lie in one storage, 128 elements apart, hardly touched."""
    begin, length = 2**31 - 37, 100
    near = State.random(length, Dtypes(BFLOAT16, BFLOAT16, BFLOAT16, None))
    storage = torch.UntypedStorage(2 * (2**31 + 1000))
    parameter, gradient, first, second = (
        torch.tensor([], dtype=BFLOAT16).set_(storage, 128 * number, (begin + length,), (1,))
        for number in range(4)
    )
    far = State(parameter, gradient, first, second, None, None)
    for there, here in zip(far.tensors()[:4], near.tensors()[:4], strict=True):
        assert there is not None
        assert here is not None
        there[begin:] = here
    row = table(coefficients())
    whole, moved = torch.tensor([[0, length, 0]]), torch.tensor([[begin, begin + length, 0]])
    assert torch.equal(_C.sum_of_squares(far.gradient, moved), _C.sum_of_squares(near.gradient, whole))
    _C.adamw_(*far.tensors(), moved, row, scale(), torch.tensor([draw(ORIGIN=-begin)]), False)
    expected = step(near, whole, row, torch.tensor([draw()]), False)
    cases.assert_same_bits(far.at(slice(begin, None)), expected)


@pytest.mark.parametrize("capability", _C.capabilities())
def test_stochastic_rounding_does_not_depend_on_how_a_tensor_is_cut(capability: str) -> None:
    rows, columns = 12, 37
    state, row = (
        State.random(rows * columns, Dtypes(BFLOAT16, BFLOAT16, BFLOAT16, None)),
        table(coefficients()),
    )
    everything = torch.tensor([[0, rows * columns, 0]])
    whole = step(state, everything, row, torch.tensor([draw()]), False, capability=capability)
    # Cut off the end, elements before it are those of others; then rows; then columns.
    tail = state.at(slice(100, None))
    pieces = torch.tensor([[0, 150, 0], [150, len(tail.parameter), 0]])
    after = step(tail, pieces, row, torch.tensor([draw(ORIGIN=100)]), False, capability=capability)
    cases.assert_same_bits(after, whole.at(slice(100, None)))
    for part in ((range(3, 9), range(columns)), (range(rows), range(20, 31)), (range(rows), range(36, 37))):
        index = (torch.tensor(part[0])[:, None] * columns + torch.tensor(part[1])).flatten()
        draws = torch.tensor([cut(*part, columns)])
        pieces = torch.tensor([[0, 5, 0], [5, len(index), 0]])
        cases.assert_same_bits(
            step(state.at(index), pieces, row, draws, False, capability=capability), whole.at(index)
        )


def test_stochastic_rounding_goes_to_a_neighbour_and_is_unbiased() -> None:
    n, value = 4096 * 20, 1 + 2.0**-7 * 0.3
    begins = torch.arange(0, n, 4096)
    pieces = torch.stack([begins, begins + 4096, torch.zeros_like(begins)], 1)
    still = table(coefficients(SHRINK=1, STEP_SIZE=0))
    master = torch.full((n,), value)
    zeros = torch.zeros(n)
    state = State(zeros.bfloat16(), zeros, zeros.clone(), zeros.clone(), None, master)
    after = step(state, pieces, still, torch.tensor([draw()]), False)
    assert after.master is not None
    assert torch.equal(after.master, master)
    assert set(after.parameter.tolist()) == {1.0, 1 + 2.0**-7}
    up = float((after.parameter > 1).double().mean())
    assert abs(up - 0.3) < 5 * (0.3 * 0.7 / n) ** 0.5


def test_stochastic_rounding_leaves_alone_what_is_not_finite() -> None:
    zeros, moments = torch.zeros(3), torch.tensor([-1.0, 1.0, float("nan")])
    state = State(zeros.bfloat16(), zeros, moments, zeros.clone(), None, None)
    infinite = table(coefficients(EPS=0))  # moments over zero
    after = step(state, torch.tensor([[0, 3, 0]]), infinite, torch.tensor([draw()]), False)
    assert torch.allclose(after.parameter.float(), moments * float("-inf"), equal_nan=True)


@pytest.mark.parametrize("capability", _C.capabilities())
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_sums_of_squares(dtype: torch.dtype, capability: str) -> None:
    pieces, size = cases.odd_pieces()
    gradient = torch.full((size,), float("nan"), dtype=dtype)
    for begin, end, _ in pieces.tolist():
        gradient[begin:end] = randn(end - begin, seed=end - begin, dtype=dtype) * 1e30
    sums = _C.sum_of_squares(gradient, pieces, capability=capability)
    assert sums.dtype == torch.float64
    expected = reference_adamw.sum_of_squares(gradient, pieces)
    assert torch.allclose(sums, expected, rtol=1e-14, atol=0)
    assert torch.equal(sums, _C.sum_of_squares(gradient, pieces, capability="default"))
    assert sums[6] == sums[7]  # the same numbers elsewhere
    for value in ("inf", "-inf", "nan"):
        for at in (0, 3, 4095):
            gradient[pieces[6, 0] + at] = float(value)
            found = _C.sum_of_squares(gradient, pieces, capability=capability).isfinite()
            assert found.tolist() == [piece != 6 for piece in range(len(pieces))]
            gradient[pieces[6, 0] + at] = 0


def test_nothing_is_something_to_do() -> None:
    state, none = State.random(5, MIXED), torch.zeros(0, 3, dtype=torch.int64)
    cases.assert_same_bits(step(state, none, SEGMENTS, None, True), state)
    cases.assert_same_bits(step(state, torch.tensor([[2, 2, 0]]), SEGMENTS, None, True), state)
    assert _C.sum_of_squares(state.gradient, none).shape == (0,)
    assert _C.sum_of_squares(state.gradient, torch.tensor([[5, 5, 0]])).tolist() == [0.0]
