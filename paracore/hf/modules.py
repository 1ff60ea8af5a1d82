"""What takes over the modules of transformers' decoders, in place, over any mesh.

Hidden states are [B, S, H], or with sequence parallelism this rank's part of the N = B * S tokens, [N/T, H]:
what lies between the tensor-parallel regions works on each token by itself, so any cut of the tokens serves.
Along cp a rank holds the tokens of its own positions, and S is how many these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from paracore import trace
from paracore.dropin.leaves import project
from paracore.dropin.report import Derived
from paracore.errors import UsageError
from paracore.hf.batch import Visible, rotary_positions, visible_by_type
from paracore.nn.dropout import DropoutDraw
from paracore.nn.sequence import SequenceContext
from paracore.nn.vocabulary import LMHead
from paracore.ops.attention import attention
from paracore.ops.cross_entropy import Objective, reduce_losses
from paracore.ops.linear_cross_entropy import sum_of_losses
from paracore.ops.ring_attention import Options, ring_attention
from paracore.ops.rotary import rotary_embedding
from paracore.parallel.collectives import gather_from, gather_list, scatter_to
from paracore.parallel.layout import Layout, parse_layout
from paracore.parallel.mesh import MeshAxis, TrainingAxes
from paracore.reference import accumulation_dtype, rotary_tables


@dataclass(frozen=True)
class Wiring:
    """What the base model knows of its architecture and of the mesh.

    frequencies, magnitude: of rotary embedding, as `rope_frequencies` returns them. layer_types: of each
    layer; windows: the keys in the sliding window of each type, or None. layout, strategy: how sequences lie
    over cp, and how keys come to queries that lie elsewhere.
    """

    frequencies: Tensor
    magnitude: float
    layer_types: tuple[str, ...]
    windows: Mapping[str, int | None]
    axes: TrainingAxes
    sequence_parallel: bool = False
    layout: str = "zigzag"
    strategy: str = "ring"

    @property
    def cuts_tokens(self) -> bool:
        """Whether hidden states are this rank's part of the tokens."""
        return self.sequence_parallel and self.axes.tp.size > 1


@dataclass(frozen=True)
class Call:
    """What the layers must know of one call of the model.

    size: (B, S), the tokens of this rank of cp. tokens: N where hidden states are a part of them, else None.
    cos, sin: [rows, D/2]; rows: [N], those of each token. visible, sequences: by type of layer, without and
    with cp.
    """

    size: tuple[int, int]
    tokens: int | None
    cos: Tensor
    sin: Tensor
    rows: Tensor
    visible: Mapping[str, Visible]
    sequences: Mapping[str, SequenceContext]
    layout: Layout | None
    cache: Any
    draw: DropoutDraw | None
    wiring: Wiring


# ---------------------------------------------------------------- layers


class Attention(Derived):
    """Attention of grouped heads, with norms of queries and keys where there are such."""

    if TYPE_CHECKING:
        q_proj: nn.Module
        k_proj: nn.Module
        v_proj: nn.Module
        q_norm: nn.Module
        k_norm: nn.Module
        o_proj: nn.Module
        head_dim: int
        layer_idx: int
        scaling: float
        attention_dropout: float
        training: bool

    @property
    def normalizes(self) -> bool:
        """Whether queries and keys are normalised, head by head."""
        return hasattr(self, "q_norm")

    def forward(self, hidden_states: Tensor, call: Call) -> tuple[Tensor, None]:
        """hidden_states: as the layers have them. Returns the same, and None for weights that never exist."""
        B, S = call.size
        projected = project(hidden_states, self.q_proj, self.k_proj, self.v_proj, tokens=call.tokens)
        q, k, v = (y.view(B * S, 1, -1, self.head_dim) for y in projected)  # [N, 1, heads/T, D]
        if self.normalizes:
            q, k = self.q_norm(q), self.k_norm(k)
        # Nothing else needs what the norms return. Without norms these are views, and left alone.
        q, k = rotary_embedding(q, k, call.cos, call.sin, call.rows, may_overwrite=True)
        q, k, v = (y.view(B, S, -1, self.head_dim).transpose(1, 2) for y in (q, k, v))  # [B, heads/T, S, D]
        if call.cache is not None:
            k, v = call.cache.update(k, v, self.layer_idx)
        out = self._attend(q, k, v, call).transpose(1, 2)  # [B, S, heads/T, D]
        shape = (B, S, -1) if call.tokens is None else (B * S, -1)
        return self.o_proj(out.reshape(*shape)), None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind = call.wiring.layer_types[self.layer_idx]
        options: Options = {"scale": self.scaling, **self._dropout(q, call)}
        if not call.sequences:
            visible = call.visible[kind]
            return attention(
                q,
                k,
                v,
                visible.mask,
                query_positions=visible.queries,
                key_positions=visible.keys,
                **options,
            )
        sequence = call.sequences[kind]
        return ring_attention(
            q,
            k,
            v,
            sequence.mask,
            sequence.layout,
            call.wiring.axes.cp,
            strategy=sequence.strategy,
            check=self.layer_idx == 0,  # all layers ask for the same
            **options,
        )

    def _dropout(self, q: Tensor, call: Call) -> Options:
        if call.draw is None or not self.training or self.attention_dropout == 0:
            return {}
        return {
            "dropout_p": self.attention_dropout,
            "seed": call.draw.of(f"layers.{self.layer_idx}").seed,
            "first_batch": call.draw.first_sequence,
            "first_head": call.wiring.axes.tp.rank * q.size(1),
        }


