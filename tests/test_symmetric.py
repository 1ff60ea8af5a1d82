"""Who reaches whose memory, and that all ranks get the same answer; what torch must have for it."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

from paracore.errors import UsageError
from paracore.parallel import Ledger, MeshAxis, symmetric
from paracore.parallel.symmetric import (
    ALIGNMENT,
    CudaCopyStream,
    SymmetricRegion,
    SymmetricWorkspace,
    local_obstacle,
    missing_link,
    peer_access,
    region_bytes,
)
from tests.conftest import tp_axis

CPU = torch.device("cpu")


def test_one_rank_has_no_peers():
    assert peer_access(MeshAxis.alone("tp"), CPU) == "axis tp has one rank, and so no peers"


def test_only_cuda_devices_share_memory(monkeypatch):
    assert "not from device 'cpu'" in str(local_obstacle(CPU))
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert "not from a ROCm device" in str(local_obstacle(torch.device("cuda")))


@pytest.mark.skipif(torch.version.cuda is not None, reason="the CUDA sources may be built here")
def test_without_the_cuda_sources_the_reason_is_what_to_build():
    reason = str(local_obstacle(torch.device("cuda")))
    assert "paracore._CUDA cannot be loaded" in reason
    assert "pip install --no-build-isolation -e ." in reason


LINKS = [[0, 18, 0], [18, 0, 18], [0, 18, 0]]  # 0 - 1 - 2, no link between 0 and 2


@pytest.mark.parametrize(
    ("rank", "devices", "reason"),
    [
        (0, [0, 1], None),
        (1, [2, 1, 0], None),
        (0, [0, 1, 2], "no NVLink connects its device 0 and rank 2's device 2"),
        (1, [1, None], "does not see the device of rank 0"),
        (0, [1, None], "does not see the device of rank 1; CUDA_VISIBLE_DEVICES"),
        (1, [1, 1], "shares device 1 with rank 0"),
    ],
)
def test_every_peer_needs_a_device_and_a_link(rank, devices, reason):
    found = missing_link(rank, devices, LINKS)
    assert found is None if reason is None else reason in str(found)


def _ask(obstacle_of_rank_1):
    axis = tp_axis()
    if obstacle_of_rank_1 is not None:
        symmetric.local_obstacle = lambda device: obstacle_of_rank_1 if axis.rank == 1 else None
    answer = peer_access(axis, CPU)
    with pytest.raises(UsageError) as refusal:
        SymmetricWorkspace(axis, CPU)
    return answer, str(refusal.value)


def test_all_ranks_hear_of_an_obstacle_that_one_has(launch):
    """Whoever went ahead would wait in vain for those that did not."""
    answers = launch(2, _ask, "its driver is too old")
    assert answers[0] == answers[1]
    assert answers[0][0] == "peer memory, rank 1: its driver is too old"
    assert "no peer memory over axis tp of 2 ranks: peer memory, rank 1: its driver" in answers[0][1]


def test_ranks_on_the_cpu_all_say_so(launch):
    (first, second) = launch(2, _ask, None)
    assert first == second
    assert re.search(r"rank 0: .*'cpu'; .*rank 1: .*'cpu'", first[0])


def _ask_apart():
    axis = tp_axis()
    symmetric.local_obstacle = lambda device: None
    symmetric._host = partial(str, f"host-{axis.rank}")
    return peer_access(axis, CPU)


def test_ranks_on_two_hosts_do_not_share_memory(launch):
    answers = launch(2, _ask_apart)
    assert answers == ["peer memory: ranks disagree on host: rank 0: 'host-0', rank 1: 'host-1'"] * 2


def test_sizes_are_rounded_up():
    pair = 2 * ALIGNMENT
    assert [region_bytes(n) for n in (0, 1, pair, pair + 1)] == [pair, pair, pair, 2 * pair]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("empty_strided_p2p", ["size", "stride", "dtype", "device", "group_name"]),
        ("rendezvous", ["tensor"]),
        ("get_buffer", ["rank", "sizes", "dtype", "storage_offset"]),
        ("barrier", ["channel", "timeout_ms"]),
        ("stream_write_value32", ["input", "offset", "val"]),
        ("get_backend", []),
    ],
)
def test_torch_has_what_peer_memory_is_made_of(method, arguments):
    """Its symmetric memory is not declared stable: a version that lacks this is not supported."""
    from torch._C._distributed_c10d import _SymmetricMemory

    signature = str(getattr(_SymmetricMemory, method).__doc__).splitlines()[0]
    places = [signature.find(f"{argument}:") for argument in arguments]
    assert places == sorted(places), signature
    assert -1 not in places, signature


def _use_a_region():
    device = torch.device("cuda", 0)
    axis = MeshAxis("tp", 1, 0, dist.group.WORLD, Ledger())
    region = SymmetricRegion(axis, device, region_bytes(100))
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    copies = CudaCopyStream(device, timeout_seconds=10.0)
    sent = torch.arange(6.0, device=device).view(2, 3)
    halves = [region.next_half(), region.next_half()]
    region.view(0, halves[0], (2, 3), torch.float32).copy_(sent)
    region.barrier()
    copies.fork()
    copies.barrier(region)
    received = torch.full_like(sent, float("nan"))
    copies.copy(received, region.view(0, halves[0], (2, 3), torch.float32))
    copies.set_flag(flags, 1, 2**31 + 5)
    copies.join()
    return sorted(halves), received.cpu(), flags.cpu()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's symmetric memory refuses CPU tensors")
def test_a_region_and_a_copy_stream_over_torchs_symmetric_memory(launch):
    ((halves, received, flags),) = launch(1, _use_a_region)
    assert halves == [0, ALIGNMENT]
    assert torch.equal(received, torch.arange(6.0).view(2, 3))
    assert flags.tolist() == [0, 5 - 2**31]
