"""W ranks in one process: their memory is W buffers, each rank is a thread, and so is each copy stream.

On a GPU the ranks share one device: each has streams of its own there, and the real copy stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paracore.parallel import Ledger, MeshAxis
from paracore.parallel.symmetric import CopyStream, CudaCopyStream, Region, region_bytes

TIMEOUT = 120.0  # seconds that any wait may last

Work = Callable[[], Any]
Delay = Callable[[int, str], float]
"""Seconds that a rank's copy stream takes longer, by rank and kind of work."""


def no_delay(rank: int, kind: str) -> float:
    return 0.0


class LocalPeers:
    """The ranks, and the memory that they reach in each other.

    delay: see `Delay`. arrival: in which order the flags of a gather are set, by number of the ring; each
    with the copy before it. Default: as given.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        *,
        delay: Delay = no_delay,
        arrival: Sequence[int] | None = None,
        timeout_seconds: float = TIMEOUT,
    ) -> None:
        self.size, self.device, self.delay, self.arrival = size, device, delay, arrival
        self.timeout_seconds = timeout_seconds
        self.memory: dict[str, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._barriers: dict[tuple[str, int], threading.Barrier] = {}
        self._events: list[Any] = [None] * size
        self.workspaces = [LocalWorkspace(self, rank) for rank in range(size)]

    def run(self, function: Callable[[LocalWorkspace], Any]) -> list[Any]:
        """Call function(workspace) as each rank, at the same time; return what they return."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # each rank has a stream of its own, which knows nothing of the caller's
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._as_rank, function, workspace) for workspace in self.workspaces]
            return [future.result(timeout=2 * TIMEOUT) for future in futures]

    def stream_of(self, numbers: Tensor) -> ThreadCopyStream | None:
        """Return the copy stream of the workspace whose flags or counters these are."""
        for workspace in self.workspaces:
            if numbers is workspace.flags or numbers is workspace.counters:
                return workspace.thread
        return None

    def close(self) -> None:
        for workspace in self.workspaces:
            workspace.close()

    def allocate(self, name: str, num_bytes: int) -> None:
        """Let every rank have that much, all NaN."""
        with self._lock:
            known = self.memory.get(name)
            if known is None or known[0].numel() < num_bytes:
                self.memory[name] = [
                    torch.full((region_bytes(num_bytes),), 0xFF, dtype=torch.uint8, device=self.device)
                    for _ in range(self.size)
                ]
                if self.device.type == "cuda":
                    torch.cuda.synchronize()

    def barrier(self, rank: int, name: str, channel: int) -> None:
        fresh = threading.Barrier(self.size, timeout=TIMEOUT)
        with self._lock:
            barrier = self._barriers.setdefault((name, channel), fresh)
        if self.device.type == "cpu":
            barrier.wait()
            return
        self._events[rank] = torch.cuda.current_stream().record_event()
        barrier.wait()
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)
        barrier.wait()

    def _as_rank(self, function: Callable[[LocalWorkspace], Any], workspace: LocalWorkspace) -> Any:
        try:
            if self.device.type == "cpu":
                return function(workspace)
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                result = function(workspace)
                torch.cuda.current_stream().synchronize()
                return result
        except BaseException:
            for barrier in self._barriers.values():
                barrier.abort()  # the others would wait for this rank
            raise


