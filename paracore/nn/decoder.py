"""A decoder of the Llama and Qwen3 families over the axes tp and cp, with Hugging Face's parameter names.

Outside batch-first ([B, S] tokens, [B, S, V] logits), inside sequence-first ([S, B, H]), so that a
cut of the sequence is a cut of dim 0. Over `MeshAxis.alone("tp")` it is the dense model. Along cp each
rank computes the tokens at its own positions: there S is how many it holds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paracore import reference
from paracore.errors import UsageError
from paracore.nn.attention import GroupedQueryAttention
from paracore.nn.config import DecoderConfig
from paracore.nn.initialization import decoder_normal_
from paracore.nn.mlp import SwiGLU
from paracore.nn.norm import RMSNorm
from paracore.nn.rope import rope_frequencies
from paracore.nn.sequence import SequenceContext, require_fitting
from paracore.parallel.collectives import reduce_from
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import ParameterPlacement, collect_placements


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): over tp 2 all-reduces forward, 2 backward."""

    def __init__(self, config: DecoderConfig, tp: MeshAxis, cp: MeshAxis | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, tp_size=tp.size)
        self.self_attn = GroupedQueryAttention(config, tp, cp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, tp_size=tp.size)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size, tp, bias=config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequence: SequenceContext | None = None) -> Tensor:
        """x: [S, B, H], the same on every tp rank; cos, sin: [S, 1, 1, D/2]. Returns [S, B, H] likewise."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, sequence)
        normalized, x = self.post_attention_layernorm(attended, x)  # added and normalised in one pass
        y: Tensor = x + self.mlp(normalized)
        return y


class DecoderStack(nn.Module):
    """Embedding, blocks and final norm: everything but the LM head."""

    def __init__(self, config: DecoderConfig, tp: MeshAxis, cp: MeshAxis) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderBlock(config, tp, cp) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, tp_size=tp.size)

    def forward(self, tokens: Tensor, positions: Tensor, sequence: SequenceContext | None) -> Tensor:
        """tokens: [B, S] int64; positions: [S] int64. Returns hidden states [S, B, H]."""
        config = self.config
        frequencies, magnitude = rope_frequencies(config.query_dim, config.rope_theta, config.rope_scaling)
        tables = reference.rotary_tables(positions, frequencies.to(positions.device))
        x: Tensor = self.embed_tokens(tokens.T)  # [S, B, H]
        dtype = reference.accumulation_dtype(x.dtype)
        cos, sin = ((table * magnitude).to(dtype)[:, None, None, :] for table in tables)
        for block in self.layers:
            x = block(x, cos, sin, sequence)
            if sequence is not None and sequence.check:  # once: further blocks ask for the same
                sequence = dataclasses.replace(sequence, check=False)
        y: Tensor = self.norm(x)
        return y


class Decoder(nn.Module):
    """A language model over the axes tp and cp (None: one rank).

    Initial weights are a function of (seed, parameter name, global index): bitwise the same for
    every size of tp and cp. After backward, call `GradientSync(model, tp, cp)` before using gradients.

    Over cp each rank is given the tokens and labels of its own positions, and a `SequenceContext` that says
    which those are. Without one the sequence is whole, causal, and on a single rank of cp.

    Raises UsageError when the heads cannot be divided over tp.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tp: MeshAxis,
        cp: MeshAxis | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        cp = MeshAxis.alone("cp") if cp is None else cp
        with torch.device("meta"):  # allocate and draw every weight once, below
            self.model = DecoderStack(config, tp, cp)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.config, self.tp, self.cp = config, tp, cp
        self.to(dtype).to_empty(device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_load_state_dict_pre_hook(functools.partial(_complete_tied_head, config))
        decoder_normal_(self, self.parameter_placements(), tp.rank, config.initializer_range, seed)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return how each parameter lies over tp, by name."""
        return collect_placements(self, self.tp.size)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, *, sequence: SequenceContext | None = None
    ) -> Tensor:
        """Return logits [B, S, V] for tokens [B, S] int64.

        positions: [S] int64, what RoPE turns by: by default where the tokens lie in the whole sequence, as
        the layout says, in packed documents too. The mask goes by the layout in any case.
        """
        return self._logits(tokens, positions, sequence).transpose(0, 1)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        sequence: SequenceContext | None = None,
        *,
        positions: Tensor | None = None,
        ignore_index: int = -100,
        over: MeshAxis | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross entropy over the labels [B, S] that are not `ignore_index` (0 if all are).

        over: the ranks whose labels count together, those of cp by default; with data parallelism
        `TrainingAxes.data`. The mean is that of all their labels, however many each holds: every rank returns
        the same loss, and its gradient is the part that this rank's tokens have in it. The parts are to be
        added up, by `GradientSync` or `paracore.optim.AdamW`; nothing is multiplied or divided by the number
        of ranks. valid: the number of labels to divide by, where gradients accumulate over several batches;
        losses and gradients are then parts of the mean over all of them.
        """
        if labels.shape != tokens.shape:
            raise UsageError(f"labels are {list(labels.shape)}, must be {list(tokens.shape)} like tokens")
        logits = self._logits(tokens, positions, sequence)
        total, count = reference.cross_entropy(logits, labels.T, ignore_index)
        # In float64, where counts are exact beyond 2^24 tokens too.
        sums = reduce_from(torch.stack([total.double(), count.double()]), over or self.cp)
        return (sums[0] / (sums[1] if valid is None else valid).clamp(min=1)).to(total.dtype)

    def _logits(self, tokens: Tensor, positions: Tensor | None, sequence: SequenceContext | None) -> Tensor:
        require_fitting(sequence, tokens.size(1), self.cp)
        if positions is None and sequence is not None:
            positions = sequence.layout.ranks[self.cp.rank].tensor(tokens.device)
        elif positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)
        logits: Tensor = self.lm_head(self.model(tokens, positions, sequence))  # [S, B, V]
        return logits


def complete_state_dict(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return `state` with the LM head's weight, which checkpoints of tied models leave out.

    Raises UsageError when the embeddings are tied and the two weights differ.
    """
    complete = dict(state)
    embedding = state.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and embedding is not None:
        head = complete.setdefault("lm_head.weight", embedding)
        if head is not embedding and not torch.equal(head, embedding):
            raise UsageError(
                "tie_word_embeddings=True, but lm_head.weight differs from model.embed_tokens.weight"
            )
    return complete


def _complete_tied_head(
    config: DecoderConfig, module: nn.Module, state: dict[str, Tensor], *rest: object
) -> None:
    state.update(complete_state_dict(state, config))
