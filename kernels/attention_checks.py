"""What attention's launchers refuse, and in which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paracore.errors import UsageError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256


def check_inputs(q: Tensor, k: Tensor, v: Tensor, terms: Mapping[str, Any]) -> None:
    """Raise UsageError unless q, k, v and the terms fit together as `reference_attention` says."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.dtype not in DTYPES:
            raise UsageError(
                f"{name} is {describe(x)}; expected [B, H, S, D] in one of {', '.join(map(str, DTYPES))}"
            )
        if not 1 <= x.size(3) <= MAX_HEAD_DIM:
            raise UsageError(f"{name} has head dim {x.size(3)}; expected 1 to {MAX_HEAD_DIM}")
        _check_last_stride(name, x)
    B, Hq, Sq, D = q.shape
    Hkv, Sk = k.size(1), k.size(2)
    _check("k", k, [B, Hkv, Sk, D], (q.dtype,), q.device)
    _check("v", v, [B, Hkv, Sk, v.size(3)], (q.dtype,), q.device)
    if (Hkv == 0) != (Hq == 0) or (Hkv and Hq % Hkv):
        raise UsageError(f"q has {Hq} heads and k has {Hkv}; expected k's number to divide q's")
    for name in ("first", "end"):
        _check(name, terms[name], [_batches(terms[name], B), Sq], (torch.int32,), q.device)
    if terms["first"].size(0) != terms["end"].size(0):
        raise UsageError(
            f"first is {describe(terms['first'])} and end {describe(terms['end'])}; expected one shape"
        )
    slopes, dropout_p = terms["alibi_slopes"], terms["dropout_p"]
    if slopes is not None:
        _check("alibi_slopes", slopes, [_batches(slopes, B), Hq], (torch.float32,), q.device)
    if not 0 <= dropout_p < 1:
        raise UsageError(f"dropout_p is {dropout_p}; expected a number in [0, 1)")
    if terms["softcap"] < 0:
        raise UsageError(f"softcap is {terms['softcap']}; expected 0 for none or a positive number")
    if slopes is not None or dropout_p > 0:
        for name, size in (("query_positions", Sq), ("key_positions", Sk)):
            if terms[name] is None:
                raise UsageError(f"{name} is None; ALiBi and dropout need it")
            _check(name, terms[name], [size], (torch.int32,), q.device)


def check_out(out: Tensor, q: Tensor, DV: int) -> None:
    """Raise UsageError unless `out` can hold q's result."""
    if out.dim() != 4 or out.dtype not in DTYPES or not 1 <= DV <= MAX_HEAD_DIM:
        raise UsageError(
            f"out is {describe(out)}; expected [B, H, S, D], D from 1 to {MAX_HEAD_DIM}, in one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    _check("out", out, [*q.shape[:3], DV], (q.dtype,), q.device)
    _check_last_stride("out", out)


def check_sink(sink: Tensor | None, q: Tensor) -> None:
    """Raise UsageError unless there is one logit for each of q's heads, or no sink."""
    if sink is not None:
        _check("sink", sink, [q.size(1)], (torch.float32,), q.device)


def check_state(
    row_max: Tensor, row_sum: Tensor, acc: Tensor, shape: Sequence[int], device: torch.device
) -> None:
    """Raise UsageError unless the state is that of an output of `shape`."""
    for name, x in (("row_max", row_max), ("row_sum", row_sum)):
        _check(name, x, shape[:3], (torch.float32,), device)
        _check_last_stride(name, x)
    if row_sum.stride() != row_max.stride():
        raise UsageError(f"row_sum has strides {row_sum.stride()}; expected row_max's, {row_max.stride()}")
    _check("acc", acc, shape, (torch.float32,), device)
    _check_last_stride("acc", acc)


def check_delta(out: Tensor, dout: Tensor) -> None:
    """Raise UsageError unless both are results of one shape and dtype."""
    check_out(out, out, out.size(-1))
    _check("dout", dout, out.shape, (out.dtype,), out.device)
    _check_last_stride("dout", dout)


def check_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    gradients: Mapping[str, Tensor],
) -> None:
    """Raise UsageError unless backward's arguments fit q, k and v."""
    _check("dout", dout, [*q.shape[:3], v.size(3)], (q.dtype,), q.device)
    _check_last_stride("dout", dout)
    for name, x in (("lse", lse), ("delta", delta)):
        _check(name, x, q.shape[:3], (torch.float32,), q.device)
    for (name, gradient), x in zip(gradients.items(), (q, k, v), strict=True):
        _check(name, gradient, x.shape, (q.dtype, torch.float32), q.device)
        _check_last_stride(name, gradient)


def describe(x: Tensor) -> str:
    """Return dtype, shape and device in words."""
    return f"{x.dtype} of shape {list(x.shape)} on {x.device}"


def _batches(x: Tensor, B: int) -> int:
    return 1 if x.dim() and x.size(0) == 1 else B


def _check(
    name: str, x: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    if list(x.shape) != list(shape) or x.dtype not in dtypes or x.device != device:
        kinds = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise UsageError(f"{name} is {describe(x)}; expected {kinds} of shape {list(shape)} on {device}")


def _check_last_stride(name: str, x: Tensor) -> None:
    if x.numel() and x.size(-1) > 1 and x.stride(-1) != 1:
        raise UsageError(f"{name} has strides {x.stride()}; expected 1 in the last dim")
