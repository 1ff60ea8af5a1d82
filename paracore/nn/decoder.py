"""A decoder of the Llama and Qwen3 families over the axes tp and cp, with Hugging Face's parameter names.

Outside batch-first ([B, S] tokens, [B, S, V] logits), inside sequence-first ([S, B, H]), so that a
cut of the sequence is a cut of dim 0. Over `MeshAxis.alone("tp")` it is the dense model. Along cp each
rank computes the tokens at its own positions: there S is how many it holds. With sequence_parallel each
rank of tp holds S/T of these between the tensor-parallel regions; with vocab_parallel V/T of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paracore import reference, trace
from paracore.errors import UsageError
from paracore.nn.attention import GroupedQueryAttention
from paracore.nn.config import DecoderConfig
from paracore.nn.dropout import Dropout, DropoutDraw
from paracore.nn.initialization import decoder_normal_
from paracore.nn.linear import require_cut
from paracore.nn.mlp import SwiGLU
from paracore.nn.norm import RMSNorm
from paracore.nn.rope import rope_frequencies
from paracore.nn.sequence import SequenceContext, require_fitting
from paracore.nn.vocabulary import Embedding, LMHead
from paracore.ops.cross_entropy import Objective, reduce_losses
from paracore.parallel.collectives import take_shard
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.overlap import Overlap
from paracore.parallel.placement import ParameterPlacement, collect_placements


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Over tp that costs 2 all-reduces forward, 2 backward; with sequence_parallel 2 all-gathers and 2
    reduce-scatters forward, 4 all-gathers (of two inputs again, and of two gradients) and 2 reduce-scatters
    backward.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tp: MeshAxis,
        cp: MeshAxis | None = None,
        *,
        sequence_parallel: bool = False,
        overlap: Overlap | None = None,
    ) -> None:
        super().__init__()
        cut: dict[str, Any] = {"sequence_parallel": sequence_parallel, "overlap": overlap}
        self.input_layernorm = _norm(config, tp, sequence_parallel)
        self.self_attn = GroupedQueryAttention(config, tp, cp, **cut)
        self.post_attention_layernorm = _norm(config, tp, sequence_parallel)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size, tp, bias=config.mlp_bias, **cut)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        sequence: SequenceContext | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """x: [S, B, H], the same on every tp rank; cos, sin: [S, D/2]. Returns [S, B, H] likewise.

        With sequence_parallel x and what is returned are this rank's [S/T, B, H].
        """
        attended = self.self_attn(self.input_layernorm(x), cos, sin, sequence, dropout)
        attended = attended if dropout is None else dropout.hidden(attended, "attention")
        # Added and normalised in one pass. Under autocast what is added comes in its dtype.
        normalized, x = self.post_attention_layernorm(attended.to(x.dtype), x)
        added = self.mlp(normalized, cos.size(0))
        y: Tensor = x + (added if dropout is None else dropout.hidden(added, "mlp"))
        return y


def _norm(config: DecoderConfig, tp: MeshAxis, sequence_parallel: bool) -> RMSNorm:
    """Return the norm of hidden states; of a rank's own tokens its gradient covers these only."""
    return RMSNorm(
        config.hidden_size,
        eps=config.rms_norm_eps,
        tp_size=tp.size,
        partial_gradient=sequence_parallel,
    )


