"""Attention with the heads dealt out over the tp axis and the sequence over the cp axis."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from paracore.nn.config import DecoderConfig
from paracore.nn.dropout import Dropout
from paracore.nn.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from paracore.nn.norm import RMSNorm
from paracore.nn.sequence import SequenceContext, require_fitting
from paracore.ops.attention import attention
from paracore.ops.ring_attention import Options, ring_attention
from paracore.ops.rotary import rotary_embedding
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.overlap import Overlap


class GroupedQueryAttention(nn.Module):
    """Attention with grouped key/value heads; each rank computes whole heads of its own.

    Over tp nothing communicates between the two cuts: forward costs one all-reduce (of y), backward one
    (of dx). The q/k norm weights are shared by all heads, so each rank's gradient covers its heads only
    and is summed over tp. With fewer key/value heads than ranks, neighbours hold the same one. With
    sequence_parallel x and y are this rank's S/T tokens, at the cost that `SwiGLU` states.

    Over cp (None: one rank) each rank computes its own tokens; only attention itself communicates.
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
        self.first_head = tp.rank * config.num_heads // tp.size
        self.cp = MeshAxis.alone("cp") if cp is None else cp
        replicas = config.require_tp(tp.size)
        self.head_dim = D = config.query_dim
        query_size, kv_size = config.num_heads * D, config.num_kv_heads * D
        H = config.hidden_size
        cut: dict[str, Any] = {"sequence_parallel": sequence_parallel, "overlap": overlap}
        column = {"bias": config.qkv_bias, **cut}
        self.q_proj = ColumnParallelLinear(H, query_size, tp, seed=0, **column)
        self.k_proj = ColumnParallelLinear(H, kv_size, tp, replicas=replicas, seed=1, **column)
        self.v_proj = ColumnParallelLinear(H, kv_size, tp, replicas=replicas, seed=2, **column)
        self.o_proj = RowParallelLinear(query_size, H, tp, bias=config.output_bias, seed=3, **cut)
        self.q_norm, self.k_norm = (
            RMSNorm(D, eps=config.rms_norm_eps, tp_size=tp.size, partial_gradient=True)
            if config.qk_norm
            else nn.Identity()
            for _ in range(2)
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        sequence: SequenceContext | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """x: [S, B, H], the same on every tp rank; cos, sin: [S, D/2]. Returns [S, B, H] likewise.

        S: the tokens of this rank of cp; with sequence_parallel x and what is returned are [S/T, B, H].
        sequence: causal attention over all of them if None. dropout: of the attention weights.
        """
        require_fitting(sequence, cos.size(0), self.cp)
        projected = column_parallel(x, self.q_proj, self.k_proj, self.v_proj, length=cos.size(0))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [S, B, heads/T, D]
        # Nothing else needs what the norms return. Without norms these are views, and left alone.
        q, k = rotary_embedding(self.q_norm(q), self.k_norm(k), cos, sin, may_overwrite=True)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (q, k, v))  # [B, heads/T, S, D]
        options: Options = {} if dropout is None else dropout.attention("weights", self.first_head)
        context = self._attend(q, k, v, sequence, options)
        y: Tensor = self.o_proj(context.permute(2, 0, 1, 3).flatten(2))  # [S, B, Hq/T * D] -> [S, B, H]
        return y

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceContext | None, options: Options
    ) -> Tensor:
        if sequence is None:
            return attention(q, k, v, **options)
        if self.cp.size == 1:
            return attention(q, k, v, sequence.mask, **options)
        return ring_attention(
            q,
            k,
            v,
            sequence.mask,
            sequence.layout,
            self.cp,
            strategy=sequence.strategy,
            check=sequence.check,
            **options,
        )
