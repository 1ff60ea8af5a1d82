"""Ring attention over real processes: equal to one device's, for every layout, mask, strategy and size."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paracore import attention, masks
from paracore.errors import UsageError
from paracore.ops.ring_attention import Options, ring_attention
from paracore.parallel import Ledger, MeshAxis, MeshShape
from paracore.parallel import layout as layouts
from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask
from paracore.parallel.ring_plan import plan_ring
from tests.conftest import Launch
from tests.numerics import assert_as_exact_as, randn

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
FLOOR = {F64: 2.0**-50, F32: 2.0**-23, BF16: 2.0**-8}
LENGTHS = (1, 2, 5, 7, 127, 1000)


class Given(NamedTuple):
    """q, k, v and the gradient that arrives at the output, of the whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @staticmethod
    def random(S: int, dtype: torch.dtype, *, B: int = 2, Hq: int = 4, Hkv: int = 2, D: int = 16) -> Given:
        Dv = D // 2  # another size, which a swapped one would show
        q, k = randn(B, Hq, S, D, seed=1, dtype=dtype), randn(B, Hkv, S, D, seed=2, dtype=dtype)
        return Given(
            q, k, randn(B, Hkv, S, Dv, seed=3, dtype=dtype), randn(B, Hq, S, Dv, seed=4, dtype=dtype)
        )

    def to(self, dtype: torch.dtype) -> Given:
        return Given(*(tensor.to(dtype) for tensor in self))


