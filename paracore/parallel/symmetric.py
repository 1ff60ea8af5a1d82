"""Memory that the ranks of an axis reach in each other over NVLink, and copies that run beside kernels.

A rank puts data where its peers can read it, or writes into what they hold, without their taking part. Three
protocols say what that takes, so that the mathematics built on it (`paracore.ops.fused_linear`) runs on one
device, too:

- `Region`: memory of one size on every rank, all of which every rank can address, and a barrier;
- `CopyStream`: copies, flags and waits that go on while the caller's stream computes;
- `Workspace`: both for one axis, with the flags that kernels wait for and the counters that they raise.

`SymmetricWorkspace` is the real one, over torch.distributed._symmetric_memory. Its copies are made by the
device's copy engines, and flags are written by the stream itself: neither takes a multiprocessor, so a kernel
that fills the device can wait for both.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paracore.errors import UsageError
from paracore.parallel.agreement import disagreement
from paracore.parallel.mesh import MeshAxis

ALIGNMENT = 512  # bytes: what begins on a multiple can be moved in vectors, whatever its dtype

# The longest wait for peers, who may compile or write a checkpoint meanwhile; NCCL's default, too.
PEER_TIMEOUT_SECONDS = 600.0

# ---------------------------------------------------------------- protocols


class Region(Protocol):
    """Memory of `num_bytes` on every rank of the axis; see `Workspace.region`."""

    @property
    def num_bytes(self) -> int:
        """How much every rank holds; see `region_bytes`."""

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor, contiguous, that lies `offset` bytes into what `rank` holds."""

    def next_half(self) -> int:
        """Return the offset of one half of the region and of the other by turns, the same on every rank."""

    def barrier(self, channel: int = 0) -> None:
        """Let the caller's stream wait until the streams of all ranks have come here.

        What they were given before is then to be seen by all. channel: another one for barriers that may be
        under way at the same time.
        """


class CopyStream(Protocol):
    """What goes on beside the caller's stream, in the order in which it is given."""

    def fork(self) -> None:
        """Let what follows wait for all that the caller's stream has been given."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Copy; both are contiguous, of one shape and dtype, and either may be a peer's."""

    def set_flag(self, flags: Tensor, index: int, value: int) -> None:
        """Write `value` to flags[index], int32, when all before it is done and to be seen by all kernels."""

    def wait(self, counters: Tensor, index: int, expected: int) -> None:
        """Let what follows wait until counters[index], int32, has reached `expected`."""

    def barrier(self, region: Region) -> None:
        """Let what follows wait until the copy streams of all ranks have come here."""

    def join(self) -> None:
        """Let the caller's stream wait for all of it."""


class Workspace(Protocol):
    """What one rank needs to exchange data with its peers while it computes.

    flags, counters: [axis.size] int32, for kernels on this device. programs: how many programs of a kernel
    that waits or is waited for may run at a time. timeout_seconds: how long such a kernel may wait. cache:
    for whatever the caller computes once per shape.
    """

    axis: MeshAxis
    flags: Tensor
    counters: Tensor
    copies: CopyStream
    programs: int | None
    timeout_seconds: float
    cache: dict[Hashable, Any]

    def call(self) -> AbstractContextManager[int]:
        """Enter one use of the workspace, behind the last one; gives its ticket, the flags' next value."""

    def region(self, name: str, num_bytes: int) -> Region:
        """Return the region called `name`, of `num_bytes` or more.

        Every rank must ask for the same, in the same order: where it is too small all ranks wait for their
        devices, and exchange a larger one.
        """


