"""Cross entropy's Triton kernels against `paracore.reference_layers`, on the GPU or under the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paracore import reference_layers as reference
from paracore.errors import UsageError
from paracore.inspection.report import missed_requirements
from paracore.inspection.worker import Job, inspect
from tests.triton_layers_cases import (
    DTYPES,
    FLOOR,
    INFINITY,
    NAN,
    apart,
    gradient_arguments,
    judge,
    kernels_device,
    labels_of,
    logits_of,
    on_cpu,
)

pytest.importorskip("triton")

from paracore.kernels import cross_entropy
from paracore.kernels.configuration import TARGETS

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def device():
    with kernels_device() as here:
        yield here


def reference_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return tuple(reference.cross_entropy_statistics(logits, labels))


def reference_gradient(
    logits: Tensor, labels: Tensor, maximum: Tensor, log_sum: Tensor, coefficients: Tensor
) -> Tensor:
    dlogits = torch.empty_like(logits)
    reference.cross_entropy_gradient(logits, labels, maximum, log_sum, coefficients, dlogits)
    return dlogits


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 3, 17, 1000, 5000, 16, 4096])
def test_cross_entropy(V, dtype, device):
    """Rows that start at multiples of 16 bytes, and anywhere."""
    logits, labels = logits_of(5, V, dtype, device), labels_of(V, device)
    ours = cross_entropy.cross_entropy_statistics(logits, labels)
    judge(
        list(ours), lambda *given: tuple(reference.cross_entropy_statistics(*given)), [logits, labels], 2e-7
    )
    arguments = gradient_arguments(logits, labels)
    dlogits = torch.empty_like(logits)
    cross_entropy.cross_entropy_gradient(*arguments, dlogits)
    judge([dlogits], reference_gradient, arguments, FLOOR[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(("V", "dtype"), [(20000, BF16), (20011, FP32)])
def test_cross_entropy_of_long_rows(V, dtype, device):
    """Several steps of the loop, with the maximum in the last."""
    logits, labels = logits_of(2, V, dtype, device), torch.tensor([5, V - 1], device=device)
    logits[:, V - 2] = 40
    ours = cross_entropy.cross_entropy_statistics(logits, labels)
    judge(
        list(ours), lambda *given: tuple(reference.cross_entropy_statistics(*given)), [logits, labels], 2e-7
    )
    arguments = gradient_arguments(logits, labels)
    dlogits = torch.empty_like(logits)
    cross_entropy.cross_entropy_gradient(*arguments, dlogits)
    judge([dlogits], reference_gradient, arguments, FLOOR[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_cross_entropy_of_strided_rows(dtype, device):
    """The bits of contiguous rows, where logits' and gradient's rows start alike or not; gaps stay."""
    dense, labels = logits_of(5, 1000, dtype, device), labels_of(1000, device)
    expected = cross_entropy.cross_entropy_statistics(dense, labels)
    arguments = gradient_arguments(dense, labels)
    dense_gradient = torch.empty_like(dense)
    cross_entropy.cross_entropy_gradient(*arguments, dense_gradient)
    for gap, d_gap in ((3, 3), (3, 5), (8, 0)):
        logits = apart(dense, gap)
        torch.testing.assert_close(
            cross_entropy.cross_entropy_statistics(logits, labels), expected, rtol=1e-5, atol=1e-5
        )
        around = dense.new_full((5, 1000 + 2 * d_gap), 77)
        dlogits = around[:, d_gap : d_gap + 1000]
        cross_entropy.cross_entropy_gradient(logits, *arguments[1:], dlogits)
        assert torch.equal(dlogits, dense_gradient)
        assert (around.sum(1) - dlogits.sum(1)).isfinite().all()
        assert (around[:, :d_gap] == 77).all()
        assert (around[:, d_gap + 1000 :] == 77).all()


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1000, 1001, 5000])
def test_cross_entropy_in_place(V, device):
    logits, labels = logits_of(5, V, BF16, device), labels_of(V, device)
    arguments = gradient_arguments(logits, labels)
    apart_gradient = torch.empty_like(logits)
    cross_entropy.cross_entropy_gradient(*arguments, apart_gradient)
    cross_entropy.cross_entropy_gradient(*arguments, logits)
    assert torch.equal(logits, apart_gradient)


def special_logits(V: int, device: torch.device) -> Tensor:
    """[11, V] float32: infinities, NaN and large numbers, early and late in the row."""
    logits = logits_of(11, V, FP32, device)
    logits[0, 1] = logits[1, V - 1] = logits[2, : V // 2] = -INFINITY
    logits[3] = -INFINITY
    logits[4, 0] = logits[5, V - 1] = 1e30
    logits[6] = -1e30
    logits[7, 2] = logits[8, V - 1] = NAN
    logits[9, V // 2] = INFINITY
    logits[10, 0], logits[10, V - 1] = INFINITY, NAN
    return logits


@pytest.mark.gpu
@pytest.mark.parametrize("V", [17, 5001])
def test_cross_entropy_of_infinities_and_nan(V, device):
    logits, labels = special_logits(V, device), torch.full((11,), 1, device=device)
    ours = cross_entropy.cross_entropy_statistics(logits, labels)
    expected = reference.cross_entropy_statistics(logits.double(), labels).float()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0, equal_nan=True)
    assert ours[:, 3].tolist() == [-INFINITY, 0, -INFINITY, -INFINITY]
    assert ours[:2, 7:9].isnan().all()
    arguments = gradient_arguments(logits, labels)
    dlogits = torch.empty_like(logits)
    cross_entropy.cross_entropy_gradient(*arguments, dlogits)
    torch.testing.assert_close(
        dlogits.cpu(), reference_gradient(*on_cpu(arguments)), rtol=1e-5, atol=1e-7, equal_nan=True
    )


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1000, 1001])
def test_tokens_without_coefficients_get_zeros(V, device):
    """Whatever their logits and their softmax's numbers are; one coefficient is enough to count."""
    logits, labels = logits_of(5, V, BF16, device), labels_of(V, device)
    arguments = gradient_arguments(logits, labels)
    logits[0], arguments[2][0], logits[1], arguments[3][1] = NAN, NAN, INFINITY, -INFINITY
    arguments[4][:] = torch.tensor([[0, -0.0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]])
    dlogits = torch.empty_like(logits)
    cross_entropy.cross_entropy_gradient(*arguments, dlogits)
    assert (dlogits[:2] == 0).all()
    assert (dlogits[2] > 0).any()
    assert (dlogits[3] == 0).all()  # its label is outside
    assert (dlogits[4] == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "V"), [(0, 7), (3, 0), (0, 0)])
