"""The error of ring attention does not grow with the ring, and neither does its memory."""

from __future__ import annotations

import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paracore import masks
from paracore.bench.memory import peak_bytes
from paracore.ops import ring as ring_module
from paracore.ops.ring_attention import ring_attention
from paracore.parallel import Ledger, MeshAxis, MeshShape
from paracore.parallel import layout as layouts
from paracore.parallel.masks import Mask
from tests.attention_op_cases import qkv
from tests.conftest import Launch
from tests.numerics import randn, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LENGTH = 768
NAMES = ("out", "dq", "dk", "dv")
PATIENCE = 30.0  # seconds that a simulated rank waits for another


class SimulatedExchange:
    """As `Exchange`, between threads, and as late as it may be: what is sent is read when it is waited for.

    So what is written before `wait` although it is being sent, or read although it has not arrived, shows.
    Each pair of ranks takes its messages in order; `wait` also waits until what was sent has been taken.
    """

    # By sender and receiver: messages, and an event for each that is set once it has been taken.
    mail: ClassVar[dict[tuple[int, int], queue.Queue[tuple[Tensor, threading.Event]]]] = {}

    def __init__(self, axis: MeshAxis) -> None:
        self._rank = axis.rank
        self._sent: list[tuple[Tensor, int, threading.Event]] = []
        self._received: list[tuple[Tensor, int]] = []

    def send(self, x: Tensor, rank: int) -> None:
        if x.numel():
            assert x.is_contiguous()
            self._sent.append((x, rank, threading.Event()))

    def receive(self, x: Tensor, rank: int) -> None:
        if x.numel():
            assert x.is_contiguous()
            self._received.append((x, rank))

    def start(self) -> None:
        for x, _ in self._received:
            x.fill_(torch.nan)
        for x, rank, taken in self._sent:
            self.mail[self._rank, rank].put((x, taken))

    def wait(self) -> None:
        for x, rank in self._received:
            message, taken = self.mail[rank, self._rank].get(timeout=PATIENCE)
            x.copy_(message)
            taken.set()
        for _, rank, taken in self._sent:
            assert taken.wait(PATIENCE), f"rank {rank} never took a message of rank {self._rank}"


def ring_in_threads(size: int, mask: Mask, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk and dv of ring attention, each rank in a thread of this process."""
    layout = layouts.zigzag(LENGTH, size)
    whole = (*qkv(B=1, Sq=LENGTH, Sk=LENGTH, D=32, Dv=32, dtype=dtype), randn(1, 4, LENGTH, 32, seed=5))

    def run(rank: int) -> list[Tensor]:
        axis = MeshAxis("cp", size, rank, None, Ledger())
        q, k, v, dout = (layout.shard(x.to(dtype), rank, 2).requires_grad_() for x in whole)
        out = ring_attention(q, k, v, mask, layout, axis, check=False)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]

    everyone = itertools.product(range(size), repeat=2)
    mail = {pair: queue.Queue[tuple[Tensor, threading.Event]]() for pair in everyone}
    with (
        mock.patch.object(ring_module, "Exchange", SimulatedExchange),
        mock.patch.object(SimulatedExchange, "mail", mail),
        ThreadPoolExecutor(size) as ranks,
    ):
        parts = list(ranks.map(run, range(size)))
    assert all(box.empty() for box in mail.values())
    return [layout.join(shards, 2) for shards in zip(*parts, strict=True)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("mask", [masks.causal(), masks.full()], ids=["causal", "full"])
def test_the_error_does_not_grow_with_the_ring(dtype: torch.dtype, mask: Mask) -> None:
    """Kind of fault: bf16 partial results whose error grows with every step of the ring.

    In units of one device's own error, 1.05 at most.
    """
    exact = ring_in_threads(1, mask, F64)
    dense = [relative_error(x, y) for x, y in zip(ring_in_threads(1, mask, dtype), exact, strict=True)]
    for size in (2, 8, 16):
        ring = ring_in_threads(size, mask, dtype)
        for name, x, y, error in zip(NAMES, ring, exact, dense, strict=True):
            assert relative_error(x, y) <= 1.05 * error, f"{name} over {size} ranks"


def peaks(local: int, mask_name: str) -> tuple[int, int]:
    """Bytes at once, forward beside its outputs, backward while the keys travel: its outputs come later."""
    size = dist.get_world_size()
    axis = MeshAxis.of(MeshShape(cp=size).build("cpu"), "cp", Ledger())
    layout = layouts.zigzag(local * size, size)
    mask = masks.causal() if mask_name == "causal" else masks.full()
    q, k, v = (x.requires_grad_() for x in qkv(B=1, Sq=local, Sk=local, D=32, Dv=32, dtype=BF16))
    dout = torch.ones_like(q)

    def forward() -> Tensor:
        return ring_attention(q, k, v, mask, layout, axis)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    out = forward()
    backward()  # so that masks and plans are kept already
    saved = out.nbytes + q.size(1) * local * 4
    cpu = torch.device("cpu")
    return peak_bytes(forward, cpu) - saved, peak_bytes(backward, cpu)


@pytest.mark.parametrize("mask_name", ["causal", "full"])
def test_memory_does_not_grow_with_the_ring(launch: Launch, mask_name: str) -> None:
    """Forward: one state and two buffers of keys; backward: five buffers, dq, and the own sums in float32."""
    local, tolerance = 256, 1000
    keys, query_rows = 2 * local * 64, 4 * local  # numbers in a block of keys and values; rows
    forward = 2 * 2 * keys + 4 * query_rows * (32 + 2)  # two blocks in bf16, and the state
    backward = 2 * 2 * keys + 4 * 4 * keys + 4 * query_rows * 32 + 4 * query_rows  # dq and delta, too
    for size in (2, 3, 4):
        for used_forward, used_backward in launch(size, peaks, local, mask_name):
            assert abs(used_forward - forward) <= tolerance
            assert abs(used_backward - backward) <= tolerance
