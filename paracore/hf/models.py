"""What takes over transformers' decoders as a whole, in place, over any mesh: base model, LM head, loss.

Callers give whole sequences, [B, S], the same on every rank of cp and tp, and get what the model itself
would return. See `paracore.hf.layers` for what the layers are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from paracore import trace
from paracore.dropin.leaves import is_watched
from paracore.dropin.report import Derived
from paracore.errors import UsageError
from paracore.hf.attention_function import OF_NO_USE, require_same_boundaries
from paracore.hf.batch import Batch, Visible
from paracore.hf.families import is_plain_head
from paracore.hf.layers import Call, Wiring
from paracore.nn.dropout import DropoutDraw
from paracore.nn.sequence import SequenceContext
from paracore.nn.vocabulary import LMHead
from paracore.ops.cross_entropy import Objective, check_labels, cross_entropy, reduce_losses
from paracore.ops.linear_cross_entropy import sum_of_losses
from paracore.parallel.collectives import gather_from, gather_list, scatter_to
from paracore.parallel.layout import Layout, parse_layout
from paracore.parallel.masks import require
from paracore.parallel.mesh import MeshAxis
from paracore.reference import accumulation_dtype, rotary_tables

_SERVED = {"output_hidden_states", "output_attentions", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k"}


def _require_known(arguments: Mapping[str, object]) -> None:
    unknown = [
        name
        for name, value in arguments.items()
        if value is not None and value is not False and name not in _SERVED | OF_NO_USE
    ]
    if unknown:
        raise UsageError(f"{unknown}: not served here; report.undo() gives the model its own forward back")


def _boundaries(queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """Return where packed documents begin and end, said of queries and maybe of keys: the same of both."""
    if keys is not None:
        if queries is None:
            raise UsageError("cu_seq_lens_k is given without cu_seq_lens_q")
        require_same_boundaries(queries, keys)
    return queries


class _Pretrained(Derived):
    """What the base model and the language model share."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own. Raises UsageError where this rank holds a part of the weights only."""
        if len(args) < 3 and kwargs.get("state_dict") is None and self._holds_parts():
            raise UsageError(
                "save_pretrained(state_dict=None): this rank holds a part of the weights; pass "
                "state_dict=parallel.full_state_dict(), parallel being what parallelize returned"
            )
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def _holds_parts(self) -> bool:
        parameters: Iterable[nn.Parameter] = self.parameters()  # type: ignore[attr-defined]
        base: Any = getattr(self, "model", self)
        return base.paracore.axes.tp.size > 1 or any(isinstance(p, DTensor) for p in parameters)


