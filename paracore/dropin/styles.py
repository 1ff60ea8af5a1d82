"""What may take the place of a leaf module over the tp axis, holding this rank's part of its weights.

| style               | for          | in its place           | weight over T ranks            |
|---------------------|--------------|------------------------|--------------------------------|
| ColumnParallel      | nn.Linear    | nn.ColumnParallelLinear| Shard(0), the bias likewise    |
| RowParallel         | nn.Linear    | nn.RowParallelLinear   | Shard(1), the bias replicated  |
| VocabularyEmbedding | nn.Embedding | nn.Embedding           | Shard(0), or replicated        |
| VocabularyHead      | nn.Linear    | nn.LMHead              | Shard(0), or replicated        |
| Replicated          | any          | itself                 | replicated                     |

The classes in the third column are those of `paracore.nn`, which say what goes in, what comes out and what
travels. A style serves exactly the class in the second: what a subclass computes (LoRA, quantised weights)
nobody here knows. What is not cut keeps its Parameter.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from paracore import nn as layers
from paracore.dropin.report import Derived
from paracore.errors import UsageError
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.overlap import Overlap
from paracore.parallel.placement import ParameterPlacement

_META = torch.device("meta")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Style(abc.ABC):
    """How one module lies over tp. Styles are values: equal ones do the same."""

    @abc.abstractmethod
    def placements(self, module: nn.Module, name: str, tp: MeshAxis) -> dict[str, ParameterPlacement]:
        """Return how the module's own parameters will lie, by local name; allocates nothing.

        name: of the module, for messages. Raises UsageError for a module that the style does not serve.
        """

    @abc.abstractmethod
    def apply(
        self,
        module: nn.Module,
        name: str,
        tp: MeshAxis,
        held: dict[nn.Parameter, nn.Parameter] | None = None,
    ) -> nn.Module:
        """Return what takes the module's place, of its dtype, device and requires_grad; meta stays meta.

        Every rank of tp must hold the same weights. The module stays as it is. held: from Parameters that are
        cut to what this rank holds of them; what is found there is used again, so that ties stay, and what
        is made is entered. Raises UsageError as `placements` does.
        """


class _Replacing(Style):
    """A style that puts another module in a leaf's place; its fields are options of that module's class."""

    def placements(self, module: nn.Module, name: str, tp: MeshAxis) -> dict[str, ParameterPlacement]:
        """See `Style`."""
        return own_placements(self._checked(module, name, tp))

    def apply(
        self,
        module: nn.Module,
        name: str,
        tp: MeshAxis,
        held: dict[nn.Parameter, nn.Parameter] | None = None,
    ) -> nn.Module:
        """See `Style`."""
        held = {} if held is None else held
        made = self._checked(module, name, tp)
        for local, placement in own_placements(made).items():
            whole = module.get_parameter(local)
            if placement.num_shards > 1 and whole not in held:
                part = placement.take(whole.detach(), tp.rank)
                held[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
            made.register_parameter(local, held[whole] if placement.num_shards > 1 else whole)
        return made.train(module.training)

    def _checked(self, module: nn.Module, name: str, tp: MeshAxis) -> nn.Module:
        try:
            made = self.build(module, name, tp)
        except UsageError as error:
            known = str(error).startswith(f"{name}: ")
            raise UsageError(str(error) if known else f"{name}: {error}") from None
        for local, placement in own_placements(made).items():
            if placement.num_shards > 1:
                _require_bare(module.get_parameter(local), f"{name}.{local}")
        return made

    @abc.abstractmethod
    def build(self, module: nn.Module, name: str, tp: MeshAxis) -> nn.Module:
        """Return the new module on the meta device; raise UsageError for one that it cannot stand for."""


@dataclass(frozen=True)
class ColumnParallel(_Replacing):
    """nn.Linear with its output features cut: see `paracore.nn.ColumnParallelLinear` for the options."""

    gather_output: bool = False
    replicas: int = 1
    sequence_parallel: bool = False
    overlap: Overlap | None = None

    def build(self, module: nn.Module, name: str, tp: MeshAxis) -> nn.Module:
        """See `_Replacing`."""
        linear = _linear(module, name, self)
        return layers.ColumnParallelLinear(
            linear.in_features,
            linear.out_features,
            tp,
            bias=linear.bias is not None,
            device=_META,
            dtype=linear.weight.dtype,
            **vars(self),
        )


@dataclass(frozen=True)
class RowParallel(_Replacing):
    """nn.Linear with its input features cut: see `paracore.nn.RowParallelLinear` for the options."""

    input_is_parallel: bool = True
    sequence_parallel: bool = False
    overlap: Overlap | None = None

    def build(self, module: nn.Module, name: str, tp: MeshAxis) -> nn.Module:
        """See `_Replacing`."""
        linear = _linear(module, name, self)
        return layers.RowParallelLinear(
            linear.in_features,
            linear.out_features,
            tp,
            bias=linear.bias is not None,
            device=_META,
            dtype=linear.weight.dtype,
            **vars(self),
        )


@dataclass(frozen=True)
class VocabularyEmbedding(_Replacing):
    """nn.Embedding over any number of ranks: see the table of `paracore.nn.vocabulary`.

    Whoever multiplies by its weight instead of calling it meets this rank's rows alone.
    """

    vocab_parallel: bool = True
    sequence_parallel: bool = False

    def build(self, module: nn.Module, name: str, tp: MeshAxis) -> nn.Module:
        """See `_Replacing`."""
        _require_exactly(nn.Embedding, module, name, self)
        table = cast(nn.Embedding, module)
        for option, off in (("max_norm", None), ("sparse", False), ("scale_grad_by_freq", False)):
            if getattr(table, option) != off:
                raise UsageError(
                    f"{name}: Embedding with {option}={getattr(table, option)}, must be {off}: "
                    "paracore.nn.Embedding has no such option"
                )
        return layers.Embedding(
            table.num_embeddings,
            table.embedding_dim,
            tp,
            padding_idx=table.padding_idx,
            device=_META,
            dtype=table.weight.dtype,
            **vars(self),
        )


@dataclass(frozen=True)
class VocabularyHead(_Replacing):
    """nn.Linear without bias as the LM head: see the table of `paracore.nn.vocabulary`."""

    vocab_parallel: bool = True
    sequence_parallel: bool = False

    def build(self, module: nn.Module, name: str, tp: MeshAxis) -> nn.Module:
        """See `_Replacing`."""
        linear = _linear(module, name, self)
        if "bias" in dict(linear.named_parameters()):
            raise UsageError(
                f"{name}: Linear with a bias cannot be an LM head; ColumnParallel(gather_output=True) has one"
            )
        return layers.LMHead(
            linear.out_features,
            linear.in_features,
            tp,
            device=_META,
            dtype=linear.weight.dtype,
            **vars(self),
        )


@dataclass(frozen=True)
class Replicated(Style):
    """A module left alone, of which every rank holds the same own parameters, not those of its children.

    partial_gradient: each rank computes other data with them (q/k norms: its own heads), so that gradients
    are summands. Otherwise they are the same on every rank; so are those of a module that no style names.
    """

    partial_gradient: bool = False

    def placements(self, module: nn.Module, name: str, tp: MeshAxis) -> dict[str, ParameterPlacement]:
        """See `Style`."""
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not own:
            raise UsageError(f"{name}: {type(module).__name__} has no parameters of its own to replicate")
        for local, parameter in own.items():
            _require_plain(parameter, f"{name}.{local}")
        return {
            local: ParameterPlacement.replicate(
                parameter.shape, tp.size, partial_gradient=self.partial_gradient
            )
            for local, parameter in own.items()
        }

    def apply(
        self,
        module: nn.Module,
        name: str,
        tp: MeshAxis,
        held: dict[nn.Parameter, nn.Parameter] | None = None,
    ) -> nn.Module:
        """See `Style`: sets the module's attribute `placements`, and returns it."""
        module.placements = self.placements(module, name, tp)  # type: ignore[assignment]
        return module


