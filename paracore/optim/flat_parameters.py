"""The parameters of stages 0 to 2: views of flat buckets, whose shards the ranks update and gather."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

from paracore.errors import UsageError
from paracore.optim.flat import BucketLayout, Entry, plan_buckets
from paracore.optim.gradients import Bucket, Gradients
from paracore.optim.options import Options
from paracore.optim.section import Part, Section
from paracore.optim.statistics import Statistics
from paracore.optim.store import follow_writes
from paracore.parallel.mesh import ShardingAxes
from paracore.parallel.placement import ParameterPlacement
from paracore.parallel.shards import ShardGather
from paracore.reference import accumulation_dtype


@dataclass(frozen=True)
class Item:
    """A parameter, its placement over tp, and whether its group keeps maxima of second moments.

    position: where it comes among all parameters in the order of their use.
    """

    parameter: nn.Parameter
    placement: ParameterPlacement
    amsgrad: bool
    position: int


class FlatParameters:
    """`items` in flat memory over `axes`, as `options` say. Those without requires_grad are left alone."""

    zeroes_gradients = True

    def __init__(self, items: Sequence[Item], axes: ShardingAxes, options: Options) -> None:
        self._items, self._axes, self._options = items, axes, options
        self.parameters = [item.parameter for item in items]
        self._sharded = options.stage > 0 and axes.data.size > 1
        self.layouts = self._plan()
        self._flats = [self._flatten(layout) for layout in self.layouts]
        buckets = [self._bucket(layout, flat) for layout, flat in zip(self.layouts, self._flats, strict=True)]
        self.gradients = Gradients(
            self.parameters,
            buckets,
            axes.data,
            options.stage,
            dtypes=[self._gradient_dtype(layout) for layout in self.layouts],
            ordered=options.ordered,
            wire_dtype=options.wire_dtype,
        )
        self.sections = [
            self._section(bucket, flat) for bucket, flat in zip(buckets, self._flats, strict=True)
        ]
        self._versions = [parameter._version for parameter in self.parameters]
        self._gathers: dict[int, ShardGather] = {}
        placed = (slot.index for layout in self.layouts for slot in layout.slots)
        self._addresses = {index: self.parameters[index].data_ptr() for index in placed}

    # ---------------------------------------------------------------- laying out

    def _plan(self) -> list[BucketLayout]:
        entries = []
        in_order_of_use = sorted(enumerate(self._items), key=lambda pair: pair[1].position)
        for index, item in reversed(in_order_of_use):
            parameter = item.parameter
            if parameter.requires_grad:
                room = math.prod(item.placement.local_shape(0))  # rank 0 has a largest shard
                key = (parameter.dtype, parameter.device, item.amsgrad)
                entries.append(Entry(index, parameter.numel(), room, key))
        itemsize = max((item.parameter.itemsize for item in self._items), default=1)
        return plan_buckets(entries, self._axes.data.size, max(1, self._options.bucket_bytes // itemsize))

    def _flatten(self, layout: BucketLayout) -> Tensor:
        """Move a bucket's parameters into one tensor, of which they become views."""
        first = self.parameters[layout.slots[0].index]
        flat = torch.zeros(layout.length, dtype=first.dtype, device=first.device)
        for slot in layout.slots:
            parameter = self.parameters[slot.index]
            view = flat[slot.begin : slot.end].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        return flat

    def _gradient_dtype(self, layout: BucketLayout) -> torch.dtype:
        return self._options.gradient_dtype or self.parameters[layout.slots[0].index].dtype

    def _bucket(self, layout: BucketLayout, flat: Tensor) -> Bucket:
        dtype, ranks = self._gradient_dtype(layout), self._axes.data.size
        if self._sharded and self._options.stage == 2:
            total = torch.zeros(layout.shard_length, dtype=accumulation_dtype(dtype), device=flat.device)
            return Bucket(layout, total, None)
        local = torch.zeros(layout.length, dtype=dtype, device=flat.device)
        mine = local[self._owned(layout, self._axes.data.rank)]
        exact = ranks == 1 or accumulation_dtype(dtype) == dtype
        return Bucket(layout, mine if exact else mine.to(accumulation_dtype(dtype)), local)

    def _owned(self, layout: BucketLayout, rank: int) -> slice:
        """What of a bucket a rank of the data axis updates."""
        return layout.shard(rank) if self._sharded else slice(0, layout.length)

    def _section(self, bucket: Bucket, flat: Tensor) -> Section:
        layout = bucket.layout
        owned = self._owned(layout, self._axes.data.rank)
        parts = []
        for slot in layout.slots:
            begin, end = max(slot.begin, owned.start), min(slot.end, owned.stop)
            if begin < end:
                parts.append(Part(slot.index, begin - owned.start, end - begin, begin - slot.begin))
        return Section.start(
            flat[owned],
            bucket.total,
            layout.pieces(owned),
            parts,
            moment_dtype=self._options.moment_dtype,
            amsgrad=self._items[layout.slots[0].index].amsgrad,
            master=self._options.master,
        )

    def memory(self) -> dict[str, int]:
        """See `ParameterStore`; padding included."""
        kept = self.tensors()["gradients"]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        return {
            "parameters": sum(flat.nbytes for flat in self._flats),
            "gradients": sum(storages.values()),
            "states": sum(section.state_bytes for section in self.sections),
            "transfers": self.gradients.transfer_bytes,
        }

    def tensors(self) -> dict[str, list[Tensor]]:
        """See `ParameterStore`."""
        return {
            "gradients": self.gradients.kept,
            "states": [x for section in self.sections for x in section.state_tensors],
        }

    def statistics(self) -> Statistics:
        """Return what sums up the gradients of all sections."""
        ranks, device = self._axes.data.size if self._sharded else 1, self.parameters[0].device
        lengths = [
            [len(layout.pieces(self._owned(layout, rank))) for rank in range(ranks)]
            for layout in self.layouts
        ]
        counts = [sum(of_rank) for of_rank in zip(*lengths, strict=True)] or [0] * ranks
        return Statistics(
            self.sections,
            counted_in_norm(self._items, self._axes.tp.rank),
            self._axes,
            counts,
            _by_bucket(lengths, counts, device),
            self._options.impl,
        )

    # ---------------------------------------------------------------- around a step

    def require_in_place(self) -> None:
        """Raise UsageError for parameters that are no longer where they were put."""
        for index, parameter in enumerate(self.parameters):
            if index in self._addresses:
                if parameter.data_ptr() != self._addresses[index]:
                    raise UsageError(
                        f"parameter {index} {list(parameter.shape)} was moved (by .to(), or by "
                        "assigning .data) after the optimizer had been made: make the optimizer after that"
                    )
            elif parameter.grad is not None:
                raise UsageError(
                    f"parameter {index} {list(parameter.shape)} has a gradient, but required none when the "
                    "optimizer was made"
                )

    def follow_writes(self) -> None:
        """See `ParameterStore`. The step writes to the flat buffers: it does not count here."""
        follow_writes(
            self.sections,
            lambda index: self.parameters[index]._version != self._versions[index],
            stochastic=self._options.stochastic,
        )
        self._versions = [parameter._version for parameter in self.parameters]

    def publish(self, *, overlap: bool) -> None:
        """Let all ranks have the parameters that this one has updated, by the end of `wait` if `overlap`.

        The buckets that forward uses first go first.
        """
        if not self._sharded:
            return
        for number in reversed(range(len(self._flats))):
            self._gathers[number] = ShardGather(self._flats[number], self._axes.data)
        if not overlap:
            self.wait()

    @property
    def gathering(self) -> bool:
        """Whether buckets are under way."""
        return bool(self._gathers)

    def wait(self, numbers: Sequence[int] | None = None) -> None:
        """Wait until buckets (all if None) are whole."""
        for number in list(self._gathers) if numbers is None else numbers:
            gather = self._gathers.pop(number, None)
            if gather is not None:
                gather.finish()

    def wait_in(self, module: nn.Module) -> None:
        """See `ParameterStore`."""
        if not self._sharded:
            return
        bucket_of = {
            id(self.parameters[slot.index]): number
            for number, layout in enumerate(self.layouts)
            for slot in layout.slots
        }
        _hook(module, weakref.ref(self), bucket_of)

    # ---------------------------------------------------------------- whole tensors

    def whole(self, read: Callable[[Section], Tensor | None]) -> Iterator[tuple[int, Tensor]]:
        """Yield each parameter's part of something that ranks own in shards, gathered bucket by bucket.

        read: returns what this rank owns of a bucket, or None for buckets that have no such thing. Yields the
        parameter's index and its elements, flat.
        """
        for layout, section in zip(self.layouts, self.sections, strict=True):
            buffer = read(section)
            if buffer is None:
                continue
            if self._sharded:
                owned, buffer = buffer, buffer.new_empty(layout.length)
                buffer[self._owned(layout, self._axes.data.rank)] = owned
                ShardGather(buffer, self._axes.data).finish()
            for slot in layout.slots:
                yield slot.index, buffer[slot.begin : slot.end]


