"""The benchmarks of attention: contenders do the same work, and the work is counted rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paracore import masks, reference
from paracore.bench.attention import DOCUMENTS, WINDOW, Attention, intervals, mask_of
from paracore.bench.case import Setting, as_call
from paracore.bench.ranks import Ranks
from paracore.bench.ring_attention import RingAttention
from paracore.errors import UsageError
from paracore.parallel import MeshAxis
from tests.numerics import assert_close

CPU = torch.device("cpu")


def setting_of(shape: tuple[int, ...], variant: str, direction: str = "forward_backward") -> Setting:
    return Setting(shape, torch.float64, direction, variant, CPU)


def hidden(setting: Setting) -> torch.Tensor:
    first, end = intervals(setting)
    keys = torch.arange(setting.shape[3])
    return ~((first[0, :, None] <= keys) & (keys < end[0, :, None]))


@pytest.mark.parametrize("variant", Attention.variants)
@pytest.mark.parametrize("name", ["torch", "reference"])
def test_contenders_of_attention_do_the_same_work(name: str, variant: str) -> None:
    setting = setting_of((2, 4, 2, 600, 8), variant)
    case = Attention()
    inputs = case.inputs(setting, torch.Generator().manual_seed(0))
    function = case.contenders[name].build(setting)
    unseen = hidden(setting)
    q, k, v = inputs.arguments.values()
    expected = reference.attention(q, k, v, hidden=unseen)
    out = function(**inputs.arguments)
    assert isinstance(out, torch.Tensor)
    assert_close(out, expected)
    results: Any = as_call(function, "forward_backward")(inputs)
    gradients = torch.autograd.grad(expected, (q, k, v), inputs.output_gradients)
    for x, y in zip(results, gradients, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize(
    ("variant", "pairs"),
    [
        ("full", 2000 * 2000),
        ("causal", 2000 * 2001 // 2),
        ("window", WINDOW * 2000 - WINDOW * (WINDOW - 1) // 2),
    ],
)
def test_the_work_of_attention(variant: str, pairs: int) -> None:
    """Two products forward, five backward, of visible pairs alone; every tensor once."""
    case, shape = Attention(), (3, 4, 2, 2000, 16)
    forward, both = (case.work(setting_of(shape, variant, way)) for way in ("forward", "forward_backward"))
    assert forward.flops == 2 * 2 * 16 * 3 * 4 * pairs
    assert both.flops == 2 * 7 * 16 * 3 * 4 * pairs
    query, key = 3 * 4 * 2000 * 16 * 8, 3 * 2 * 2000 * 16 * 8
    assert forward.bytes == 2 * query + 2 * key
    assert both.bytes == forward.bytes + 4 * query + 4 * key


@pytest.mark.parametrize("length", [1, 7, 100, 8192])
def test_documents_cover_any_length(length: int) -> None:
    first, end = intervals(setting_of((1, 1, 1, length, 8), "documents"))
    assert (end > first).all()
    assert torch.equal(end[0], torch.arange(1, length + 1).int())
    assert len(first.unique()) <= DOCUMENTS
    assert mask_of("causal", length) == masks.causal()


def test_what_would_not_be_a_measurement_is_refused() -> None:
    case = Attention()
    with pytest.raises(UsageError, match="interpreter"):
        case.contenders["triton"].build(setting_of((1, 1, 1, 8, 8), "causal"))
    with pytest.raises(UsageError, match="one fast backend"):
        case.contenders["torch_flash"].build(setting_of((1, 1, 1, 8, 8), "causal"))
    with pytest.raises(UsageError, match=r"S x S matrices, here of 4.00 \* 2\^30 numbers"):
        case.contenders["reference"].build(setting_of((1, 64, 64, 8192, 8), "causal"))
    with pytest.raises(UsageError, match="3 and 3 heads cannot be divided over 2 ranks"):
        RingAttention.contenders["ulysses_contiguous"].build(setting_of((2, 1, 3, 3, 8, 8), "causal"))


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["ring_balanced", "ulysses_contiguous"])
def test_ranks_do_the_work_of_one_process(name: str, two_threads: None, quick_ranks: None) -> None:
    setting = setting_of((2, 1, 4, 2, 70, 8), "causal")
    case = RingAttention()
    function: Any = case.contenders[name].build(setting)
    for seed in (0, 1):  # two sets of inputs, as the rotation has them, each twice
        inputs = case.inputs(setting, torch.Generator().manual_seed(seed))
        expected = as_call(case.contenders["one_process"].build(setting), "forward_backward")(inputs)
        for _ in range(2):
            results: Any = as_call(function, "forward_backward")(inputs)
            function.collect()
            for x, y in zip(results, expected, strict=True):  # type: ignore[call-overload]
                assert_close(x, y)


def fail_later(axis: MeshAxis) -> Callable[..., None]:
    def turn(rank: int) -> None:
        if axis.rank == rank:
            raise ValueError(f"no more of rank {rank}")

    return turn


def test_a_rank_that_fails_is_named_with_its_reason(quick_ranks: None) -> None:
    ranks = Ranks(2, 2, fail_later)
    ranks.turn(-1)
    with pytest.raises(RuntimeError, match=r"rank 1 failed:[\s\S]*no more of rank 1"):
        ranks.turn(1)
    with pytest.raises(UsageError, match="3 threads cannot be divided among 2 ranks"):
        Ranks(2, 3, fail_later)
