"""What native operations declare to take beside tensors is what they take, and every one declares it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor

import paracore.ops
from paracore.errors import UsageError
from paracore.ops.attention_terms import pack_terms
from paracore.ops.scratch import DECLARATIONS, Scratch, scratch_of
from paracore.parallel import masks
from tests.conftest import Launch
from tests.resident import MIB, SUPPORTED, peak_growth, return_memory_at_once, tensor_bytes, touched

BF16 = torch.bfloat16
ops = torch.ops.paracore

# Of what is declared, and for pages begun and the kernel's counters, which it brings up to date now and then.
TOLERANCE, SLACK = 0.1, MIB // 4


def attention_arguments(
    heads: int, kv_heads: int, length: int, head_dim: int, *, backward: bool
) -> tuple[Any, ...]:
    """Arguments of attention or its backward, made without calling it: threads keep what a call took."""
    q = touched(1, heads, length, head_dim, dtype=BF16)
    k, v = (touched(1, kv_heads, length, head_dim, dtype=BF16) for _ in range(2))
    mask = masks.causal() & masks.sliding_window(left=300)
    packed = pack_terms(
        q,
        length,
        mask,
        None,
        None,
        scale=None,
        softcap=0.0,
        alibi_slopes=None,
        dropout_p=0.0,
        seed=None,
        first_batch=0,
        first_head=0,
    )
    if not backward:
        return (q, k, v, None, *packed, None)
    dout, out = (touched(1, heads, length, head_dim, dtype=BF16) for _ in range(2))
    return (dout, None, q, k, v, None, out, torch.full((1, heads, length), 5.0), *packed, None)


def norm_arguments(rows: int, hidden: int, *, backward: bool) -> tuple[Any, ...]:
    x, weight = touched(rows, hidden, dtype=BF16), touched(hidden, dtype=BF16)
    if not backward:
        return x, weight, None, 1e-6, None
    return touched(rows, hidden, dtype=BF16), None, x, weight, torch.ones(rows), None


# name, threads, a small call that makes threads and code resident, the call that is measured.
CASES: dict[str, tuple[Any, int, tuple[int, ...], tuple[int, ...]]] = {
    "tiles of forward": (ops.attention.default, 8, (8, 8, 100, 16), (16, 16, 600, 256)),
    "dq of whole heads": (ops.attention_backward.default, 2, (4, 4, 100, 16), (8, 4, 2048, 256)),
    "dq of a few tiles": (ops.attention_backward.default, 8, (8, 8, 100, 16), (8, 1, 2048, 256)),
    "a wide weight": (ops.rms_norm.default, 2, (4, 64), (4, 1 << 20)),
    "sums of blocks": (ops.rms_norm_backward.default, 2, (4, 64), (512, 1 << 14)),
}


def declared_and_measured(case: str) -> tuple[Scratch, int]:
    operation, threads, small, large = CASES[case]
    make = attention_arguments if "attention" in operation.name() else norm_arguments
    torch.set_num_threads(threads)
    return_memory_at_once()
    operation(*make(*small, backward="backward" in operation.name()))
    arguments = make(*large, backward="backward" in operation.name())
    outputs = []

    def call() -> object:
        result = operation(*arguments)
        outputs.append(tensor_bytes(*result))
        return result

    growth = peak_growth(call)
    return scratch_of(operation, arguments), growth - outputs[0]


@pytest.mark.skipif(not SUPPORTED, reason="reads Linux's count of resident memory, on glibc's heap")
@pytest.mark.parametrize("case", CASES)
def test_what_is_declared_is_what_the_process_grows_by(launch: Launch, case: str) -> None:
    [(scratch, measured)] = launch(1, declared_and_measured, case)
    declared = sum(scratch)
    assert declared > 2 * MIB  # much more than the tolerance
    assert abs(measured - declared) <= TOLERANCE * declared + SLACK, (declared / MIB, measured / MIB)


def test_every_operation_declares_its_scratch() -> None:
    for module in pkgutil.iter_modules(paracore.ops.__path__):
        importlib.import_module(f"paracore.ops.{module.name}")
    registered = {
        name.partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("paracore::")
    }
    assert registered == {operation.name().partition(".")[0] for operation in DECLARATIONS}


def test_an_operation_without_a_declaration_is_refused() -> None:
    library = torch.library.Library("paracore", "FRAGMENT")
    try:
        library.define("undeclared(Tensor x) -> Tensor")
        with pytest.raises(UsageError, match=r"undeclared.* declares no scratch memory"):
            scratch_of(ops.undeclared.default, (torch.ones(1),))
    finally:
        library._destroy()


def test_operations_of_torch_have_none_that_is_known() -> None:
    assert scratch_of(torch.ops.aten.mm.default, (torch.ones(1, 1), torch.ones(1, 1))) == Scratch()


def test_what_would_not_run_natively_is_refused() -> None:
    x, weight = torch.ones(2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"rms_norm: paracore\.reference would run"):
        scratch_of(ops.rms_norm.default, (x, weight, None, 1e-6, None))


@pytest.mark.usefixtures("one_thread")
def test_thread_memory_grows_with_the_threads() -> None:
    arguments = attention_arguments(4, 4, 200, 64, backward=True)
    one = scratch_of(ops.attention_backward.default, arguments)
    torch.set_num_threads(2)
    two = scratch_of(ops.attention_backward.default, arguments)
    assert two == Scratch(2 * one.tiles, 2 * one.query_sums, one.temporary)


@pytest.mark.parametrize(
    ("arrange", "copies"),
    [
        (lambda x: x, 0),
        (lambda x: x[:, :, ::2].contiguous()[:, :, :3], 0),  # rows at one stride
        (lambda x: x.transpose(0, 1), 1),  # rows at two strides
        (lambda x: x.transpose(1, 2), 1),  # the last dim is not contiguous
    ],
)
def test_copies_that_the_norm_makes_of_its_input_count(arrange: Any, copies: int) -> None:
    x: Tensor = arrange(torch.ones(4, 5, 6))
    weight = torch.ones(x.size(-1))
    assert scratch_of(ops.rms_norm.default, (x, weight, None, 1e-6, None)).temporary == copies * x.nbytes
