"""Gradients on their way from backward into flat buckets, and from there, summed, to the ranks that own them.

| stage | where gradients lie | when they are summed over the ranks |
|---|---|---|
| 0 | in buckets; `parameter.grad` are views | in `reduce`, on all ranks |
| 1 | in buckets; `parameter.grad` are views | in `reduce`, each rank its shard |
| 2 | each rank its shard | a bucket as soon as backward has filled it, beside the rest of backward |

`parameter.grad` cannot be a view of a bucket of another dtype: it is None then, once the bucket has it, as it
is in stage 2. There a bucket has a buffer only from its first gradient until the sum is done, and all ranks
send buckets in the same order, whatever order gradients arrive in; those that backward does not fill are sent
when it ends. A pass in which no parameter gets a gradient on a rank is not seen there: every pass must reach
one.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paracore.errors import UsageError
from paracore.optim.flat import BucketLayout, Slot
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.shards import ShardGather, ShardSum

_IN_FLIGHT = 2  # sums under way at once
# An attribute of parameters: what brings their gradients to the last optimizer that was made for them.
_HOOK = "_paracore_gradient_hook"


@dataclass
class Bucket:
    """Gradients of one bucket on this rank.

    total: those that this rank owns, summed over the ranks and over backward passes; [length] in stage 0,
    else [shard_length]. local: this rank's own ones, [length]; in stage 2 only while it holds some.
    """

    layout: BucketLayout
    total: Tensor
    local: Tensor | None
    has_total: bool = False
    filled: set[int] = field(default_factory=set)  # parameters whose gradients are in `local`
    arrived: int = 0  # how many of them came in this backward pass

    @property
    def is_total(self) -> bool:
        """Whether total and local are the same memory, all of it."""
        local, total = self.local, self.total
        return local is not None and local.data_ptr() == total.data_ptr() and local.shape == total.shape


class _Buffers:
    """Flat buffers that are used again and again: fresh memory costs more than what is done with it."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._length, self._device = length, device
        self._free: dict[torch.dtype, list[Tensor]] = defaultdict(list)

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer with whatever is in it."""
        free = self._free[dtype]
        buffer = free.pop() if free else torch.zeros(self._length, dtype=dtype, device=self._device)
        return buffer[:length]

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; what is more than can be under way is freed."""
        free = self._free[buffer.dtype]
        if len(free) < 2 * _IN_FLIGHT:
            free.append(buffer._base if buffer._base is not None else buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that nobody uses now."""
        return sum(buffer.nbytes for free in self._free.values() for buffer in free)


class _Hook:
    """What brings a parameter's gradients here; saved or copied with the parameter, it is nothing."""

    def __init__(self, handle: RemovableHandle | None = None) -> None:
        self._handle = handle

    def remove(self) -> None:
        """Let gradients go elsewhere."""
        if self._handle is not None:
            self._handle.remove()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class Gradients:
    """The gradients of `parameters`, in `buckets`, over the ranks of `axis`.

    ordered, wire_dtype: how they are summed and in which dtype they travel (None: as they are); see
    `paracore.parallel.shards.ShardSum`. dtypes: those of the buckets' gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        axis: MeshAxis,
        stage: int,
        *,
        dtypes: Sequence[torch.dtype],
        ordered: bool,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.buckets, self._parameters, self._axis, self._stage = list(buckets), parameters, axis, stage
        self._dtypes, self._ordered, self._wire_dtype = dtypes, ordered, wire_dtype
        self._transient = stage == 2 and axis.size > 1
        self._place = {s.index: (b, s) for b, bucket in enumerate(buckets) for s in bucket.layout.slots}
        self.present: set[int] = set()  # parameters that have got a gradient here since the last step
        self._buffers = _Buffers(
            max((bucket.layout.length for bucket in buckets), default=0), parameters[0].device
        )
        self._under_way: deque[tuple[Bucket, ShardSum, list[Tensor]]] = deque()
        self._synchronized, self._held_back = True, False
        self._in_backward = False
        self._passes = 0  # backward passes since the last step whose buckets were sent
        self._next = 0  # the bucket that is sent next
        self._views = self._make_views()
        for index in self._place:
            parameter = parameters[index]
            if hasattr(parameter, _HOOK):
                getattr(parameter, _HOOK).remove()
            hook = functools.partial(self._arrive, index)
            setattr(parameter, _HOOK, _Hook(parameter.register_post_accumulate_grad_hook(hook)))
        self._attach()

    # ---------------------------------------------------------------- from backward into buckets

    @property
    def transfer_bytes(self) -> int:
        """Bytes of buffers that are kept for sums under way."""
        return self._buffers.nbytes

    @property
    def kept(self) -> list[Tensor]:
        """The buffers of buckets, but for those that are borrowed until a sum is done."""
        locals_ = [b.local for b in self.buckets if b.local is not None and not self._transient]
        return [*(bucket.total for bucket in self.buckets), *locals_]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backward passes in here on their ranks, until a pass outside or `reduce`.

        Every rank must enter it for the same passes.
        """
        before, self._synchronized = self._synchronized, False
        self._held_back = True  # on every rank, whether it gets gradients in here or not
        try:
            yield
        finally:
            self._synchronized = before

    @torch.no_grad()
    def _arrive(self, index: int, parameter: Tensor) -> None:
        """Autograd has accumulated a gradient."""
        number, slot = self._place[index]
        if self._transient and self._synchronized:
            self._begin_pass()
            if number < self._next:
                raise UsageError(
                    f"a gradient {list(parameter.shape)} arrived twice in one backward pass, when its bucket "
                    "had been sent: checkpoint with use_reentrant=False, or use no_sync"
                )
        if parameter.grad is not None:
            self._take(number, slot, parameter, parameter.grad)
        if self._in_backward:
            self.buckets[number].arrived += 1
            self._send_full()

    def _take(self, number: int, slot: Slot, parameter: Tensor, gradient: Tensor) -> None:
        """Bring a gradient into its bucket, unless it is a view of that, to which autograd has added."""
        bucket, attached = self.buckets[number], self._views.get(slot.index)
        view = _view(self._local(number), slot, parameter) if attached is None else attached
        if gradient is not attached:
            # What stands in place of a view is the whole gradient; without views it is one more part of it.
            if slot.index in bucket.filled and attached is None:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            parameter.grad = attached
        bucket.filled.add(slot.index)
        self.present.add(slot.index)

    def _local(self, number: int) -> Tensor:
        """Return the buffer of a bucket's own gradients; in stage 2 it may have to be borrowed."""
        bucket = self.buckets[number]
        if bucket.local is None:
            bucket.local = self._buffers.take(bucket.layout.length, self._dtypes[number])
        return bucket.local

    def _make_views(self) -> dict[int, Tensor]:
        """Return what `parameter.grad` is to be, where gradients stay in a bucket of the same dtype."""
        views = {}
        for index, (number, slot) in self._place.items():
            parameter, local = self._parameters[index], self.buckets[number].local
            if not self._transient and local is not None and local.dtype == parameter.dtype:
                views[index] = _view(local, slot, parameter)
        return views

    def _attach(self) -> None:
        for index in self._place:
            parameter, view = self._parameters[index], self._views.get(index)
            if parameter.grad is not view:  # each assignment costs as much as a small kernel
                parameter.grad = view

    # ---------------------------------------------------------------- stage 2: within backward

    def _begin_pass(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _send_full(self) -> None:
        """Send the buckets whose turn it is and that lack nothing."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.arrived < len(bucket.layout.slots):
                return
            self._send(self._next)
            self._next += 1

    def _end_pass(self) -> None:
        """Send what backward has not filled: others may have more there."""
        for number in range(self._next, len(self.buckets)):
            self._send(number)
        self._in_backward, self._held_back, self._next = False, False, 0
        for bucket in self.buckets:
            bucket.arrived = 0
        self._passes += 1

    # ---------------------------------------------------------------- sums over the ranks

    def reduce(self) -> None:
        """Bring all gradients to those who own them; every rank must call it, once before each step."""
        self._collect()
        if self._axis.size == 1:
            return
        if not self._transient:
            for number in range(len(self.buckets)):
                self._send(number)
        elif self._passes == 0 or self._held_back or self._in_backward:  # as on all other ranks
            self._end_pass()
        elif any(bucket.filled for bucket in self.buckets):
            raise UsageError(
                "a gradient was assigned by hand after a backward pass whose gradients have been sent: other "
                "ranks do not expect it; assign it before, or let that pass run within no_sync"
            )
        while self._under_way:
            self._finish_oldest()
        if self._stage == 0:
            gathers = [ShardGather(bucket.total, self._axis) for bucket in self.buckets]
            for gather in gathers:
                gather.finish()

    def _collect(self) -> None:
        """Take gradients in that did not come by autograd, and drop those that were taken away."""
        for index, (number, slot) in self._place.items():
            parameter, view = self._parameters[index], self._views.get(index)
            if parameter.grad is view:
                continue
            if parameter.grad is not None:
                self._take(number, slot, parameter, parameter.grad)
            elif view is not None:
                view.zero_()
                self.present.discard(index)

    def _send(self, number: int) -> None:
        """Start the sum of a bucket's own gradients, without waiting for it."""
        bucket, local = self.buckets[number], self._local(number)
        begin = 0  # of what no gradient has filled, padding included: a borrowed buffer is full of old ones
        for slot in bucket.layout.slots:
            if slot.index in bucket.filled:
                local[begin : slot.begin].zero_()
                begin = slot.end
        local[begin:].zero_()
        while len(self._under_way) >= _IN_FLIGHT:
            self._finish_oldest()
        borrowed = []
        sent, wire = local, self._wire_dtype or local.dtype
        if wire != local.dtype:
            sent = self._buffers.take(local.numel(), wire).copy_(local)
            borrowed.append(sent)
        received = self._buffers.take(local.numel(), wire) if self._ordered else None
        if received is not None:
            borrowed.append(received)
        if self._transient:
            borrowed.append(local)
            bucket.local = None
        bucket.filled.clear()
        self._under_way.append((bucket, ShardSum(sent, received, self._axis), borrowed))

    def _finish_oldest(self) -> None:
        bucket, under_way, borrowed = self._under_way.popleft()
        total = bucket.total[bucket.layout.shard(self._axis.rank)] if self._stage == 0 else bucket.total
        under_way.finish(total, accumulate=bucket.has_total)
        bucket.has_total = self._transient
        for buffer in borrowed:
            self._buffers.give(buffer)

    # ---------------------------------------------------------------- after the step

    def clear(self, *, zeroed: bool) -> None:
        """Forget all gradients. zeroed: whether the totals are zero already."""
        while self._under_way:
            self._finish_oldest()
        for bucket in self.buckets:
            if not zeroed:
                bucket.total.zero_()
            if self._transient and bucket.local is not None:
                self._buffers.give(bucket.local)
                bucket.local = None
            elif bucket.local is not None and not bucket.is_total:
                bucket.local.zero_()
            bucket.has_total, bucket.arrived = False, 0
            bucket.filled.clear()
        self.present.clear()
        self._in_backward, self._held_back, self._next, self._passes = False, False, 0, 0
        self._attach()


def _view(local: Tensor, slot: Slot, parameter: Tensor) -> Tensor:
    return local[slot.begin : slot.end].view(parameter.shape)
