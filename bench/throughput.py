"""How many tokens a training step takes per second, by mode: whole steps of real ranks.

All modes live in one set of ranks and take their turns in the same rounds, in an order that changes from
round to round; a step takes as long as it takes the slowest rank. Steps are those of `Trainer` with torch's
AdamW.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from paracore.bench.modes import Workload
from paracore.parallel.mesh import TrainingAxes
from paracore.training import Trainer

Samples = dict[str, list[float]]
"""Seconds of each step, by mode."""


def measure(
    workload: Workload,
    axes: Mapping[str, TrainingAxes],
    device: torch.device,
    *,
    steps: int,
    warmup: int,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Return the seconds of `steps` steps of each mode that has `axes`, those of the slowest rank.

    `warmup` steps of each come before. Every rank must call it, with the same arguments.
    """
    turns = {name: _turn(workload, name, own, device, seed) for name, own in axes.items()}
    samples: Samples = {name: [] for name in turns}
    for order in orders(list(turns), warmup + steps, seed):
        for name in order:
            dist.barrier()
            start = clock()
            turns[name]()
            samples[name].append(clock() - start)
    seconds = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(samples, seconds[:, warmup:].tolist(), strict=True))


def orders(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """Return the order of turns in each round, the same on every rank."""
    generator = random.Random(seed)
    return [generator.sample(names, len(names)) for _ in range(rounds)]


def _turn(
    workload: Workload, name: str, axes: TrainingAxes, device: torch.device, seed: int
) -> Callable[[], None]:
    trainer = Trainer(workload.build(name, axes, seed=seed, device=device), lr=1e-4, axes=axes)
    generator = torch.Generator().manual_seed(seed + axes.dp.rank)  # ranks of dp have other sequences
    shape = workload.sequences(name), workload.seq_len + 1
    text = torch.randint(workload.config.vocab_size, shape, generator=generator).to(device)

    def turn() -> None:
        trainer.step(text[:, :-1], text[:, 1:])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return turn