class DecoderStack(nn.Module):
    """Embedding, blocks and final norm: everything but the LM head."""

    def __init__(
        self,
        config: DecoderConfig,
        tp: MeshAxis,
        cp: MeshAxis,
        *,
        sequence_parallel: bool,
        vocab_parallel: bool,
        overlap: Overlap | None,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.sequence_parallel = config, tp, sequence_parallel
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            tp,
            vocab_parallel=vocab_parallel,
            sequence_parallel=sequence_parallel,
        )
        self.layers = nn.ModuleList(
            DecoderBlock(config, tp, cp, sequence_parallel=sequence_parallel, overlap=overlap)
            for _ in range(config.num_layers)
        )
        self.norm = _norm(config, tp, sequence_parallel)

    def forward(
        self,
        tokens: Tensor,
        places: Tensor,
        positions: Tensor,
        sequence: SequenceContext | None,
        draw: DropoutDraw | None,
    ) -> Tensor:
        """Return hidden states [S, B, H], or with sequence_parallel this rank's [S/T, B, H].

        tokens: [B, S] int64; places: [S] int64, where they lie in the sequence; positions: [S] int64, what
        RoPE turns by.
        """
        config = self.config
        own = take_shard(places, self.tp, 0) if self.sequence_parallel else places
        dropout = Dropout(config, draw, own)
        frequencies, magnitude = rope_frequencies(config.query_dim, config.rope_theta, config.rope_scaling)
        tables = reference.rotary_tables(positions, frequencies.to(positions.device))
        x: Tensor = dropout.hidden(self.embed_tokens(tokens.T), "embedding")  # [S, B, H]
        dtype = reference.accumulation_dtype(x.dtype)
        cos, sin = ((table * magnitude).to(dtype) for table in tables)
        for number, block in enumerate(self.layers):
            with trace.range("paracore.decoder.layer", number):
                x = block(x, cos, sin, sequence, dropout.of(f"layers.{number}"))
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

    sequence_parallel: between the tensor-parallel regions each rank of tp holds its part of the tokens, any
    number of them. vocab_parallel: each holds its part of the embedding and of the LM head, any V; the loss
    never sees whole logits. overlap: the layers that sequence_parallel cuts compute while they communicate,
    over peer memory where there is NVLink.

    With dropout in the config `forward` and `loss` need a `DropoutDraw` in training; `eval()` drops nothing.

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
        sequence_parallel: bool = False,
        vocab_parallel: bool = False,
        overlap: Overlap | None = None,
    ) -> None:
        super().__init__()
        cp = MeshAxis.alone("cp") if cp is None else cp
        cuts: dict[str, Any] = {"sequence_parallel": sequence_parallel, "vocab_parallel": vocab_parallel}
        config.require_tp(tp.size)
        require_cut(overlap, sequence_parallel)
        self.overlap = None if overlap is None else overlap.on(torch.device(device), tp)
        with torch.device("meta"):  # allocate and draw every weight once, below
            self.model = DecoderStack(config, tp, cp, overlap=self.overlap, **cuts)
            self.lm_head = LMHead(config.vocab_size, config.hidden_size, tp, **cuts)
        self.config, self.tp, self.cp = config, tp, cp
        self.to(dtype).to_empty(device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_load_state_dict_pre_hook(functools.partial(_complete_tied_head, config))
        decoder_normal_(self, self.parameter_placements(), tp.rank, config.initializer_range, seed)

    def describe_overlap(self, batch_size: int, tokens: int) -> str | None:
        """Say how hidden states of [batch_size, tokens] travel over tp; None where nothing is to overlap."""
        shape, dtype = (tokens, batch_size, self.config.hidden_size), self.lm_head.weight.dtype
        return None if self.overlap is None else self.overlap.describe(shape, dtype, self.tp)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return how each parameter lies over tp, by name."""
        return collect_placements(self, self.tp.size)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        sequence: SequenceContext | None = None,
        draw: DropoutDraw | None = None,
    ) -> Tensor:
        """Return logits [B, S, V] for tokens [B, S] int64, the same on every rank of tp.

        positions: [S] int64, what RoPE turns by: by default where the tokens lie in the whole sequence, as
        the layout says, in packed documents too. The mask goes by the layout in any case. draw: of dropout.
        """
        hidden = self._hidden(tokens, positions, sequence, draw)
        logits: Tensor = self.lm_head(hidden, tokens.size(1))  # [S, B, V]
        return logits.transpose(0, 1)

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
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        draw: DropoutDraw | None = None,
    ) -> Tensor:
        """Return the mean cross entropy over the labels [B, S] that are not `ignore_index` (0 if all are).

        label_smoothing, z_loss: see `paracore.ops.cross_entropy.Objective`. Logits exist for a chunk of
        tokens at a time, and backward can run once: see `paracore.linear_cross_entropy`.

        over: the ranks whose labels count together, those of cp by default; with data parallelism
        `TrainingAxes.data`. The mean is that of all their labels, however many each holds: every rank returns
        the same loss, and its gradient is the part that this rank's tokens have in it. The parts are to be
        added up, by `GradientSync` or `paracore.optim.AdamW`; nothing is multiplied or divided by the number
        of ranks. valid: the number of labels to divide by, where gradients accumulate over several batches;
        losses and gradients are then parts of the mean over all of them. draw: of dropout.
        """
        if labels.shape != tokens.shape:
            raise UsageError(f"labels are {list(labels.shape)}, must be {list(tokens.shape)} like tokens")
        if labels.dtype != torch.int64 or labels.device != tokens.device:
            raise UsageError(
                f"labels are {labels.dtype} on {labels.device}, must be torch.int64 on {tokens.device}"
            )
        objective = Objective(self.config.vocab_size, ignore_index, label_smoothing, z_loss)
        hidden = self._hidden(tokens, positions, sequence, draw)
        total, labels = self.lm_head.sum_of_losses(hidden, labels.T, objective)
        axes = [over or self.cp, *([self.tp] if self.lm_head.cuts_tokens else [])]
        loss = reduce_losses(total, labels, "mean", axes, ignore_index, valid)
        return loss.to(reference.accumulation_dtype(hidden.dtype))

    def _hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        sequence: SequenceContext | None,
        draw: DropoutDraw | None,
    ) -> Tensor:
        require_fitting(sequence, tokens.size(1), self.cp)
        if positions is not None and positions.shape != tokens.shape[1:]:
            raise UsageError(f"positions are {list(positions.shape)}, must be {list(tokens.shape[1:])}, [S]")
        draw = self._checked(draw)
        if sequence is None:
            places = torch.arange(tokens.size(1), device=tokens.device)
        else:
            places = sequence.layout.ranks[self.cp.rank].tensor(tokens.device)
        hidden: Tensor = self.model(
            tokens, places, places if positions is None else positions, sequence, draw
        )
        return hidden

    def _checked(self, draw: DropoutDraw | None) -> DropoutDraw | None:
        """Return the draw by which to drop, or None; raise UsageError where one is missing."""
        config = self.config
        if not self.training or not config.drops:
            return None
        if draw is None:
            raise UsageError(
                f"draw=None: dropout={config.dropout} and attention_dropout={config.attention_dropout} need "
                "a DropoutDraw in training, with a seed of its own for each step; or call eval()"
            )
        return draw


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
