"""Tensors of tokens, [..., D], as the matrices [N, D] that kernels take, not copied where strides allow."""

from __future__ import annotations

from torch import Tensor


class TokenOrder:
    """The order in which `x` [..., D] holds its tokens in memory.

    Taken in that order, tensors like a transposed [B, S, D] are a matrix without a copy. as_given: the order
    of the dims instead, the same on every rank that holds such a tensor.
    """

    def __init__(self, x: Tensor, *, as_given: bool = False) -> None:
        self._shape = x.shape[:-1]
        self._dims = list(range(x.dim() - 1))
        if not as_given and not x.is_contiguous():
            strides = x.stride()
            self._dims.sort(key=lambda dim: -strides[dim])

    def matrix(self, x: Tensor) -> Tensor:
        """Return x [..., D] as [N, D], its last dim contiguous; copied only if it cannot be viewed so."""
        rows = x.permute(*self._dims, -1).reshape(self._shape.numel(), x.size(-1))
        return rows if rows.stride(-1) == 1 or rows.size(-1) == 1 else rows.contiguous()

    def vector(self, x: Tensor) -> Tensor:
        """Return x [...], one number for each token, as [N]."""
        return x.permute(self._dims).reshape(-1)

    def restore(self, x: Tensor) -> Tensor:
        """Return x [N] or [N, D] as [...] or [..., D]."""
        inner = [self._shape[dim] for dim in self._dims]
        inverse = [self._dims.index(dim) for dim in range(len(self._dims))]
        tail = x.shape[1:]
        return x.view([*inner, *tail]).permute([*inverse, *range(len(inner), len(inner) + len(tail))])
