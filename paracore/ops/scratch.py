"""Memory that native operations take besides their arguments and results.

A memory tracker follows tensors; what a kernel takes inside of a call is not among them, and with fake
tensors, for which no kernel runs, nothing of it is. So every operation declares it here. Sizes come from the
extension, where the same code allocates; only what the operations allocate in Python is added here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from paracore.errors import UsageError
from paracore.ops import (  # noqa: F401 (some only register their operations)
    adamw,
    attention,
    attention_state,
    cross_entropy,
    embedding,
    rms_norm,
    rotary,
    swiglu,
)
from paracore.ops.implementations import Operation


class Scratch(NamedTuple):
    """Bytes of a call.

    tiles, query_sums: two kinds of memory that threads keep for the next call, so that of several calls the
    largest of each kind counts. temporary: given back when the call ends.
    """

    tiles: int = 0
    query_sums: int = 0
    temporary: int = 0


def scratch_of(operation: OpOverload, arguments: tuple[Any, ...]) -> Scratch:
    """Return the scratch memory of a call with these arguments, and as many threads as torch has now.

    Only shapes, strides and dtypes are looked at: tensors may be fake. Of other libraries' operations nothing
    is known: none. Raises UsageError for an operation of paracore that declares nothing, or whose native
    kernels would not run.
    """
    if operation.namespace != "paracore":
        return Scratch()
    if operation not in DECLARATIONS:
        raise UsageError(f"{operation} declares no scratch memory: add it to paracore.ops.scratch")
    return DECLARATIONS[operation](*arguments)


def _require_native(operation: Operation[Any], impl: str | None, *tensors: Tensor) -> None:
    kernels = operation.choose(impl, *tensors)
    if kernels.__name__ != "paracore._C":
        raise UsageError(
            f"{operation.name}: {kernels.__name__} would run, but scratch memory is known of native kernels "
            "alone: use their dtypes, and leave impl and PARACORE_IMPL unset"
        )


def _copies(*tensors: Tensor) -> int:
    """Bytes of the copies that attention makes of tensors whose last dim is not contiguous."""
    return sum(x.nbytes for x in tensors if x.stride(-1) != 1 and x.size(-1) != 1)


def _row_copies(*tensors: Tensor | None) -> int:
    """Bytes of the copies that rms_norm makes of tensors that are not rows with a contiguous last dim."""
    return sum(x.nbytes for x in tensors if x is not None and not _are_rows(x))


def _are_rows(x: Tensor) -> bool:
    try:
        return x.view(-1, x.size(-1)).stride(-1) == 1
    except RuntimeError:  # the rows do not lie at one stride
        return False


# Arguments of each are those of the operation. A sink's one number per head is left out.


def _rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, impl: str | None) -> Scratch:
    _require_native(rms_norm.OPERATION, impl, x)
    wide = _extension().rms_norm_forward_scratch(x.size(-1), weight.dtype)
    return Scratch(temporary=wide + _row_copies(x, residual))


def _rms_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor, impl: str | None
) -> Scratch:
    _require_native(rms_norm.OPERATION, impl, h)
    sums = _extension().rms_norm_backward_scratch(rstd.numel(), h.size(-1), weight.dtype)
    return Scratch(temporary=sums + _row_copies(dy, dh, h))


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Scratch:
    _require_native(attention.OPERATION, rest[-1], q, v)
    tiles, query_sums = _extension().attention_forward_scratch(q.dtype, q.shape, k.shape, v.shape)
    return Scratch(tiles, query_sums, _copies(q, k, v))


def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> Scratch:
    _require_native(attention.OPERATION, rest[-1], q, v)
    tiles, query_sums = _extension().attention_backward_scratch(
        q.dtype, q.shape, k.shape, v.shape, q.dtype == torch.float32
    )
    # delta is of lse's size, and so are the two terms of a sink's gradient.
    return Scratch(tiles, query_sums, _copies(dout, q, k, v) + lse.nbytes * (1 if sink is None else 3))


def _attention_backward_in_place(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, *rest: Any
) -> Scratch:
    _require_native(attention.OPERATION, rest[-1], q, v)
    tiles, query_sums = _extension().attention_backward_scratch(
        q.dtype, q.shape, k.shape, v.shape, dq.dtype == torch.float32
    )
    return Scratch(tiles, query_sums, _copies(dout, q, k, v))


def _attention_delta(out: Tensor, dout: Tensor, impl: str | None) -> Scratch:
    _require_native(attention.OPERATION, impl, out, out)
    return Scratch(temporary=_copies(out, dout))


def _cross_entropy(logits: Tensor, *rest: Any) -> Scratch:
    _require_native(cross_entropy.OPERATION, rest[-1], logits)
    return Scratch()


def _swiglu(gate: Tensor, up: Tensor, impl: str | None) -> Scratch:
    _require_native(swiglu.OPERATION, impl, gate)
    return Scratch()


def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, impl: str | None) -> Scratch:
    _require_native(swiglu.OPERATION, impl, gate)
    return Scratch(temporary=_copies(dy))


def _rotate_pair(q: Tensor, k: Tensor, *rest: Any) -> Scratch:
    _require_native(rotary.OPERATION, rest[-1], q)
    return Scratch(temporary=_copies(q, k))


def _rotate_pair_in_place(q: Tensor, k: Tensor, *rest: Any) -> Scratch:
    _require_native(rotary.OPERATION, rest[-1], q)
    return Scratch()


def _embedding(tokens: Tensor, weight: Tensor, impl: str | None) -> Scratch:
    # Which tokens lie outside, and where the others lie.
    return Scratch(temporary=tokens.nbytes + 3 * tokens.numel() * torch.bool.itemsize)


def _embedding_gradient(dy: Tensor, tokens: Tensor, vocab_size: int, impl: str | None) -> Scratch:
    _require_native(embedding.OPERATION, impl, dy)
    order = _extension().embedding_gradient_scratch(tokens.numel(), vocab_size)
    return Scratch(temporary=order + _copies(dy))


def _nothing(*_: Any) -> Scratch:
    return Scratch()


def _extension() -> Any:
    from paracore import _C  # not above: the extension need not be built

    return _C


DECLARATIONS: Mapping[OpOverload, Callable[..., Scratch]] = {
    torch.ops.paracore.rms_norm.default: _rms_norm,
    torch.ops.paracore.rms_norm_backward.default: _rms_norm_backward,
    torch.ops.paracore.attention.default: _attention,
    torch.ops.paracore.attention_backward.default: _attention_backward,
    torch.ops.paracore.attention_continue_.default: _attention,
    torch.ops.paracore.attention_backward_.default: _attention_backward_in_place,
    torch.ops.paracore.attention_delta.default: _attention_delta,
    torch.ops.paracore.attention_finish.default: _nothing,
    torch.ops.paracore.cross_entropy_statistics.default: _cross_entropy,
    torch.ops.paracore.cross_entropy_gradient.default: _cross_entropy,
    torch.ops.paracore.cross_entropy_gradient_.default: _cross_entropy,
    torch.ops.paracore.swiglu.default: _swiglu,
    torch.ops.paracore.swiglu_backward.default: _swiglu_backward,
    torch.ops.paracore.rotate_pair.default: _rotate_pair,
    torch.ops.paracore.rotate_pair_.default: _rotate_pair_in_place,
    torch.ops.paracore.embedding.default: _embedding,
    torch.ops.paracore.embedding_gradient.default: _embedding_gradient,
    torch.ops.paracore.adamw_.default: _nothing,
    torch.ops.paracore.sum_of_squares.default: _nothing,
}
