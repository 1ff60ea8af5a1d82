"""The shape of a decoder."""

from __future__ import annotations

import dataclasses
import math

from paracore.errors import UsageError
from paracore.nn.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder of the Llama and Qwen3 families.

    intermediate_size: None means pi * hidden_size, rounded up to a multiple of 64 (the rule of the
        tutorial model whose figures we compare with).
    head_dim: None means hidden_size / num_heads.
    qk_norm: normalise each query and key head (Qwen3 yes, Llama no).
    dropout: of the embedding and of what attention and MLP add, in training; attention_dropout: of the
        weights of attention.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int | None = None
    head_dim: int | None = None
    qk_norm: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    initializer_range: float = 0.02
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "intermediate_size", "head_dim"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UsageError(f"{name}={size}: must be at least 1")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not getattr(self, name) > 0:  # also refuses NaN
                raise UsageError(f"{name}={getattr(self, name)}: must be positive")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least 0 and less than 1")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise UsageError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}; "
                "give head_dim"
            )
        if self.query_dim % 2:
            raise UsageError(f"head_dim={self.query_dim} is odd: rotary embedding turns pairs of dims")

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
        return self.dropout > 0 or self.attention_dropout > 0

    @property
    def query_dim(self) -> int:
        """The dim of one head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def mlp_size(self) -> int:
        """The number of intermediate features of the MLP."""
        if self.intermediate_size is None:
            return math.ceil(math.pi * self.hidden_size / 64) * 64
        return self.intermediate_size

    def require_tp(self, tp_size: int) -> int:
        """Return how many neighbouring ranks share one key/value head; see `key_value_replicas`."""
        return key_value_replicas(self.num_heads, self.num_kv_heads, tp_size)


def key_value_replicas(num_heads: int, num_kv_heads: int, tp_size: int) -> int:
    """Return how many neighbouring ranks of tp share one key/value head.

    Query heads must divide by tp. Key/value heads must either divide by tp (then 1 is returned), or tp by
    them: then each is held by tp / num_kv_heads ranks. Raises UsageError otherwise.
    """
    if num_heads % tp_size:
        raise UsageError(f"num_heads={num_heads} cannot be divided over tp={tp_size} ranks")
    if num_kv_heads % tp_size == 0:
        return 1
    if tp_size % num_kv_heads:
        raise UsageError(
            f"num_kv_heads={num_kv_heads} neither divides nor is divided by tp={tp_size}: "
            "key/value heads can be neither dealt out nor replicated evenly"
        )
    return tp_size // num_kv_heads
