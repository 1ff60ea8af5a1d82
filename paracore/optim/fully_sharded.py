"""The parameters of stage 3: FSDP2 shards them and their gradients; AdamW updates the local shards."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from paracore.errors import UsageError
from paracore.optim.flat import cut_pieces
from paracore.optim.flat_parameters import Item, counted_in_norm
from paracore.optim.options import Options
from paracore.optim.section import Part, Section
from paracore.optim.statistics import Statistics
from paracore.optim.store import follow_writes
from paracore.parallel.collectives import gather_list
from paracore.parallel.mesh import MeshAxis, ShardingAxes
from paracore.parallel.placement import shard_range


def shard_parameters(model: nn.Module, data: MeshAxis, *, forward_methods: Sequence[str] = ()) -> None:
    """Shard a model's parameters over `data` with torch's FSDP2, for `AdamW(model, stage=3)`.

    Each element of a ModuleList is gathered as one, and what is left of the model as another. Gradients are
    summed, not averaged. forward_methods: what is called in place of the model's forward, such as
    `Decoder.loss`. A single rank has nothing to shard.
    """
    if data.size == 1:
        return
    device = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(data.connection(), device)
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other factor
    for name in forward_methods:
        register_fsdp_forward_method(model, name)


class FullySharded:
    """`items` as FSDP2 has sharded them over the data axis; each parameter's shard is a section."""

    zeroes_gradients = False

    def __init__(
        self, module: nn.Module, items: Sequence[Item], axes: ShardingAxes, options: Options
    ) -> None:
        self._items, self._axes, self._options = items, axes, options
        self.parameters = [item.parameter for item in items]
        for index, parameter in enumerate(self.parameters):
            if not isinstance(parameter, DTensor):
                raise UsageError(
                    f"stage=3: parameter {index} {list(parameter.shape)} is not sharded; call "
                    "paracore.optim.shard_parameters(model, data) before"
                )
        self._trainable = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        self.sections = [self._section(index) for index in self._trainable]
        self.gradients = _Gradients(module, self.parameters, self._trainable, self.sections)
        self._versions = self._read_versions()

    def memory(self) -> dict[str, int]:
        """See `ParameterStore`. Gradients are there from backward to the step."""
        shards = sum(section.parameter.nbytes for section in self.sections)
        return {
            "parameters": shards,
            "gradients": shards,
            "states": sum(section.state_bytes for section in self.sections),
            "transfers": 0,
        }

    def tensors(self) -> dict[str, list[Tensor]]:
        """See `ParameterStore`."""
        return {
            "gradients": [section.gradient for section in self.sections],
            "states": [x for section in self.sections for x in section.state_tensors],
        }

    def statistics(self) -> Statistics:
        """See `ParameterStore`."""
        counts = [
            sum(len(cut_pieces(0, self._length(index, rank))) for index in self._trainable)
            for rank in range(self._axes.data.size)
        ]
        counted = counted_in_norm(self._items, self._axes.tp.rank)
        return Statistics(self.sections, counted, self._axes, counts, None, self._options.impl)

    def require_in_place(self) -> None:
        """See `ParameterStore`."""
        for index, section in zip(self._trainable, self.sections, strict=True):
            if _local(self.parameters[index]).data_ptr() != section.parameter.data_ptr():
                raise UsageError(
                    f"parameter {index} {list(self.parameters[index].shape)} was moved after the optimizer "
                    "had been made: make the optimizer after that"
                )

    def follow_writes(self) -> None:
        """See `ParameterStore`."""
        versions = self._read_versions()
        follow_writes(
            self.sections,
            lambda index: versions[index] != self._versions[index],
            stochastic=self._options.stochastic,
        )

    def publish(self, *, overlap: bool) -> None:
        """FSDP gathers parameters where it needs them. What was written so far was written by the step."""
        self._versions = self._read_versions()

    def wait(self, numbers: Sequence[int] | None = None) -> None:
        """Nothing is under way."""

    def wait_in(self, module: nn.Module) -> None:
        """Nothing is under way."""

    def whole(self, read: Callable[[Section], Tensor | None]) -> Iterator[tuple[int, Tensor]]:
        """See `ParameterStore`."""
        data = self._axes.data
        for index, section in zip(self._trainable, self.sections, strict=True):
            held = read(section)
            if held is not None:
                lengths = [self._length(index, rank) for rank in range(data.size)]
                yield index, torch.cat(gather_list(held, data, lengths, 0))

    def _section(self, index: int) -> Section:
        local = _local(self.parameters[index])
        begin = self._inner(index) * self._rows(index, self._axes.data.rank).start
        part = [Part(index, 0, len(local), begin)] if len(local) else []
        return Section.start(
            local,
            torch.zeros_like(local),
            [(*piece, index) for piece in cut_pieces(0, len(local))],
            part,
            moment_dtype=self._options.moment_dtype,
            amsgrad=self._items[index].amsgrad,
            master=self._options.master,
        )

    def _rows(self, index: int, rank: int) -> range:
        shape = self.parameters[index].shape
        return shard_range(shape[0] if shape else 1, self._axes.data.size, rank)

    def _inner(self, index: int) -> int:
        return math.prod(self.parameters[index].shape[1:])

    def _length(self, index: int, rank: int) -> int:
        return self._inner(index) * len(self._rows(index, rank))

    def _read_versions(self) -> dict[int, int]:
        return {index: _local(self.parameters[index])._version for index in self._trainable}


class _Gradients:
    """Gradients of sharded parameters: FSDP has summed them by the end of backward."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        trainable: Sequence[int],
        sections: Sequence[Section],
    ) -> None:
        self._module, self._parameters = module, parameters
        self._trainable, self._sections = trainable, sections
        self.present: set[int] = set()
        self._depth, self._held_back = 0, False

    def reduce(self) -> None:
        """See `GradientStore`."""
        for index, section in zip(self._trainable, self._sections, strict=True):
            gradient = self._parameters[index].grad
            if gradient is None:
                section.gradient = torch.zeros_like(section.parameter)
            else:
                section.gradient = _local(gradient)
                self.present.add(index)
        if self._held_back and not self.present:
            raise UsageError("stage=3: all backward passes ran within no_sync; the last must run outside")

    def clear(self, *, zeroed: bool) -> None:
        """See `GradientStore`. Nothing may stay that a later step could take for a gradient."""
        for index, section in zip(self._trainable, self._sections, strict=True):
            self._parameters[index].grad = None
            section.gradient = section.parameter.new_empty(0)
        self.present.clear()
        self._held_back = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `GradientStore`: FSDP keeps the whole gradients then."""
        self._set_sync(False)
        self._depth += 1
        self._held_back = True
        try:
            yield
        finally:
            self._depth -= 1
            self._set_sync(self._depth == 0)

    def _set_sync(self, on: bool) -> None:
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(on, recurse=False)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, flat."""
    local: Tensor = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.view(-1)
