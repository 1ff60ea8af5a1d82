"""The functions of paracore.reference_layers under one signature, and how any implementation is judged."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Protocol, cast

import torch
from torch import Tensor

from paracore import _C, reference_layers
from tests.numerics import assert_as_exact_as, randn

F32, BF16 = torch.float32, torch.bfloat16
INF, NAN = float("inf"), float("nan")
# Half a unit in the last place of the dtype: what rounding the result alone can cost.
FLOOR = {F32: 2.0**-24, BF16: 2.0**-9}
SIZES = (1, 3, 17, 64, 1000)


class LayerKernels(Protocol):
    """As paracore.reference_layers."""

    def cross_entropy_statistics(self, logits: Tensor, labels: Tensor) -> Tensor: ...

    def cross_entropy_gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        log_sum: Tensor,
        coefficients: Tensor,
        dlogits: Tensor,
    ) -> None: ...

    def swiglu_forward(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def swiglu_backward(self, dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]: ...

    def rotate_pair(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        q_out: Tensor,
        k_out: Tensor,
        inverse: bool,
    ) -> None: ...

    def embedding_gradient(self, dy: Tensor, tokens: Tensor, vocab_size: int) -> Tensor: ...


REFERENCE = cast(LayerKernels, reference_layers)
NAMES = [name for name in vars(LayerKernels) if not name.startswith("_")]


def native(capability: str) -> LayerKernels:
    bound = {name: partial(getattr(_C, name), capability=capability) for name in NAMES}
    return cast(LayerKernels, SimpleNamespace(**bound))


def gapped(tensor: Tensor, padding: int = 5) -> Tensor:
    """The same numbers, with NaN between the rows."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.size(-1) + padding), NAN)
    view = wide[..., : tensor.size(-1)]
    view.copy_(tensor)
    return view


def labels_of(tokens: int, size: int) -> Tensor:
    """Of which some are outside the columns, on either side."""
    labels = torch.randint(max(size, 1), (tokens,), generator=torch.Generator().manual_seed(size))
    for i, outside in enumerate((-100, size, -1, 2 * size + 7)):
        labels[3 * i + 1 :: 12] = outside
    return labels


def assert_statistics(kernels: LayerKernels, logits: Tensor, labels: Tensor, name: str = "") -> None:
    got = kernels.cross_entropy_statistics(logits, labels)
    assert got.dtype == F32
    assert got.shape == (4, len(labels))
    assert got.is_contiguous()
    plain = reference_layers.cross_entropy_statistics(logits, labels)
    exact = reference_layers.cross_entropy_statistics(logits.double(), labels)
    assert torch.equal(got[0], plain[0]), name
    assert torch.equal(got[2], plain[2]), name
    for row in (1, 3):
        assert_as_exact_as(got[row], plain[row], exact[row], floor=FLOOR[F32], name=f"{name}, row {row}")


def gradient_inputs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """maximum, log_sum and coefficients; those of some tokens are 0."""
    statistics = reference_layers.cross_entropy_statistics(logits, labels)
    coefficients = randn(3, len(labels), seed=1, dtype=F32) / torch.tensor([[1.0], [1.0], [1e4]])
    coefficients[:, 2::5] = 0.0
    return statistics[0], statistics[1].log(), coefficients


def gradient(
    kernels: LayerKernels,
    logits: Tensor,
    labels: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    dlogits: Tensor,
) -> Tensor:
    kernels.cross_entropy_gradient(logits, labels, *given, dlogits)
    return dlogits


def assert_gradient(
    kernels: LayerKernels,
    logits: Tensor,
    labels: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    dlogits: Tensor,
) -> None:
    """dlogits may be the logits."""
    plain = gradient(REFERENCE, logits, labels, given, torch.empty_like(logits))
    wide = logits.double()
    m, log_sum, coefficients = (tensor.double() for tensor in given)
    exact = gradient(REFERENCE, wide, labels, (m, log_sum, coefficients), torch.empty_like(wide))
    got = gradient(kernels, logits, labels, given, dlogits)
    assert_as_exact_as(got, plain, exact, floor=FLOOR[logits.dtype], name="dlogits")


def swiglu_inputs(
    shape: tuple[int, int], dtype: torch.dtype, *, gaps: bool = False, scale: float = 3.0
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, gate, up."""
    dy, gate, up = ((scale * randn(*shape, seed=seed)).to(dtype) for seed in range(3))
    return (gapped(dy, 3), gapped(gate, 8), gapped(up, 1)) if gaps else (dy, gate, up)


def swiglu(kernels: LayerKernels, dy: Tensor, gate: Tensor, up: Tensor) -> dict[str, Tensor]:
    dgate, dup = kernels.swiglu_backward(dy, gate, up)
    return {"y": kernels.swiglu_forward(gate, up), "dgate": dgate, "dup": dup}


def assert_swiglu(kernels: LayerKernels, dy: Tensor, gate: Tensor, up: Tensor) -> None:
    got, plain = swiglu(kernels, dy, gate, up), swiglu(REFERENCE, dy, gate, up)
    exact = swiglu(REFERENCE, dy.double(), gate.double(), up.double())
    for name, result in got.items():
        assert result.dtype == gate.dtype
        assert result.is_contiguous()
        assert_as_exact_as(result, plain[name], exact[name], floor=FLOOR[gate.dtype], name=name)


def tables(rows: int, D: int) -> tuple[Tensor, Tensor]:
    angles = 10 * randn(rows, D // 2, seed=D)
    return angles.cos().float(), angles.sin().float()


def rotated(
    kernels: LayerKernels, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    """In fresh memory."""
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    kernels.rotate_pair(q, k, cos, sin, positions, q_out, k_out, inverse)
    return q_out, k_out


def assert_rotated(
    got: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    inverse: bool,
) -> None:
    plain = rotated(REFERENCE, q, k, cos, sin, positions, inverse)
    exact = rotated(REFERENCE, q.double(), k.double(), cos, sin, positions, inverse)
    for name, result, other, right in zip("qk", got, plain, exact, strict=True):
        assert_as_exact_as(result, other, right, floor=FLOOR[q.dtype], name=name)


def tokens_of(N: int, vocab_size: int) -> Tensor:
    """Half of them are one token, as padding is; some are outside."""
    tokens = torch.randint(-2, vocab_size + 2, (N,), generator=torch.Generator().manual_seed(N))
    tokens[::2] = vocab_size // 2
    return tokens