class _StoreHook:
    """A hook of modules. It outlives its store, which does not live on in it; copied or saved it is none."""

    def __init__(self, store: weakref.ref[FlatParameters]) -> None:
        self._store = store

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_hook, ()


class _BeforeForward(_StoreHook):
    """Lets a module wait, before its forward, for its own parameters and for those it may read of others.

    Those are of submodules that have never been called: attention may read its output layer's weight.
    """

    def __init__(
        self, store: weakref.ref[FlatParameters], own: set[int], children: Sequence[_BeforeForward]
    ) -> None:
        super().__init__(store)
        self._own, self._children, self._called = own, children, False

    def __call__(self, *_: object) -> None:
        self._called = True
        store = self._store()
        if store is not None and store.gathering:
            store.wait(sorted(self._read()))

    def _read(self) -> set[int]:
        return self._own.union(*(child._read() for child in self._children if not child._called))


class _BeforeStateDict(_StoreHook):
    """Lets a module wait for all parameters before they are saved or loaded."""

    def __call__(self, *_: object) -> None:
        store = self._store()
        if store is not None:
            store.wait()


def _no_hook() -> Callable[..., None]:
    """Return what becomes of a hook that is copied or saved with its module."""
    return _nothing


def _nothing(*_: object) -> None:
    """Do nothing. By name, so that a copy can be saved in its turn."""


