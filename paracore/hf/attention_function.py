"""The attention function behind transformers' interface: its arguments, brought to those of `attention`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from paracore.errors import UsageError
from paracore.ops.attention import attention
from paracore.ops.implementations import dtype_name
from paracore.ops.scaled_dot_product_attention import drawn_seed
from paracore.parallel.masks import Mask, causal, documents, from_boolean, full, intervals, require
from paracore.parallel.masks import sliding_window as window

# What callers, collators and trainers hand to every model: of no use to decoders, or said already.
OF_NO_USE = frozenset(
    {
        "cache_position",
        "max_length_k",
        "max_length_q",
        "mm_token_type_ids",
        "num_items_in_batch",
        "seq_idx",
        "token_type_ids",
    }
)
# What models hand through to their attention besides, although it is not its business, or is in the mask.
_NO_CONCERN = OF_NO_USE | {
    "deterministic",
    "labels",
    "layer_idx",
    "logits_to_keep",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}

_WHY_REFUSED = {
    "cache": "a paged cache is not served",
    "head_mask": "weights of heads are not served",
    "output_attentions": 'its weights never exist here. Use attn_implementation="eager" to see them',
    "position_bias": "a bias for each query and key is not served",
}

_CAUSAL, _FULL = causal(), full()


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; returns out [B, Sq, Hq, Dv], contiguous, and no weights.

    query: [B, Hq, Sq, D]; key: [B, Hkv, Sk, D]; value: [B, Hkv, Sk, Dv]; see `paracore.attention`.
    attention_mask: what our mask function returned; or a `Mask` over the indices of keys; or what a caller
    gave the model, [B or 1, 1, Sq or 1, Sk]: boolean, or float with 0 where a key is seen and the dtype's
    minimum or -inf where not. On a GPU, looking at a mask of the caller's waits for it. Without a mask,
    `is_causal`, else the module's own, decides, and `sliding_window` keys up to the query's are seen.
    softcap: of the scores. s_aux: [Hq], logits of attention sinks. dropout: its seed is drawn from torch's
    default generator of the CPU. cu_seq_lens_q, cu_seq_lens_k: where packed sequences begin and end, for a
    batch of one; both the same.
    Raises UsageError for what is not supported, and for arguments that are not known.
    """
    for name, given in others.items():
        if name not in _NO_CONCERN and given is not None and given is not False:
            why = _WHY_REFUSED.get(name, "paracore's attention does not know it, and must not ignore it")
            raise UsageError(f"{name} was given to attention: {why}")
    mask = _mask(module, query, key, attention_mask, is_causal, sliding_window)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        mask = _within_sequences(mask, cu_seq_lens_q, cu_seq_lens_k, query, key)
    out = attention(
        query,
        key,
        value,
        mask,
        scale=scaling,
        softcap=softcap or 0.0,
        sink=s_aux,
        dropout_p=dropout,
        seed=drawn_seed(dropout),
    )
    return out.transpose(1, 2).contiguous(), None


def _mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Mask | Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Mask:
    if isinstance(attention_mask, Mask):
        return attention_mask
    if isinstance(attention_mask, Tensor):
        return _kept_mask_of(attention_mask, query, key)
    if attention_mask is not None:
        raise UsageError(
            f"attention_mask is a {type(attention_mask).__name__}, must be a tensor, a Mask or None"
        )
    Sq, Sk = query.size(2), key.size(2)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and sliding_window < Sk and not (is_causal and Sq == Sk):
        raise UsageError(
            f"sliding_window={sliding_window} for {Sq} queries and {Sk} keys: without an attention_mask it "
            "must be causal self-attention"
        )
    if not is_causal or Sq == 1:
        return _FULL
    if Sq != Sk:
        raise UsageError(
            f"attention_mask=None for causal attention of {Sq} queries and {Sk} keys: it must say where the "
            f"queries lie"
        )
    return _CAUSAL if sliding_window is None else window(sliding_window - 1, 0)


# ---------------------------------------------------------------- masks in tensors

# All layers of a model get the same tensor: it is looked at once, as long as nobody writes to it.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _kept_mask_of(tensor: Tensor, query: Tensor, key: Tensor) -> Mask:
    if torch.compiler.is_compiling() or tensor.is_inference() or _capturing(tensor):
        return mask_of(tensor, query.size(0), query.size(2), key.size(2))
    sizes = query.size(0), query.size(2), key.size(2)
    state = (tensor._version, *sizes)
    if tensor not in _kept or _kept[tensor][0] != state:
        _kept[tensor] = state, mask_of(tensor, *sizes)
    mask: Mask = _kept[tensor][1]
    return mask


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def mask_of(tensor: Tensor, B: int, Sq: int, Sk: int) -> Mask:
    """Return the mask over indices of B sequences of Sq queries and Sk keys that a 4-dimensional tensor says.

    See `attention_function`. Raises UsageError for other tensors, and for what a mask cannot be.
    """
    ours = tensor.dtype == torch.int32
    rows, heads, queries, last = tensor.shape if tensor.dim() == 4 else (0, 0, 0, 0)
    if rows not in (1, B) or heads != 1 or queries not in (1, Sq) or last != (2 if ours else Sk):
        raise UsageError(
            f"attention_mask is {dtype_name(tensor.dtype)} {list(tensor.shape)}, must be bool or float "
            f"[{B}, 1, {Sq}, {Sk}], the same for all heads"
        )
    if ours:
        first, end = tensor[:, 0].unbind(-1)
        return intervals(first.clone(), end.clone())  # views would keep what they are kept for alive
    return from_boolean(_visible(tensor)[:, 0].expand(-1, Sq, -1))


def _visible(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point() or mask.requires_grad:
        raise UsageError(
            f"attention_mask is {dtype_name(mask.dtype)}, must be bool or float without a gradient"
        )
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    other = ~(visible | hidden)
    if other.any():
        where = other.nonzero()[0].tolist()
        raise UsageError(
            f"attention_mask{where} is {mask[tuple(where)].item()}: must be 0, or the minimum of its dtype: "
            "other biases are not served"
        )
    return visible


# ---------------------------------------------------------------- packed sequences


def _within_sequences(
    mask: Mask, first: Tensor | None, second: Tensor | None, query: Tensor, key: Tensor
) -> Mask:
    if first is None or second is None:
        raise UsageError("cu_seq_lens_q and cu_seq_lens_k must be given both, or neither")
    if query.size(0) != 1 or query.size(2) != key.size(2):
        raise UsageError(
            f"cu_seq_lens_q is given for a batch of {query.size(0)} with {query.size(2)} queries and "
            f"{key.size(2)} keys each: must be a batch of 1 with as many queries as keys"
        )
    if torch.compiler.is_compiling() or first.is_inference() or second.is_inference() or _capturing(first):
        return _intersect(mask, first, second)
    return _kept_intersection(mask, first, second, first._version, second._version)


def _intersect(mask: Mask, first: Tensor, second: Tensor, *_: int) -> Mask:
    require_same_boundaries(first, second)
    return mask & documents(first)


def require_same_boundaries(queries: Tensor, keys: Tensor) -> None:
    """Raise UsageError unless packed sequences begin and end where those of their keys do."""
    if queries is keys:
        return
    if queries.shape != keys.shape:
        raise UsageError(
            f"cu_seq_lens_q is {list(queries.shape)}, but cu_seq_lens_k {list(keys.shape)}: must be the same"
        )
    require((queries == keys).all(), "cu_seq_lens_q and cu_seq_lens_k must be the same")


_kept_intersection = functools.lru_cache(maxsize=8)(_intersect)  # the same in every layer of a model
