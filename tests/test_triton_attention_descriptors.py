"""Attention's Triton kernels load the same through tensor descriptors as through pointers."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.interpreter import interpreting, mended
from tests.triton_attention_cases import Case, run

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from paracore.kernels import attention as kernels
from paracore.kernels.attention_configurations import KERNELS, Blocks, choose_blocks, head_dim_parts
from paracore.kernels.configuration import SM_90, TARGETS, target_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = Blocks(32, 16, warps=4, stages=2, descriptors=True)


@pytest.fixture
def device():
    """Where the kernels run: a GPU whose kernels use descriptors, or the interpreter."""
    if interpreting(os.environ):
        with mended():
            yield torch.device("cpu")
    elif target_of(torch.device("cuda")) == SM_90:
        yield torch.device("cuda")
    else:
        pytest.skip("needs sm_90")


@pytest.fixture
def blocks(monkeypatch):
    """blocks(chosen): these tiles, so that short sequences cross several."""

    def force(chosen: Blocks) -> None:
        monkeypatch.setattr(kernels, "choose_blocks", lambda *_: chosen)

    return force


def sequence_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mask", "D", "dtype", "layout"),
    [
        ("causal", (128, 128), BF16, sequence_first),
        ("window", (192, 128), BF16, torch.Tensor.contiguous),
        ("documents", (104, 40), FP16, sequence_first),  # the last columns of tiles lie outside the tensors
        ("some_nothing", (96, 64), FP16, torch.Tensor.contiguous),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_descriptors_load_what_pointers_load(mask, D, dtype, layout, device, blocks, monkeypatch):
    """Bit for bit, for every batch and head, in the middle and at the edges of the tensors."""
    given = Case.random(mask, B=2, heads=(4, 2), S=(50, 55), D=D[0], DV=D[1], dtype=dtype, device=device)
    given = Case(given.q, layout(given.k), layout(given.v), given.dout, None, given.terms)
    made: list[tuple[int, int]] = []

    def describe(x: torch.Tensor, shape: Any, strides: Any, block: list[int]) -> TensorDescriptor:
        made.append((x.data_ptr(), block[-1]))
        return TensorDescriptor(x, shape, strides, block)

    monkeypatch.setattr(kernels, "TensorDescriptor", describe)
    blocks(replace(BLOCKS, descriptors=False))
    expected = run(kernels, given)
    assert not made
    blocks(BLOCKS)
    results = run(kernels, given)
    parts = [(x.data_ptr(), part) for x in (given.k, given.v) for part in head_dim_parts(x.size(3)) if part]
    assert made == parts * 2  # forward's and dq's
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("layout", ["address", "row", "head", "expanded"])
def test_what_descriptors_do_not_allow_is_loaded_through_pointers(layout, which, device, blocks):
    """An address or a stride that is no multiple of 16 bytes, a stride of 0: of either tensor."""
    given = Case.random("causal", heads=(4, 2), S=(33, 40), D=32, dtype=BF16, device=device)
    tensors = {"k": given.k, "v": given.v}
    x = tensors[which]
    if layout == "address":
        x = torch.zeros(x.numel() + 1, dtype=BF16, device=device)[1:].view_as(x).copy_(x)
    elif layout == "row":
        x = torch.zeros(1, 2, 40, 36, dtype=BF16, device=device)[..., :32].copy_(x)
    elif layout == "head":
        x = torch.zeros(1, 2, 40 * 32 + 4, dtype=BF16, device=device)[..., :-4].view_as(x).copy_(x)
    else:
        x = x[:, :1].expand(1, 2, 40, 32)
    k, v = (tensors | {which: x}).values()
    k16, v16 = (y.clone(memory_format=torch.contiguous_format) for y in (k, v))
    assert sum(y is not None for y in kernels._descriptors(BLOCKS, k16, v16).values()) == 2
    assert set(kernels._descriptors(BLOCKS, k, v).values()) == {None}
    blocks(BLOCKS)
    expected = run(kernels, Case(given.q, k16, v16, given.dout, None, given.terms))
    results = run(kernels, Case(given.q, k, v, given.dout, None, given.terms))
    assert all(torch.equal(results[name], expected[name]) for name in expected)


def test_empty_tensors_and_float32_have_no_descriptors():
    even = torch.zeros(2, 2, 16, 32, dtype=BF16)
    for odd in (even[:0], even[:, :0], even[:, :, :0], even.float()):
        assert set(kernels._descriptors(BLOCKS, odd, odd).values()) == {None}


def test_descriptors_are_used_where_they_pay():
    for target in TARGETS.values():
        for D, DV in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
            pays = {"forward": D in (128, 192), "backward_query": D == 128, "backward_key": False}
            for kernel in KERNELS:
                used = choose_blocks(kernel, target, BF16, D, DV).descriptors
                assert used == (target == SM_90 and pays[kernel]), (target, kernel, D)
                assert not choose_blocks(kernel, target, FP32, D, DV).descriptors
