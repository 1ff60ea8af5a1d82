"""AdamW's Triton kernels against the reference, on the GPU or under the interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from paracore import reference_adamw as reference
from paracore.counter_random import philox_words
from paracore.errors import UsageError
from paracore.reference_adamw import PIECE, Column, Draw
from tests.interpreter import interpreting, mended
from tests.numerics import assert_as_exact_as, randn

pytest.importorskip("triton")

from paracore.kernels import adamw as kernels
from tests.triton_adamw_cases import (
    INACTIVE,
    PIECES,
    Step,
    assert_same_bits,
    bits,
    make_step,
    with_gradient,
)

FP32, BF16, FP16, INT16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.float64
KINDS = [(FP32, None), (FP32, FP32), (FP16, None), (FP16, FP32), (BF16, None), (BF16, FP32), (BF16, INT16)]


@pytest.fixture(autouse=True)
def device():
    if not interpreting(os.environ):
        yield torch.device("cuda")
        return
    with mended():
        yield torch.device("cpu")


def rows_of(step: Step, active: bool) -> Tensor:
    """Which elements belong to segments that are active, or inactive."""
    chosen = torch.zeros(len(step.parameter), dtype=torch.bool)
    for begin, end, segment in step.pieces.tolist():
        chosen[begin:end] = bool(step.coefficients[segment, Column.ACTIVE]) == active
    return chosen


@pytest.mark.gpu
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("moment", [FP32, BF16], ids=str)
@pytest.mark.parametrize("gradient", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("parameter", "master"), KINDS, ids=str)
def test_every_combination(parameter, master, gradient, moment, amsgrad, device):
    """As exact as the reference in float32, and of the same bits; nothing else is touched."""
    zero_gradient = not amsgrad
    step = make_step(parameter, gradient, moment, master, amsgrad=amsgrad, zero_gradient=zero_gradient)
    ours, plain, exact = step.by_kernel(device), step.by_reference(), step.in_float64().by_reference()
    on, off = rows_of(step, True), rows_of(step, False)
    for name in ("first_moment", "second_moment", "max_second_moment"):
        if getattr(ours, name) is not None:
            x, y, z = (getattr(result, name)[on] for result in (ours, plain, exact))
            assert_as_exact_as(x, y, z, floor=1e-7, name=name)
    assert_as_exact_as(ours.whole()[on], plain.whole()[on], exact.parameter[on], floor=1e-7)
    assert_same_bits(ours, plain)
    assert_same_bits(replace(ours, gradient=step.gradient), step, ~on)
    if zero_gradient:
        assert torch.equal(ours.gradient[on | off], torch.zeros_like(ours.gradient[on | off]))
        assert ours.gradient[~(on | off)].isnan().all()
    else:
        assert torch.equal(bits(ours.gradient), bits(step.gradient))


@pytest.mark.gpu
@pytest.mark.parametrize("moment", [FP32, BF16], ids=str)
def test_a_remainder_keeps_the_bits_of_a_master(moment, device):
    """Over several steps; the parameter is the master, rounded, at each."""
    whole = make_step(BF16, BF16, moment, FP32, amsgrad=True)
    parts = make_step(BF16, BF16, moment, INT16, amsgrad=True)
    for seed in range(10, 14):
        whole, parts = (with_gradient(step, seed).by_kernel(device) for step in (whole, parts))
        on = rows_of(whole, True)
        assert torch.equal(parts.whole()[on], whole.whole()[on])
        assert_same_bits(replace(parts, parameter=whole.parameter, master=None), replace(whole, master=None))
        nearest = (parts.parameter.double() - parts.whole().double()).abs()
        assert (nearest <= (whole.parameter.double() - whole.whole().double()).abs())[on].all()


@pytest.mark.gpu
def test_remainders_of_every_kind_of_number(device):
    """Ties of both signs, carries into the exponent and to infinity, the smallest numbers, zeros and NaN."""
    ties, carries = [0x3F808000, 0x3F818000, 0x3F807FFF], [0x3FFFFFFF, 0x7F7FFFFF]
    numbers = torch.tensor([*ties, *carries, 0x00000001, 0x00008000, 0, 0x7F800001], dtype=torch.int32)
    numbers = torch.cat([numbers, numbers | -(2**31)])
    parameter, remainder = reference.split_master(numbers.view(FP32))
    still = torch.tensor([[1, 1, 0, 1, 0, 1, 0, 0, 1, 1]], dtype=FP64)
    zeros, pieces = torch.zeros(len(numbers)), torch.tensor([[0, len(numbers), 0]])
    step = Step(parameter, zeros, zeros, zeros, None, remainder, pieces, still, still[0, :1], None, False)
    ours = step.by_kernel(device)
    is_number = ~numbers.view(FP32).isnan()
    assert ours.master is not None
    assert torch.equal(bits(ours.parameter)[is_number], bits(parameter)[is_number])
    assert torch.equal(ours.master[is_number], remainder[is_number])
    assert torch.equal(ours.whole().isnan(), ~is_number)


def round_at_random(x: Tensor, words: Tensor) -> Tensor:
    """float32 to bfloat16 by integers: up with the probability that the cut bits say."""
    below = x.view(torch.int32) & 0xFFFF
    up = below + (words >> 16) > 0xFFFF
    higher = (x.view(torch.int32) >> 16) + up.to(torch.int32)
    return torch.where(x.isfinite(), higher.to(INT16).view(BF16), x.to(BF16))


def words_of(step: Step, segment: int, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert step.draws is not None
    key0, key1, number, origin, inner, whole_inner, first = step.draws[segment].tolist()
    places = [divmod(origin + i, inner) for i in range(begin, end)]
    index = torch.tensor([row * whole_inner + first + column for row, column in places])
    zero = torch.zeros_like(index)
    return philox_words(index & 0xFFFFFFFF, index >> 32, zero + (number & 0xFFFFFFFF), zero, (key0, key1))


@pytest.mark.gpu
@pytest.mark.parametrize("master", [None, FP32], ids=str)
def test_stochastic_rounding_is_of_the_float32_results(master, device):
    drawn = make_step(BF16, FP32, BF16, master, amsgrad=True, drawn=True)
    drawn.gradient[3] = math.inf  # the moments then are, and the parameter is NaN
    bits(drawn.gradient)[5] = 0x7FFFFFFF  # the GPUs' NaN, which additions to its bits would make -0
    names = ["parameter", "first_moment", "second_moment", "max_second_moment"]
    wide = replace(drawn, draws=None, **{name: getattr(drawn, name).float() for name in names})
    ours, exact = drawn.by_kernel(device), wide.by_kernel(device)
    for begin, end, segment in PIECES:
        if segment == INACTIVE:
            continue
        for name, words in zip(names, words_of(drawn, segment, begin, end), strict=True):
            expected = round_at_random(getattr(exact, name)[begin:end], words)
            torch.testing.assert_close(
                getattr(ours, name)[begin:end], expected, rtol=0, atol=0, equal_nan=True, msg=name
            )
    assert ours.first_moment[3] == math.inf
    assert ours.parameter[3].isnan()
    assert ours.max_second_moment is not None
    assert ours.max_second_moment[5].isnan()
    if master is not None:
        assert torch.equal(bits(ours.whole()), bits(exact.whole()))


@pytest.mark.gpu
def test_draws_leave_what_is_not_bfloat16_rounded_to_nearest(device):
    for parameter, moment, master in ((FP16, FP32, None), (FP16, FP32, FP32), (FP32, FP32, None)):
        step = make_step(parameter, FP16, moment, master, drawn=True)
        assert_same_bits(step.by_kernel(device), replace(step, draws=None).by_kernel(device))
    step = make_step(BF16, BF16, BF16, INT16, drawn=True)  # the moments alone are
    assert_same_bits(step.by_kernel(device), step.by_reference())


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True], ids=["nearest", "drawn"])
@pytest.mark.parametrize(
    "pieces",
    [[(0, PIECE, 0), (PIECE, 2 * PIECE - 1, 3)], [(3, 1 + PIECE, 1), (1 + PIECE, 2 * PIECE, 0)]],
    ids=["aligned", "odd"],
)
def test_long_pieces(pieces, drawn, device):
    """More than one round of a program, full and not, in vectors and element by element."""
    step = make_step(BF16, BF16, BF16, drawn=drawn, pieces=pieces, length=2 * PIECE + 5)
    assert_same_bits(step.by_kernel(device), step.by_reference())


def flat(step: Step, places: Tensor, length: int, begin: int) -> Step:
    """A step on the elements `places` of another, which start at `begin` in tensors of `length`."""
    moved = {}
    for field, x in zip(fields(Step)[:6], step.arguments(), strict=False):
        if x is not None:
            moved[field.name] = x.new_full((length,), 77)
            moved[field.name][begin : begin + len(places)] = x[places]
    pieces = [(at, min(at + 100, begin + len(places)), 0) for at in range(begin, begin + len(places), 100)]
    return replace(step.copy(torch.device("cpu")), pieces=torch.tensor(pieces), **moved)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [0, 1])
def test_results_do_not_depend_on_the_cut(dim, device):
    """[12, 50], whole and a shard of it along either dim, which begins elsewhere and is cut elsewhere."""
    rows, columns, low, high, begin = 12, 50, 5, 9, 13
    shard = torch.arange(rows * columns).view(rows, columns).narrow(dim, low, high - low).flatten()
    whole = make_step(BF16, BF16, BF16, amsgrad=True, drawn=True, pieces=[(0, 600, 0)], length=600)
    cut = flat(whole, shard, 700, begin)
    inner, first = (columns, low * columns) if dim == 0 else (high - low, low)
    for step, place in ((whole, (0, columns, columns, 0)), (cut, (-begin, inner, columns, first))):
        assert step.draws is not None
        step.draws[0, Draw.ORIGIN :] = torch.tensor(place)
    ours, theirs = cut.by_kernel(device), flat(whole.by_kernel(device), shard, 700, begin)
    assert_same_bits(ours, theirs)
    assert (ours.parameter != cut.parameter).any()


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31(device):
    """A piece across element 2^31. The tensors lie in one storage, 128 elements apart, hardly touched."""
    begin, length = 2**31 - 37, 100
    storage = torch.UntypedStorage(2 * (2**31 + 1000), device=device)
    near = make_step(BF16, BF16, BF16, drawn=True, pieces=[(0, length, 1)], length=length)
    far = [
        torch.tensor([], dtype=BF16, device=device).set_(storage, 128 * i, (begin + length,), (1,))
        for i in range(4)
    ]
    names = [field.name for field in fields(Step)][:4]
    for name, x in zip(names, far, strict=True):
        x[begin:] = getattr(near, name).to(device)
    assert near.draws is not None
    moved = near.draws.clone()
    moved[:, Draw.ORIGIN] -= begin
    tables = [near.pieces + torch.tensor([begin, begin, 0]), near.coefficients, near.gradient_scale, moved]
    pieces, table, scale, moved = (x.to(device) for x in tables)
    sums = kernels.sum_of_squares(far[1], pieces)
    assert torch.equal(sums, kernels.sum_of_squares(near.gradient.to(device), near.pieces.to(device)))
    kernels.adamw_(far[0], far[1], far[2], far[3], None, None, pieces, table, scale, moved, False)
    expected = near.by_kernel(device)
    for name, x in zip(names, far, strict=True):
        assert torch.equal(x[begin:].cpu(), getattr(expected, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_sums_of_squares(dtype, device):
    gradient = make_step(FP32, dtype, FP32).gradient
    pieces = torch.tensor([piece for piece in PIECES if piece[2] != INACTIVE] + [(7, 7, 0)])
    ours = kernels.sum_of_squares(gradient.to(device), pieces.to(device)).cpu()
    assert ours.dtype == FP64
    expected = [math.fsum(x * x for x in gradient[begin:end].tolist()) for begin, end, _ in pieces.tolist()]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=FP64), rtol=1e-15, atol=0)


@pytest.mark.gpu
def test_the_order_of_additions_depends_on_the_length_alone(device):
    values = randn(PIECE, seed=0, dtype=FP32) * 10.0 ** randn(PIECE, seed=1)
    for length in (PIECE, 3000, 1024, 77):
        places = [0, PIECE + 64, 2 * PIECE + 129, 3 * PIECE + 200 + 1]
        gradient = torch.full((4 * PIECE + 201,), torch.nan)
        for at in places:
            gradient[at : at + length] = values[:length]
        pieces = torch.tensor([[at, at + length, 0] for at in places])
        sums = kernels.sum_of_squares(gradient.float().to(device), pieces.to(device))
        assert (sums == sums[0]).all()
        shifted = torch.cat([gradient.new_zeros(1), gradient]).float().to(device)[1:]  # not at 16 bytes
        assert torch.equal(kernels.sum_of_squares(shifted, pieces.to(device)), sums)


@pytest.mark.gpu
def test_sums_are_finite_exactly_if_the_gradient_is(device):
    gradient = torch.full((5 * 64,), 3e38)
    gradient[64], gradient[130], gradient[250] = math.inf, -math.inf, math.nan
    pieces = torch.tensor([[64 * i, 64 * (i + 1), i] for i in range(5)])
    sums = kernels.sum_of_squares(gradient.to(device), pieces.to(device))
    assert sums.isfinite().tolist() == [True, False, False, False, True]
    assert sums[0].item() == pytest.approx(64 * float(gradient[0]) ** 2)


@pytest.mark.gpu
def test_no_pieces(device):
    step = make_step(FP32, FP32, FP32, pieces=[(0, 64, 0)], zero_gradient=True)
    none = replace(step, pieces=step.pieces[:0])
    assert_same_bits(none.by_kernel(device), none)
    assert kernels.sum_of_squares(none.gradient.to(device), none.pieces.to(device)).shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(interpreting(os.environ), reason="only a GPU is waited for")
def test_the_kernels_can_be_captured_and_replayed(device):
    step = make_step(BF16, BF16, FP32, INT16, zero_gradient=False)
    step.by_kernel(device)  # compiles, which is not allowed in a capture
    kernels.sum_of_squares(step.gradient.to(device), step.pieces.to(device))
    here, graph = step.copy(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.adamw_(*here.arguments())
        sums = kernels.sum_of_squares(here.gradient, here.pieces)
    assert_same_bits(here.copy(torch.device("cpu")), step)
    graph.replay()
    assert_same_bits(here.copy(torch.device("cpu")), step.by_kernel(device))
    assert torch.equal(bits(sums), bits(kernels.sum_of_squares(here.gradient, here.pieces)))


def test_pieces_that_allow_it_are_moved_in_vectors():
    """Compiled for sm_90 in another process, where kernels are not interpreted."""
    program = """
