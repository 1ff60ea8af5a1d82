"""What takes over the layers of transformers' decoders, in place, over any mesh.

Hidden states are [B, S, H], or with sequence parallelism this rank's part of the N = B * S tokens, [N/T, H]:
what lies between the tensor-parallel regions works on each token by itself, so any cut of the tokens serves.
Along cp a rank holds the tokens of its own positions, and S is how many these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch import Tensor, nn

from paracore.dropin.leaves import is_watched, project
from paracore.dropin.report import Derived
from paracore.dropin.untraced import eagerly
from paracore.hf.batch import Visible
from paracore.nn.dropout import DropoutDraw
from paracore.nn.sequence import SequenceContext
from paracore.ops.attention import attention
from paracore.ops.ring_attention import Options, ring_attention
from paracore.ops.rotary import rotary_embedding
from paracore.parallel.layout import Layout
from paracore.parallel.mesh import TrainingAxes

P = ParamSpec("P")
R = TypeVar("R")


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
    def communicates(self) -> bool:
        """Whether layers, or loss, need other ranks."""
        return any(axis.size > 1 for axis in (self.axes.tp, self.axes.data))

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function, out of torch.compile's sight if it communicates."""
        return eagerly(function, *args, **kwargs) if self.communicates else function(*args, **kwargs)

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

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See `Wiring.run`."""
        return self.wiring.run(function, *args, **kwargs)


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
        layers = self.q_proj, self.k_proj, self.v_proj
        projected = call.run(project, hidden_states, *layers, tokens=call.tokens)
        # Not view(..., -1, D), which cannot tell the heads where this rank of cp has no tokens.
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        q, k, v = (y.flatten(0, -3).unsqueeze(1) for y in (q, k, v))  # [N, 1, heads/T, D]
        if self.normalizes:
            q, k = self.q_norm(q), self.k_norm(k)
        # Nothing else needs what the norms return. Without norms these are views, and left alone.
        q, k = rotary_embedding(q, k, call.cos, call.sin, call.rows, may_overwrite=True)
        q, k, v = (y.view(B, S, *y.shape[2:]).transpose(1, 2) for y in (q, k, v))  # [B, heads/T, S, D]
        if call.cache is not None:
            k, v = call.cache.update(k, v, self.layer_idx)
        out = self._attend(q, k, v, call).transpose(1, 2)  # [B, S, heads/T, D]
        out = out.flatten(2)
        return self.o_proj(out if call.tokens is None else out.flatten(0, 1)), None

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
        out: Tensor = eagerly(
            ring_attention,
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
        return out

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
        attended = attended.to(hidden_states.dtype)  # under autocast it comes in another
        if is_watched(self.post_attention_layernorm):
            hidden_states = hidden_states + attended
            normalized = self.post_attention_layernorm(hidden_states)
        else:  # added and normalised in one pass
            normalized, hidden_states = self.post_attention_layernorm(attended, hidden_states)
        y: Tensor = hidden_states + self.mlp(normalized, call)
        return y
