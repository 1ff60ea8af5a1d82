"""How the decoders of known families are taken over, in place; imports transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from paracore.dropin import leaves
from paracore.dropin.report import Derived, Left, Report
from paracore.hf import families, layers, models
from paracore.parallel.mesh import TrainingAxes


def adopt_decoders(report: Report, model: nn.Module, axes: TrainingAxes, **how: Any) -> None:
    """Adopt every base model of a known family in the tree, with all in it, and the LM heads on them.

    how: fields of `layers.Wiring`. What cannot be served is left, and reported.
    """
    for name, base, family in list(families.base_models(model)):
        reason = families.obstacle(base, family)
        if reason is not None:
            report.left.append(Left(name, type(base).__name__, reason))
            continue
        frequencies, magnitude = families.rotary(base)
        wiring = layers.Wiring(
            frequencies=frequencies,
            magnitude=magnitude,
            layer_types=families.layer_types(base.config),
            windows=families.windows(base.config),
            axes=axes,
            **how,
        )
        report.changes.set_attribute(base, "paracore", wiring)
        for path, module in list(base.named_modules()):
            _adopt_part(report, ".".join(filter(None, (name, path))), module, family)
    for name, module in model.named_modules():
        if families.family_of(module, "ForCausalLM"):
            adopted = isinstance(module.get_submodule("model"), Derived)
            reason = families.head_obstacle(module) if adopted else "its base model was left"
            if reason is None:
                report.adopt(name, module, models.ForCausalLM, "the LM head with its loss")
            else:
                report.left.append(Left(name, type(module).__name__, reason))


_PARTS = {
    "Model": (models.Model, "masks as intervals"),
    "DecoderLayer": (layers.DecoderLayer, "residual addition with RMSNorm"),
    "Attention": (layers.Attention, "attention, rotary embedding"),
    "MLP": (leaves.MLP, "SwiGLU"),
    "RMSNorm": (leaves.RMSNorm, "RMSNorm"),
}


def _adopt_part(report: Report, name: str, module: nn.Module, family: families.Family) -> None:
    for role, (mixin, by) in _PARTS.items():
        if family.has(module, role):
            report.adopt(name, module, mixin, by)
            return
