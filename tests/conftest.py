"""Shared by all tests: the launcher of distributed ones, and the choice of Triton's interpreter."""

from __future__ import annotations

import dataclasses
import datetime
import io
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from paracore.parallel import Ledger, MeshAxis, MeshShape
from paracore.parallel.mesh import TrainingAxes
from tests.interpreter import prepare_interpreter

# Before any test imports a kernel: triton.jit decides when it decorates.
prepare_interpreter(os.environ)

# Before any rank starts: threads that spin while they wait take the cores that other ranks need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_TIMEOUT = 120.0  # seconds that any wait may last

# Forked from a clean server that has imported a lot but computed nothing: fresh processes, quickly. What a
# test's module imports beside this costs every rank of every test there.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch.testing",
        "torch._dynamo",
        "paracore.optim",
        "paracore.validation",
        "paracore.bench.peak_memory",
        "paracore.hf.models",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3")),
        "paracore.cli.main",
        "pytest",
        "hypothesis",
        "tests.conftest",
    ]
)

Launch = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class Died:
    """What a rank returns whose process ended before its function did."""

    code: int | None


def _rank_main(
    rank: int,
    world_size: int,
    rendezvous: str,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=_TIMEOUT),
        )
        # As bytes: torch would hand over the memory of tensors, which dies with this process.
        returned = io.BytesIO()
        torch.save(function(*args), returned)
        results.put((rank, returned.getvalue(), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer over small tensors than one does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a benchmark's ranks, which are fresh interpreters otherwise, be processes as those of `launch`."""
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda _: _processes)


@pytest.fixture
def launch() -> Launch:
    """launch(world_size, function, *args): call function(*args) on every rank; return their results.

    Real processes over gloo. `function` must be importable (defined at the top of a test module).
    An exception on any rank fails the test with that rank's traceback, and so does the end of its process.
    """
    return run_ranks


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """See `launch`."""
    results = run_mortal_ranks(world_size, function, *args)
    for rank, result in enumerate(results):
        if isinstance(result, Died):
            pytest.fail(f"the process of rank {rank} ended with code {result.code}")
    return results


def run_mortal_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """See `launch`; but a rank whose process ends by itself returns `Died`."""
    results = _processes.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _processes.Process(
                target=_rank_main, args=(rank, world_size, f"{folder}/rendezvous", results, function, args)
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(results, ranks)
        finally:
            for process in ranks:
                process.join(timeout=10)
                process.kill()


def _collect(results: Any, ranks: list[Any]) -> list[Any]:
    returned: dict[int, Any] = {}
    latest = time.monotonic() + _TIMEOUT
    while len(returned) < len(ranks):
        ended = [rank for rank, process in enumerate(ranks) if not process.is_alive()]
        try:
            rank, value, failure = results.get(timeout=1.0)
        except queue.Empty:
            # Whatever those had to say who had ended before would have arrived.
            returned |= {rank: Died(ranks[rank].exitcode) for rank in ended if rank not in returned}
            missing = set(range(len(ranks))) - returned.keys()
            if missing and time.monotonic() > latest:
                pytest.fail(f"ranks {missing} returned nothing in {_TIMEOUT} s")
            continue
        if failure is not None:
            pytest.fail(f"rank {rank} failed:\n{failure}")
        returned[rank] = torch.load(io.BytesIO(value), weights_only=False)
        latest = time.monotonic() + _TIMEOUT
    return [returned[rank] for rank in range(len(ranks))]


def tp_axis() -> MeshAxis:
    """Inside a rank: the tp axis over all ranks, with a ledger of its own."""
    return axis_over_all("tp")


def axis_over_all(name: str) -> MeshAxis:
    """Inside a rank: the axis `name` over all ranks, with a ledger of its own."""
    return MeshAxis.of(MeshShape(**{name: dist.get_world_size()}).build("cpu"), name, Ledger())


def training_axes(**sizes: int) -> TrainingAxes:
    """Inside a rank: all axes of a mesh of these sizes over all ranks, with one ledger."""
    return TrainingAxes.of(MeshShape(**sizes).build("cpu"))


def tp_and_cp(tp: int, cp: int) -> tuple[MeshAxis, MeshAxis]:
    """Inside a rank: the axes tp and cp of a mesh over all ranks, with one ledger."""
    mesh, ledger = MeshShape(cp=cp, tp=tp).build("cpu"), Ledger()
    return MeshAxis.of(mesh, "tp", ledger), MeshAxis.of(mesh, "cp", ledger)
