"""`fuse`: our kernels for a model that exists already, on one device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paracore.dropin import leaves
from paracore.dropin.plan import match
from paracore.dropin.report import Changes, Derived, Left, Replaced, Report
from paracore.hf import families
from paracore.ops.product import is_widened
from paracore.parallel.mesh import TrainingAxes


def fuse(model: nn.Module, plan: Mapping[str, leaves.Claim | str] | None = None) -> Report:
    """Let our kernels serve an existing model, in place; on one device, without a mesh.

    In models of transformers' Llama, Qwen2, Qwen3 and Mistral: RMSNorm, with the residual addition before
    it, SwiGLU, rotary embedding, attention, and the LM head with its loss, whose logits then never exist as a
    whole. In any model: torch's RMSNorm; and torch's Linear where 16-bit numbers lie on a CPU that cannot
    multiply them fast. Parameters, their names and hooks stay. Only these instances change, no class does.

    plan: what modules of other classes are, by patterns of their names, as in `paracore.dropin.plan`:
    "rms_norm" for one with `weight` and `eps`, "swiglu" for one with `gate_proj`, `up_proj` and `down_proj`,
    or `swiglu_of("w1", "w3", "w2")` of `paracore.dropin.leaves` for other names. Each is compared on random
    numbers before anything is changed; UsageError is raised where one computes something else, or a pattern
    matches nothing.

    In training with labels such a language model returns no logits, and it caches keys only where
    use_cache=True asks for it. Returns a `Report` of what was replaced, and what was left and why; its
    `undo()` takes everything back.
    """
    report = Report([], [], Changes())
    claims = match(model, plan or {}, leaves.CLAIMS, leaves.Claim, 'swiglu_of("w1", "w3", "w2")')
    for name, claim in claims.items():
        leaves.require_true(claim, model.get_submodule(name), name)
    for name, claim in claims.items():
        module = model.get_submodule(name)
        report.replaced.append(Replaced(name, type(module).__name__, claim.by))
        claim.adopt(module, report.changes)
    if any(families.base_models(model)):
        from paracore.hf.adopt import adopt_decoders  # imports transformers, which is there by now

        adopt_decoders(report, model, TrainingAxes.alone())
    for name, module in model.named_modules():
        _adopt_leaf(report, name, module)
    return report


def _adopt_leaf(report: Report, name: str, module: nn.Module) -> None:
    """Adopt a norm, an MLP or a linear layer; say of others that look like ours why they are left."""
    kind = type(module)
    if isinstance(module, Derived) or any(entry.name == name for entry in report.left):
        return
    if "forward" in vars(module):
        reason = "its forward was replaced, perhaps by a hook of another library"
    elif leaves.is_rms_norm(module) or families.family_of(module, "RMSNorm"):
        return report.adopt(name, module, leaves.RMSNorm, "RMSNorm")
    elif families.family_of(module, "MLP"):
        obstacle = families.activation_obstacle(module)
        if obstacle is None:
            return report.adopt(name, module, leaves.MLP, "SwiGLU")
        reason = obstacle
    elif type(module) is nn.Linear:
        if is_widened(module.weight.dtype, module.weight.device):
            report.adopt(name, module, leaves.Linear, "products in float32, rounded once")
        return
    elif families.family_of(module, "Attention"):
        reason = "the base model that it belongs to was left, or is not there"
    elif kind.__name__.endswith("Attention"):
        reason = "not a class that we know; paracore.attention or paracore.hf.register() may serve it"
    elif kind.__name__.endswith(("RMSNorm", "MLP")):
        reason = f"{kind.__module__}.{kind.__qualname__} is not a class that we know"
    else:
        return
    report.left.append(Left(name, kind.__name__, reason))