class Model(_Pretrained):
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
        old_name = kwargs.pop("past_key_values", None)  # of cache, which callers may use until 5.40
        cache = old_name if cache is None else cache
        _require_known(kwargs)
        call, x = self.paracore.run(
            self._begin, input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, kwargs
        )
        states, shows_states = [], _asked(self, "output_hidden_states", kwargs)
        for number, layer in enumerate(self.layers[: len(call.wiring.layer_types)]):
            if shows_states:
                states.append(call.run(whole, x, call))
            with trace.range("paracore.decoder.layer", number):
                x = layer(x, call)
        x = self.norm(x)
        if shows_states:
            states.append(call.run(whole, x, call))
        output = BaseModelOutputWithPast(
            last_hidden_state=call.run(whole, x, call) if _whole else x,
            cache=call.cache,
            hidden_states=tuple(states) or None,
        )
        if not _whole:
            return output, call
        return _in_form(output, self, kwargs)

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
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise UsageError("input_ids and inputs_embeds: exactly one of them must be given")
        if _asked(self, "output_attentions", kwargs):
            raise UsageError("output_attentions=True: the weights of fused attention never exist")
        wiring = self.paracore
        batch = Batch(
            size=(given.size(0), given.size(1)),
            device=given.device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=_boundaries(kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")),
            cache=self._cache(cache, use_cache),
            continues=cache is not None,
        )
        positions = batch.rotary_positions()
        visible = {kind: batch.visible(kind, window) for kind, window in wiring.windows.items()}
        layout, sequences = _over_cp(wiring, visible, given.size(1))
        if layout is not None:
            if inputs_embeds is None:  # one rank alone would find out, and leave the others waiting
                count = self.config.vocab_size  # type: ignore[attr-defined]
                require(((given >= 0) & (given < count)).all(), f"input_ids must be from 0 to {count - 1}")
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
            cache=batch.cache,
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
        cp_size = self.paracore.axes.cp.size
        if cache is not None or use_cache:
            if cp_size > 1:
                raise UsageError(f"use_cache=True over cp={cp_size} ranks: a cache lies on one rank of cp")
            if checkpoints:
                raise UsageError("use_cache=True: layers that backward computes again would fill it twice")
            return DynamicCache(config=config) if cache is None else cache
        by_default = use_cache is None and config.use_cache and not self.training and cp_size == 1
        return DynamicCache(config=config) if by_default else None

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
        x = gather_from(x, tp, 0, call.tokens).view(*call.size, x.size(-1))
    return x if call.layout is None else call.layout.unshard(x, cp, 1)


def _asked(model: Any, name: str, kwargs: Mapping[str, Any], *, default: bool = False) -> bool:
    """Whether a call, or else the config, asks for something; by default where neither says."""
    wanted = kwargs.get(name)
    return bool(getattr(model.config, name, default) if wanted is None else wanted)


def _in_form(output: Any, model: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return an output as it is, or as a tuple where that is asked for."""
    return output if _asked(model, "return_dict", kwargs, default=True) else output.to_tuple()


class ForCausalLM(_Pretrained):
    """The language model: the base model, the LM head and the loss."""

    if TYPE_CHECKING:
        loss_function: Any
        model: nn.Module
        lm_head: nn.Module
        training: bool

    # The names are those of the model's own: trainers take any with "label" for a column of the data.
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
        **kwargs: Any,
    ) -> Any:
        """As the model's own. Every rank of cp and tp is given the same whole sequences, [B, S].

        labels: [B, S] int64, of which each token's is the next; or shift_labels, of which it is its own. The
        loss is the mean over the labels of all ranks of dp and cp; with num_items_in_batch their sum divided
        by that. In training with labels no logits are returned: they never exist as a whole. Else they are
        those of all tokens, or of the last `logits_to_keep`, on every rank.
        """
        valid, ignore_index = kwargs.pop("num_items_in_batch", None), kwargs.pop("ignore_index", -100)
        shift_labels = kwargs.pop("shift_labels", None)
        given = input_ids if inputs_embeds is None else inputs_embeds
        objective = Objective(self.config.vocab_size, ignore_index)  # type: ignore[attr-defined]
        labels = _own_labels(labels, shift_labels, given, objective)
        if labels is not None and self.loss_function.__name__ != "ForCausalLMLoss":
            raise UsageError(
                f"loss_function is {self.loss_function.__name__}, must be transformers' ForCausalLMLoss; "
                "compute another loss from the logits of a call without labels"
            )
        if labels is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep != 0):
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
        if labels is not None:
            loss = call.run(self._loss, hidden, labels, call, objective, valid)
        if labels is None or not self.training:
            logits = call.run(self._logits, hidden, call, logits_to_keep)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )
        return _in_form(output, self, kwargs)

    def _loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        call: Call,
        objective: Objective,
        valid: Tensor | int | None,
    ) -> Tensor:
        """labels: [B, S], of the whole sequences, each token's own."""
        axes, head = call.wiring.axes, self.lm_head
        labels = labels.to(hidden.device)
        if call.layout is not None:
            labels = call.layout.shard(labels, axes.cp.rank, 1)
        labels = labels if call.tokens is None else labels.reshape(-1)
        over = [axes.data]
        if is_watched(head) or not is_plain_head(head):
            logits = self._head(hidden, math.prod(call.size), call.wiring)
            total = cross_entropy(
                logits, labels, ignore_index=objective.ignore_index, reduction="sum"
            ).double()
        elif isinstance(head, LMHead):
            total, labels = head.sum_of_losses(hidden, labels, objective)
            over += [axes.tp] if head.cuts_tokens else []
        else:
            total = sum_of_losses(
                hidden, head.get_parameter("weight"), labels, objective, MeshAxis.alone("tp")
            )
        valid = valid if valid is None else torch.as_tensor(valid, device=hidden.device)
        loss = reduce_losses(total, labels, "mean", over, objective.ignore_index, valid)
        return loss.to(accumulation_dtype(hidden.dtype))

    def _logits(self, hidden: Tensor, call: Call, keep: int | Tensor) -> Tensor:
        """Return the logits of all tokens, [B, S, V], or of those to keep."""
        every = isinstance(keep, int) and keep == 0
        # A token's logits cost much more than its hidden state. Over cp a head must see its own tokens only.
        if not every and call.layout is None:
            kept = _kept(whole(hidden, call), keep)
            B, S = kept.shape[:2]
            logits = self._head(_cut(kept, call.wiring), B * S, call.wiring)
            return logits.view(B, S, logits.size(-1))
        logits = self._head(hidden, math.prod(call.size), call.wiring)
        logits = logits.view(*call.size, logits.size(-1))  # of no tokens too, where -1 could not be told
        if call.layout is not None:
            logits = call.layout.unshard(logits, call.wiring.axes.cp, 1)
        return logits if every else _kept(logits, keep)

    def _head(self, hidden: Tensor, tokens: int, wiring: Wiring) -> Tensor:
        """hidden: as the layers have them, of `tokens` tokens. Returns logits [..., V]."""
        logits: Tensor = self.lm_head(hidden, tokens) if wiring.cuts_tokens else self.lm_head(hidden)
        return logits


def _own_labels(
    labels: Tensor | None, shift_labels: Tensor | None, given: Tensor | None, objective: Objective
) -> Tensor | None:
    """Return the label of each token, [B, S]: the next one's, unless shift_labels says it already."""
    found = labels if shift_labels is None else shift_labels
    if found is None or given is None:
        return None
    if found.dtype != torch.int64 or found.shape != given.shape[:2]:
        raise UsageError(
            f"labels are {found.dtype} {list(found.shape)}, must be torch.int64 {list(given.shape[:2])}"
        )
    check_labels(found, objective)  # whole: of a rank's own it alone would complain, and the others wait
    return F.pad(found[:, 1:], (0, 1), value=objective.ignore_index) if shift_labels is None else found


def _kept(x: Tensor, keep: int | Tensor) -> Tensor:
    return x[:, -keep:] if isinstance(keep, int) else x[:, keep]
