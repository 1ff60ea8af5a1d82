"""Tiny models of transformers, and the inputs that tests give them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

B, S, VOCABULARY = 3, 19, 61

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough for attention to be far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}

DECODERS: dict[str, transformers.PreTrainedConfig] = {
    "Llama": transformers.LlamaConfig(**_GROUPED),
    "Qwen3": transformers.Qwen3Config(**_GROUPED),
    "Mistral, window": transformers.MistralConfig(**_GROUPED, sliding_window=6),
    "Gemma 2, soft caps, alternating windows": transformers.Gemma2Config(
        **_GROUPED, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=7
    ),
    "gpt-oss, sinks, alternating windows": transformers.GptOssConfig(
        **_GROUPED, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
    "Gemma 3, bidirectional": transformers.Gemma3TextConfig(
        **_GROUPED, sliding_window=6, use_bidirectional_attention=True
    ),
    "Llama 4, chunks": transformers.Llama4TextConfig(
        **_GROUPED,
        attention_chunk_size=7,
        intermediate_size_mlp=48,
        num_local_experts=2,
        no_rope_layers=[1, 0],
    ),
}
ENCODERS: dict[str, transformers.PreTrainedConfig] = {
    "BERT": transformers.BertConfig(**_COMMON),
    "ModernBERT, windows": transformers.ModernBertConfig(
        **_COMMON, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
}


@dataclass(frozen=True)
class Pair:
    """One model twice, with the same weights: as transformers has it, and with paracore's attention."""

    eager: transformers.PreTrainedModel
    ours: transformers.PreTrainedModel


def pair(config: transformers.PreTrainedConfig, seed: int = 0) -> Pair:
    torch.manual_seed(seed)
    encoder = isinstance(config, (transformers.BertConfig, transformers.ModernBertConfig))
    auto = transformers.AutoModelForMaskedLM if encoder else transformers.AutoModelForCausalLM
    # A model keeps the very configuration it is given, and its attention implementation in there.
    eager = auto.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = auto.from_config(copy.deepcopy(config), attn_implementation="paracore").eval()
    ours.load_state_dict(eager.state_dict())
    return Pair(eager, ours)


def tokens(batch: int = B, length: int = S) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def padded(side: str, lengths: list[int] | None = None, total: int = S) -> Tensor:
    """An attention mask of rows of unequal lengths, padded on one side."""
    lengths = [total, total - 5, 3] if lengths is None else lengths
    index = torch.arange(total).expand(len(lengths), -1)
    real = torch.tensor(lengths).unsqueeze(1)
    return (index < real if side == "right" else index >= total - real).long()


def packed(*lengths: int) -> Tensor:
    """Position ids [rows, S] of sequences that are packed into rows: their lengths fill row after row."""
    return torch.cat([torch.arange(length) for length in lengths]).view(-1, S)


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())
