"""What the tests of ring attention share: inputs, masks, layouts, and both ways to compute the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paracore import attention, masks
from paracore.ops.ring_attention import ring_attention
from paracore.parallel import Ledger, MeshAxis, MeshShape
from paracore.parallel import layout as layouts
from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask
from tests.numerics import assert_as_exact_as, randn

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
FLOOR = {F64: 2.0**-50, F32: 2.0**-23, BF16: 2.0**-8}
STRATEGIES = ("ring", "all_gather", "ulysses")
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
NAMES = ("out", "dq", "dk", "dv")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    def of_rank(self, layout: Layout, rank: int) -> Given:
        """What a rank holds; q, k and v want gradients."""
        q, k, v, dout = (layout.shard(tensor, rank, 2) for tensor in self)
        return Given(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


@lru_cache(maxsize=16)
def all_masks(S: int) -> dict[str, Mask]:
    """For a batch of two."""
    some = sorted({0, S // 7, S // 3, S // 3 + 1, S // 2, S})
    return {
        "causal": masks.causal(),
        "full": masks.full(),
        "window": masks.sliding_window(S // 5, 0),
        "both ways": masks.sliding_window(3, S // 4),
        "documents": masks.causal() & masks.documents(some),
        "prefix": masks.prefix_lm(S // 3),
        "chunked": masks.causal() & masks.chunked(S // 3 + 1),
        "padded": masks.causal() & masks.key_range(torch.tensor([0, S // 2]), torch.tensor([S // 2, S])),
    }


MASKS = tuple(all_masks(1))


@lru_cache(maxsize=1024)
def layout_named(name: str, S: int, size: int, mask: Mask) -> Layout:
    block = {"striped": ":3", "balanced": ":16"}.get(name, "")
    return layouts.parse_layout(name + block)(mask, S, size)


def all_layouts(S: int, size: int, mask: Mask) -> dict[str, Layout]:
    return {name: layout_named(name, S, size, mask) for name in LAYOUTS}


def cp_axis() -> MeshAxis:
    """Inside a rank: the axis over all ranks."""
    return MeshAxis.of(MeshShape(cp=dist.get_world_size()).build("cpu"), "cp", Ledger())


def cp_and_heads(cp: int, heads: int) -> tuple[MeshAxis, MeshAxis, int]:
    """Inside a rank: the axis over the sequence, that over heads, and which part of a layout it holds."""
    mesh = MeshShape(cp=cp, tp=heads).build("cpu")
    axis, heads_axis = (MeshAxis.of(mesh, name, Ledger()) for name in ("cp", "tp"))
    return axis, heads_axis, axis.rank * heads + heads_axis.rank


def dense(given: Given, mask: Mask, impl: str | None = None, **options: Any) -> list[Tensor]:
    """out, dq, dk, dv, and dsink if there is a sink."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    sink = options.pop("sink", None)
    leaves += [] if sink is None else [sink.to(given.q.dtype).requires_grad_()]
    options["sink"] = leaves[3] if len(leaves) > 3 else None
    out: Tensor = attention(leaves[0], leaves[1], leaves[2], mask, impl=impl, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout)]


def ring(
    given: Given, mask: Mask, layout: Layout, axis: MeshAxis, rank: int | None = None, **options: Any
) -> list[Tensor]:
    """This rank's part of what `dense` returns."""
    q, k, v, dout = given.of_rank(layout, axis.rank if rank is None else rank)
    sink = options.pop("sink", None)
    leaves = [q, k, v] + ([] if sink is None else [sink.to(q.dtype).requires_grad_()])
    options["sink"] = leaves[3] if len(leaves) > 3 else None
    out: Tensor = ring_attention(q, k, v, mask, layout, axis, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def joined(parts: list[list[Tensor]], layout: Layout) -> list[Tensor]:
    """The parts of all ranks as one device would have them."""
    together = [layout.join(shards, 2) for shards in zip(*(part[:4] for part in parts), strict=True)]
    if len(parts[0]) > 4:  # dsink: each rank's part
        together.append(torch.stack([part[4] for part in parts]).sum(0))
    return together


def assert_right(
    ours: list[Tensor], plain: list[Tensor], exact: list[Tensor], given: Given, label: str
) -> None:
    """By the rule of the project: out, dq, dk and dv have at most twice the error of plain torch."""
    for name, x, y, exact_x in zip(NAMES, ours, plain, exact, strict=True):
        dtype = x.dtype
        assert dtype == y.dtype
        assert x.shape == exact_x.shape
        if exact_x.norm() < 1e-12:  # with one key, nothing depends on q and k
            assert x.norm() < FLOOR[dtype] * given.dout.norm(), f"{name} of {label}"
        else:
            assert_as_exact_as(x, y, exact_x, floor=FLOOR[dtype], name=f"{name} of {label}")