class DecoderLayer(Derived):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    if TYPE_CHECKING:
        self_attn: nn.Module
        mlp: nn.Module
        input_layernorm: nn.Module
        post_attention_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, call: Call) -> Tensor:
        """hidden_states: [B, S, H], or this rank's [N/T, H]. Returns the same."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), call)
        # Added and normalised in one pass. Under autocast what is added comes in its dtype.
        normalized, hidden_states = self.post_attention_layernorm(
            attended.to(hidden_states.dtype), hidden_states
        )
        y: Tensor = hidden_states + self.mlp(normalized, call.tokens)
        return y


# ---------------------------------------------------------------- the models

# What callers may say that is said already, or is about speed only.
_IGNORED = {"max_length_q", "max_length_k", "cu_seq_lens_k", "cache_position"}
_SERVED = {"output_hidden_states", "output_attentions", "return_dict", "cu_seq_lens_q"}


def _require_known(arguments: Mapping[str, object]) -> None:
    unknown = [
        name for name, value in arguments.items() if value is not None and name not in _SERVED | _IGNORED
    ]
    if unknown:
        raise UsageError(f"{unknown}: not served here; report.undo() gives the model its own forward back")


class Model(Derived):
    """The base model: embedding, layers and the last norm."""

    if TYPE_CHECKING:
        embed_tokens: nn.Module
        layers: nn.ModuleList
        norm: nn.Module
        paracore: Wiring
        training: bool
        gradient_checkpointing: bool

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: object = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        _whole: bool = True,
        **kwargs: Any,
    ) -> Any:
        """As the model's own. Every rank of cp and tp is given the same whole sequences [B, S].

        attention_mask may also be a `paracore.masks` mask. In training keys and values are cached only where
        use_cache=True asks for it. Returns hidden states of all tokens, on every rank.
        """
        call, x = self._begin(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, kwargs
        )
        states = []
        for number, layer in enumerate(self.layers[: len(call.wiring.layer_types)]):
            if kwargs.get("output_hidden_states"):
                states.append(whole(x, call))
            with trace.range("paracore.decoder.layer", number):
                x = layer(x, call)
        x = self.norm(x)
        if kwargs.get("output_hidden_states"):
            states.append(whole(x, call))
        output = BaseModelOutputWithPast(
            last_hidden_state=whole(x, call) if _whole else x,
            cache=call.cache,
            hidden_states=tuple(states) or None,
        )
        if not _whole:
            return output, call
        return output if _returns_dict(self, kwargs) else output.to_tuple()

    def _begin(
        self,
        input_ids: Tensor | None,
        attention_mask: object,
        position_ids: Tensor | None,
        cache: Any,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        kwargs: Mapping[str, Any],
    ) -> tuple[Call, Tensor]:
        """Return what the layers must know, and their input."""
        _require_known(kwargs)
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise UsageError("input_ids and inputs_embeds: exactly one of them must be given")
        if kwargs.get("output_attentions"):
            raise UsageError("output_attentions=True: the weights of fused attention never exist")
        wiring, (B, S) = self.paracore, given.shape[:2]
        continues, cache = cache is not None, self._cache(cache, use_cache)
        positions = rotary_positions(position_ids, kwargs.get("cu_seq_lens_q"), B, S, cache, given.device)
        visible = visible_by_type(
            wiring.windows,
            attention_mask,
            None if continues else position_ids,  # behind earlier keys they tell nothing of documents
            kwargs.get("cu_seq_lens_q"),
            B,
            S,
            cache,
            given.device,
        )
        layout, sequences = _over_cp(wiring, visible, S)
        if layout is not None:
            places = layout.ranks[wiring.axes.cp.rank].tensor(given.device)
            given, positions = given.index_select(1, places), positions.index_select(-1, places)
        B, S = given.shape[:2]
        x = self._embed(given) if inputs_embeds is None else _cut(given, wiring)
        cos, sin = _tables(positions, wiring, accumulation_dtype(x.dtype))
        rows = torch.arange(positions.numel(), device=given.device)
        call = Call(
            size=(B, S),
            tokens=B * S if wiring.cuts_tokens else None,
            cos=cos,
            sin=sin,
            rows=rows if positions.dim() == 2 else rows.repeat(B),
            visible=visible,
            sequences=sequences,
            layout=layout,
            cache=cache,
            draw=self._draw(B, given.device),
            wiring=wiring,
        )
        return call, x

    def _embed(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S]. Returns hidden states as the layers have them."""
        x: Tensor = self.embed_tokens(tokens.reshape(-1) if self.paracore.cuts_tokens else tokens)
        return x

    def _cache(self, cache: Any, use_cache: bool | None) -> Any:
        """Return the cache that the layers read and fill, or None."""
        config: Any = self.config  # type: ignore[attr-defined]
        checkpoints = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        wanted = (config.use_cache and not self.training) if use_cache is None else use_cache
        wanted = cache is not None or (wanted and not checkpoints)
        if not wanted or (use_cache is None and cache is None and self.paracore.axes.cp.size > 1):
            return None
        if self.paracore.axes.cp.size > 1:
            raise UsageError(
                f"use_cache=True over cp={self.paracore.axes.cp.size} ranks: a cache lies on one rank of cp"
            )
        return DynamicCache(config=config) if cache is None else cache

    def _draw(self, batch: int, device: torch.device) -> DropoutDraw | None:
        """Return a draw of dropout, from torch's generator; the same on all ranks of cp and tp."""
        config: Any = self.config  # type: ignore[attr-defined]
        if not self.training or not config.attention_dropout:
            return None
        axes, seed = self.paracore.axes, torch.randint(1 << 62, (1,))
        for axis in (axes.cp, axes.tp):
            if axis.size > 1:
                seed = gather_list(seed.to(device), axis, [1] * axis.size, 0)[0]
        return DropoutDraw(int(seed), axes.dp.rank * batch)


