"""`torch.nn.functional.scaled_dot_product_attention`'s signature, served by `attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.ops.attention import attention
from paracore.parallel.masks import Mask, causal, from_boolean, full


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as `torch.nn.functional.scaled_dot_product_attention` has it.

    query: [B, Hq, Sq, D] or [N, Sq, D]; key, value likewise. Causal attention lets query i see keys 0 to i,
    as there. Dropout is random as there: its seed is drawn from torch's default generator of the CPU.
    attn_mask: None, a `paracore.parallel.masks.Mask`, or a boolean tensor [Sq, Sk], [B, Sq, Sk] or
    [B, 1, Sq, Sk], where Sq may be 1 for all queries alike. What each query sees must be an interval; on a
    GPU, looking at it waits. Float masks raise: of these, ALiBi is `attention(..., alibi_slopes=...)`.
    Raises UsageError for what is not supported.
    """
    if is_causal and attn_mask is not None:
        raise UsageError("is_causal=True and attn_mask are both given, must be one of them")
    if query.dim() == 3 and key.dim() == 3 and value.dim() == 3:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        ).squeeze(1)
    if query.dim() == 4 and key.dim() == 4 and query.size(1) != key.size(1) and not enable_gqa:
        raise UsageError(
            f"query has {query.size(1)} heads and key {key.size(1)}: grouped queries need enable_gqa=True"
        )
    mask = causal() if is_causal else _mask(attn_mask, query.size(-2))
    return attention(query, key, value, mask, scale=scale, dropout_p=dropout_p, seed=drawn_seed(dropout_p))


def drawn_seed(dropout_p: float) -> int | None:
    """Return a seed for dropout from torch's default generator of the CPU, if there is dropout."""
    return int(torch.randint(1 << 62, ())) if dropout_p > 0 else None


def _mask(attn_mask: Mask | Tensor | None, queries: int) -> Mask:
    if attn_mask is None:
        return full()
    if isinstance(attn_mask, Mask):
        return attn_mask
    if attn_mask.dtype != torch.bool:
        raise UsageError(f"attn_mask is {attn_mask.dtype}: only boolean masks, and Mask objects, are served")
    if attn_mask.dim() == 4:
        if attn_mask.size(1) != 1:
            raise UsageError(
                f"attn_mask is {list(attn_mask.shape)}, must be the same for all heads: [B, 1, Sq, Sk]"
            )
        attn_mask = attn_mask.squeeze(1)
    if attn_mask.dim() >= 2 and attn_mask.size(-2) == 1:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], queries, -1)
    return from_boolean(attn_mask)