def region_bytes(num_bytes: int) -> int:
    """Round up to what a region holds: two halves of equal size, each with something in it."""
    return max(1, -(-num_bytes // (2 * ALIGNMENT))) * 2 * ALIGNMENT


# ---------------------------------------------------------------- whether peers can be reached


def peer_access(axis: MeshAxis, device: torch.device) -> str | None:
    """Return why the ranks of `axis` cannot reach each other's memory on `device`, or None if they can.

    Every rank of the axis must call it, and all get the same answer. It communicates: ask once.
    """
    if axis.size == 1:
        return f"axis {axis.name} has one rank, and so no peers"
    obstacle = disagreement("peer memory", {"host": _host()}, local_obstacle(device), axis, device)
    if obstacle is None:
        obstacle = disagreement("peer memory", {}, _link_obstacle(axis, device), axis, device)
    return obstacle


def local_obstacle(device: torch.device) -> str | None:
    """Return why this process cannot share memory of `device`, whoever its peers are, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "a ROCm device" if device.type == "cuda" else f"device {str(device)!r}"
        return f"peers are reached over NVLink between CUDA devices, not from {kind}"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory ({error})"
    backend = _SymmetricMemory.get_backend(device)
    if backend not in (None, "CUDA"):
        return f"torch's symmetric memory was set to the backend {backend!r}, must be 'CUDA'"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}); install triton 3.6 or 3.7"
    try:
        importlib.import_module("paracore._CUDA")
    except ImportError as error:
        return (
            f"paracore._CUDA cannot be loaded ({error}); install paracore where torch is a CUDA build and "
            "its nvcc is there: pip install --no-build-isolation -e ."
        )
    return None


def _host() -> str:
    """Name the running system: names of hosts repeat, and containers of one system have several."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _link_obstacle(axis: MeshAxis, device: torch.device) -> str | None:
    from torch._C import _distributed_c10d as c10d
    from torch._C._autograd import DeviceType

    detect = getattr(c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return f"torch {torch.__version__} cannot tell which devices NVLink connects"
    identities: list[Any] = [None] * axis.size
    dist.all_gather_object(identities, _identity(_index(device)), group=axis.connection())
    visible = {_identity(index): index for index in range(torch.cuda.device_count())}
    devices = [visible.get(identity) for identity in identities]
    return missing_link(axis.rank, devices, detect(DeviceType.CUDA, "nvlink").matrix)


def missing_link(rank: int, devices: Sequence[int | None], links: Sequence[Sequence[int]]) -> str | None:
    """Return which peer `rank` has no NVLink to, or None.

    devices: each rank's device, numbered as this process sees them; None where it does not see it. links:
    between each two devices, how many.
    """
    own = devices[rank]
    for peer, device in enumerate(devices):
        if peer == rank:
            continue
        if device is None or own is None:
            return f"it does not see the device of rank {peer}; CUDA_VISIBLE_DEVICES must list those of all"
        if device == own:
            return f"it shares device {own} with rank {peer}; each needs its own"
        if links[own][device] == 0:
            return f"no NVLink connects its device {own} and rank {peer}'s device {device}"
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _identity(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


# ---------------------------------------------------------------- over torch's symmetric memory


class SymmetricWorkspace:
    """A `Workspace` of CUDA devices that NVLink connects. Whoever computes holds it, e.g. one per model.

    Making one communicates, and so does the first use of each size: every rank of the axis must do the same.
    Raises UsageError on every rank alike, with the reason, where peers cannot be reached; see `peer_access`.
    """

    def __init__(self, axis: MeshAxis, device: torch.device, *, timeout_seconds: float = 30.0) -> None:
        obstacle = peer_access(axis, device)
        if obstacle is not None:
            raise UsageError(f"no peer memory over axis {axis.name} of {axis.size} ranks: {obstacle}")
        self.axis, self.device = axis, torch.device("cuda", _index(device))
        self.timeout_seconds = timeout_seconds
        self.flags = torch.zeros(axis.size, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros_like(self.flags)
        self.copies: CopyStream = CudaCopyStream(self.device, timeout_seconds)
        # One is left to what the copy stream may need: the thread of a barrier or of a wait, or a copy that
        # the driver makes a kernel of. A kernel that kept out what it waits for would wait for ever.
        self.programs: int | None = torch.cuda.get_device_properties(self.device).multi_processor_count - 1
        self.cache: dict[Hashable, Any] = {}
        self._regions: dict[str, SymmetricRegion] = {}
        self._ticket = 0
        self._last_call = torch.cuda.Event()

    @contextmanager
    def call(self) -> Iterator[int]:
        """See `Workspace.call`. Raises UsageError while a CUDA graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph is being captured: each replay would wait for the flags of the captured call, "
                "which are set already. Capture without peer memory."
            )
        self._ticket += 1
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._last_call)  # where the last call was on another stream
        try:
            yield self._ticket
        finally:
            self._last_call.record(stream)

    def region(self, name: str, num_bytes: int) -> SymmetricRegion:
        """See `Workspace.region`."""
        known = self._regions.get(name)
        if known is None or known.num_bytes < num_bytes:
            # No peer may still be reading or writing the old one: each waits for its device first, and none
            # gets a new one before all have.
            torch.cuda.synchronize(self.device)
            self._regions[name] = known = SymmetricRegion(self.axis, self.device, region_bytes(num_bytes))
        return known

    def __deepcopy__(self, memo: dict[int, object]) -> SymmetricWorkspace:
        # A copied model uses the same memory, one call after the other.
        return self


class SymmetricRegion:
    """A `Region` of `num_bytes`, see `region_bytes`; every rank of the axis must make it."""

    def __init__(self, axis: MeshAxis, device: torch.device, num_bytes: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        self.num_bytes = num_bytes
        self._turn = 0
        timeout = PEER_TIMEOUT_SECONDS if axis.timeout is None else axis.timeout.total_seconds()
        self._timeout_ms = int(1000 * timeout)
        # An allocation of its own: torch's memory pool would keep what a larger region replaces.
        self._memory = _SymmetricMemory.empty_strided_p2p(
            (num_bytes,), (1,), torch.uint8, device, axis.connection().group_name
        )
        self._handle = _SymmetricMemory.rendezvous(self._memory)

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Region`, as for the others."""
        return self._handle.get_buffer(rank, tuple(shape), dtype, offset // dtype.itemsize)

    def next_half(self) -> int:
        """Return one offset and the other by turns."""
        self._turn = 1 - self._turn
        return self._turn * (self.num_bytes // 2)

    def barrier(self, channel: int = 0) -> None:
        """Wait for the streams of all ranks."""
        self._handle.barrier(channel=channel, timeout_ms=self._timeout_ms)


class CudaCopyStream:
    """A stream of `device`: copies between devices are its copy engines', flags are written by itself."""

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self._device, self._timeout_seconds = device, timeout_seconds
        # Prior to the kernels of the caller's stream where both wait for a multiprocessor.
        self.stream = torch.cuda.Stream(device, priority=-1)

    def fork(self) -> None:
        """See `CopyStream`, as for the others."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Copy."""
        with torch.cuda.stream(self.stream):
            destination.copy_(source, non_blocking=True)
        for tensor in (destination, source):  # its memory is not to be given away before that
            tensor.record_stream(self.stream)

    def set_flag(self, flags: Tensor, index: int, value: int) -> None:
        """Write a flag."""
        from torch._C._distributed_c10d import _SymmetricMemory

        with torch.cuda.stream(self.stream):
            # The stream itself writes, behind a fence at the scope of the system.
            _SymmetricMemory.stream_write_value32(flags.view(torch.uint32), index, value & 0xFFFFFFFF)

    def wait(self, counters: Tensor, index: int, expected: int) -> None:
        """Wait for a counter."""
        from paracore import _CUDA

        with torch.cuda.device(self._device):
            _CUDA.wait_for_counter(
                self.stream.cuda_stream, counters.data_ptr(), index, expected, self._timeout_seconds
            )

    def barrier(self, region: Region) -> None:
        """Wait for the copy streams of all ranks."""
        with torch.cuda.stream(self.stream):
            region.barrier(channel=1)

    def join(self) -> None:
        """Let the caller's stream wait."""
        torch.cuda.current_stream(self._device).wait_stream(self.stream)