def _over_cp(
    wiring: Wiring, visible: Mapping[str, Visible], length: int
) -> tuple[Layout | None, dict[str, SequenceContext]]:
    """Return how sequences lie over cp, and what each type of layer attends by; nothing over one rank."""
    if wiring.axes.cp.size == 1:
        return None, {}
    first = next(iter(visible.values()))
    layout = parse_layout(wiring.layout)(first.mask, length, wiring.axes.cp.size)
    return layout, {
        kind: SequenceContext(layout, seen.mask, wiring.strategy) for kind, seen in visible.items()
    }


def _tables(positions: Tensor, wiring: Wiring, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [rows, D/2] each."""
    frequencies = wiring.frequencies.to(positions.device)
    cos, sin = rotary_tables(positions.reshape(-1), frequencies)
    return (cos * wiring.magnitude).to(dtype), (sin * wiring.magnitude).to(dtype)


def _cut(x: Tensor, wiring: Wiring) -> Tensor:
    """[B, S, H] -> hidden states as the layers have them."""
    return scatter_to(x.flatten(0, 1), wiring.axes.tp, 0) if wiring.cuts_tokens else x


def whole(x: Tensor, call: Call) -> Tensor:
    """Hidden states as the layers have them -> those of all tokens, [B, S, H], on every rank."""
    tp, cp = call.wiring.axes.tp, call.wiring.axes.cp
    if call.tokens is not None:
        x = gather_from(x, tp, 0, call.tokens).view(*call.size, -1)
    return x if call.layout is None else call.layout.unshard(x, cp, 1)


def _returns_dict(model: Any, kwargs: Mapping[str, Any]) -> bool:
    wanted = kwargs.get("return_dict")
    return bool(getattr(model.config, "return_dict", True) if wanted is None else wanted)


class ForCausalLM(Derived):
    """The language model: the base model, the LM head and the loss."""

    if TYPE_CHECKING:
        model: nn.Module
        lm_head: nn.Module
        training: bool

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: object = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> Any:
        """As the model's own. Every rank of cp and tp is given the same whole sequences, [B, S].

        labels: [B, S] int64, of which each token's is the next; or shift_labels, of which it is its own. The
        loss is the mean over the labels of all ranks of dp and cp; with num_items_in_batch their sum divided
        by that. In training with labels no logits are returned: they never exist as a whole. Else they are
        those of all tokens, or of the last `logits_to_keep`, on every rank.
        """
        has_labels = labels is not None or shift_labels is not None
        if has_labels and (isinstance(logits_to_keep, Tensor) or logits_to_keep != 0):
            raise UsageError(f"logits_to_keep={logits_to_keep} with labels: the loss needs all tokens, so 0")
        outputs, call = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cache,
            inputs_embeds,
            use_cache=use_cache,
            _whole=False,
            **kwargs,
        )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        if has_labels:
            shifted = _next(labels, ignore_index) if shift_labels is None else shift_labels
            loss = self._loss(hidden, shifted, call, num_items_in_batch, ignore_index)
        if not has_labels or not self.training:
            logits = self._logits(hidden, call, logits_to_keep)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )
        return output if _returns_dict(self, kwargs) else output.to_tuple()

    def _loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        call: Call,
        valid: Tensor | int | None,
        ignore_index: int,
    ) -> Tensor:
        """labels: [B, S], of the whole sequences."""
        axes, head = call.wiring.axes, self.lm_head
        if labels.dim() != 2 or labels.dtype != torch.int64:
            raise UsageError(f"labels are {labels.dtype} {list(labels.shape)}, must be torch.int64 [B, S]")
        labels = labels.to(hidden.device)
        if call.layout is not None:
            labels = call.layout.shard(labels, axes.cp.rank, 1)
        labels = labels if call.tokens is None else labels.reshape(-1)
        objective = Objective(self.config.vocab_size, ignore_index)  # type: ignore[attr-defined]
        over = [axes.data]
        if isinstance(head, LMHead):
            total, labels = head.sum_of_losses(hidden, labels, objective)
            over += [axes.tp] if head.cuts_tokens else []
        else:
            total = sum_of_losses(
                hidden, head.get_parameter("weight"), labels, objective, MeshAxis.alone("tp")
            )
        valid = valid if valid is None else torch.as_tensor(valid, device=hidden.device)
        loss = reduce_losses(total, labels, "mean", over, ignore_index, valid)
        return loss.to(accumulation_dtype(hidden.dtype))

    def _logits(self, hidden: Tensor, call: Call, keep: int | Tensor) -> Tensor:
        """Return the logits of all tokens, [B, S, V], or of those to keep."""
        every = isinstance(keep, int) and keep == 0
        # A token's logits cost much more than its hidden state. Over cp a head must see its own tokens only.
        if not every and call.layout is None:
            kept = _kept(whole(hidden, call), keep)
            B, S = kept.shape[:2]
            return self._head(_cut(kept, call.wiring), B * S, call.wiring).view(B, S, -1)
        logits = self._head(hidden, math.prod(call.size), call.wiring).view(*call.size, -1)
        if call.layout is not None:
            logits = call.layout.unshard(logits, call.wiring.axes.cp, 1)
        return logits if every else _kept(logits, keep)

    def _head(self, hidden: Tensor, tokens: int, wiring: Wiring) -> Tensor:
        """hidden: as the layers have them, of `tokens` tokens. Returns logits [..., V]."""
        logits: Tensor = self.lm_head(hidden, tokens) if wiring.cuts_tokens else self.lm_head(hidden)
        return logits


def _next(labels: Tensor | None, ignore_index: int) -> Tensor:
    """Return the label of each token: the next one's."""
    if labels is None or labels.dim() != 2:
        raise UsageError(f"labels are {None if labels is None else list(labels.shape)}, must be [B, S]")
    return F.pad(labels[:, 1:], (0, 1), value=ignore_index)


def _kept(x: Tensor, keep: int | Tensor) -> Tensor:
    return x[:, -keep:] if isinstance(keep, int) else x[:, keep]
