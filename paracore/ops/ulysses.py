"""From a part of the sequence for all heads to all of it for a part of the heads, and back.

So each rank computes whole rows of attention, for some heads (Jacobs et al. 2023, "DeepSpeed Ulysses").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paracore import trace
from paracore.errors import UsageError
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.messages import Exchange
from paracore.parallel.positions import Positions


@dataclass(frozen=True)
class Order:
    """The order of what several ranks hold: together, and in the concatenation of their parts."""

    positions: Positions  # together, in order of position
    order: Tensor  # where each of these is found in the concatenation
    places: list[Tensor]  # for each rank, where its positions are found among those of all

    @staticmethod
    @lru_cache(maxsize=16)
    def of(held: tuple[Positions, ...], device: torch.device | str = "cpu") -> Order:
        """Return the order of what ranks hold; kept, for every layer asks for the same."""
        with torch.inference_mode(False):
            concatenated = torch.cat([positions.tensor() for positions in held])
            order = concatenated.argsort()
            places = order.argsort().split([len(positions) for positions in held])
            positions = Positions.from_tensor(concatenated[order])
            return Order(positions, order.to(device), [place.to(device) for place in places])


@dataclass(frozen=True)
class Members:
    """The ranks of an axis, and which positions each of them holds."""

    axis: MeshAxis
    held: tuple[Positions, ...]

    def heads(self, total: int) -> slice:
        """Return which of `total` heads this rank computes."""
        share = total // self.axis.size
        return slice(self.axis.rank * share, (self.axis.rank + 1) * share)

    def require_divisible(self, **heads: int) -> None:
        """Raise UsageError unless every number of heads can be divided among the ranks."""
        for name, number in heads.items():
            if number % self.axis.size:
                raise UsageError(
                    f"{name}={number} heads cannot be divided over axis {self.axis.name} of {self.axis.size} "
                    "ranks; the strategies ring and all_gather take any number"
                )


def to_heads(x: Tensor, members: Members) -> Tensor:
    """[B, H, S_local, D] -> [B, H / size, S, D] in order of position. Differentiable."""
    return _ToHeads.apply(x, members)  # type: ignore[no-any-return]


def to_sequence(x: Tensor, members: Members) -> Tensor:
    """[B, H / size, S, D] -> [B, H, S_local, D]: the inverse of `to_heads`. Differentiable."""
    return _ToSequence.apply(x, members)  # type: ignore[no-any-return]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Members) -> Tensor:
        ctx.members = members
        return _collect_sequence(x, members)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _collect_heads(grad, ctx.members), None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Members) -> Tensor:
        ctx.members = members
        return _collect_heads(x, members)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _collect_sequence(grad, ctx.members), None


@trace.ranged("paracore.ulysses.to_heads")
def _collect_sequence(x: Tensor, members: Members) -> Tensor:
    """Send every rank its heads of what this rank holds."""
    B, H, _, D = x.shape
    share = H // members.axis.size
    by_rank = x.unflatten(1, (members.axis.size, share))  # [B, T, h, S_local, D]
    leaving = by_rank.permute(1, 3, 0, 2, 4).contiguous()  # [T, S_local, B, h, D]
    lengths = [len(positions) for positions in members.held]
    arriving = x.new_empty(sum(lengths), B, share, D)
    _all_to_all(list(leaving), list(arriving.split(lengths)), members.axis)
    return arriving.index_select(0, Order.of(members.held, x.device).order).permute(1, 2, 0, 3)


@trace.ranged("paracore.ulysses.to_sequence")
def _collect_heads(x: Tensor, members: Members) -> Tensor:
    """Send every rank the positions that it holds, of the heads that this rank has."""
    B, share, _, D = x.shape
    rows = x.permute(2, 0, 1, 3)  # [S, B, h, D]
    leaving = [rows.index_select(0, places) for places in Order.of(members.held, x.device).places]
    arriving = x.new_empty(members.axis.size, len(members.held[members.axis.rank]), B, share, D)
    _all_to_all(leaving, list(arriving), members.axis)
    return arriving.permute(2, 0, 3, 1, 4).flatten(1, 2)  # [T, S_local, B, h, D] -> [B, T * h, S_local, D]


def _all_to_all(leaving: Sequence[Tensor], arriving: Sequence[Tensor], axis: MeshAxis) -> None:
    """Send the r-th tensor to rank r and receive the r-th from it; any sizes, also none."""
    exchange = Exchange(axis)
    for rank in range(axis.size):
        if rank != axis.rank:
            exchange.send(leaving[rank], rank)
            exchange.receive(arriving[rank], rank)
    exchange.start()
    arriving[axis.rank].copy_(leaving[axis.rank])
    exchange.wait()
