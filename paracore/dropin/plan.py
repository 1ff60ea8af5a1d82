"""Plans: which style the modules of a model get, by patterns of their names; and carrying them out.

    plan = {
        "embed": "embedding",
        "layers.*.attention.[qkv]": "column",
        "layers.*.attention.out": "row",
        "layers.*.mlp.up": ColumnParallel(),
        "**.q_norm": "replicated_partial",
    }

A pattern matches whole names of modules. `*` and `?` stand for characters of one component, `[...]` for one
of several; `**` crosses dots, and `**.` may stand for nothing. The root is "".
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from paracore.checkpoint import gather_copies
from paracore.dropin.report import Changes, Replaced
from paracore.dropin.styles import (
    ColumnParallel,
    Replicated,
    RowParallel,
    Style,
    VocabularyEmbedding,
    VocabularyHead,
    own_placements,
)
from paracore.errors import UsageError
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import ParameterPlacement

Plan: TypeAlias = Mapping[str, Style | str]

SHORT: dict[str, Style] = {
    "column": ColumnParallel(),
    "column_gather": ColumnParallel(gather_output=True),
    "row": RowParallel(),
    "row_scatter_input": RowParallel(input_is_parallel=False),
    "embedding": VocabularyEmbedding(),
    "head": VocabularyHead(),
    "replicated": Replicated(),
    "replicated_partial": Replicated(partial_gradient=True),
}


def resolve(model: nn.Module, plan: Plan) -> dict[str, Style]:
    """Return the style of each module that the plan matches, by name, in the order of the model's modules.

    Raises UsageError, with all that is wrong, for what is no style, for entries that match no module, and
    for modules to which two entries give different styles.
    """
    return match(model, plan, SHORT, Style, "ColumnParallel()")


Meaning = TypeVar("Meaning")


def match(
    model: nn.Module,
    plan: Mapping[str, Meaning | str],
    short: Mapping[str, Meaning],
    kind: type[Any],
    example: str,
) -> dict[str, Meaning]:
    """Return what a plan means for each module that it matches, by name; see `resolve`.

    short: what strings stand for. kind: the class of all else that may stand there, such as `example`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    wrong: list[str] = []
    found: dict[str, tuple[str, Meaning]] = {}
    for pattern, given in plan.items():
        style = given if isinstance(given, kind) else short.get(given) if isinstance(given, str) else None
        if style is None:
            wrong.append(
                f"{pattern!r}: {given!r} is no style; must be one of {', '.join(short)}, or a "
                f"{kind.__name__} such as {example}"
            )
            continue
        expression = _expression(pattern)
        matched = [name for name in modules if expression.fullmatch(name) and (name or not pattern)]
        if not matched:
            wrong.append(f"{pattern!r} matches no module{_near(pattern, list(modules))}")
        for name in matched:
            other, before = found.setdefault(name, (pattern, style))
            if before != style:
                wrong.append(f"{name}: {other!r} gives it {before}, {pattern!r} {style}")
    if wrong:
        raise UsageError("plan: " + "; ".join(wrong))
    return {name: found[name][1] for name in modules if name in found}


def _expression(pattern: str) -> re.Pattern[str]:
    parts: list[str] = []
    for token in re.findall(r"\*\*\.|\*\*|\*|\?|\[[^\]]+\]|.", pattern, re.DOTALL):
        at_start = not parts or parts[-1] == r"\."
        match token:
            case "**.":
                parts.append(r"(?:.*\.)?" if at_start else r".*\.")
            case "**":
                parts.append(".*")
            case "*":
                parts.append(r"[^.]*")
            case "?":
                parts.append(r"[^.]")
            case _ if len(token) > 1:
                parts.append("[" + re.escape(token[1:-1]).replace(r"\-", "-").replace("!", "^", 1) + "]")
            case _:
                parts.append(re.escape(token))
    return re.compile("".join(parts), re.DOTALL)


