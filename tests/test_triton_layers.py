"""Triton kernels of `paracore.reference_layers` against it, on the GPU or under the interpreter.

Those of cross entropy are in test_triton_cross_entropy.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from paracore import reference_layers as reference
from paracore.errors import UsageError
from tests.numerics import randn
from tests.triton_layers_cases import (
    DTYPES,
    FLOOR,
    apart,
    gradient_arguments,
    judge,
    kernels_device,
    strided,
)

pytest.importorskip("triton")

from paracore.kernels import cross_entropy, embedding, rotary, swiglu

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def device():
    with kernels_device() as here:
        yield here


# ---------------------------------------------------------------- SwiGLU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("I", [1, 3, 17, 1000, 5000, 1024])
@pytest.mark.parametrize("gap", [0, 3, 16])
def test_swiglu(gap, I, dtype, device):  # noqa: E741
    gate, up, dy = (
        apart((randn(3, I, seed=seed) * 3).to(device, dtype), gap + shift if gap else 0)
        for seed, shift in ((0, 0), (1, 32), (2, 16))
    )
    y = swiglu.swiglu_forward(gate, up)
    assert y.is_contiguous()
    judge([y], reference.swiglu_forward, [gate, up], FLOOR[dtype])
    dgate, dup = swiglu.swiglu_backward(dy, gate, up)
    assert dgate.is_contiguous()
    assert dup.is_contiguous()
    judge([dgate, dup], reference.swiglu_backward, [dy, gate, up], FLOOR[dtype])


@pytest.mark.gpu
def test_swiglu_to_where_it_is_wanted(device):
    """In place, and to the halves of one tensor; nothing else is written."""
    gate, up, dy = (randn(4, 1030, seed=seed).to(device, BF16) for seed in range(3))
    y, (dgate, dup) = swiglu.swiglu_forward(gate, up), swiglu.swiglu_backward(dy, gate, up)
    both = gate.new_full((4, 2 * 1030 + 1), 77)
    halves = both[:, :1030], both[:, 1030:-1]
    assert swiglu.swiglu_backward(dy, gate, up, out=halves)[0] is halves[0]
    assert torch.equal(both, torch.cat([dgate, dup, gate.new_full((4, 1), 77)], 1))
    other = gate.clone()
    assert swiglu.swiglu_forward(other, up, out=other) is other
    assert torch.equal(other, y)
    swiglu.swiglu_backward(dy, gate, up, out=(gate, up))
    assert torch.equal(gate, dgate)
    assert torch.equal(up, dup)


@pytest.mark.gpu
def test_swiglu_of_large_gates(device):
    gate = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4]], device=device)
    up, dy = torch.full_like(gate, 2), torch.full_like(gate, 0.5)
    assert swiglu.swiglu_forward(gate, up).tolist() == [[0, 0, pytest.approx(0, abs=1e-30), 180, 400, 2e4]]
    dgate, dup = swiglu.swiglu_backward(dy, gate, up)
    torch.testing.assert_close(dgate, torch.tensor([[0.0, 0, 0, 1, 1, 1]], device=device))
    torch.testing.assert_close(dup, torch.tensor([[0.0, 0, 0, 45, 100, 5e3]], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_swiglu_of_nothing(shape, device):
    x = torch.empty(shape, device=device)
    assert swiglu.swiglu_forward(x, x).shape == shape
    assert [gradient.shape for gradient in swiglu.swiglu_backward(x, x, x)] == [shape, shape]


# ---------------------------------------------------------------- rotary


def angles(P: int, D: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = randn(P, D // 2, seed=9) * 10
    return table.cos().float().to(device), table.sin().float().to(device)


def pair(D: int, dtype: torch.dtype, device: torch.device, heads: tuple[int, int] = (3, 2)) -> list[Tensor]:
    """Return q and k, [3, 2, heads, D]."""
    return [randn(3, 2, h, D, seed=h).to(device, dtype) for h in heads]


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool) -> list[Tensor]:
    out = [torch.empty_like(q), torch.empty_like(k)]
    rotary.rotate_pair(q, k, cos, sin, positions, out[0], out[1], inverse)
    return out


def reference_turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q), torch.empty_like(k)
    reference.rotate_pair(q, k, cos, sin, positions, out[0], out[1], inverse)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True], ids=["", "inverse"])
@pytest.mark.parametrize("D", [2, 6, 64, 96])
def test_rotate_pair(D, inverse, dtype, device):
    q, k = pair(D, dtype, device)
    cos, sin = angles(7, D, device)
    positions = torch.tensor([[0, 6], [3, 3], [5, 1]], device=device)
    arguments = (q, k, cos, sin, positions, inverse)
    judge(turned(*arguments), reference_turned, arguments, FLOOR[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(17, 1), (0, 9), (8, 0), (5, 16)])
def test_heads_of_any_number(heads, device):
    """More than one program's and fewer, and none."""
    q, k = pair(128, BF16, device, heads)
    cos, sin = angles(4, 128, device)
    arguments = (q, k, cos, sin, torch.tensor([[0, 1], [2, 3], [1, 0]], device=device), False)
    judge(turned(*arguments), reference_turned, arguments, FLOOR[BF16])


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["broadcast over B", "broadcast over S", "transposed", "every other"])
def test_rotate_pair_of_any_strides(positions, device):
    """The bits of contiguous tensors; what lies between is left alone."""
    q, k = pair(6, FP32, device)
    cos, sin = angles(9, 6, device)
    where = {
        "broadcast over B": torch.tensor([[4], [0], [8]]).expand(3, 2),
        "broadcast over S": torch.tensor([[4, 7]]).expand(3, 2),
        "transposed": torch.tensor([[1, 2, 3], [4, 5, 6]]).T,
        "every other": torch.arange(9).repeat(2)[1:13:2].view(3, 2),
    }[positions].to(device)
    expected = turned(q, k, cos, sin, where.contiguous(), False)
    joint = torch.cat([q, k], 2)  # as one linear layer yields them
    views = [joint[:, :, :3], strided(k.transpose(0, 1).contiguous(), 2).transpose(0, 1)]
    around = [torch.full((2, 5, 3, 10), 77.0, device=device), torch.full((4, 2, 2, 8), 77.0, device=device)]
    outs = [around[0].permute(2, 0, 1, 3)[:, :, 1:4, 2:8], around[1][1:, :, :, :6]]
    rotary.rotate_pair(views[0], views[1], cos, sin, where, outs[0], outs[1], False)
    for out, untouched, result in zip(outs, around, expected, strict=True):
        assert torch.equal(out, result)
        assert (untouched == 77).sum() == untouched.numel() - out.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("D", [6, 128])