def _hook(module: nn.Module, store: weakref.ref[FlatParameters], bucket_of: dict[int, int]) -> _BeforeForward:
    """Register the hooks of a module and of all in it."""
    children = [_hook(child, store, bucket_of) for child in module.children()]
    own = {bucket_of[id(p)] for p in module.parameters(recurse=False) if id(p) in bucket_of}
    before = _BeforeForward(store, own, children)
    module.register_forward_pre_hook(before)
    module.register_state_dict_pre_hook(_BeforeStateDict(store))
    module.register_load_state_dict_pre_hook(_BeforeStateDict(store))
    return before


def counted_in_norm(items: Sequence[Item], tp_rank: int) -> Tensor:
    """Return for each parameter 1 if it counts in the norm, 0 if another tp rank's does; float64."""
    counted = [item.placement.counts_in_norm(tp_rank) for item in items]
    return torch.tensor(counted, dtype=torch.float64, device=items[0].parameter.device)


def draw_place(placement: ParameterPlacement, rank: int) -> tuple[int, int, int]:
    """Return inner, whole inner and first of `paracore.reference_adamw.Draw` for what `rank` holds."""
    region = placement.region(rank)
    dim = placement.layout.dim if isinstance(placement.layout, Shard) else 0
    behind = math.prod(placement.full_shape[dim + 1 :])
    if not region:
        return 1, 1, 0
    return max(1, len(region[dim]) * behind), placement.full_shape[dim] * behind, region[dim].start * behind


def _by_bucket(
    lengths: Sequence[Sequence[int]], counts: Sequence[int], device: torch.device
) -> Tensor | None:
    """Return where pieces, gathered rank by rank, lie in the order of buckets; lengths[bucket][rank]."""
    if len(counts) == 1:
        return None
    begins = [sum(counts[:rank]) for rank in range(len(counts))]
    order: list[int] = []
    for of_bucket in lengths:
        for rank, length in enumerate(of_bucket):
            order.extend(range(begins[rank], begins[rank] + length))
            begins[rank] += length
    return torch.tensor(order, dtype=torch.int64, device=device)
