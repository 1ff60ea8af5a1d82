"""The native kernels of paracore.reference_layers: as exact as plain torch, the same bits on any threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from paracore import _C, reference_layers
from tests import native_layers_cases as cases
from tests.native_layers_cases import BF16, F32, INF, NAN, REFERENCE, SIZES, LayerKernels, gapped, native
from tests.numerics import all_equal, nan_in_fresh_memory, randn

DTYPES = (F32, BF16)
B, HQ, HK = 3, 4, 2


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield


@pytest.fixture(params=_C.capabilities())
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    return native(request.param)


def logits_of(tokens: int, size: int, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    return (factor * randn(tokens, size, seed=size)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestCrossEntropy:
    @pytest.mark.parametrize("factor", [1.0, 1e4, 1e30])
    def test_statistics(self, kernels: LayerKernels, dtype: torch.dtype, factor: float) -> None:
        for size in (*SIZES, 1024, 1025, 32000):
            logits, labels = logits_of(13, size, dtype, factor), cases.labels_of(13, size)
            cases.assert_statistics(kernels, logits, labels, f"V={size}")
            cases.assert_statistics(kernels, gapped(logits), labels, f"V={size}, gaps between rows")

    def test_a_million_logits_whose_maximum_keeps_rising(
        self, kernels: LayerKernels, dtype: torch.dtype
    ) -> None:
        rising = torch.linspace(-1000, 1000, 1_000_003, dtype=torch.float64)
        logits = torch.stack([rising, rising.flip(0), randn(len(rising), seed=0)]).to(dtype)
        cases.assert_statistics(kernels, logits, torch.tensor([5, 1_000_002, -1]))

    def test_special_logits(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        """Each alone in a long row, and rows full of them, of one block and of several."""
        specials = (-INF, INF, NAN, 1e30, -1e30)
        for size in (1, 5, 3000):
            ordinary = logits_of(1, size, dtype)
            rows = [torch.full_like(ordinary, special) for special in specials]
            for special in specials:
                for position in {0, size // 2, size - 1}:
                    rows.append(ordinary.clone())
                    rows[-1][0, position] = special
            rows += [
                torch.where(torch.arange(size) < size - 1, -INF, ordinary),
                ordinary.clone(),
                ordinary.clone(),
            ]
            rows[-1][0, 0], rows[-1][0, -1] = NAN, INF
            rows[-2][0, 0], rows[-2][0, -1] = INF, -INF
            logits = torch.cat(rows).to(dtype)
            labels = torch.arange(len(logits)) % size
            got = kernels.cross_entropy_statistics(logits, labels)
            plain = reference_layers.cross_entropy_statistics(logits, labels)
            torch.testing.assert_close(got, plain, equal_nan=True, rtol=1e-5, atol=1e-5)

    def test_every_payload_of_not_a_number(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        logits = torch.zeros(4, 9, dtype=dtype)
        payloads = [-1, 0x7FC1, -2] if dtype == BF16 else [-1, 0x7FC00001, -2]
        bits = torch.int16 if dtype == BF16 else torch.int32
        logits[:3, 3] = torch.tensor(payloads, dtype=bits).view(dtype)
        statistics = kernels.cross_entropy_statistics(logits, torch.zeros(4, dtype=torch.int64))
        assert statistics[[0, 1, 3], :3].isnan().all()
        assert not statistics[:, 3].isnan().any()

    def test_gradient(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        for size in (*SIZES, 32000):
            logits, labels = logits_of(13, size, dtype, 3.0), cases.labels_of(13, size)
            given = cases.gradient_inputs(logits, labels)
            cases.assert_gradient(kernels, logits, labels, given, torch.empty_like(logits))
            cases.assert_gradient(kernels, gapped(logits), labels, given, gapped(torch.empty_like(logits), 3))
            in_place = logits.clone()
            fresh = cases.gradient(kernels, logits, labels, given, torch.empty_like(logits))
            cases.gradient(kernels, in_place, labels, given, in_place)
            assert torch.equal(in_place, fresh)

    def test_gaps_between_rows_stay(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        wide = torch.full((4, 20), 7.0, dtype=dtype)
        logits, labels = wide[:, :17], torch.arange(4)
        cases.gradient(kernels, logits, labels, cases.gradient_inputs(logits, labels), logits)
        assert (wide[:, 17:] == 7).all()
        assert (wide[:, :17] != 7).all()

    def test_gradient_of_special_logits(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        """Masked, far below the maximum, above it, and not a number; a maximum of -inf."""
        logits = torch.tensor([[-INF, -1e30, 1.0, 0.0, -85.0], [NAN, 1.0, 1.0, -INF, INF], [-INF] * 5]).to(
            dtype
        )
        labels = torch.tensor([0, 1, 2])
        maximum, log_sum = torch.tensor([1.0, 1.0, -INF]), torch.tensor([0.5, 0.0, -INF])
        given = maximum, log_sum, torch.tensor([1.0, 1.0, 0.0]).repeat(3, 1).T.contiguous()
        got, plain = (cases.gradient(k, logits, labels, given, logits.clone()) for k in (kernels, REFERENCE))
        torch.testing.assert_close(
            got, plain, equal_nan=True, rtol=1e-6 if dtype == F32 else 1e-2, atol=1e-37
        )

    def test_what_has_no_coefficients_is_zero_whatever_the_logits(
        self, kernels: LayerKernels, dtype: torch.dtype
    ) -> None:
        logits, labels, bad = (
            torch.full((3, 9), NAN, dtype=dtype),
            torch.tensor([0, -100, 3]),
            torch.full((3,), NAN),
        )
        coefficients = torch.zeros(3, 3)
        coefficients[:, 1] = -0.0
        got = cases.gradient(kernels, logits, labels, (bad, bad, coefficients), torch.empty_like(logits))
        assert (got == 0).all()
        coefficients[2, 0], coefficients[1, 1] = 1.0, NAN
        got = cases.gradient(kernels, logits, labels, (bad, bad, coefficients), torch.empty_like(logits))
        assert got[:2].isnan().all()
        assert (got[2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestSwiGLU:
    @pytest.mark.parametrize("gaps", [False, True])
    def test_exact(self, kernels: LayerKernels, dtype: torch.dtype, gaps: bool) -> None:
        for size in (*SIZES, 32000):
            cases.assert_swiglu(kernels, *cases.swiglu_inputs((5, size), dtype, gaps=gaps))

    def test_columns_of_one_matrix(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        gate, up = randn(7, 70, seed=0, dtype=dtype).split(35, -1)
        cases.assert_swiglu(kernels, randn(7, 35, seed=1, dtype=dtype), gate, up)

    def test_large_gates(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        gate = torch.tensor(
            [[1e30, -1e30, 88.5, -87.0, 100.0, -100.0, 0.0, -0.0, INF, -INF, NAN, 17.0, 20.0]]
        )
        gate, ones = gate.to(dtype), torch.ones(1, 13, dtype=dtype)
        got, plain = (cases.swiglu(k, ones, gate, ones) for k in (kernels, REFERENCE))
        for name, result in got.items():
            torch.testing.assert_close(result, plain[name], equal_nan=True, rtol=1e-5, atol=1e-30)
            assert result[0, :8].isfinite().all()

    def test_outputs_may_be_given_and_may_be_inputs(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        dy, gate, up = cases.swiglu_inputs((3, 37), dtype)
        expected = cases.swiglu(kernels, dy, gate, up)
        out = torch.full_like(gate, NAN)
        assert _C.swiglu_forward(gate, up, out=out).data_ptr() == out.data_ptr()
        y, both = gate.clone(), (gate.clone(), up.clone())
        assert all_equal([_C.swiglu_forward(y, up, out=y), out, _C.swiglu_forward(gate, up)])
        dgate, dup = _C.swiglu_backward(dy, *both, out=both)
        assert (dgate.data_ptr(), dup.data_ptr()) == (both[0].data_ptr(), both[1].data_ptr())
        torch.testing.assert_close(dgate, expected["dgate"])
        torch.testing.assert_close(dup, expected["dup"])


def heads(shape: tuple[int, ...], order: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Of that shape, whose leading dims lie in memory in that order, with gaps in each."""
    sizes = [shape[dim] + 1 for dim in order]
    memory = randn(*sizes, shape[-1] + 3, seed=seed, dtype=dtype)
    back = [list(order).index(dim) for dim in range(3)]
    s, b, h, d = shape
    return memory.permute(*back, 3)[:s, :b, :h, :d]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestRotatePair:
    @pytest.mark.parametrize("D", [2, 6, 10, 64, 96, 128])
    @pytest.mark.parametrize("inverse", [False, True])
    def test_exact(self, kernels: LayerKernels, dtype: torch.dtype, D: int, inverse: bool) -> None:
        q, k = randn(7, B, HQ, D, seed=0, dtype=dtype), randn(7, B, HK, D, seed=1, dtype=dtype)
        positions = torch.tensor([3, 0, 8, 8, 1, 5, 2]).unsqueeze(1).expand(7, B)
        given = q, k, *cases.tables(9, D), positions, inverse
        cases.assert_rotated(cases.rotated(kernels, *given), *given)

    @pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2)])
    def test_any_strides_and_in_place(
        self, kernels: LayerKernels, dtype: torch.dtype, order: tuple[int, ...]
    ) -> None:
        shapes = (5, B, HQ, 22), (5, B, HK, 22)
        q, k = (heads(shape, order, dtype, seed) for seed, shape in enumerate(shapes))
        q_out, k_out = (heads(shape, order[::-1], dtype, 9) for shape in shapes)
        positions = torch.randint(9, (B, 10), generator=torch.Generator().manual_seed(0)).t()[::2]
        given = q, k, *cases.tables(9, 22), positions, False
        kernels.rotate_pair(*given[:-1], q_out, k_out, False)
        cases.assert_rotated((q_out, k_out), *given)
        kernels.rotate_pair(*given[:-1], q, k, False)
        assert torch.equal(q, q_out)
        assert torch.equal(k, k_out)

    def test_inverse_turns_back(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        q, k = randn(4, 1, 2, 30, seed=0, dtype=dtype), randn(4, 1, 1, 30, seed=1, dtype=dtype)
        turns = *cases.tables(4, 30), torch.arange(4).unsqueeze(1)
        turned = cases.rotated(kernels, q, k, *turns, False)
        assert (turned[0] != q).any()
        back = cases.rotated(kernels, *turned, *turns, True)
        eps = 1e-6 if dtype == F32 else 2e-2
        torch.testing.assert_close(back, (q, k), rtol=eps, atol=eps)

    def test_only_what_is_given_is_written(self, kernels: LayerKernels, dtype: torch.dtype) -> None:
        wide = torch.full((4, B, 3, 13), 7.0, dtype=dtype)
        x = wide[:, :, :2, :10]
        kernels.rotate_pair(
            x, x[:, :, :0], *cases.tables(2, 10), torch.ones(4, B).long(), x, x[:, :, :0], False
        )
        assert (wide[..., 10:] == 7).all()
        assert (wide[:, :, 2] == 7).all()
        assert (x != 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEmbeddingGradient:
    @pytest.mark.parametrize(("N", "vocab_size"), [(1, 1), (50, 1), (50, 7), (300, 1000), (700, 11)])
    def test_bits_are_the_references(
        self, kernels: LayerKernels, dtype: torch.dtype, N: int, vocab_size: int
    ) -> None:
        """It adds in the order of tokens too."""
        tokens = cases.tokens_of(N, vocab_size)
        for H in (1, 3, 17, 64, 1000, 2500):
            dy = gapped(randn(N, H, seed=H, dtype=dtype))
            got = kernels.embedding_gradient(dy, tokens, vocab_size)
            assert got.dtype == dtype
            assert got.is_contiguous()
            assert torch.equal(got, reference_layers.embedding_gradient(dy, tokens, vocab_size)), H

    def test_a_token_that_is_not_a_number_harms_its_row_alone(
        self, kernels: LayerKernels, dtype: torch.dtype
    ) -> None:
        dy = torch.ones(4, 5, dtype=dtype)
        dy[0], dy[3] = NAN, NAN
        got = kernels.embedding_gradient(dy, torch.tensor([2, 0, 0, 9]), 4)
        assert got[2].isnan().all()
        assert got[0].eq(2).all()
        assert got[[1, 3]].eq(0).all()


def statistics_of_many() -> Sequence[Tensor]:
    return [_C.cross_entropy_statistics(logits_of(300, 1111, F32), cases.labels_of(300, 1111))]


def gradient_of_many() -> Sequence[Tensor]:
    logits, labels = logits_of(300, 1111, F32), cases.labels_of(300, 1111)
    given = cases.gradient_inputs(logits, labels)
    _C.cross_entropy_gradient(logits, labels, *given, logits)
    return [logits]


def swiglu_of_many() -> Sequence[Tensor]:
    dy, gate, up = cases.swiglu_inputs((1, 400_003), BF16)
    return [_C.swiglu_forward(gate, up), *_C.swiglu_backward(dy, gate, up)]


def rotated_many() -> Sequence[Tensor]:
    q, k = randn(300, 2, 8, 64, seed=0, dtype=F32), randn(300, 2, 2, 64, seed=1, dtype=F32)
    positions = torch.arange(300).unsqueeze(1).expand(300, 2)
    _C.rotate_pair(q, k, *cases.tables(300, 64), positions, q, k, False)
    return [q, k]


def embedding_of_many() -> Sequence[Tensor]:
    dy = randn(2000, 1500, seed=0, dtype=F32)
    few = _C.embedding_gradient(dy, cases.tokens_of(2000, 30), 30)
    return [few, _C.embedding_gradient(dy, torch.randint(500, (2000,), generator=torch.Generator()), 500)]


@pytest.mark.parametrize(
    "compute", [statistics_of_many, gradient_of_many, swiglu_of_many, rotated_many, embedding_of_many]
)
def test_bits_do_not_depend_on_threads(compute: Callable[[], Sequence[Tensor]]) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    for each in zip(*results, strict=True):
        assert all_equal(each)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing(kernels: LayerKernels, dtype: torch.dtype) -> None:
    """No tokens, no columns, no heads, no rows."""
    for shape in ((0, 5), (3, 0), (0, 0)):
        x, labels = torch.ones(shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.int64)
        statistics = kernels.cross_entropy_statistics(x, labels)
        assert torch.equal(statistics, reference_layers.cross_entropy_statistics(x, labels))
        cases.gradient(kernels, x, labels, cases.gradient_inputs(x, labels), x)
        assert kernels.swiglu_forward(x, x).shape == shape
        assert [d.shape for d in kernels.swiglu_backward(x, x, x)] == [shape, shape]
        for vocab_size in (0, 4):
            got = kernels.embedding_gradient(x, labels, vocab_size)
            assert torch.equal(got, torch.zeros(vocab_size, shape[1], dtype=dtype))
    for S, batch, H, D in ((0, 2, 2, 4), (2, 0, 2, 4), (2, 2, 0, 4), (2, 2, 2, 0)):
        x, positions = torch.ones(S, batch, H, D, dtype=dtype), torch.zeros(S, batch, dtype=torch.int64)
        kernels.rotate_pair(x, x, *cases.tables(1, D), positions, x, x, False)