def test_cross_entropy_of_nothing(N, V, device):
    logits, labels = torch.empty(N, V, device=device), torch.zeros(N, dtype=torch.int64, device=device)
    statistics = cross_entropy.cross_entropy_statistics(logits, labels)
    assert torch.equal(statistics, torch.tensor([-INFINITY, 0, 0, 0], device=device).repeat(N, 1).T)
    numbers = torch.zeros(3, N, device=device)
    cross_entropy.cross_entropy_gradient(logits, labels, numbers[0], numbers[1], numbers, logits)


def test_refusals_name_the_argument_and_what_would_be_right(device):
    logits, labels = torch.zeros(4, 6, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(UsageError, match=r"logits is torch\.float64 of .*; expected torch\.bfloat16 or"):
        cross_entropy.cross_entropy_statistics(logits.double(), labels)
    with pytest.raises(UsageError, match=r"logits has strides \(1, 4\); expected a contiguous last dim"):
        cross_entropy.cross_entropy_statistics(logits.view(6, 4).T, labels)
    with pytest.raises(UsageError, match=r"labels is .*\[3\] .*; expected torch\.int64 of shape \[4\]"):
        cross_entropy.cross_entropy_statistics(logits, labels[1:])
    numbers = torch.zeros(3, 4, device=device)
    for name, changes in {
        "dlogits": {"dlogits": logits.half()},
        "maximum": {"maximum": labels},
        "log_sum": {"log_sum": numbers},
        "coefficients": {"coefficients": numbers.T.contiguous().T},
    }.items():
        given = {"maximum": numbers[0], "log_sum": numbers[0], "coefficients": numbers, "dlogits": logits}
        with pytest.raises(UsageError, match=f"{name} (is|has strides) .*; expected "):
            cross_entropy.cross_entropy_gradient(logits, labels, **(given | changes))


def test_the_statistics_meet_their_requirements_on_every_target():
    """Of the layers' kernels the one with most registers; `paracore kernels` compiles the rest."""
    jobs = {
        Job(name, entry.kernel_name, entry.name): entry.requirements
        for name, target in TARGETS.items()
        for entry in cross_entropy.configurations(target)
        if (entry.kernel_name, entry.name) == ("cross_entropy_statistics_kernel", "bf16 V>8192")
    }
    assert len(jobs) == len(TARGETS)
    for result in inspect(list(jobs), workers=2, cache=None):
        assert result.measurement is not None, result.error
        assert not missed_requirements(result.measurement, jobs[result.job]), result.job
