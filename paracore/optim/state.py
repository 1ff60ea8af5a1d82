"""The optimizer's state in the form of torch.optim.AdamW, and back, for any number of ranks."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.ops.implementations import dtype_name
from paracore.optim.section import Part, Section
from paracore.optim.store import ParameterStore

_MASTER = "master"
KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", _MASTER)
_NOT_SAVED = ("params", "param_names")
_OF_SCHEDULERS = ("initial_lr",)  # which one that continues looks for in the groups

Groups = Sequence[dict[str, Any]]


@torch.no_grad()
def state_of(
    store: ParameterStore, steps: Tensor, names: Sequence[str], groups: Groups, *, keep: bool
) -> dict[str, Any]:
    """Return the state of all parameters that have taken a step, on the CPU; every rank must call it.

    keep: whether this rank wants it; otherwise it only takes part.
    """
    counts = steps.tolist()
    state: dict[str, dict[str, Tensor]] = {
        name: {"step": torch.tensor(float(count))} for name, count in zip(names, counts, strict=True) if count
    }
    for kind in KINDS:
        for index, whole in store.whole(functools.partial(_read, kind)):
            if counts[index] and keep:
                state[names[index]][kind] = whole.to("cpu", copy=True).view(store.parameters[index].shape)
    return {"state": state, "param_groups": _save_groups(groups, names)}


def _read(kind: str, section: Section) -> Tensor | None:
    if kind == _MASTER:
        return section.read_master(slice(0, section.parameter.numel()))
    return section.states().get(kind)


def _save_groups(groups: Groups, names: Sequence[str]) -> list[dict[str, Any]]:
    remaining = iter(names)
    return [
        {key: value for key, value in group.items() if key not in _NOT_SAVED}
        | {"params": list(itertools.islice(remaining, len(group["params"])))}
        for group in groups
    ]


@torch.no_grad()
def load_states(
    saved: Mapping[str, Any], store: ParameterStore, steps: Tensor, names: Sequence[str], groups: Groups
) -> None:
    """Take over `saved`; nothing is changed where it does not fit."""
    states = _states_of_parameters(saved, names, groups)
    for index, state in enumerate(states):
        _require_fitting(names[index], state, store.parameters[index])
    parts = [(section, part) for section in store.sections for part in section.parts]
    for section, part in parts:
        _require_dtypes(names[part.index], states[part.index], section)
    for section, part in parts:
        _load_part(section, part, states[part.index])
    counts = [int(state["step"]) if state else 0 for state in states]
    steps.copy_(torch.tensor(counts, dtype=torch.int64))
    for group, old in zip(groups, saved["param_groups"], strict=True):
        keys = {*group, *_OF_SCHEDULERS}.difference(_NOT_SAVED)
        # Copied: a learning rate may be a tensor, which its owner goes on changing.
        group.update(copy.deepcopy({key: value for key, value in old.items() if key in keys}))


def _states_of_parameters(
    saved: Mapping[str, Any], names: Sequence[str], groups: Groups
) -> list[Mapping[str, Tensor]]:
    """Return the saved state of each parameter; empty for those without.

    By name where it was saved by names; torch.optim.AdamW saves by the order in the groups.
    """
    lengths = [len(group["params"]) for group in saved["param_groups"]]
    expected = [len(group["params"]) for group in groups]
    if lengths != expected:
        raise UsageError(f"the state has groups of {lengths} parameters, must have groups of {expected}")
    for number, (group, old) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        if old.get("amsgrad", group["amsgrad"]) != group["amsgrad"]:
            raise UsageError(
                f"group {number} was saved with amsgrad={old['amsgrad']}: the optimizer was made with "
                f"amsgrad={group['amsgrad']}, which decides what it keeps"
            )
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        if set(keys) != set(names):
            missing, unknown = sorted({*names} - {*keys}), sorted({*keys} - {*names})
            raise UsageError(f"the state lacks {missing} and has unknown {unknown}")
        keys = list(names)
    return [saved["state"].get(key, {}) for key in keys]


def _require_fitting(name: str, state: Mapping[str, Tensor], parameter: Tensor) -> None:
    for kind in KINDS:
        if kind in state and state[kind].shape != parameter.shape:
            raise UsageError(
                f"{kind} of {name} is {list(state[kind].shape)}, must be {list(parameter.shape)} like the "
                "parameter"
            )


def _require_dtypes(name: str, state: Mapping[str, Tensor], section: Section) -> None:
    """Raise UsageError where a state would be narrowed, or is missing."""
    for kind, own in section.states().items():
        if not state:
            continue
        if kind not in state:
            raise UsageError(f"the state of {name} lacks {kind}: it was saved without amsgrad")
        if torch.promote_types(state[kind].dtype, own.dtype) != own.dtype:
            raise UsageError(
                f"{kind} of {name} is {dtype_name(state[kind].dtype)}: {dtype_name(own.dtype)} would lose "
                f"precision; use moment_dtype=torch.{dtype_name(state[kind].dtype)}"
            )


def _load_part(section: Section, part: Part, state: Mapping[str, Tensor]) -> None:
    held = slice(part.first, part.first + part.length)
    for kind, own in section.states().items():
        if state:
            own[part.place] = state[kind].flatten()[held].to(own.device)
        else:
            own[part.place] = 0
    if section.master is not None and _MASTER in state:
        section.write_master(part.place, state[_MASTER].flatten()[held].to(section.master.device))
