"""What takes over norms and MLPs, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from paracore.dropin.report import Changes, Derived
from paracore.errors import UsageError
from paracore.nn.linear import ColumnParallelLinear, column_parallel
from paracore.ops.linear import linear
from paracore.ops.rms_norm import rms_norm
from paracore.ops.swiglu import swiglu
from paracore.reference import accumulation_dtype

_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class RMSNorm(Derived):
    """The RMSNorm of Llama and its relatives, and torch's; with a residual to add before if there is one."""

    if TYPE_CHECKING:
        weight: nn.Parameter

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """hidden_states: [..., H]. With a residual returns the norm of their sum, and the sum."""
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        if eps is None:  # torch's, of the dtype that it computes in
            eps = torch.finfo(accumulation_dtype(hidden_states.dtype)).eps
        if residual is None:
            return rms_norm(hidden_states, self.weight, eps)
        return rms_norm(hidden_states, self.weight, eps, residual=residual)


def project(x: Tensor, *layers: nn.Module, tokens: int | None) -> list[Tensor]:
    """Feed one input to several linear layers; over tp it is gathered, and its gradient reduced, once."""
    cut = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
    if len(cut) == len(layers) and not any(map(is_watched, layers)):
        return column_parallel(x, *cut, length=tokens)
    return [layer(x, tokens) if isinstance(layer, ColumnParallelLinear) else layer(x) for layer in layers]


def is_watched(module: nn.Module) -> bool:
    """Whether somebody relies on the module being called: its hooks, or what was put over its forward."""
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in _CALL_HOOKS)


class MLP(Derived):
    """down(silu(gate(x)) * up(x))."""

    layer_names = ("gate_proj", "up_proj", "down_proj")

    def forward(self, x: Tensor, call: Any = None) -> Tensor:
        """x: [..., H]. call: in an adopted decoder, its `paracore.hf.layers.Call`."""
        gate_proj, up_proj, down_proj = (getattr(self, name) for name in self.layer_names)
        if call is None:
            gate, up = gate_proj(x), up_proj(x)
        else:
            gate, up = call.run(project, x, gate_proj, up_proj, tokens=call.tokens)
        y: Tensor = down_proj(swiglu(gate, up))
        return y


class Linear(Derived):
    """x W^T + b, by way of float32 where a CPU has no units for 16-bit numbers."""

    if TYPE_CHECKING:
        weight: nn.Parameter
        bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        return linear(x, self.weight, self.bias)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is torch's RMSNorm over the last dim, with a weight, as torch computes it."""
    return type(module) is nn.RMSNorm and len(module.normalized_shape) == 1 and module.weight is not None


# ---------------------------------------------------------------- modules that somebody says are such


@dataclass(frozen=True)
class Claim:
    """That a module computes what a mixin does; attributes: what the mixin must be told of it."""

    mixin: type[Derived]
    by: str
    attributes: tuple[tuple[str, object], ...] = ()

    def features(self, module: nn.Module) -> int | None:
        """Return the size of the last dim that the module takes; None if it is not what is claimed."""
        if self.mixin is RMSNorm:
            weight = getattr(module, "weight", None)
            known = isinstance(weight, nn.Parameter) and weight.dim() == 1
            return weight.numel() if known and weight is not None else None
        names = dict(self.attributes).get("layer_names", MLP.layer_names)
        layers = [getattr(module, name, None) for name in cast(tuple[str, ...], names)]
        first = getattr(layers[0], "in_features", None)
        return first if all(isinstance(layer, nn.Module) for layer in layers) else None

    def adopt(self, module: nn.Module, changes: Changes) -> None:
        """Make the module what is claimed."""
        for name, value in self.attributes:
            changes.set_attribute(module, name, value)
        changes.adopt(module, self.mixin)


def swiglu_of(gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Claim:
    """Return the claim that a module is down(silu(gate(x)) * up(x)), by the names of its three layers."""
    return Claim(MLP, "SwiGLU", (("layer_names", (gate, up, down)),))


CLAIMS = {"rms_norm": Claim(RMSNorm, "RMSNorm"), "swiglu": swiglu_of()}
"""What strings stand for in the plan of `fuse`."""


def require_true(claim: Claim, module: nn.Module, name: str) -> None:
    """Raise UsageError unless a module computes what is claimed, of four random tokens; changes nothing.

    On the meta device, where nothing is computed, only its parts are looked at.
    """
    own, features = f"{name}: {type(module).__name__}", claim.features(module)
    if features is None or isinstance(module, Derived) or "forward" in vars(module):
        raise UsageError(f"{own} has not the parts of {claim.by}, or somebody has changed it")
    weight = next(module.parameters())
    if weight.is_meta:
        return
    tokens = torch.randn(4, features, generator=torch.Generator().manual_seed(0)).to(weight)
    training = {part: part.training for part in module.modules()}
    changes = Changes()
    try:
        with torch.no_grad():
            expected = module.eval()(tokens)
            claim.adopt(module, changes)
            found = module(tokens)
    finally:
        changes.undo()
        for part, mode in training.items():
            part.training = mode
    tolerance = 8 * torch.finfo(weight.dtype).eps
    if found.shape != expected.shape or float((found - expected).norm()) > tolerance * float(expected.norm()):
        raise UsageError(f"{own} computes something else than {claim.by}")