def _near(pattern: str, names: list[str]) -> str:
    # Numbers of layers aside, a name is one of few.
    kinds = {re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name): name for name in reversed(names) if name}
    near = difflib.get_close_matches(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", pattern), kinds, 3, 0.5)
    return f" (near: {', '.join(near)})" if near else ""


def check(model: nn.Module, styles: Mapping[str, Style], tp: MeshAxis) -> dict[str, ParameterPlacement]:
    """Return the placement that every parameter will have, by name, tied parameters under each name.

    Raises UsageError unless every style serves its module, and tied parameters will lie alike. Changes
    nothing and does not communicate: tp may be an axis without a process group.
    """
    declared: dict[str, Mapping[str, ParameterPlacement]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, style in styles.items():
        if not name and not isinstance(style, Replicated):
            raise UsageError(f"plan: {style} for the model itself, which nothing can take the place of")
        declared[name] = style.placements(modules[name], name or "(model)", tp)
    return _placements(modules, declared, tp)


def _placements(
    modules: Mapping[str, nn.Module], declared: Mapping[str, Mapping[str, ParameterPlacement]], tp: MeshAxis
) -> dict[str, ParameterPlacement]:
    found: dict[str, ParameterPlacement] = {}
    first: dict[nn.Parameter, tuple[str, ParameterPlacement]] = {}
    for name, module in modules.items():
        own = declared.get(name, getattr(module, "placements", {}))
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            placement = own.get(local) or ParameterPlacement.replicate(parameter.shape, tp.size)
            full_name = f"{name}.{local}" if name else local
            other, before = first.setdefault(parameter, (full_name, placement))
            if before != placement:
                raise UsageError(
                    f"{other} and {full_name} are one parameter, but would lie over tp as {before} and as "
                    f"{placement}: give both modules styles that cut it alike"
                )
            found[full_name] = placement
    return found


def apply_styles(
    model: nn.Module, styles: Mapping[str, Style], tp: MeshAxis, changes: Changes
) -> list[Replaced]:
    """Put in the place of each module what its style says, and enter that in `changes`.

    styles: by names of modules. Every rank of tp must hold the same weights. Of what is cut each rank keeps
    its part; the Parameters that the model had are emptied, so make optimizers afterwards. Undoing gathers
    the parts into them again, in whatever dtype and device they have come to be, over tp: every rank must.
    Raises UsageError as `check` does, the model untouched.
    """
    check(model, styles, tp)
    report: list[Replaced] = []
    held: dict[nn.Parameter, nn.Parameter] = {}
    restored: dict[nn.Parameter, nn.Parameter] = {}
    made: dict[nn.Module, nn.Module] = {}  # a module in two places stays one module
    for name, style in styles.items():
        module = model.get_submodule(name)
        if isinstance(style, Replicated):
            changes.set_attribute(module, "placements", style.placements(module, name, tp))
            continue
        if module not in made:
            made[module] = style.apply(module, name, tp, held)
            changes.on_undo(functools.partial(_restore, module, made[module], tp, restored))
            for parameter in module.parameters(recurse=False):
                if parameter in held:
                    parameter.data = parameter.data.new_empty(0)
        changes.replace_module(model, name, made[module])
        by = f"{type(made[module]).__name__} over {tp.size} ranks of tp"
        report.append(Replaced(name, type(module).__name__, by))
    return report


@torch.no_grad()
def _restore(
    module: nn.Module, made: nn.Module, tp: MeshAxis, restored: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Give `module` the weights of `made`, which has been in its place."""
    for local, placement in own_placements(made).items():
        current, whole = made.get_parameter(local), module.get_parameter(local)
        if placement.num_shards == 1:
            module.register_parameter(local, current)
            continue
        if whole not in restored:
            restored[whole] = _made_whole(whole, current, placement, tp)
        module.register_parameter(local, restored[whole])
    module.train(made.training)


def _made_whole(
    whole: nn.Parameter, current: nn.Parameter, placement: ParameterPlacement, tp: MeshAxis
) -> nn.Parameter:
    """Return `whole` with the values that the ranks hold in `current`; another where it cannot take them."""
    if current.is_meta:
        full = current.new_empty(placement.full_shape)
    else:
        full = gather_copies({"": current.detach()}, {"": placement}, tp)[""][0]
    if torch._has_compatible_shallow_copy_type(whole, full):
        whole.data = full
        whole.requires_grad_(current.requires_grad)
        return whole
    return nn.Parameter(full, requires_grad=current.requires_grad)  # it was on the meta device