class LocalRegion:
    def __init__(self, peers: LocalPeers, rank: int, name: str) -> None:
        self._peers, self._rank, self._name = peers, rank, name
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        return self._peers.memory[self._name][0].numel()

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        elements = torch.Size(shape).numel()
        memory = self._peers.memory[self._name][rank]
        return memory[offset : offset + elements * dtype.itemsize].view(dtype).view(*shape)

    def next_half(self) -> int:
        self._turn = 1 - self._turn
        return self._turn * (self.num_bytes // 2)

    def barrier(self, channel: int = 0) -> None:
        self._peers.barrier(self._rank, self._name, channel)


class LocalWorkspace:
    def __init__(self, peers: LocalPeers, rank: int) -> None:
        self.axis = MeshAxis("tp", peers.size, rank, None, Ledger())
        self.flags = torch.zeros(peers.size, dtype=torch.int32, device=peers.device)
        self.counters = torch.zeros_like(self.flags)
        self.timeout_seconds = peers.timeout_seconds
        self.cache: dict[Hashable, Any] = {}
        self.programs: int | None = None
        self._peers, self._ticket = peers, 0
        self._regions: dict[str, LocalRegion] = {}
        self.thread: ThreadCopyStream | None = None
        if peers.device.type == "cpu":
            self.copies: CopyStream = (thread := ThreadCopyStream(peers, rank))
            self.thread = thread
        else:
            self.copies = LateCopyStream(peers, rank)
            # The programs of all ranks, and room for the copies, which are kernels within one device.
            processors = torch.cuda.get_device_properties(peers.device).multi_processor_count
            self.programs = max(1, (processors - 2 * peers.size) // peers.size)

    @contextmanager
    def call(self) -> Iterator[int]:
        self._ticket += 1
        yield self._ticket

    def region(self, name: str, num_bytes: int) -> Region:
        self._peers.allocate(name, num_bytes)
        return self._regions.setdefault(name, LocalRegion(self._peers, self.axis.rank, name))

    def close(self) -> None:
        if self.thread is not None:
            self.thread.close()


class LateCopyStream(CudaCopyStream):
    """The real copy stream, with a delay before each copy."""

    def __init__(self, peers: LocalPeers, rank: int) -> None:
        super().__init__(peers.device, peers.timeout_seconds)
        self._cycles = int(1e9 * peers.delay(rank, "copy"))

    def copy(self, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self._cycles)
        super().copy(destination, source)


class ThreadCopyStream:
    """A copy stream that is a thread, beside a caller's stream of which only products are another."""

    def __init__(self, peers: LocalPeers, rank: int) -> None:
        self._peers, self._rank = peers, rank
        self._pool = ThreadPoolExecutor(1)
        self._products = ThreadPoolExecutor(1)
        self._held: list[list[tuple[str, Work]]] = [[]]  # what is to be done with each flag
        self._under_way: list[Future[None]] = []

    def product(self, work: Work) -> None:
        """Start a product; until `join` it runs beside the copies."""
        self._under_way.append(self._products.submit(work))

    def fork(self) -> None:
        pass  # but for products, the caller's work is done when it returns

    def copy(self, destination: Tensor, source: Tensor) -> None:
        assert destination.is_contiguous()
        assert source.is_contiguous()
        assert (destination.shape, destination.dtype) == (source.shape, source.dtype)
        self._add("copy", lambda: destination.copy_(source))

    def set_flag(self, flags: Tensor, index: int, value: int) -> None:
        self._add("flag", lambda: flags.__setitem__(index, value))
        if self._peers.arrival is not None:
            self._held.append([])
            if len(self._held) > self._peers.size:
                groups, self._held = self._held, [[]]
                for number in self._peers.arrival:
                    for kind, work in groups[number]:
                        self._start(kind, work)

    def wait(self, counters: Tensor, index: int, expected: int) -> None:
        def poll() -> None:
            latest = time.monotonic() + TIMEOUT
            while (found := int(counters[index])) < expected:
                if time.monotonic() > latest:
                    raise TimeoutError(f"counter {index} is {found}, expected {expected}")
                time.sleep(1e-4)
            assert found == expected

        self._start("wait", poll)

    def barrier(self, region: Region) -> None:
        self._start("barrier", lambda: region.barrier(channel=1))

    def join(self) -> None:
        under_way, self._under_way = self._under_way, []
        done, pending = wait(under_way, timeout=TIMEOUT, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending:
            raise TimeoutError(
                f"rank {self._rank}: {len(pending)} pieces of work are not done in {TIMEOUT} s"
            )

    def close(self) -> None:
        self._pool.shutdown()
        self._products.shutdown()

    def _add(self, kind: str, work: Work) -> None:
        if self._peers.arrival is None:
            self._start(kind, work)
        else:
            self._held[-1].append((kind, work))

    def _start(self, kind: str, work: Work) -> None:
        def late() -> None:
            time.sleep(self._peers.delay(self._rank, kind))
            work()

        self._under_way.append(self._pool.submit(late))