def test_rotate_pair_in_place_and_back(D, device):
    q, k = pair(D, FP32, device, (9, 2))
    cos, sin = angles(5, D, device)
    positions = torch.tensor([[0, 4], [3, 2], [1, 1]], device=device)
    there, given = turned(q, k, cos, sin, positions, False), [q.clone(), k.clone()]
    rotary.rotate_pair(q, k, cos, sin, positions, q, k, False)
    assert torch.equal(q, there[0])
    assert torch.equal(k, there[1])
    rotary.rotate_pair(q, k, cos, sin, positions, q, k, True)
    torch.testing.assert_close([q, k], given)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_rotate_pair_of_nothing(shape, device):
    x, (cos, sin) = torch.empty(shape, device=device), angles(1, 4, device)
    rotary.rotate_pair(x, x, cos, sin, torch.zeros(shape[:2], dtype=torch.int64, device=device), x, x, False)


# ---------------------------------------------------------------- embedding


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("H", [1, 17, 64, 1030])
def test_embedding_gradient(H, dtype, device):
    """Tokens that repeat, that are missing, and that are out of range on either side."""
    tokens = torch.tensor([3, 0, 3, 7, -1, 3, 6, 0, 8, 3, 2**40, -(2**33)], device=device)
    dy = randn(len(tokens), H, seed=H).to(device, dtype)
    ours = embedding.embedding_gradient(dy, tokens, 8)
    judge([ours], reference.embedding_gradient, [dy, tokens, 8], FLOOR[dtype])
    assert (ours[[1, 2, 4, 5]] == 0).all()
    assert torch.equal(ours, embedding.embedding_gradient(apart(dy, 3), tokens, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1, 2, 20])
def test_embedding_gradient_of_nothing_or_nearly(vocab_size, device):
    for tokens in ([], [-1, 20], [0]):
        dy = randn(len(tokens), 5, seed=0, dtype=FP32).to(device)
        given = torch.tensor(tokens, dtype=torch.int64, device=device)
        ours = embedding.embedding_gradient(dy, given, vocab_size).cpu()
        assert torch.equal(ours, reference.embedding_gradient(dy.cpu(), given.cpu(), vocab_size))
    none = embedding.embedding_gradient(dy, given, 0), embedding.embedding_gradient(dy[:, :0], given, 4)
    assert [x.shape for x in none] == [(0, 5), (4, 0)]


def in_pieces(dy: Tensor, tokens: Tensor, vocab_size: int, piece: int) -> Tensor:
    """Sums of pieces of each token's run, in order, then of these, in order."""
    total = torch.zeros(vocab_size, dy.size(1))
    for token in range(vocab_size):
        for rows in dy.float()[tokens == token].split(piece):
            part = torch.zeros(dy.size(1))
            for row in rows:
                part += row
            total[token] += part
    return total


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("lengths", [(4, 5, 8, 9), (13, 0, 17, 4), (40, 1, 41)])
def test_long_runs_are_summed_in_pieces(lengths, first, device, monkeypatch):
    """Bitwise, wherever a run lies among the sorted tokens, and whatever order the tokens come in."""
    monkeypatch.setattr(embedding, "PIECE", 4)
    tokens = torch.cat(
        [torch.full((n,), t) for t, n in enumerate((first, *lengths, 0))] + [torch.tensor([99])]
    )
    tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(first))]
    dy = randn(len(tokens), 3, seed=0, dtype=FP32)
    vocab_size = len(lengths) + 2
    ours = embedding.embedding_gradient(dy.to(device), tokens.to(device), vocab_size).cpu()
    assert torch.equal(ours, in_pieces(dy, tokens, vocab_size, 4))


