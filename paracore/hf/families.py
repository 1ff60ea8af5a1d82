"""The architectures of transformers that we know: their classes, what their configs mean, what we refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paracore.dropin.report import Derived
from paracore.errors import UsageError
from paracore.nn.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, rope_frequencies

_KNOWN_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Family:
    """One architecture, by the prefix of its classes' names."""

    prefix: str

    @property
    def module(self) -> str:
        """Where transformers defines it."""
        name = self.prefix.lower()
        return f"transformers.models.{name}.modeling_{name}"

    def has(self, module: nn.Module, role: str) -> bool:
        """Whether `module` is exactly this family's class of a role, such as "Attention"; no subclass."""
        kind = type(module)
        return (
            kind.__module__ == self.module
            and kind.__qualname__ == self.prefix + role
            and not issubclass(kind, Derived)  # which bears the same name
        )


FAMILIES = tuple(Family(prefix) for prefix in ("Llama", "Qwen2", "Qwen3", "Mistral"))


def family_of(module: nn.Module, role: str) -> Family | None:
    """Return the family of which `module` is the class of a role."""
    return next((family for family in FAMILIES if family.has(module, role)), None)


def base_models(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family]]:
    """Yield the base models of known families in a module tree, with their names."""
    for name, module in model.named_modules():
        family = family_of(module, "Model")
        if family is not None:
            yield name, module, family


def obstacle(base: Any) -> str | None:
    """Return what keeps us from serving a base model as a whole; None if nothing does."""
    config = base.config
    kinds = sorted(set(layer_types(config)) - set(_KNOWN_LAYERS))
    if kinds:
        return f"layer_types {kinds}, must be of {list(_KNOWN_LAYERS)}"
    if getattr(config, "is_causal", True) is False:
        return "is_causal=False, must be causal"
    act = config.hidden_act
    if act not in ("silu", "swish"):
        return f"hidden_act={act!r}, must be 'silu'"
    try:
        rotary(base)
    except UsageError as error:
        return str(error)
    return None


def layer_types(config: Any) -> tuple[str, ...]:
    """Return what each layer attends to."""
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return tuple(kinds[:count])
    sliding = getattr(config, "sliding_window", None) is not None
    return ("sliding_attention" if sliding else "full_attention",) * count


def windows(config: Any) -> dict[str, int | None]:
    """Return, for each type of layer that there is, how many keys its window shows; None: all."""
    return {
        kind: config.sliding_window if kind == "sliding_attention" else None
        for kind in dict.fromkeys(layer_types(config))
    }


def rotary(base: Any) -> tuple[Tensor, float]:
    """Return frequencies, float64, and magnitude of a base model's rotary embedding.

    They follow from the config, and must be those that transformers itself computes, in float32: so nothing
    in the config goes unnoticed. Raises UsageError otherwise.
    """
    parameters = base.config.rope_parameters
    scaling = _scaling(parameters)
    frequencies, magnitude = rope_frequencies(_head_dim(base.config), parameters["rope_theta"], scaling)
    with torch.device("cpu"):  # the model's own may be on the meta device
        theirs = type(base.rotary_emb)(base.config)
    same = theirs.inv_freq.shape == frequencies.shape and torch.allclose(
        theirs.inv_freq.double(), frequencies, rtol=1e-5, atol=0
    )
    if not same or abs(theirs.attention_scaling - magnitude) > 1e-6 * magnitude:
        raise UsageError(f"rope_parameters={dict(parameters)}: there is something in it that we do not know")
    return frequencies, magnitude


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _scaling(parameters: Any) -> RopeScaling | None:
    kind = parameters["rope_type"]
    original = parameters.get("original_max_position_embeddings")
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(parameters["factor"])
        case "llama3":
            slow, fast = parameters["low_freq_factor"], parameters["high_freq_factor"]
            return Llama3Scaling(parameters["factor"], original, slow_turns=slow, fast_turns=fast)
        case "yarn":
            fast, slow = parameters.get("beta_fast") or 32.0, parameters.get("beta_slow") or 1.0
            return YarnScaling(parameters["factor"], original, fast_turns=fast, slow_turns=slow)
    raise UsageError(f"rope_type={kind!r}, must be one of default, linear, llama3 and yarn")


def foreign_part(base: Any, family: Family) -> str | None:
    """Return which part of a base model is not the family's own class, and keeps us from serving it."""
    parts: list[tuple[str, nn.Module, str]] = [("norm", base.norm, "RMSNorm")]
    for number, layer in enumerate(base.layers):
        at = f"layers.{number}"
        parts.append((at, layer, "DecoderLayer"))
        if family.has(layer, "DecoderLayer"):
            parts += [
                (f"{at}.{name}", getattr(layer, name), role)
                for name, role in (
                    ("self_attn", "Attention"),
                    ("mlp", "MLP"),
                    ("input_layernorm", "RMSNorm"),
                    ("post_attention_layernorm", "RMSNorm"),
                )
            ]
    for name, module, role in [("(itself)", base, "Model"), *parts]:
        if not family.has(module, role):
            return f"{name} is {type(module).__module__}.{type(module).__qualname__}, not {family.prefix}{role}"
        if "forward" in vars(module):
            return f"{name}: its forward was replaced, by a hook of another library perhaps"
    return None


def mlp_obstacle(module: Any) -> str | None:
    """Return what keeps us from serving an MLP; None if nothing does, or if it is not a known family's."""
    if family_of(module, "MLP") is None:
        return None
    act = type(module.act_fn).__name__
    return None if act in ("SiLU", "SiLUActivation") else f"its activation is {act}, must be SiLU"


def head_obstacle(model: Any) -> str | None:
    """Return what keeps us from serving a language model's LM head and loss; None if nothing does."""
    if not isinstance(model.model, Derived):
        return "its base model was left"
    if type(model.lm_head) is not nn.Linear or model.lm_head.bias is not None:
        return f"lm_head is {type(model.lm_head).__name__}, must be a torch.nn.Linear without bias"
    if "forward" in vars(model):
        return "its forward was replaced, by a hook of another library perhaps"
    if model.loss_function.__name__ != "ForCausalLMLoss":
        return f"its loss is {model.loss_function.__name__}, must be transformers' ForCausalLMLoss"
    return None
