"""Weights out of checkpoints onto the ranks of tp: each reads its own part of every tensor, one at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from paracore.errors import UsageError
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import ParameterPlacement

Source: TypeAlias = str | Path | Mapping[str, Tensor]
Recompute: TypeAlias = Callable[[nn.Module, str], Tensor | None]
"""Given a module and the name of a buffer of its own: the buffer's values, or None where it knows none."""

_SHOWN = 8  # names of one kind in a message
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Weights(Protocol):
    """Tensors by name, any part of which can be read alone."""

    def names(self) -> set[str]:
        """Return the names of all tensors."""

    def facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        """Return a tensor's shape, and its dtype, as text where torch has no such dtype; reads no values."""

    def read(self, name: str, region: Sequence[range]) -> Tensor:
        """Return a contiguous copy of a region of a tensor."""


def open_weights(source: Source) -> Weights:
    """Return what can be read of a checkpoint: its headers are read, no values.

    source: a folder with `*.safetensors`, one file or several with an index; such a file, or an index
    (`*.safetensors.index.json`); or whole tensors by name. Raises UsageError for anything else, and where
    files are missing.
    """
    return _Tensors(source) if isinstance(source, Mapping) else _Files(Path(source))


@torch.no_grad()
def load_shards(
    model: nn.Module,
    placements: Mapping[str, ParameterPlacement],
    source: Source | Weights,
    tp: MeshAxis,
    device: torch.device,
    recompute: Recompute | None = None,
) -> None:
    """Give every parameter and persistent buffer of `model`, cut over tp by `placements`, its values.

    source: the dense weights; see `open_weights`. No more than this rank's part of each tensor is read, one
    after the other. What is on the meta device is made on `device`, tied parameters once; the rest stays
    where it is. recompute: gives buffers that the checkpoint lacks. Raises UsageError, before anything is
    written, as `require_fitting` does. Does not communicate.
    """
    weights = open_weights(source) if isinstance(source, str | Path | Mapping) else source
    require_fitting(model, placements, weights, recompute)
    known = weights.names()
    for parameter, holders in _holders(model).items():
        first, *others = [name for name, _, _ in holders if name in known]
        region = placements[first].region(tp.rank)
        values = weights.read(first, region)
        for other in others:
            if not torch.equal(weights.read(other, region), values):
                raise UsageError(f"{first} and {other} are one parameter, but differ in the checkpoint")
        if not parameter.is_meta:
            parameter.copy_(values)
            continue
        made = nn.Parameter(values.to(device), requires_grad=parameter.requires_grad)
        for _, module, local in holders:
            module.register_parameter(local, made)
    for name, module, local in list(_buffers(model)):
        _fill_buffer(module, local, _buffer_values(name, module, local, weights, recompute), device)


def require_fitting(
    model: nn.Module,
    placements: Mapping[str, ParameterPlacement],
    weights: Weights,
    recompute: Recompute | None = None,
) -> None:
    """Raise UsageError, with all that does not fit, unless `weights` has what the model lacks and no more.

    The model may have been cut or not. Every parameter must be there, in the parameter's dtype, and whole;
    of tied ones one suffices. So must every persistent buffer, and every other one that is on the meta
    device, unless `recompute` gives it.
    """
    known, wrong = weights.names(), defaultdict[str, list[str]](list)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for parameter, holders in _holders(model).items():
        names = [name for name, _, _ in holders]
        if known.isdisjoint(names):
            wrong["lacks"].append(" or ".join(names))
        expected |= {name: (placements[name].full_shape, parameter.dtype) for name in names}
    for name, module, local in _buffers(model):
        buffer = module.get_buffer(local)
        persistent = local not in module._non_persistent_buffers_set
        if persistent:
            expected[name] = (tuple(buffer.shape), buffer.dtype)
        given = (persistent and name in known) or (not persistent and not buffer.is_meta)
        if not given and (recompute is None or recompute(module, local) is None):
            kind = "lacks" if persistent else "lacks, as nobody computes them here, the buffers"
            wrong[kind].append(name)
    for name in sorted(known):
        if name not in expected:
            wrong["has unknown"].append(name)
            continue
        (shape, dtype), (wanted_shape, wanted_dtype) = weights.facts(name), expected[name]
        if shape != wanted_shape:
            wrong["has other shapes"].append(f"{name} {list(shape)}, must be {list(wanted_shape)}")
        if dtype != wanted_dtype:
            wrong["has other dtypes (model.to(dtype) first)"].append(
                f"{name} {dtype}, must be {wanted_dtype}"
            )
    if wrong:
        listed = [f"{kind}: {_shortened(entries)}" for kind, entries in wrong.items()]
        raise UsageError("the checkpoint does not fit the model; it " + "; it ".join(listed))


