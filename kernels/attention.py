"""Attention that continues a running state, forward and backward: what `reference_attention` defines.

Its names, arguments and formulas are this module's; dtypes are bf16, fp16 and fp32, head dims at most 256.
Tensors may have any strides except in the last dim, which must be contiguous. Sums are taken in float32 and
in an order that shapes alone decide, so the same inputs give the same bits on every run, and keys given in
several pieces, cut between tiles, give the bits that they give in one.

| file | holds |
|---|---|
| attention_ranges | which tiles a program walks |
| attention_forward, attention_backward | the kernels |
| attention_tiles | what they share |
| attention_configurations | sizes of tiles, per architecture |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paracore.kernels.attention_backward import (
    attention_backward_key_kernel,
    attention_backward_query_kernel,
    attention_delta_kernel,
)
from paracore.kernels.attention_checks import (
    check_backward,
    check_delta,
    check_inputs,
    check_out,
    check_sink,
    check_state,
)
from paracore.kernels.attention_configurations import (
    ROW_WARPS,
    Blocks,
    choose_blocks,
    configurations,
    head_dim_constants,
    head_dim_parts,
    row_tile,
)
from paracore.kernels.attention_forward import attention_finish_kernel, attention_forward_kernel
from paracore.kernels.attention_ranges import ranges_of_keys, ranges_of_queries
from paracore.kernels.configuration import target_of
from paracore.reference_attention import LOG2_E, Terms, dropout_threshold

__all__ = [
    "attention_backward",
    "attention_continue",
    "attention_delta",
    "attention_finish",
    "attention_forward",
    "configurations",
]

# Of the keys and values, or queries and gradients, that programs running side by side read again and again.
CACHE_BYTES = 16 << 20


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, **terms: Unpack[Terms]
) -> Tensor:
    """Write the attention of all keys to `out`, in one pass from a fresh state. Returns lse [B, Hq, Sq].

    terms: `reference_attention.Terms`. Raises UsageError on any other dtype, shape, stride or device.
    """
    check_inputs(q, k, v, terms)
    check_out(out, q, v.size(3))
    check_sink(sink, q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    state = {
        "row_max": None,
        "row_sum": None,
        "acc": None,
        "sink": None if sink is None else sink.contiguous(),
    }
    _launch_forward(q, k, v, terms, {"out": out, "lse": lse} | state)
    return lse


def attention_continue(
    q: Tensor, k: Tensor, v: Tensor, row_max: Tensor, row_sum: Tensor, acc: Tensor, **terms: Unpack[Terms]
) -> None:
    """Continue the state, in place, with the keys of k. Raises UsageError as `attention_forward`."""
    check_inputs(q, k, v, terms)
    check_state(row_max, row_sum, acc, [*q.shape[:3], v.size(3)], q.device)
    if k.size(2) == 0:
        return
    state = {"row_max": row_max, "row_sum": row_sum, "acc": acc}
    _launch_forward(q, k, v, terms, {"out": None, "lse": None, "sink": None} | state)


def attention_finish(row_max: Tensor, row_sum: Tensor, acc: Tensor, out: Tensor) -> Tensor:
    """Write acc / row_sum to `out`. Returns lse [B, Hq, Sq]. Raises UsageError as `attention_forward`."""
    check_state(row_max, row_sum, acc, out.shape, out.device)
    check_out(out, out, out.size(-1))
    B, Hq, Sq, DV = out.shape
    lse = torch.empty(B, Hq, Sq, dtype=torch.float32, device=out.device)
    if out.numel() == 0:
        return lse
    block_d, queries = row_tile(DV)
    with torch.cuda.device_of(out):  # Triton launches on the current device, whatever the tensors' own
        attention_finish_kernel[(B * Hq * triton.cdiv(Sq, queries),)](
            out,
            lse,
            row_max,
            row_sum,
            acc,
            *out.stride()[:3],
            *row_max.stride()[:2],
            *acc.stride()[:3],
            Hq,
            Sq,
            DV=DV,
            BLOCK_D=block_d,
            QUERIES=queries,
            num_warps=ROW_WARPS,
            num_stages=1,
        )
    return lse


def attention_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Return sum(out * dout), [B, Hq, Sq] float32. Raises UsageError as `attention_forward`."""
    check_delta(out, dout)
    B, Hq, Sq, DV = out.shape
    delta = torch.empty(B, Hq, Sq, dtype=torch.float32, device=out.device)
    if out.numel() == 0:
        return delta
    block_d, queries = row_tile(DV)
    with torch.cuda.device_of(out):
        attention_delta_kernel[(B * Hq * triton.cdiv(Sq, queries),)](
            delta,
            out,
            dout,
            *out.stride()[:3],
            *dout.stride()[:3],
            Hq,
            Sq,
            DV=DV,
            BLOCK_D=block_d,
            QUERIES=queries,
            num_warps=ROW_WARPS,
            num_stages=1,
        )
    return delta


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
    **terms: Unpack[Terms],
) -> None:
    """Write the gradients to dq, dk, dv, or add them if `accumulate`.

    dq, dk, dv: shaped as q, k, v; in q's dtype, or float32. Raises UsageError as `attention_forward`.
    """
    check_inputs(q, k, v, terms)
    check_backward(dout, q, k, v, lse, delta, {"dq": dq, "dk": dk, "dv": dv})
    if q.numel() == 0 or k.numel() == 0:  # then nothing is summed
        for gradient in () if accumulate else (dq, dk, dv):
            gradient.zero_()
        return
    first, end, Sk = terms["first"], terms["end"], k.size(2)
    both = _arguments(q, k, v, terms) | {"dout": dout, "lse": lse.contiguous(), "delta": delta.contiguous()}
    both |= _strides("dout", dout) | {"scale": terms["scale"], "ACCUMULATE": accumulate}
    group, units = q.size(1) // k.size(1), k.size(0) * k.size(1)

    more = accumulate or _further_terms(terms)
    blocks = _blocks("backward_query", q, v, more)
    ranges = ranges_of_queries(first, end, Sk, blocks.queries, blocks.keys)
    arguments = both | {"dq": dq} | _strides("dq", dq) | _work(ranges, units, _bytes(k, v))
    arguments |= _descriptors(blocks, k, v)
    _launch(attention_backward_query_kernel, ranges.size(1) * units * group, q, blocks, arguments)

    blocks = _blocks("backward_key", q, v, more)
    ranges = ranges_of_keys(first, end, Sk, blocks.queries, blocks.keys)
    arguments = both | {"dk": dk, "dv": dv} | _strides("dk", dk) | _strides("dv", dv)
    arguments |= _work(ranges, units, group * _bytes(q, dout))
    _launch(attention_backward_key_kernel, ranges.size(1) * units, q, blocks, arguments)


