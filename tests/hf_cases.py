"""Little models of transformers, batches for them, and what untouched models make of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

_SIZES: dict[str, Any] = {
    "vocab_size": 61,  # no mesh divides it
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

# What differs: heads of keys (grouped, one, as many as queries), ties, biases, windows, ways to stretch RoPE.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3}),
    "llama, as many key heads": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3, one key head": ("Qwen3", {"head_dim": 12, "num_key_value_heads": 1, "attention_bias": True}),
    "qwen3, windows in one layer": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
}


def config_of(name: str, **changes: Any) -> Any:
    prefix, options = MODELS[name]
    return getattr(transformers, f"{prefix}Config")(**{**_SIZES, **options, **changes})


def model_of(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return the language model of a config with weights that leave nothing small; the same in each call."""
    architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    model = getattr(transformers, f"{architecture[config.model_type]}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.25 * draw if parameter.dim() > 1 else 1 + 0.5 * draw)
    return model.to(dtype).train()


@dataclass(frozen=True)
class Batch:
    """Arguments of a call, and which tokens are real: [B, S]."""

    arguments: dict[str, Any]
    real: Tensor
    labels: Tensor = field(repr=False)

    @property
    def ids(self) -> Tensor:
        tokens: Tensor = self.arguments["input_ids"]
        return tokens


def batches(length: int = 13, seed: int = 0) -> dict[str, Batch]:
    """Plain, padded and packed batches. Labels of padding, and some others, are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(61, (2, length), generator=generator)
    plain = torch.ones(2, length, dtype=torch.bool)
    padded = plain.clone()
    padded[0, :4] = False
    padded[1, -3:] = False
    # Documents that divide nothing, the second row's others than the first's.
    starts = [torch.arange(n) for n in (5, 1, length - 6)], [torch.arange(n) for n in (length - 2, 2)]
    packed = torch.stack([torch.cat(row) for row in starts])
    cu_seqlens = torch.tensor([0, 5, 6, length], dtype=torch.int32)
    return {
        "plain": _batch(ids, plain, {}),
        "padded": _batch(ids, padded, {"attention_mask": padded.long()}),
        # A cache, which transformers makes by default, would let tokens see other documents there.
        "packed": _batch(ids, plain, {"position_ids": packed, "use_cache": False}),
        "cu_seq_lens": _batch(
            ids[:1],
            plain[:1],
            {
                "position_ids": packed[:1],
                "use_cache": False,
                "cu_seq_lens_q": cu_seqlens,
                "cu_seq_lens_k": cu_seqlens,
            },
        ),
    }


def _batch(ids: Tensor, real: Tensor, arguments: dict[str, Any]) -> Batch:
    labels = ids.masked_fill(~real, -100)
    labels[:, 6] = -100
    return Batch({"input_ids": ids, **arguments}, real, labels)


@dataclass(frozen=True)
class Outcome:
    """What a model makes of a batch: logits [B, S, V] in evaluation; in training the loss, and gradients."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def evaluate(model: Any, batch: Batch) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(**batch.arguments).logits
    model.train()
    return logits


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def train(model: Any, batch: Batch, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch.arguments, labels=batch.labels, **arguments).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def outcome(model: Any, batch: Batch) -> Outcome:
    return Outcome(evaluate(model, batch), *train(model, batch))


def assert_logits(batch: Batch, found: Tensor, expected: Tensor, what: str) -> None:
    """Of real tokens: what others say is nobody's business."""
    found, expected = found.detach()[batch.real], expected.detach()[batch.real]
    error = float((found - expected).norm() / expected.norm())
    assert error < 5e-6, f"{what}: logits are off by {error:.2e}"


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Each beside its own norm, or a thousandth of all of them's where it is nearly nothing."""
    assert found.keys() == expected.keys(), what
    least = 1e-3 * float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for name, gradient in expected.items():
        assert found[name].shape == gradient.shape, f"{what}: {name}"
        error = float((found[name] - gradient).norm()) / max(float(gradient.norm()), least)
        assert error < 2e-5, f"{what}: the gradient of {name} is off by {error:.2e}"


def assert_equal(batch: Batch, found: Outcome, expected: Outcome, what: str) -> None:
    assert_logits(batch, found.logits, expected.logits, what)
    torch.testing.assert_close(found.loss, expected.loss, rtol=2e-6, atol=0, msg=f"{what}: loss")
    assert_gradients(found.gradients, expected.gradients, what)