def own_placements(module: nn.Module) -> dict[str, ParameterPlacement]:
    """Return the placements that a module of `paracore.nn` declares, of its own parameters by local name."""
    return cast(dict[str, ParameterPlacement], module.placements)


def _linear(module: nn.Module, name: str, style: Style) -> nn.Linear:
    _require_exactly(nn.Linear, module, name, style)
    return cast(nn.Linear, module)


def _require_exactly(expected: type[nn.Module], module: nn.Module, name: str, style: Style) -> None:
    """Raise UsageError for another class, a subclass too, and for what another module would not do."""
    own = type(module)
    if own is not expected:
        what = f"{own.__module__}.{own.__qualname__}"
        hint = "parallelize before adapters, quantisation or parametrisations come; of a block, name leaves"
        if own.__module__.startswith("paracore."):
            hint = "which has been parallelized already"
        elif isinstance(module, Derived):
            hint = "which paracore.fuse has taken over; undo that before"
        raise UsageError(
            f"{name}: {type(style).__name__} serves exactly torch.nn.{expected.__name__}; "
            f"this is {what}: {hint}"
        )
    for local, parameter in module.named_parameters(recurse=False):
        _require_plain(parameter, f"{name}.{local}")
    hooks = [attribute for attribute in _HOOKS if getattr(module, attribute, None)]
    if "forward" in vars(module):
        hooks.append("a forward of its own")
    if hooks:
        raise UsageError(
            f"{name}: {own.__name__} has {', '.join(hooks)}, which the module in its place would not run; "
            "remove them, and put them on that module (activation checkpointing, which makes such: enable it "
            "afterwards)"
        )


def _require_plain(parameter: nn.Parameter, name: str) -> None:
    if type(parameter) is not nn.Parameter:
        raise UsageError(
            f"{name}: a {type(parameter).__name__}, must be a torch.nn.Parameter: parallelize before FSDP, "
            "DTensor or quantisation take the weights"
        )


def _require_bare(parameter: nn.Parameter, name: str) -> None:
    """Raise UsageError for what a Parameter that is cut would lose."""
    if parameter.grad is not None:
        raise UsageError(f"{name}: has a gradient, which would be lost; zero_grad(set_to_none=True) before")
    if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UsageError(f"{name}: has gradient hooks, which its shard would not run; remove them before")
