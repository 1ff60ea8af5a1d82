"""The native CPU kernels, compiled from csrc/. Import torch first: its libraries must be loaded.

`capability` selects the instruction set of one call, by a name among `capabilities()`; the default is
the best one. It lets tests run them all; users have no need of it.
"""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from paracore.reference_attention import Terms

class BuildInfo(TypedDict):
    """What the extension was built from: torch's version and the compiler's."""

    torch: str
    compiler: str

def capabilities() -> list[str]:
    """Return the instruction sets that are built and that this processor has, best last."""

def count_threads() -> int:
    """Return the number of threads that take part in a kernel with enough work for all."""

def build_info() -> BuildInfo:
    """Return what the extension was built from."""

def rms_norm_forward(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    *,
    out: Tensor | None = None,
    capability: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + residual, y = weight * h * rstd, rstd = 1 / sqrt(mean(h^2) + eps) over each row.

    x, residual: [rows, D] float32 or bfloat16, any row stride, last dim contiguous; weight: [D]
    float32 or x's dtype. Returns y [rows, D], h [rows, D] (x itself without a residual), rstd [rows]
    float32, taken from h as rounded to x's dtype. `out` is written and returned as y.
    Raises ValueError naming the argument that is otherwise.
    """

def rms_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    out: Tensor | None = None,
    capability: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dx [rows, D], the gradient of x and of the residual alike, and dweight [D] in weight's dtype.

    dy and dh are the gradients that arrive at y and at h, [rows, D] in h's dtype, any row stride, last
    dim contiguous. dweight is summed in float32 in an order that depends on the number of rows alone.
    `out` is written and returned as dx. Raises ValueError naming the argument that is otherwise.
    """

def rms_norm_forward_scratch(hidden: int, weight_dtype: torch.dtype) -> int:
    """Return the bytes that a call takes besides its arguments and results, and gives back."""

def rms_norm_backward_scratch(rows: int, hidden: int, weight_dtype: torch.dtype) -> int:
    """Return the bytes that a call takes besides its arguments and results, and gives back."""

def attention_key_tile() -> int:
    """Return the number of keys in a tile: pieces cut at its multiples give the bits of one pass."""

def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    *,
    capability: str | None = None,
    products: str | None = None,
    **terms: Unpack[Terms],
) -> Tensor:
    """Write the attention of all keys to `out` and return lse, as paracore.reference_attention, whose table
    of shapes and dtypes holds for all five functions.

    float32 or bfloat16, head dims D and Dv from 1 to 256; any strides, but the last dim of all but
    lse, delta and the state's maxima and sums contiguous; sizes may be 0. Nothing of the size Sq x Sk is
    kept, and no bit of a result depends on the number of threads.

    products: how bfloat16 numbers are multiplied; sums are float32. "float32": widened, exactly. "pairs":
    two at a time, for which weights and gradients of logits are rounded to bfloat16; by the instruction
    of AVX512-BF16 where the processor has it, which is then the default, else emulated.
    Raises ValueError naming the argument that is otherwise.
    """

def attention_continue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    acc: Tensor,
    *,
    capability: str | None = None,
    products: str | None = None,
    **terms: Unpack[Terms],
) -> None:
    """Continue the state, in place, with the keys of k. A query that sees none of them keeps every bit."""

def attention_finish(
    row_max: Tensor, row_sum: Tensor, acc: Tensor, out: Tensor, *, capability: str | None = None
) -> Tensor:
    """Write acc / row_sum to `out` and return lse."""

def attention_delta(out: Tensor, dout: Tensor, *, capability: str | None = None) -> Tensor:
    """Return sum(out * dout) over the last dim, [B, Hq, Sq]."""

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
    *,
    capability: str | None = None,
    products: str | None = None,
    **terms: Unpack[Terms],
) -> None:
    """Write the gradients to dq, dk and dv, each in q's dtype or float32, or add them if `accumulate`."""

def attention_forward_scratch(
    dtype: torch.dtype, q: Sequence[int], k: Sequence[int], v: Sequence[int]
) -> tuple[int, int]:
    """Return the bytes that threads take, and keep, for tiles and for sums of dq: two kinds of memory.

    For attention_forward and attention_continue of tensors of `dtype` and these shapes, with as many threads
    as torch has now. It is the most that all threads together may come to; those kept are the largest of all
    calls.
    """

def attention_backward_scratch(
    dtype: torch.dtype, q: Sequence[int], k: Sequence[int], v: Sequence[int], dq_holds_sums: bool
) -> tuple[int, int]:
    """The same for attention_backward. dq_holds_sums: whether dq is float32."""

def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    max_second_moment: Tensor | None,
    master: Tensor | None,
    pieces: Tensor,
    coefficients: Tensor,
    gradient_scale: Tensor,
    draws: Tensor | None,
    zero_gradient: bool,
    *,
    capability: str | None = None,
) -> None:
    """Take AdamW's step in place, in one pass over memory, as paracore.reference_adamw.

    Everything contiguous. parameter, gradient and the moments, which share one dtype: float32 or bfloat16,
    of one length; a master only with a bfloat16 parameter, draws not with an int16 master. The bits are
    those of the reference with a square root that is rounded to nearest, for any capability, number of
    threads and beginning of a piece. Pieces in ascending order are the fastest; that they are disjoint is
    not checked. Raises ValueError naming the argument that is otherwise, and has then written nothing.
    """

def sum_of_squares(gradient: Tensor, pieces: Tensor, *, capability: str | None = None) -> Tensor:
    """Return the sum of squares of each piece, float64 [n], as paracore.reference_adamw.

    gradient: contiguous, float32 or bfloat16. The bits are the same for any capability, number of threads
    and beginning of a piece. Raises ValueError naming the argument that is otherwise.
    """

def cross_entropy_statistics(logits: Tensor, labels: Tensor, *, capability: str | None = None) -> Tensor:
    """Return the statistics of paracore.reference_layers, which defines this and the next five functions.

    All six: float32 or bfloat16, computed in float32; any strides, but the last dim of every tensor
    contiguous; sizes may be 0. No bit of a result depends on the number of threads. Exponentials below
    about 2^-126.5 are 0. They raise ValueError naming the argument that is otherwise.
    """

def cross_entropy_gradient(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    coefficients: Tensor,
    dlogits: Tensor,
    *,
    capability: str | None = None,
) -> None:
    """Write the gradient of the logits to dlogits, which may be the logits; each is walked once."""

def swiglu_forward(
    gate: Tensor, up: Tensor, *, out: Tensor | None = None, capability: str | None = None
) -> Tensor:
    """Return silu(gate) * up. `out`, contiguous, is written and returned; it may be an input."""

def swiglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    capability: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dgate and dup. `out`, both contiguous, are written and returned; they may be inputs."""

def rotate_pair(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    inverse: bool,
    *,
    capability: str | None = None,
) -> None:
    """Write q and k, turned, to q_out and k_out, which may be q and k. Refuses a position without a row."""

def embedding_gradient(
    dy: Tensor, tokens: Tensor, vocab_size: int, *, capability: str | None = None
) -> Tensor:
    """Return the gradient of an embedding's weight."""

def prefault(tensor: Tensor) -> None:
    """Have the system back a large CPU tensor, not written to yet, by memory at once; on Linux alone."""

def embedding_gradient_scratch(tokens: int, vocab_size: int) -> int:
    """Return the bytes that embedding_gradient takes, besides its result, to sort so many tokens."""
