"""The architectures of transformers that we know: their classes, what their configs mean, what we refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paracore.dropin.report import Derived, own_class
from paracore.dropin.styles import (
    ColumnParallel,
    Replicated,
    RowParallel,
    Style,
    VocabularyEmbedding,
    VocabularyHead,
)
from paracore.errors import UsageError
from paracore.nn.config import key_value_replicas
from paracore.nn.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, rope_frequencies
from paracore.nn.vocabulary import LMHead
from paracore.parallel.overlap import Overlap

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


def base_models(model: nn.Module) -> Iterator[tuple[str, Any, Family]]:
    """Yield the base models of known families in a module tree, with their names."""
    for name, module in model.named_modules():
        family = family_of(module, "Model")
        if family is not None:
            yield name, module, family


def obstacle(base: Any, family: Family) -> str | None:
    """Return what keeps us from serving a base model as a whole; None if nothing does."""
    config = base.config
    kinds = sorted(set(layer_types(config)) - set(_KNOWN_LAYERS))
    if kinds:
        return f"layer_types {kinds}, must be of {list(_KNOWN_LAYERS)}"
    if getattr(config, "is_causal", True) is False:
        return "is_causal=False, must be causal"
    try:
        rotary(base)
    except UsageError as error:
        return str(error)
    for name, module, role in _parts(base, family):
        if not family.has(module, role):
            own = f"{type(module).__module__}.{type(module).__qualname__}"
            return f"{name} is a {own}, must be a {family.prefix}{role}"
        if "forward" in vars(module):
            return f"{name}: its forward was replaced, perhaps by a hook of another library"
        reason = activation_obstacle(module) if role == "MLP" else None
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _parts(base: Any, family: Family) -> Iterator[tuple[str, Any, str]]:
    """Yield the parts of a base model whose mathematics we take over, their names and roles."""
    yield "the base model", base, "Model"
    yield "norm", base.norm, "RMSNorm"
    for number, layer in enumerate(base.layers):
        at = f"layers.{number}"
        yield at, layer, "DecoderLayer"
        yield f"{at}.self_attn", layer.self_attn, "Attention"
        yield f"{at}.mlp", layer.mlp, "MLP"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}", getattr(layer, norm), "RMSNorm"


def layer_types(config: Any) -> tuple[str, ...]:
    """Return what each layer attends to; as the models do, which of some configs do not read all."""
    count: int = config.num_hidden_layers
    if config.model_type in ("qwen2", "qwen3"):
        return tuple(map(str, config.layer_types[:count]))
    slides = config.model_type == "mistral" and config.sliding_window is not None
    return ("sliding_attention" if slides else "full_attention",) * count


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
    theirs = _made_anew(base.rotary_emb)
    same = theirs.inv_freq.shape == frequencies.shape and torch.allclose(
        theirs.inv_freq.double(), frequencies, rtol=1e-5, atol=0
    )
    if not same or abs(theirs.attention_scaling - magnitude) > 1e-6 * magnitude:
        raise UsageError(f"rope_parameters={dict(parameters)}: there is something in it that we do not know")
    return frequencies, magnitude


def _made_anew(rotary_embedding: Any) -> Any:
    """Return a rotary embedding as its config has it, on the CPU: a model may be on the meta device."""
    with torch.device("cpu"):
        return type(rotary_embedding)(rotary_embedding.config)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


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


def activation_obstacle(mlp: Any) -> str | None:
    """Return what keeps us from serving an MLP of a known family; None if nothing does."""
    name = type(mlp.act_fn).__name__
    return None if name in ("SiLU", "SiLUActivation") else f"its activation is {name}, must be SiLU"


def head_obstacle(model: Any) -> str | None:
    """Return what keeps us from serving a language model's LM head and loss; None if nothing does.

    Of the base model, nothing is asked here.
    """
    head = model.lm_head
    if not is_plain_head(head):
        return f"lm_head is a {type(head).__name__}, must be a torch.nn.Linear without bias"
    if "forward" in vars(model):
        return "its forward was replaced, perhaps by a hook of another library"
    if model.loss_function.__name__ != "ForCausalLMLoss":
        return f"its loss is {model.loss_function.__name__}, must be transformers' ForCausalLMLoss"
    return None


def is_plain_head(head: nn.Module) -> bool:
    """Whether an LM head is its weight and nothing else: no bias, adapter, or weight that FSDP2 has alone."""
    plain = own_class(head) in (nn.Linear, LMHead) and getattr(head, "bias", None) is None
    return plain and not isinstance(head.weight, DTensor)


# ---------------------------------------------------------------- over a mesh


def plan(
    model: nn.Module, tp_size: int, *, sequence_parallel: bool, vocab_parallel: bool, overlap: Overlap | None
) -> dict[str, Style]:
    """Return how the leaves of a model of a known family lie over tp, by patterns of their names.

    Raises UsageError, which names what it is, for a model that cannot be served over a mesh.
    """
    if any(isinstance(module, Derived) for module in model.modules()):
        raise UsageError(f"{type(model).__name__} was changed by paracore before: undo() that report first")
    found = list(base_models(model))
    if len(found) != 1 or not (found[0][1] is model or family_of(model, "ForCausalLM")):
        raise UsageError(
            f"no plan: {type(model).__name__} is not one of "
            f"{', '.join(f'{family.prefix}ForCausalLM' for family in FAMILIES)} or their base models"
            + (f"; its {found[0][0]} is one, and can be parallelized by itself" if found else "")
            + "; or pass a plan such as {'layers.*.up': 'column', 'layers.*.down': 'row'}"
        )
    ((name, base, family),) = found
    reason = obstacle(base, family) or (None if base is model else head_obstacle(model))
    if reason is not None:
        raise UsageError(f"{type(model).__name__}: {reason}")
    config = base.config
    replicas = key_value_replicas(config.num_attention_heads, config.num_key_value_heads, tp_size)
    cut: dict[str, Any] = {"sequence_parallel": sequence_parallel, "overlap": overlap}
    vocabulary = {"sequence_parallel": sequence_parallel, "vocab_parallel": vocab_parallel}
    column, row, norm = ColumnParallel(**cut), RowParallel(**cut), Replicated(sequence_parallel)
    shared = ColumnParallel(replicas=replicas, **cut)
    at = f"{name}." if name else ""
    styles: dict[str, Style] = {
        f"{at}embed_tokens": VocabularyEmbedding(**vocabulary),
        f"{at}layers.*.self_attn.q_proj": column,
        f"{at}layers.*.self_attn.[kv]_proj": shared,
        f"{at}layers.*.self_attn.o_proj": row,
        f"{at}layers.*.mlp.gate_proj": column,
        f"{at}layers.*.mlp.up_proj": column,
        f"{at}layers.*.mlp.down_proj": row,
        f"{at}layers.*.*_layernorm": norm,
        f"{at}norm": norm,
    }
    if hasattr(base.layers[0].self_attn, "q_norm"):
        styles[f"{at}layers.*.self_attn.[qk]_norm"] = Replicated(partial_gradient=True)
    if base is not model:
        styles["lm_head"] = VocabularyHead(**vocabulary)
    return styles


def recompute_buffer(module: nn.Module, name: str) -> Tensor | None:
    """Return a buffer that no checkpoint has, where it follows from the config; see `load_shards`."""
    if family_of(module, "RotaryEmbedding") is None:
        return None
    buffer: Tensor = _made_anew(module).get_buffer(name)
    return buffer