def _shortened(entries: Sequence[str]) -> str:
    more = f", and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more


_Holder: TypeAlias = tuple[str, nn.Module, str]  # the full name, the module that owns it, the name in there


def _holders(model: nn.Module) -> dict[nn.Parameter, list[_Holder]]:
    found: dict[nn.Parameter, list[_Holder]] = defaultdict(list)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found[parameter].append((_joined(prefix, local), module, local))
    return found


def _buffers(model: nn.Module) -> Iterator[_Holder]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for local, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            yield _joined(prefix, local), module, local


def _joined(prefix: str, local: str) -> str:
    return f"{prefix}.{local}" if prefix else local


def _buffer_values(
    name: str, module: nn.Module, local: str, weights: Weights, recompute: Recompute | None
) -> Tensor | None:
    """Return the values for a buffer; None where it keeps its own."""
    persistent = local not in module._non_persistent_buffers_set
    if persistent and name in weights.names():
        return weights.read(name, [range(length) for length in module.get_buffer(local).shape])
    if not persistent and not module.get_buffer(local).is_meta:
        return None
    return None if recompute is None else recompute(module, local)


def _fill_buffer(module: nn.Module, local: str, values: Tensor | None, device: torch.device) -> None:
    buffer = module.get_buffer(local)
    if values is None:
        return
    if buffer.is_meta:
        module._buffers[local] = values.to(device=device, dtype=buffer.dtype)
    else:
        buffer.copy_(values)


class _Tensors:
    """Weights that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        """See `Weights`."""
        return set(self._tensors)

    def facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        """See `Weights`."""
        return tuple(self._tensors[name].shape), self._tensors[name].dtype

    def read(self, name: str, region: Sequence[range]) -> Tensor:
        """See `Weights`."""
        part = self._tensors[name].detach()[_slices(region)]
        return part.clone(memory_format=torch.contiguous_format)


class _Files:
    """Weights in files of safetensors."""

    def __init__(self, path: Path) -> None:
        try:
            import safetensors
        except ImportError as error:
            raise UsageError(
                f"weights={str(path)!r}: needs safetensors; pip install 'paracore[hf]'"
            ) from error
        files = _files_of(path)
        self._opened: dict[Path, Any] = {file: safetensors.safe_open(file, "pt") for file in set(files)}
        self._slices: dict[str, Any] = {}
        for opened in self._opened.values():
            self._slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118

    def names(self) -> set[str]:
        """See `Weights`."""
        return set(self._slices)

    def facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        """See `Weights`."""
        entry = self._slices[name]
        return tuple(entry.get_shape()), _DTYPES.get(entry.get_dtype(), entry.get_dtype())

    def read(self, name: str, region: Sequence[range]) -> Tensor:
        """See `Weights`."""
        if not all(region):  # safetensors has no slices without elements
            dtype = _DTYPES[self._slices[name].get_dtype()]
            return torch.empty([len(indices) for indices in region], dtype=dtype)
        part: Tensor = self._slices[name][_slices(region)]  # maybe a view of the file's memory
        return part.clone(memory_format=torch.contiguous_format)


def _slices(region: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(indices.start, indices.stop) for indices in region)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        files = [path / name for name in ("model.safetensors",) if (path / name).is_file()]
        candidates = indices or files or sorted(path.glob("*.safetensors"))
        if len(candidates) != 1:
            raise UsageError(
                f"weights={str(path)!r}: has {len(candidates)} of *.safetensors.index.json or *.safetensors, "
                "must have one; or name the file"
            )
        path = candidates[0]
    if not path.is_file():
        raise UsageError(f"weights={str(path)!r}: there is no such file or folder")
    if path.suffix == ".safetensors":
        return [path]
    if not path.name.endswith(".safetensors.index.json"):
        raise UsageError(
            f"weights={str(path)!r}: must be a folder, *.safetensors or *.safetensors.index.json, or tensors "
            "by name"
        )
    listed = {path.parent / name for name in json.loads(path.read_text())["weight_map"].values()}
    missing = sorted(str(file.name) for file in listed if not file.is_file())
    if missing:
        raise UsageError(f"weights={str(path)!r}: its files are missing: {', '.join(missing)}")
    return sorted(listed)
