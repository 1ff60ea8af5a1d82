"""`fuse`: our kernels for a model that exists already, on one device."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from paracore.dropin import leaves
from paracore.dropin.report import Changes, Derived, Left, Replaced, Report
from paracore.hf import families
from paracore.parallel.mesh import TrainingAxes

# What the names of classes end with for which we have kernels; where we do not know such a class we say so.
_SOUGHT = ("RMSNorm", "MLP", "Attention")


def fuse(model: nn.Module) -> Report:
    """Let our kernels serve an existing model, in place; on one device, without a mesh.

    In models of transformers' Llama, Qwen2, Qwen3 and Mistral: RMSNorm, with the residual addition before
    it, SwiGLU, rotary embedding, attention, and the LM head with its loss, whose logits then never exist as a
    whole. In any model: torch's RMSNorm. Parameters, their names and hooks stay. Only these instances change,
    no class does.

    In training with labels such a language model returns no logits, and it caches keys only where
    use_cache=True asks for it. Returns a `Report` of what was replaced, and what was left and why; its
    `undo()` takes everything back.
    """
    report = Report([], [], Changes())
    for name, base, family in list(families.base_models(model)):
        _adopt_base(report, name, base, family)
    for name, module in model.named_modules():
        _adopt_one(report, name, module)
    return report


def adopt(report: Report, name: str, module: nn.Module, mixin: type[Derived], by: str) -> None:
    """Adopt a module and report it."""
    report.replaced.append(Replaced(name, type(module).__name__, by))
    report.changes.adopt(module, mixin)


def _adopt_base(report: Report, name: str, base: Any, family: families.Family) -> None:
    """Adopt a base model with its layers, or say why not."""
    reason = families.obstacle(base) or families.foreign_part(base, family)
    if reason is not None:
        report.left.append(Left(name, type(base).__name__, reason))
        return
    modules = importlib.import_module("paracore.hf.modules")  # needs transformers, which is loaded by now
    report.changes.set_attribute(base, "paracore", wiring_of(base, TrainingAxes.alone()))
    adopt(report, name, base, modules.Model, "masks as intervals, rotary tables in float64")
    for path, module in base.named_modules():
        full = f"{name}.{path}" if name else path
        if family.has(module, "DecoderLayer"):
            adopt(report, full, module, modules.DecoderLayer, "residual addition with RMSNorm")
        elif family.has(module, "Attention"):
            adopt(report, full, module, modules.Attention, "attention, rotary embedding")


def wiring_of(base: Any, axes: TrainingAxes, **how: Any) -> Any:
    """Return what an adopted base model must know; `how` are fields of `paracore.hf.modules.Wiring`."""
    modules = importlib.import_module("paracore.hf.modules")
    frequencies, magnitude = families.rotary(base)
    return modules.Wiring(
        frequencies=frequencies,
        magnitude=magnitude,
        layer_types=families.layer_types(base.config),
        windows=families.windows(base.config),
        axes=axes,
        **how,
    )


def _adopt_one(report: Report, name: str, module: nn.Module) -> None:
    """Adopt a norm, an MLP or a language model, or say why not."""
    if isinstance(module, Derived):
        return
    if families.family_of(module, "ForCausalLM"):
        reason = families.head_obstacle(module)
        if reason is None:
            modules = importlib.import_module("paracore.hf.modules")
            adopt(report, name, module, modules.ForCausalLM, "LM head and loss, in chunks of tokens")
        else:
            report.left.append(Left(name, type(module).__name__, reason))
    elif leaves.is_rms_norm(module) or families.family_of(module, "RMSNorm"):
        adopt(report, name, module, leaves.RMSNorm, "RMSNorm")
    elif families.family_of(module, "MLP") and families.mlp_obstacle(module) is None:
        adopt(report, name, module, leaves.MLP, "SwiGLU")
    elif type(module).__name__.endswith(_SOUGHT):
        reason = families.mlp_obstacle(module) or f"{type(module).__module__}'s is not a class that we know"
        report.left.append(Left(name, type(module).__name__, reason))
