"""Messages between the ranks of an axis, started together and waited for together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paracore import trace
from paracore.arrivals import Work
from paracore.parallel.mesh import MeshAxis


class Exchange:
    """The sends and receives of one step. Both sides must name them in the same order for each pair of ranks.

    Nothing moves until `start`; until `wait` returns, what is sent must not be written to and what is
    received must not be read. On a GPU neither call waits on the host: the transfer follows what the
    current stream has been given before `start`, and what it is given after `wait` follows the transfer.
    Empty messages are left out on both sides. Each message sent is entered in the axis' ledger.
    """

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._operations: list[dist.P2POp] = []
        self._works: Sequence[Work] = ()
        self._bytes = 0  # sent

    def send(self, x: Tensor, rank: int) -> None:
        """Send `x`, contiguous, to `rank` of the axis."""
        if x.numel():
            self._axis.ledger.enter("send", self._axis.name, x.nbytes)
            self._bytes += x.nbytes
            self._add(dist.isend, x, rank)

    def receive(self, x: Tensor, rank: int) -> None:
        """Receive into `x`, contiguous, from `rank` of the axis."""
        if x.numel():
            self._add(dist.irecv, x, rank)

    def start(self) -> None:
        """Start all messages."""
        if not self._operations:
            return
        # gloo sends what it has, then what it asks for: asked for behind its own data, the other side's
        # would set out only when that has arrived.
        self._operations.sort(key=lambda operation: operation.op is dist.isend)
        with trace.post("exchange", self._axis.name, self._bytes):
            self._works = dist.batch_isend_irecv(self._operations)
        if self._operations[0].tensor.device.type == "cpu":
            self._works = trace.follow(self._works)

    def wait(self) -> None:
        """Wait until all messages have arrived."""
        if not self._works:
            return
        with trace.wait("exchange", self._axis.name):
            for work in self._works:
                work.wait()
        self._works, self._operations = (), []  # what was sent need not be kept any longer

    def _add(self, operation: Callable[..., Any], x: Tensor, rank: int) -> None:
        group = self._axis.connection()
        peer = dist.get_global_rank(group, rank)
        self._operations.append(dist.P2POp(operation, x, peer, group))