# ---------------------------------------------------------------- launching


def _launch_forward(q: Tensor, k: Tensor, v: Tensor, terms: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Run the forward kernel; `state` holds out, lse, row_max, row_sum, acc and sink."""
    rows, Hkv = q.size(0) * q.size(1), k.size(1)
    if rows * q.size(2) == 0:
        return
    blocks = _blocks("forward", q, v, _further_terms(terms))
    ranges = ranges_of_queries(terms["first"], terms["end"], k.size(2), blocks.queries, blocks.keys)
    statistics = state["row_max"]
    arguments = (
        _arguments(q, k, v, terms) | state | _strides("out", state["out"]) | _strides("acc", state["acc"])
    )
    arguments["state_batch"], arguments["state_head"] = (
        (0, 0) if statistics is None else statistics.stride()[:2]
    )
    arguments |= _work(ranges, q.size(0) * Hkv, _bytes(k, v)) | _descriptors(blocks, k, v)
    _launch(attention_forward_kernel, ranges.size(1) * rows, q, blocks, arguments)


def _blocks(kernel: str, q: Tensor, v: Tensor, more: bool) -> Blocks:
    return choose_blocks(kernel, target_of(q.device), q.dtype, q.size(3), v.size(3), more)


def _further_terms(terms: Mapping[str, Any]) -> bool:
    return terms["softcap"] > 0 or terms["alibi_slopes"] is not None or terms["dropout_p"] > 0


def _arguments(q: Tensor, k: Tensor, v: Tensor, terms: Mapping[str, Any]) -> dict[str, Any]:
    """What the kernels of both directions take."""
    softcap, scale, p = terms["softcap"], terms["scale"], terms["dropout_p"]
    first, end = _by_rows(terms["first"]), _by_rows(terms["end"])
    if first.stride() != end.stride():
        first, end = first.contiguous(), end.contiguous()
    slopes = None if terms["alibi_slopes"] is None else _by_rows(terms["alibi_slopes"])
    positions = {
        name: terms[name].contiguous() if slopes is not None or p > 0 else None
        for name in ("query_positions", "key_positions")
    }
    linear = softcap == 0 and slopes is None and scale > 0  # t = factor * s, and grows with s
    numbers = {
        "Hq": q.size(1),
        "Sq": q.size(2),
        "Sk": k.size(2),
        "mask_batch": _batch_stride(first),
        "slopes_batch": 0 if slopes is None else _batch_stride(slopes),
        "factor": scale / softcap if softcap > 0 else scale * LOG2_E,
        "softcap": softcap * LOG2_E if softcap > 0 else None,
        "keep_inverse": 1 / (1 - p) if p > 0 else None,
        "drop_threshold": _signed(dropout_threshold(p)),
        "seed_low": _signed(terms["seed"]),
        "seed_high": _signed(terms["seed"] >> 32),
        "first_batch": terms["first_batch"],
        "first_head": terms["first_head"],
        "GROUP": q.size(1) // k.size(1),
        "LINEAR": linear,
        "PRECISION": _precision(q),
    }
    tensors = {"q": q, "k": k, "v": v, "first": first, "end": end, "slopes": slopes}
    strides = _strides("q", q) | _strides("k", k) | _strides("v", v)
    return tensors | positions | strides | numbers | head_dim_constants(q.size(3), v.size(3))


def _work(ranges: Tensor, units: int, bytes_per_unit: int) -> dict[str, Any]:
    """What `attention_tiles.place` and `load_ranges` take."""
    at_once = max(1, min(units, CACHE_BYTES // max(1, bytes_per_unit)))
    return {"ranges": ranges, "ranges_batch": _batch_stride(ranges), "units": units, "units_at_once": at_once}


def _descriptors(blocks: Blocks, k: Tensor, v: Tensor) -> dict[str, TensorDescriptor | None]:
    """Descriptors of k's and v's parts, or None where the kernel loads through pointers: the same bits."""
    used = blocks.descriptors and _describable(k) and _describable(v)
    return {
        f"{name}_tiles{suffix}": (
            TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, blocks.keys, part])
            if used and part
            else None
        )
        for name, x in (("k", k), ("v", v))
        for suffix, part in zip(("", "1"), head_dim_parts(x.size(3)), strict=True)
    }


def _describable(x: Tensor) -> bool:
    """Whether a tensor map can describe x: CUDA driver API, cuTensorMapEncodeTiled. 16-bit dtypes only.

    It wants addresses and strides that are multiples of 16 bytes, strides below 2^40 bytes; and no dim empty.
    """
    aligned = all(0 < stride < 2**39 and stride % 8 == 0 for stride in x.stride()[:3])
    sixteen_bit = x.dtype in (torch.bfloat16, torch.float16)
    return sixteen_bit and aligned and x.stride(3) == 1 and x.data_ptr() % 16 == 0 and x.numel() > 0


def _launch(kernel: Any, programs: int, q: Tensor, blocks: Blocks, arguments: dict[str, Any]) -> None:
    if programs == 0:
        return
    with torch.cuda.device_of(q):
        kernel[(programs,)](
            **arguments,
            QUERIES=blocks.queries,
            KEYS=blocks.keys,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def _signed(word: int) -> int:
    """The lowest 32 bits of `word` as a signed number, the one type in which Triton then always takes it."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _precision(q: Tensor) -> str:
    allowed = q.is_cuda and torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def _strides(name: str, x: Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0) if x is None else x.stride()[:3]
    return dict(zip((f"{name}_batch", f"{name}_head", f"{name}_row"), strides, strict=True))


def _batch_stride(x: Tensor) -> int:
    return 0 if x.size(0) == 1 else x.stride(0)


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bytes(x: Tensor, y: Tensor) -> int:
    """Bytes of one head of both."""
    return x.size(2) * (x.size(3) + y.size(3)) * x.element_size()
