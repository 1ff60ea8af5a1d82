"""The most memory that a rank holds in training, by mode.

On the CPU nothing is computed: the steps are taken on fake tensors, over a process group that sends nothing,
and every tensor that exists at a time is counted (`paracore.profiling.tracker`). So the largest model takes
seconds and no memory. It is rank 0 that is looked at, which has the largest shards. On CUDA real ranks train,
and torch's allocator tells its own peak, of the rank where it is highest.

Steps are those of `Trainer` with torch's AdamW, whose moments have the parameters' dtype. Two are taken: the
moments come into being at the end of the first.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode

from paracore.bench.modes import MODES, Workload
from paracore.parallel.mesh import TrainingAxes
from paracore.profiling.tracker import MemoryTracker
from paracore.training import Trainer

STEPS = 2

Job = tuple[Workload, str]
"""A workload, and the mode to train it in."""


def predict(jobs: Sequence[Job], *, threads: int, processes: int) -> list[int]:
    """Return the peak, in bytes, of rank 0 for each job, when a rank has as many `threads`.

    Each is found in a process of its own: neither the process groups of this one are touched, nor what it has
    cached, where a later call would take fake tensors for real ones.
    """
    # Forked from a server that has imported all this, but made no tensor.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # what building a model imports
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        longest_first = sorted(range(len(jobs)), key=lambda index: -jobs[index][0].config.num_layers)
        peaks = {index: pool.submit(predict_here, jobs[index], threads) for index in longest_first}
        return [peaks[index].result() for index in range(len(jobs))]


def predict_here(job: Job, threads: int) -> int:
    """Return the same of one job within this process, which is fit for nothing else afterwards."""
    workload, name = job
    torch.set_num_threads(threads)
    tracker = MemoryTracker()
    with _fake_world(workload.ranks):
        axes = TrainingAxes.of(MODES[name].mesh(workload.ranks).build("cpu"))
        trace(workload, name, axes, tracker)
    return tracker.peak


@contextmanager
def _fake_world(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of so many, none of which is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace(workload: Workload, name: str, axes: TrainingAxes, tracker: MemoryTracker) -> None:
    """Take the steps on fake tensors, before the eyes of `tracker`."""
    model = workload.build(name, axes, device="meta")
    with FakeTensorMode():
        _become_fake(model)
        trainer = Trainer(model, lr=1e-3, axes=axes)
        tokens = torch.zeros(workload.sequences(name), workload.seq_len, dtype=torch.int64)
        labels = torch.zeros_like(tokens)
        tracker.track(*model.parameters(), *model.buffers(), tokens, labels)
        with tracker:
            for _ in range(STEPS):
                trainer.step(tokens, labels)


def _become_fake(model: nn.Module) -> None:
    """Replace parameters on the meta device by fake ones on the CPU, tied ones by one: `to` cannot do it."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in replaced:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                replaced[parameter] = nn.Parameter(empty, parameter.requires_grad)
            setattr(module, name, replaced[parameter])


def measure_on_cuda(workload: Workload, name: str, axes: TrainingAxes, device: torch.device) -> int:
    """Return the peak of all ranks, in bytes, that torch's allocator of CUDA saw; every rank must call it.

    Memory that was held before does not count.
    """
    before = torch.cuda.memory_allocated(device)
    trainer = Trainer(workload.build(name, axes, device=device), lr=1e-3, axes=axes)
    shape = workload.sequences(name), workload.seq_len
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    labels = torch.zeros_like(tokens)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(STEPS):
        trainer.step(tokens, labels)
    peak = torch.tensor(torch.cuda.max_memory_allocated(device) - before, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)