import triton
from triton.backends.compiler import GPUTarget
from paracore.inspection.compile import _source
from paracore.kernels import adamw
from paracore.kernels.configuration import SM_90
for entry in adamw.configurations(SM_90):
    if entry.name in ("bf16 fp32 int16", "bf16 bf16 unaligned"):
        target = GPUTarget(SM_90.backend, SM_90.arch, SM_90.warp_size)
        compiled = triton.compile(_source(entry), target=target, options={"num_warps": entry.num_warps})
        print(sum(compiled.asm["ptx"].count(f"{name}.global.v4.b32") for name in ("ld", "st")))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    # Both moments are read and written, 8 elements a thread.
    assert printed.split() == ["8", "0"]


def test_refusals_name_the_argument_and_what_would_be_right(device):
    step = make_step(BF16, BF16, FP32, INT16, amsgrad=True, drawn=True).copy(device)

    def refused(message, **changes):
        with pytest.raises(UsageError, match=message):
            kernels.adamw_(*replace(step, **changes).arguments())

    assert step.draws is not None
    wide = torch.zeros(240, 2, device=device)
    refused(r"parameter is torch\.float64 of .*; expected torch\.bfloat16 or", parameter=wide[:, 0].double())
    refused(r"parameter is .* shape \[240, 2\] .*; expected .* shape \[n\]", parameter=wide)
    refused(r"parameter has strides \(2,\); expected a contiguous", parameter=wide[:, 0])
    refused(r"gradient is .* shape \[239\] .*; expected .* shape \[240\]", gradient=step.gradient[1:])
    refused(r"first_moment is torch\.float16 .*; expected torch\.bfloat16 or", first_moment=wide[:, 0].half())
    refused(r"second_moment is torch\.bfloat16 .*; expected torch\.float32", second_moment=step.parameter)
    refused(r"max_second_moment is torch\.bfloat16 .*; expected", max_second_moment=step.parameter)
    refused(r"master is torch\.bfloat16 .*; expected torch\.float32 or torch\.int16", master=step.parameter)
    refused(r"master is torch\.int16 .*; expected torch\.float32 of", parameter=step.parameter.half())
    refused(r"pieces is torch\.int32 .*; expected torch\.int64 of shape \[n, 3\]", pieces=step.pieces.int())
    refused(
        r"pieces has strides \(3, 2\)", pieces=step.pieces.repeat(1, 2)[:, ::2].as_strided((3, 3), (3, 2))
    )
    refused(r"coefficients is .* \[4, 9\] .*; expected .* \[n, 10\]", coefficients=step.coefficients[:, 1:])
    refused(r"gradient_scale is torch\.float32 of shape \[1\]", gradient_scale=step.gradient_scale.float())
    refused(r"gradient_scale is .* shape \[\] .*; expected .* \[1\]", gradient_scale=step.gradient_scale[0])
    refused(r"draws is .* \[3, 7\] .*; expected .* \[4, 7\]", draws=step.draws[:3])
    refused(r"gradient is .* on meta; expected .* on", gradient=step.gradient.to("meta"))
    with pytest.raises(UsageError, match=r"gradient is torch\.int16 .*; expected torch\.bfloat16 or"):
        kernels.sum_of_squares(step.gradient.to(INT16), step.pieces)
    with pytest.raises(UsageError, match=r"pieces is .* shape \[6\] .*; expected .* \[n, 3\]"):
        kernels.sum_of_squares(step.gradient, step.pieces[:, 0])
