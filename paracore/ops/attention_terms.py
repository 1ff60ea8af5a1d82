"""What attention's operations share: checks of their arguments, and what becomes of a mask."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.ops.implementations import dtype_name
from paracore.parallel.masks import Mask, visible_keys
from paracore.parallel.positions import Positions
from paracore.reference import accumulation_dtype
from paracore.reference_attention import Terms


class PackedTerms(NamedTuple):
    """`Terms` as an operator's schema can hold them."""

    first: Tensor
    end: Tensor
    alibi_slopes: Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    floats: list[float]  # scale, softcap, dropout_p
    integers: list[int]  # seed, first_batch, first_head

    def of_heads(self, heads: slice) -> PackedTerms:
        """Return them for some of the query heads."""
        seed, first_batch, first_head = self.integers
        slopes = None if self.alibi_slopes is None else self.alibi_slopes[:, heads]
        return self._replace(alibi_slopes=slopes, integers=[seed, first_batch, first_head + heads.start])

    def unpack(self) -> Terms:
        """Return them as kernels take them."""
        scale, softcap, dropout_p = self.floats
        seed, first_batch, first_head = self.integers
        return Terms(
            first=self.first,
            end=self.end,
            scale=scale,
            softcap=softcap,
            alibi_slopes=self.alibi_slopes,
            dropout_p=dropout_p,
            seed=seed,
            first_batch=first_batch,
            first_head=first_head,
            query_positions=self.query_positions,
            key_positions=self.key_positions,
        )


def pack_terms(
    q: Tensor,
    key_length: int,
    mask: Mask,
    query_positions: Positions | Tensor | None,
    key_positions: Positions | Tensor | None,
    *,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    seed: int | None,
    first_batch: int,
    first_head: int,
) -> PackedTerms:
    """Check the arguments of `attention` that decide its weights, and bring them into the kernels' form."""
    queries = _positions("query_positions", query_positions, q.size(2), q.device)
    keys = _positions("key_positions", key_positions, key_length, q.device)
    first, end = visible_keys(mask, queries, keys, q.device)
    if first.size(0) not in (1, q.size(0)):
        raise UsageError(f"mask is for a batch of {first.size(0)}, but q has a batch of {q.size(0)}")
    if not 0 <= softcap < math.inf:
        raise UsageError(f"softcap={softcap}: must be 0, for none, or more, and finite")
    if scale is not None and not math.isfinite(scale):
        raise UsageError(f"scale={scale}: must be finite, or None for 1/sqrt(D)")
    slopes = None if alibi_slopes is None else _slopes(alibi_slopes, q)
    seed = _dropout_seed(dropout_p, seed)
    need_positions = slopes is not None or dropout_p > 0
    return PackedTerms(
        first,
        end,
        slopes,
        _int32(queries, q.device) if need_positions else None,
        _int32(keys, q.device) if need_positions else None,
        [q.size(3) ** -0.5 if scale is None else scale, softcap, dropout_p],
        [seed, first_batch, first_head],
    )


def require_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UsageError unless q, k and v fit each other."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise UsageError(
                f"{name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, must be float [B, H, S, D]"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise UsageError(
                f"{name} is {dtype_name(tensor.dtype)} on {tensor.device}, must be as q: "
                f"{dtype_name(q.dtype)} on {q.device}"
            )
    B, Hq, _, D = q.shape
    if k.size(0) != B or k.size(3) != D or D == 0:
        raise UsageError(f"k is {list(k.shape)}, must be [{B}, Hkv, Sk, {D}] for q {list(q.shape)}, D >= 1")
    if v.shape[:3] != k.shape[:3] or v.size(3) == 0:
        raise UsageError(
            f"v is {list(v.shape)}, must be {list(k.shape[:3])} and Dv >= 1, as k {list(k.shape)}"
        )
    if Hq % max(k.size(1), 1) or (Hq > 0) != (k.size(1) > 0):
        raise UsageError(f"q has {Hq} heads, must have a multiple of the {k.size(1)} heads of k")


def _positions(
    name: str, positions: Positions | Tensor | None, length: int, device: torch.device
) -> Positions | Tensor:
    """Return `length` positions, which start at 0 if none are given."""
    if positions is None:
        return Positions.contiguous(length)
    if isinstance(positions, Positions):
        if len(positions) != length:
            raise UsageError(f"{name} has {len(positions)} positions, must have {length}")
        return positions
    integer = not (positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool)
    if list(positions.shape) != [length] or positions.device != device or not integer:
        raise UsageError(
            f"{name} is {dtype_name(positions.dtype)} {list(positions.shape)} on {positions.device}, must be "
            f"integers [{length}] on {device}"
        )
    return positions.long()


def _int32(positions: Positions | Tensor, device: torch.device) -> Tensor:
    return (positions.tensor(device) if isinstance(positions, Positions) else positions).int()


def _slopes(slopes: Tensor, q: Tensor) -> Tensor:
    B, Hq = q.shape[:2]
    if (
        list(slopes.shape) not in ([Hq], [B, Hq])
        or not slopes.is_floating_point()
        or slopes.device != q.device
    ):
        raise UsageError(
            f"alibi_slopes is {dtype_name(slopes.dtype)} {list(slopes.shape)} on {slopes.device}, must be "
            f"float [{Hq}] or [{B}, {Hq}] on {q.device}"
        )
    if slopes.requires_grad:
        raise UsageError("alibi_slopes requires a gradient, but they are constants here: detach them")
    return slopes.to(accumulation_dtype(q.dtype)).reshape(-1, Hq)


def _dropout_seed(dropout_p: float, seed: int | None) -> int:
    if not 0 <= dropout_p < 1:
        raise UsageError(f"dropout_p={dropout_p}: must be at least 0 and less than 1")
    if dropout_p > 0 and seed is None:
        raise UsageError(f"dropout_p={dropout_p} needs a seed: ranks and recomputation must draw the same")
    seed = seed or 0
    if not -(1 << 63) <= seed < 1 << 63:
        raise UsageError(f"seed={seed}: must be a signed 64-bit integer")
    return seed


def last_dim_contiguous(x: Tensor) -> Tensor:
    """Return x, or a copy if its last dim is not contiguous: kernels read rows in long words."""
    if x.stride(-1) == 1 or x.size(-1) == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves empty tensors as they are


def empty_in_order_of(x: Tensor, last_dim: int) -> Tensor:
    """Return an empty tensor [*x.shape[:-1], last_dim] whose dims lie in memory in the order of x's.

    So what was [S, B, H, D] before a permutation is so again after the inverse one, without a copy.
    """
    outer = sorted(range(x.dim() - 1), key=lambda dim: x.stride(dim), reverse=True)
    inverse = sorted(range(x.dim() - 1), key=outer.__getitem__)
    return x.new_empty([*(x.size(dim) for dim in outer), last_dim]).permute(*inverse, x.dim() - 1)