@pytest.mark.gpu
def test_padding_is_no_less_exact(device):
    tokens = torch.zeros(400, dtype=torch.int64, device=device)
    tokens[::7] = 1
    dy = randn(400, 20, seed=0).to(device, BF16)
    judge([embedding.embedding_gradient(dy, tokens, 2)], reference.embedding_gradient, [dy, tokens, 2], 4e-3)
    assert torch.equal(*(embedding.embedding_gradient(dy, tokens, 2) for _ in range(2)))


# ---------------------------------------------------------------- all


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31(device):
    """Rows 2^30 elements apart; hardly any of the memory is touched."""
    far = torch.tensor([], dtype=BF16, device=device)
    far = far.set_(torch.UntypedStorage(2 * (2**31 + 64), device=device), 0, (3, 16), (2**30, 1))
    near = randn(3, 16, seed=0).to(device, BF16)
    labels = torch.tensor([1, 2, 3], device=device)

    def results(x: Tensor) -> list[Tensor]:
        x.copy_(near)
        found = [cross_entropy.cross_entropy_statistics(x, labels), swiglu.swiglu_forward(near, x)]
        found += [*swiglu.swiglu_backward(x, near, x), embedding.embedding_gradient(x, labels, 4)]
        cos, sin = angles(4, 16, device)
        heads = x.view(3, 1, 1, 16)
        rotary.rotate_pair(heads, heads[:, :, :0], cos, sin, labels.view(3, 1), heads, heads[:, :, :0], False)
        found.append(x.clone())
        cross_entropy.cross_entropy_gradient(*gradient_arguments(near, labels), x)
        return [*found, x.clone()]

    for here, there in zip(results(near.clone()), results(far), strict=True):
        assert torch.equal(here, there)


def test_aligned_tensors_are_moved_in_vectors():
    """Compiled for sm_90 in another process, where kernels are not interpreted."""
    program = """
import triton
from triton.backends.compiler import GPUTarget
from paracore.inspection.compile import _source
from paracore.kernels import cross_entropy, embedding, rotary, swiglu
from paracore.kernels.configuration import SM_90
chosen = {
    "cross_entropy_statistics_kernel bf16 V<=8192 unaligned",
    "cross_entropy_gradient_kernel bf16 V<=8192 unaligned",
    "swiglu_backward_kernel bf16",
    "rotate_pair_kernel bf16 D=80",
    "sum_runs_kernel bf16 H<=512",
}
for module in (cross_entropy, swiglu, rotary, embedding):
    for entry in module.configurations(SM_90):
        if f"{entry.kernel_name} {entry.name}" in chosen:
            target = GPUTarget(SM_90.backend, SM_90.arch, SM_90.warp_size)
            ptx = triton.compile(_source(entry), target=target, options=entry.options).asm["ptx"]
            print(entry.kernel_name, *(ptx.count(f"{name}.global.v4.b32") for name in ("ld", "st")))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [
        "cross_entropy_statistics_kernel 4 0",  # three blocks, and one; not the end
        "cross_entropy_gradient_kernel 4 8",  # four blocks; and as many of zeros
        "swiglu_backward_kernel 3 2",
        "rotate_pair_kernel 4 4",
        "sum_runs_kernel 15 1",  # four rows and one, and four sums of pieces and one
    ]


def test_refusals_name_the_argument_and_what_would_be_right(device):
    x, labels = torch.zeros(4, 6, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(UsageError, match=r"up is .* shape \[4, 5\] .*; expected .* shape \[4, 6\]"):
        swiglu.swiglu_forward(x, x[:, 1:])
    with pytest.raises(UsageError, match=r"dup is torch\.float16 .*; expected torch\.float32"):
        swiglu.swiglu_backward(x, x, x, out=(x, x.half()))
    q, (cos, sin) = torch.zeros(2, 2, 1, 6, device=device), angles(1, 6, device)
    with pytest.raises(UsageError, match=r"q has shape \[2, 2, 1, 5\]; expected an even last dim"):
        rotary.rotate_pair(q[..., 1:], q, cos, sin, labels.view(2, 2), q, q, False)
    with pytest.raises(UsageError, match=r"sin is .* shape \[1, 2\] .*; expected .* shape \[1, 3\]"):
        rotary.rotate_pair(q, q, cos, sin[:, 1:], labels.view(2, 2), q, q, False)
    with pytest.raises(UsageError, match=r"positions is .* shape \[4\] .*; expected .* shape \[2, 2\]"):
        rotary.rotate_pair(q, q, cos, sin, labels, q, q, False)
    with pytest.raises(UsageError, match=r"tokens is torch\.float32"):
        embedding.embedding_gradient(x, x[:, 0], 3)
    with pytest.raises(UsageError, match="vocab_size is -1; expected 0 to 2147483646"):
        embedding.embedding_gradient(x, labels, -1)
