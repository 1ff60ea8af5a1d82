"""What the kernels of cross entropy, SwiGLU, rotary embedding and the embedding's gradient compute.

The contract of every implementation, and the implementation in plain torch: right in float64, and holding no
more than a few MiB of intermediates. N is a number of tokens. "float32" means float32 or better: float64
where the input is float64. Unless said otherwise the last dim of a tensor is contiguous, the others are not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paracore.chunks import chunks
from paracore.reference import accumulation_dtype


def cross_entropy_statistics(logits: Tensor, labels: Tensor) -> Tensor:
    """Return of each token, over the V columns that this shard of the vocabulary has, [4, N] float32:

    0. the maximum m of the logits, -inf for V = 0;
    1. the sum of exp(logit - m), 0 where m is -inf;
    2. the logit of its label, 0 for a label that is not among the columns 0 to V - 1;
    3. the sum of (logit - m): -inf where a logit is, 0 for V = 0.

    logits: [N, V]; labels: [N] int64, counted from the shard's first column. Kernels read the logits once
    (Milakov & Gimelshein 2018, algorithm 3): where the running maximum rises by d, the fourth falls by d for
    each logit so far. It is taken from the maximum so that large logits do not drown their differences.
    """
    size, dtype = logits.size(-1), accumulation_dtype(logits.dtype)
    statistics = logits.new_zeros(4, len(labels), dtype=dtype)
    statistics[0].fill_(float("-inf"))
    for (rows,) in chunks(labels.shape, size * dtype.itemsize) if size else ():
        x = _exact_copy(logits[rows], dtype)
        columns, inside = _columns(labels[rows], size)
        maximum, at_label = x.amax(-1), x.gather(-1, columns).squeeze(-1).masked_fill_(~inside, 0.0)
        nothing = maximum == float("-inf")
        shifted = x.sub_(maximum.masked_fill(nothing, 0.0).unsqueeze(-1))
        off = shifted.sum(-1)
        statistics[:, rows] = torch.stack([maximum, shifted.exp_().sum(-1), at_label, off])
    return statistics


def cross_entropy_gradient(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    coefficients: Tensor,
    dlogits: Tensor,
) -> None:
    """Write a * softmax - b * onehot(label) - c to dlogits, for each token's coefficients a, b, c.

    logits, dlogits: [N, V] of one dtype; dlogits may be logits itself. labels: as above. maximum, log_sum:
    [N] float32, of the whole vocabulary; the softmax is exp((logit - maximum) - log_sum), in this order: the
    sum of the two would be as inexact as a large maximum. coefficients: [3, N] float32, contiguous. A token
    whose coefficients are all 0 gets zeros, whatever its logits are.
    """
    size, dtype = logits.size(-1), accumulation_dtype(logits.dtype)
    for (rows,) in chunks(labels.shape, size * dtype.itemsize) if size else ():
        x = _exact_copy(logits[rows], dtype)
        softmax, at_label, everywhere = coefficients[:, rows].unsqueeze(-1)
        x.sub_(maximum[rows].unsqueeze(-1)).sub_(log_sum[rows].unsqueeze(-1)).exp_().mul_(softmax)
        columns, inside = _columns(labels[rows], size)
        x.scatter_add_(-1, columns, -at_label * inside.unsqueeze(-1)).sub_(everywhere)
        unused = (coefficients[:, rows] == 0).all(0).unsqueeze(-1)
        dlogits[rows] = x.masked_fill_(unused, 0.0)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, [N, I] contiguous (Shazeer 2020). gate, up: [N, I] of one dtype."""
    y, dtype = torch.empty_like(gate, memory_format=torch.contiguous_format), accumulation_dtype(gate.dtype)
    for index in chunks(gate.shape, dtype.itemsize):
        y[index] = F.silu(gate[index].to(dtype)).mul_(up[index].to(dtype))
    return y


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return dgate and dup, [N, I] contiguous. dy, gate, up: [N, I] of one dtype.

    With s = sigmoid(gate): dgate = dy * up * s * (1 + gate * (1 - s)), dup = dy * gate * s.
    """
    dgate, dup = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    dtype = accumulation_dtype(gate.dtype)
    for index in chunks(gate.shape, dtype.itemsize):
        g, u, d = (tensor[index].to(dtype) for tensor in (gate, up, dy))
        s = torch.sigmoid(g)
        dgate[index] = d * u * s * (1 + g * (1 - s))
        dup[index] = d * g * s
    return dgate, dup


def rotate_pair(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    inverse: bool,
) -> None:
    """Write q and k, turned by the angles of their positions, to q_out and k_out (Su et al. 2021).

    q: [S, B, Hq, D], k: [S, B, Hk, D], of one dtype, D even; q_out and k_out likewise, and they may be q and
    k themselves. cos, sin: [P, D/2] float32, contiguous, a row for each position that occurs; positions:
    [S, B] int64, rows of these, any strides. Dims are paired as (i, i + D/2), as Llama and Qwen do: first *
    cos - second * sin, and second * cos + first * sin. inverse: turn back, which is the gradient.
    """
    for x, out in ((q, q_out), (k, k_out)):
        dtype = accumulation_dtype(x.dtype)
        for (rows,) in chunks(x.shape[:1], x[:1].numel() * dtype.itemsize):
            c, s = (table[positions[rows]].unsqueeze(-2) for table in (cos, sin))  # [S, B, 1, D/2]
            first, second = x[rows].to(dtype).chunk(2, -1)
            s = -s if inverse else s
            out[rows] = torch.cat([first * c - second * s, second * c + first * s], -1)


def embedding_gradient(dy: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the gradient of an embedding's weight, [vocab_size, H] in dy's dtype.

    dy: [N, H]; tokens: [N] int64; those outside 0 to vocab_size - 1 add nothing. Each row is summed in
    float32 in an order that the tokens alone decide: the same bits in every run, on any number of threads.
    Here a matrix of that size is held in float32 besides.
    """
    dtype = accumulation_dtype(dy.dtype)
    total = dy.new_zeros(vocab_size + 1, dy.size(-1), dtype=dtype)  # the last row takes the tokens outside
    order = torch.where((tokens >= 0) & (tokens < vocab_size), tokens, vocab_size)
    for (rows,) in chunks(tokens.shape, dy.size(-1) * dtype.itemsize):
        if dy.is_cuda:  # it sorts, where index_add_ adds atomically
            total.index_put_((order[rows],), dy[rows].to(dtype), accumulate=True)
        else:  # in order, where index_put_ adds in parallel
            total.index_add_(0, order[rows], dy[rows].to(dtype))
    return total[:vocab_size].to(dy.dtype)


def _exact_copy(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy to compute in; contiguous, so that sums do not depend on the logits' strides."""
    return logits.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _columns(labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label, any for those outside the shard, [N, 1]; and which are inside, [N]."""
    return labels.clamp(0, size - 1).unsqueeze(-1), (labels >= 0) & (labels < size)
