"""Processes that do one rank's part of a benchmark each, and wait in between for the next turn.

So a parallel contender takes its turns in the same rounds as those that run in the measuring process.
Tensors are shared, not sent: a rank reads its part of them once, and writes its part of the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from paracore.bench.shaped_link import ShapedLink
from paracore.errors import UsageError
from paracore.parallel.ledger import Ledger
from paracore.parallel.mesh import MeshAxis, MeshShape

_TIMEOUT = datetime.timedelta(seconds=300)

Worker = Callable[..., Callable[..., None]]
"""Called once on each rank with its axis and the arguments of `Ranks`; returns what a turn does."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a rank is, and with what it computes."""

    rank: int
    size: int
    rendezvous: str
    threads: int
    link: ShapedLink | None
    device_type: str

    def take(self) -> None:
        """Let this process be that rank: from now on it communicates, and computes, as such."""
        torch.set_num_threads(self.threads)
        if self.link is not None:
            self.link.enter(self.rank)
        if self.device_type == "cuda":
            torch.cuda.set_device(self.rank)
        dist.init_process_group(
            "nccl" if self.device_type == "cuda" else "gloo",
            init_method=f"file://{self.rendezvous}",
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
        )


class Ranks:
    """`size` processes, each with its share of `threads`, in which `worker` takes turns.

    They communicate over gloo and loopback, or over gloo and `link`; with device_type "cuda" over NCCL, each
    with a GPU of its own.
    """

    def __init__(
        self,
        size: int,
        threads: int,
        worker: Worker,
        *arguments: object,
        link: ShapedLink | None = None,
        device_type: str = "cpu",
    ) -> None:
        if threads % size:
            raise UsageError(f"{threads} threads cannot be divided among {size} ranks; see --threads")
        context = torch.multiprocessing.get_context("spawn")
        folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = _Place(rank, size, f"{folder.name}/rendezvous", threads // size, link, device_type)
            process = context.Process(target=_serve, args=(theirs, place, worker, arguments), daemon=True)
            with _idle_threads_asleep():
                process.start()
            self._connections.append(ours)
            processes.append(process)
        self.end = weakref.finalize(self, _end, self._connections, processes, folder)
        self._wait()

    def turn(self, *arguments: object) -> None:
        """Let every rank do its part; return when all are done. Raises RuntimeError if one fails."""
        for connection in self._connections:
            connection.send(arguments)
        self._wait()

    def _wait(self) -> None:
        for rank, connection in enumerate(self._connections):
            if not connection.poll(_TIMEOUT.total_seconds()):
                raise RuntimeError(f"rank {rank} did not answer in {_TIMEOUT}")
            failure = connection.recv()
            if failure is not None:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")


def _end(connections: list[Connection], processes: list[Any], folder: Any) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # it may have died, and said so, before
            connection.send(None)
    for process in processes:
        process.join(timeout=10)
        process.kill()
    folder.cleanup()


@contextlib.contextmanager
def _idle_threads_asleep() -> Iterator[None]:
    """Start processes whose threads sleep while they wait: those that spin take the cores of other ranks."""
    if "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def _serve(connection: Connection, place: _Place, worker: Worker, arguments: tuple[object, ...]) -> None:
    try:
        place.take()
        axis = MeshAxis.of(MeshShape(cp=place.size).build(place.device_type), "cp", Ledger())
        take_turn = worker(axis, *arguments)
        connection.send(None)
        while (received := connection.recv()) is not None:
            take_turn(*received)
            connection.send(None)
    except Exception:  # noqa: BLE001 - the measuring process raises it
        connection.send(traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