def all_masks(S: int) -> dict[str, Mask]:
    some = sorted({0, S // 7, S // 3, S // 3 + 1, S // 2, S})
    return {
        "causal": masks.causal(),
        "full": masks.full(),
        "window": masks.sliding_window(S // 5, 0),
        "both ways": masks.sliding_window(3, S // 4),
        "documents": masks.causal() & masks.documents(some),
        "prefix": masks.prefix_lm(S // 3),
        "padded": masks.causal() & masks.key_range(torch.tensor([0, S // 2]), torch.tensor([S // 2, S])),
    }


def all_layouts(S: int, size: int, mask: Mask) -> dict[str, Layout]:
    return {
        "contiguous": layouts.contiguous(S, size),
        "zigzag": layouts.zigzag(S, size),
        "striped": layouts.striped(S, size, block=3),
        "balanced": layouts.balanced(mask, S, size, block=16),
    }


def cp_axis() -> MeshAxis:
    return MeshAxis.of(MeshShape(cp=dist.get_world_size()).build("cpu"), "cp", Ledger())


def dense(given: Given, mask: Mask, impl: str | None = None, **options: Any) -> list[Tensor]:
    """out, dq, dk, dv, and dsink if there is a sink."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    sink = options.pop("sink", None)
    leaves += [] if sink is None else [sink.to(given.q.dtype).requires_grad_()]
    out = attention(
        leaves[0],
        leaves[1],
        leaves[2],
        mask,
        impl=impl,
        sink=leaves[3] if len(leaves) > 3 else None,
        **options,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout)]


def ring(
    given: Given, mask: Mask, layout: Layout, axis: MeshAxis, rank: int | None = None, **options: Any
) -> list[Tensor]:
    """This rank's part of what `dense` returns."""
    rank = axis.rank if rank is None else rank
    q, k, v, dout = (layout.shard(tensor, rank, 2).requires_grad_() for tensor in given)
    sink = options.pop("sink", None)
    leaves = [q, k, v] + ([] if sink is None else [sink.to(q.dtype).requires_grad_()])
    options["sink"] = leaves[3] if len(leaves) > 3 else None
    out: Tensor = ring_attention(q, k, v, mask, layout, axis, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]


def joined(parts: list[list[Tensor]], layout: Layout) -> list[Tensor]:
    """The parts of all ranks as one device would have them."""
    together = [layout.join(shards, 2) for shards in zip(*(part[:4] for part in parts), strict=True)]
    if len(parts[0]) > 4:  # dsink: each rank's part
        together.append(torch.stack([part[4] for part in parts]).sum(0))
    return together


def strategies(size: int) -> tuple[str, ...]:
    return ("ring", "all_gather", "ulysses") if size <= 2 else ("ring", "all_gather")


# ---------------------------------------------------------------- equal to one device


Case = tuple[int, str, str, str]


def run_everywhere(cases: list[Case], dtype: torch.dtype) -> list[list[Tensor]]:
    axis = cp_axis()
    return [
        ring(
            Given.random(S, dtype),
            all_masks(S)[mask],
            all_layouts(S, axis.size, all_masks(S)[mask])[layout],
            axis,
            strategy=strategy,
        )
        for S, mask, layout, strategy in cases
    ]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_to_one_device(launch: Launch, size: int, dtype: torch.dtype) -> None:
    """Kind of fault: lengths that are no multiple of cp or 2 * cp, ranks that hold nothing, repeated keys."""
    cases = [
        (S, mask, layout, strategy)
        for S in LENGTHS
        for mask in all_masks(S)
        for layout in all_layouts(S, size, masks.causal())
        for strategy in strategies(size)
    ]
    chosen = cases if dtype == F32 else random.Random(size).sample(cases, 40)
    chosen = [case for case in chosen if case[0] < 1000 or case[1] in ("causal", "documents")]
    results = launch(size, run_everywhere, chosen, dtype)
    contenders: dict[tuple[int, str], tuple[list[Tensor], list[Tensor]]] = {}
    for index, (S, mask, layout, strategy) in enumerate(chosen):
        given = Given.random(S, dtype)
        if (S, mask) not in contenders:
            exact = dense(given.to(F64), all_masks(S)[mask])
            contenders[S, mask] = dense(given, all_masks(S)[mask], impl="reference"), exact
        ours = joined(
            [results[rank][index] for rank in range(size)], all_layouts(S, size, all_masks(S)[mask])[layout]
        )
        for name, x, plain, exact_x in zip(
            ("out", "dq", "dk", "dv"), ours, *contenders[S, mask], strict=True
        ):
            assert x.dtype == dtype
            label = f"{name} of S={S} {mask} {layout} {strategy}"
            if exact_x.norm() < 1e-12:  # with one key, nothing depends on q and k
                assert x.norm() < FLOOR[dtype] * given.dout.norm(), label
            else:
                assert_as_exact_as(x, plain, exact_x, floor=FLOOR[dtype], name=label)


EVERYTHING: dict[str, Any] = {
    "softcap": 2.0,
    "scale": 0.4,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]),
    "dropout_p": 0.25,
    "seed": 11,
    "sink": randn(4, seed=8),
}


def run_with_every_option(size: int) -> list[list[Tensor]]:
    axis, given = cp_axis(), Given.random(77, F64)
    return [
        ring(given, mask, layout, axis, strategy=strategy, **EVERYTHING)
        for mask in all_masks(77).values()
        for layout in all_layouts(77, size, mask).values()
        for strategy in strategies(size)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_every_option_works_as_on_one_device(launch: Launch, size: int) -> None:
    """Kind of fault: window, sink, softcap, ALiBi or dropout ignored, or wrong in backward. In float64."""
    results = launch(size, run_with_every_option, size)
    index = 0
    for mask in all_masks(77).values():
        expected = dense(Given.random(77, F64), mask, **EVERYTHING)
        for layout in all_layouts(77, size, mask).values():
            for _ in strategies(size):
                ours = joined([results[rank][index] for rank in range(size)], layout)
                for x, y in zip(ours, expected, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
                index += 1
    assert index == len(results[0])


def run_on_two_axes() -> list[list[Tensor]]:
    """Two ranks of the ring times two among whom the heads are divided."""
    mesh = MeshShape(cp=2, tp=2).build("cpu")
    axis, heads_axis = (MeshAxis.of(mesh, name, Ledger()) for name in ("cp", "tp"))
    given, rank = Given.random(77, F64), axis.rank * 2 + heads_axis.rank
    return [
        ring(given, mask, layout, axis, rank, heads_axis=heads_axis, strategy=strategy, **EVERYTHING)
        for mask in all_masks(77).values()
        for layout in all_layouts(77, 4, mask).values()
        for strategy in ("ring", "all_gather")
    ]


def test_heads_may_be_divided_over_a_second_axis(launch: Launch) -> None:
    results, index = launch(4, run_on_two_axes), 0
    for mask in all_masks(77).values():
        expected = dense(Given.random(77, F64), mask, **EVERYTHING)
        for layout in all_layouts(77, 4, mask).values():
            for _ in ("ring", "all_gather"):
                ours = joined([results[rank][index] for rank in range(4)], layout)
                for x, y in zip(ours, expected, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
                index += 1


def lse_and_its_gradient() -> list[Tensor]:
    axis, given = cp_axis(), Given.random(20, F64)
    layout = layouts.zigzag(20, axis.size)
    q, k, v, _ = (layout.shard(tensor, axis.rank, 2).requires_grad_() for tensor in given)
    out, lse = ring_attention(q, k, v, masks.causal(), layout, axis, return_lse=True)
    return [lse.detach(), *torch.autograd.grad((out.sum() + lse.sin().sum()), (q, k, v))]


def test_lse_and_its_gradient(launch: Launch) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in Given.random(20, F64)[:3])
    out, lse = attention(q, k, v, return_lse=True)
    expected = [lse.detach(), *torch.autograd.grad((out.sum() + lse.sin().sum()), (q, k, v))]
    results = launch(3, lse_and_its_gradient)
    for x, y in zip(zip(*results, strict=True), expected, strict=True):
        torch.testing.assert_close(layouts.zigzag(20, 3).join(x, 2), y)


# ---------------------------------------------------------------- exactly


def run_gathered(S: int) -> list[Tensor]:
    axis = cp_axis()
    mask = masks.causal() & masks.sliding_window(300, 0)
    layout = layouts.zigzag(S, axis.size)
    return ring(Given.random(S, F32), mask, layout, axis, strategy="all_gather")


def test_gathered_keys_give_the_same_bits_for_every_number_of_ranks(launch: Launch) -> None:
    """Tiles agree, since a key lies at the index that is its position."""
    whole = dense(Given.random(1000, F32), masks.causal() & masks.sliding_window(300, 0))
    for size in (2, 3, 4):
        out, dq, _, _ = joined(launch(size, run_gathered, 1000), layouts.zigzag(1000, size))
        assert torch.equal(out, whole[0])
        assert torch.equal(dq, whole[1])


def run_twice() -> bool:
    axis, given = cp_axis(), Given.random(200, F32)
    layout = layouts.striped(200, axis.size, 7)
    return all(
        all(map(torch.equal, *(ring(given, masks.causal(), layout, axis, strategy=s) for _ in range(2))))
        for s in strategies(axis.size)
    )


def test_two_runs_give_the_same_bits(launch: Launch) -> None:
    assert launch(3, run_twice) == [True] * 3


def run_with_one_token_changed(position: int) -> list[tuple[Tensor, Tensor]]:
    axis, S = cp_axis(), 60
    given = Given.random(S, F32)
    changed = Given(*(tensor.clone() for tensor in given))
    changed.k[:, :, position] += 1.0
    changed.v[:, :, position] -= 1.0
    outs = []
    for mask, strategy in itertools.product(all_masks(S).values(), strategies(axis.size)):
        layout = layouts.zigzag(S, axis.size)
        outs.append(
            tuple(ring(tokens, mask, layout, axis, strategy=strategy)[0] for tokens in (given, changed))
        )
    return outs  # type: ignore[return-value]


@pytest.mark.parametrize("position", [0, 17, 59])
def test_a_token_changes_exactly_the_outputs_that_see_it(launch: Launch, position: int) -> None:
    """Kind of fault: tokens leaking across documents, windows or padding. Not by one bit."""
    S, layout = 60, layouts.zigzag(60, 2)
    results = launch(2, run_with_one_token_changed, position)
    for index, (mask, _) in enumerate(itertools.product(all_masks(S).values(), strategies(2))):
        before, after = (
            layout.join([results[rank][index][which] for rank in range(2)], 2) for which in (0, 1)
        )
        first, end = torch.broadcast_tensors(*mask.interval(torch.arange(S)))
        sees = ((first <= position) & (position < end)).view(-1, 1, S, 1)
        assert torch.equal((before != after).any(-1, keepdim=True), sees.expand(2, 4, S, 1))


# ---------------------------------------------------------------- what moves


def bytes_sent(strategy: str) -> list[int]:
    """Forward and backward, of every mask and layout."""
    axis, sent = cp_axis(), []
    for mask in all_masks(127).values():
        for layout in all_layouts(127, axis.size, mask).values():
            q, k, v, _ = (layout.shard(x, axis.rank, 2).requires_grad_() for x in Given.random(127, BF16))
            axis.ledger.take()
            out = ring_attention(q, k, v, mask, layout, axis, strategy=strategy, check=False)
            sent.append(sum(row.bytes for row in axis.ledger.take()))
            out.sum().backward()
            sent.append(sum(row.bytes for row in axis.ledger.take()))
    return sent


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_the_plan_knows_every_byte_beforehand(launch: Launch, strategy: str) -> None:
    """Keys are sent as they are, for the key heads alone, and gradients in float32."""
    results = launch(3, bytes_sent, strategy)
    key = 2 * 2 * (16 + 8)  # B * Hkv * (D + Dv)
    expected: list[list[int]] = [[], [], []]
    for mask in all_masks(127).values():
        for layout in all_layouts(127, 3, mask).values():
            plan = plan_ring(mask, layout)
            for rank in range(3):
                keys, gradients = plan.keys_sent(rank, strategy)
                expected[rank] += [2 * key * keys, 2 * key * keys + 4 * key * gradients]
    assert results == expected
    assert any(map(any, expected))


# ---------------------------------------------------------------- many rounds, and what goes wrong


def many_rounds(rounds: int) -> int:
    """Ranks that dawdle at random: nobody may overtake, nothing may mix."""
    axis = cp_axis()
    delays = random.Random(axis.rank)
    layout = layouts.zigzag(13, axis.size)
    for number in range(rounds):
        given = Given.random(13, F32, B=1, Hq=2, Hkv=1, D=4)
        given = Given(given.q, given.k, given.v + number, given.dout)
        if delays.random() < 0.1:
            time.sleep(delays.random() * 0.01)
        strategy = strategies(axis.size)[number % 2]
        ours = ring(given, masks.causal(), layout, axis, strategy=strategy, check=number % 3 == 0)
        if number % 50 == 49:
            for x, whole in zip(ours, dense(given, masks.causal()), strict=True):
                torch.testing.assert_close(x, layout.shard(whole, axis.rank, 2))
    return rounds


def test_a_thousand_rounds_with_random_delays(launch: Launch) -> None:
    """Kind of fault: point-to-point mismatches that hang after many iterations, on odd rank counts."""
    assert launch(3, many_rounds, 1000) == [1000] * 3


def refused(name: str) -> str:
    axis, odd = cp_axis(), dist.get_rank() == 1
    given, mask, layout = Given.random(12, F32), masks.causal(), layouts.zigzag(12, 3)
    q, k, v, _ = (layout.shard(tensor, axis.rank, 2) for tensor in given)
    options: Options = {}
    if odd and name == "dtype":
        q, k, v = q.double(), k.double(), v.double()
    elif odd and name == "heads":
        q = q[:, :2]
    elif odd and name == "mask":
        mask = masks.full()
    elif odd and name == "layout":
        layout = layouts.striped(12, 3, block=1)
    elif odd and name == "scale":
        options = {"scale": 0.5}
    elif odd and name == "length":
        q = q[:, :, 1:]
    elif odd and name == "gradients":
        q.requires_grad_()
    elif odd and name == "dropout":
        options = {"dropout_p": 0.5}
    try:
        ring_attention(q, k, v, mask, layout, axis, **options)
    except UsageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dtype",
            "ranks disagree on dtype: rank 0: torch.float32, rank 1: torch.float64, rank 2: torch.float32",
        ),
        ("heads", "ranks disagree on q: rank 0: [2, 4, 'S', 16], rank 1: [2, 2, 'S', 16], rank 2: [2, 4,"),
        ("mask", "ranks disagree on mask: rank 0: '"),
        ("layout", "ranks disagree on layout: rank 0: ([4, 4, 4], '"),
        ("gradients", "ranks disagree on gradients: rank 0: False, rank 1: True, rank 2: False"),
        ("scale", "ranks disagree on options: rank 0: [], rank 1: [('scale', 0.5)], rank 2: []"),
        ("length", "rank 1: q is [2, 4, 3, 16], must have the 4 positions of its rank in dim 2"),
        ("dropout", "rank 1: dropout_p=0.5 needs a seed"),
    ],
)
def test_ranks_that_disagree_are_named_on_every_rank(launch: Launch, name: str, message: str) -> None:
    for refusal in launch(3, refused, name):
        assert message in refusal


def refused_on_two_axes() -> str:
    mesh = MeshShape(cp=2, tp=2).build("cpu")
    axis, heads_axis = (MeshAxis.of(mesh, name, Ledger()) for name in ("cp", "tp"))
    rank, layout = axis.rank * 2 + heads_axis.rank, layouts.contiguous(12, 4)
    q, k, v, _ = (layout.shard(tensor, rank, 2) for tensor in Given.random(12, F32))
    if rank == 3:
        q = q[..., :8]
    try:
        ring_attention(q, k, v, masks.causal(), layout, axis, heads_axis=heads_axis)
    except UsageError as error:
        return str(error)
    return "nothing"


def test_on_two_axes_a_refusal_reaches_the_rank_that_shares_none(launch: Launch) -> None:
    """Kind of fault: those who meet the bad rank end, and others wait for them."""
    for refusal in launch(4, refused_on_two_axes):
        assert "must be [2, Hkv, Sk, 8]" in refusal


def one_rank_dies() -> str:
    axis, given = cp_axis(), Given.random(12, F32)
    layout = layouts.zigzag(12, axis.size)
    q, k, v, _ = (layout.shard(tensor, axis.rank, 2) for tensor in given)
    ring_attention(q, k, v, masks.causal(), layout, axis)
    if axis.rank == 1:
        return "left"  # and the process ends
    begin = time.monotonic()
    try:
        for _ in range(100):  # without the check, so that it is the ring itself that waits
            ring_attention(q, k, v, masks.causal(), layout, axis, check=False)
            time.sleep(0.05)
    except RuntimeError:
        return "error" if time.monotonic() - begin < 60 else "late"
    return "nothing noticed"


def test_when_a_rank_dies_the_others_end_with_an_error(launch: Launch) -> None:
    assert launch(3, one_rank_dies) == ["error", "left", "error"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "star"}, "strategy='star': must be one of ring, all_gather, ulysses"),
        ({"layout": layouts.contiguous(12, 2)}, "the layout is for 2 ranks, but there are 1"),
        ({"layout": layouts.contiguous(11, 1)}, r"q is \[2, 4, 12, 16\], must have the 11 positions"),
        ({"softcap": -1.0}, "softcap=-1.0: must be 0"),
        ({"impl": "native", "dtype": F64}, "implementation 'native' .*float64"),
        ({"heads_axis": MeshAxis.alone("tp"), "strategy": "ulysses"}, "heads_axis must be None"),
        ({"query_positions": None}, r"unknown options \['query_positions'\]"),
        ({"mask": masks.documents([0, 5])}, "boundaries end at 5, must end at 12"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str, check: bool) -> None:
    arguments: dict[str, Any] = {"mask": masks.causal(), "layout": layouts.contiguous(12, 1), "dtype": F32}
    arguments |= {"axis": MeshAxis.alone("cp"), "check": check} | changes
    q, k, v, _ = Given.random(12, arguments.pop("dtype"))
    with pytest.raises(UsageError, match=message):
        ring_attention(q, k, v, **arguments)


def refused_by_ulysses() -> str:
    axis = cp_axis()
    layout = layouts.contiguous(12, axis.size)
    q, k, v, _ = (layout.shard(tensor, axis.rank, 2) for tensor in Given.random(12, F32))
    with pytest.raises(UsageError) as error:
        ring_attention(q, k, v, masks.causal(), layout, axis, strategy="ulysses")
    return str(error.value)


def test_ulysses_refuses_heads_that_cannot_be_divided(launch: Launch) -> None:
    for message in launch(3, refused_by_ulysses):
        assert "query=4 heads cannot be divided over axis cp of 3 ranks" in message
