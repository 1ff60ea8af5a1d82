"""Problems for tests of the optimizer: gradients made to order, and what torch.optim.AdamW does with them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paracore.optim import AdamW
from paracore.optim.flat_parameters import FlatParameters
from paracore.parallel import MeshShape
from paracore.parallel.ledger import Ledger
from paracore.parallel.mesh import ShardingAxes
from tests.conftest import run_ranks
from tests.numerics import randn

IMPL: str | None = None
MASTERLESS: Mapping[str, Any] = {"master": "none", "moment_dtype": torch.bfloat16}


def flat_of(optimizer: AdamW) -> FlatParameters:
    """The flat buckets of an optimizer of stage 0 to 2."""
    assert isinstance(optimizer._store, FlatParameters)
    return optimizer._store


def adamw(params: nn.Module | Iterable[Any], **options: Any) -> AdamW:
    return AdamW(params, impl=IMPL, **options)


def data_axes(**shape: int) -> ShardingAxes:
    """Inside a rank: the axes of a mesh over all ranks, dp if nothing else is said, with one ledger."""
    if not dist.is_initialized():
        return ShardingAxes.alone()
    return ShardingAxes.of(MeshShape(**shape or {"dp": dist.get_world_size()}).build("cpu"), Ledger())


@functools.cache
def _launched(world: int, function: Callable[[], Any]) -> list[Any] | str:
    try:
        return run_ranks(world, function) if world > 1 else [function()]
    except pytest.fail.Exception as failure:  # kept too: a hang is waited for once
        return str(failure)


def launched(world: int, function: Callable[[], Any]) -> list[Any]:
    """What `function` returns on each of `world` ranks; launched once for all tests that ask."""
    found = _launched(world, function)
    if isinstance(found, str):
        pytest.fail(found)
    return found


class Bag(nn.Module):
    """Parameters p0, p1, ...; the gradient of each is the tensor that the loss is called with, or none."""

    p0: nn.Parameter

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32, seed: int = 0):
        super().__init__()
        for index, shape in enumerate(shapes):
            start = randn(*shape, seed=seed + index, dtype=dtype)
            self.register_parameter(f"p{index}", nn.Parameter(start))

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        given = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * g.to(p.dtype)).sum() for p, g in given if g is not None]).sum()


def dyadic(*shape: int, seed: int) -> Tensor:
    """Random multiples of 1/64 below 4: their sums have the same bits in every order and float dtype."""
    return (randn(*shape, seed=seed) * 64).round().clamp(-255, 255) / 64


def digest(tensors: Iterable[Tensor]) -> str:
    """A number for the bits of all tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained, and how.

    missing: the share of parameters without a gradient everywhere, and on each rank. unsynchronized: the
    microbatches within no_sync. overflow: the step in which the last rank's gradient is not finite.
    groups: differing hyperparameters; parameter i belongs to group i modulo their number. first_only: all
    ranks but the first have gradients of zero.
    """

    shapes: Sequence[Sequence[int]]
    dtype: torch.dtype = torch.float64
    stage: int = 0
    steps: int = 4
    microbatches: int = 1
    unsynchronized: Sequence[int] = ()
    missing: tuple[float, float] = (0.0, 0.0)
    overflow: tuple[int, float] | None = None
    groups: Sequence[Mapping[str, Any]] = ({},)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_scale: float = 1.0
    first_only: bool = False
    seed: int = 0

    @property
    def order(self) -> list[int]:
        """The parameters in the order of the groups."""
        groups, count = len(self.groups), len(self.shapes)
        return [index for group in range(groups) for index in range(group, count, groups)]

    def grouped(self, model: Bag) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": parameters[g :: len(self.groups)], **self.group(g)} for g in range(len(self.groups))
        ]

    def group(self, number: int) -> dict[str, Any]:
        return {"lr": 0.1, "weight_decay": 0.1} | dict(self.groups[number])

    def gradient(self, rank: int, step: int, micro: int, index: int) -> Tensor | None:
        """The same on every rank that asks; the last parameter always has one."""
        last, (everywhere, here) = index == len(self.shapes) - 1, self.missing
        if not last and random.Random(f"{self.seed}/{step}/{index}").random() < everywhere:
            return None
        if not last and random.Random(f"{self.seed}/{step}/{index}/{micro}/{rank}").random() < here:
            return None
        seed = zlib.crc32(f"{self.seed}/{rank}/{step}/{micro}/{index}".encode())
        if not self.first_only:
            return dyadic(*self.shapes[index], seed=seed)
        found = randn(*self.shapes[index], seed=seed)  # the bits of a norm depend on the order of its sum
        return torch.zeros_like(found) if rank else found


def random_shapes(seed: int) -> list[tuple[int, ...]]:
    """Shapes of five parameters: one larger than a grid cell, one empty or a scalar, the others small."""
    draw = random.Random(seed)
    small = [tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3))) for _ in range(2)]
    large = (draw.randint(41, 90), draw.randint(101, 140))
    return [large, draw.choice([(), (0, 3)]), *small, (draw.choice([64, 4096, 4097]),)]


def train(problem: Problem, axes: ShardingAxes, *, steps: int | None = None) -> tuple[Bag, AdamW, list[Any]]:
    """Train over the ranks of `axes`; return also, for each step, its norm and whether it was skipped."""
    model = Bag(problem.shapes, problem.dtype, problem.seed)
    if len(problem.groups) == 1:
        optimizer = adamw(model, mesh=axes, stage=problem.stage, **problem.group(0), **problem.options)
    else:
        optimizer = adamw(problem.grouped(model), mesh=axes, stage=problem.stage, **problem.options)
    history = []
    for step in range(problem.steps if steps is None else steps):
        take_step(problem, model, optimizer, axes.data.rank, axes.data.size, step)
        history.append((optimizer.gradient_norm.item(), optimizer.skipped))
    optimizer.synchronize()
    return model, optimizer, history


def take_step(problem: Problem, model: Bag, optimizer: AdamW, rank: int, size: int, step: int) -> None:
    for micro in range(problem.microbatches):
        gradients = [problem.gradient(rank, step, micro, index) for index in range(len(problem.shapes))]
        if problem.overflow and step == problem.overflow[0] and rank == size - 1:
            assert gradients[-1] is not None
            gradients[-1].view(-1)[-1] = problem.overflow[1]
        with optimizer.no_sync() if micro in problem.unsynchronized else contextlib.nullcontext():
            (model(gradients) * problem.loss_scale).backward()
    optimizer.step(loss_scale=problem.loss_scale)


def train_with_torch(problem: Problem, size: int) -> tuple[Bag, torch.optim.AdamW]:
    """The same training in one process: gradients added up, then clipped, by torch.optim.AdamW."""
    model = Bag(problem.shapes, problem.dtype, problem.seed)
    # Adam's L2 penalty is an option of torch.optim.Adam, of which AdamW is the one without.
    optimizer = torch.optim.AdamW(problem.grouped(model), foreach=False)
    for step in range(problem.steps):
        if problem.overflow and step == problem.overflow[0]:
            continue
        for index, parameter in enumerate(model.parameters()):
            parts = [
                part.to(problem.dtype)
                for micro in range(problem.microbatches)
                for rank in range(size)
                if (part := problem.gradient(rank, step, micro, index)) is not None
            ]
            parameter.grad = torch.stack(parts).sum(0) if parts else None
        _clip(model, problem.options.get("max_norm"))
        optimizer.step()
    return model, optimizer


def _clip(model: Bag, max_norm: float | None) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    if max_norm is not None and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
