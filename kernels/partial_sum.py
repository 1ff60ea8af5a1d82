"""The sum of partial results that ranks computed, for the one rank that owns it.

The parts are added up in the order of ranks in float32, and the sum is rounded once: a rank's own part lies
where it was computed, those of the others side by side where they were received.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from paracore.errors import UsageError
from paracore.kernels.configuration import Configuration, Target, target_of
from paracore.kernels.layer_checks import DTYPES, check

BLOCK = 1024
THREADS = 128  # 8 elements each: a vector of 16 bytes


@triton.jit(do_not_specialize=("own_rank",))
def partial_sum_kernel(
    out,  # [elements]
    own,  # [elements]
    received,  # [RECEIVED, elements]
    elements,
    own_rank,  # how many of the received parts come before the rank's own
    RECEIVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    mine = tl.load(own + at, mask=inside).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    part = received + at
    for index in tl.static_range(RECEIVED):
        total += tl.where(index == own_rank, mine, 0.0)
        total += tl.load(part, mask=inside).to(tl.float32)
        part += elements
    total += tl.where(own_rank == RECEIVED, mine, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launcher launches on `target`, for 2, 4 and 8 ranks."""
    for out, parts, ranks, alignment in (
        *(("bf16", "bf16", ranks, ":16") for ranks in (2, 4, 8)),
        ("bf16", "fp32", 8, ":16"),
        ("fp32", "fp32", 8, ":16"),
        ("bf16", "bf16", 8, ""),
    ):
        yield Configuration(
            kernel=partial_sum_kernel,
            name=f"{out} of {parts} ranks={ranks}{'' if alignment else ' unaligned'}",
            signature={"out": f"*{out}:16", "own": f"*{parts}{alignment}", "received": f"*{parts}:16"}
            | {"elements": f"i32{alignment}", "own_rank": "i32"},
            constants={"RECEIVED": ranks - 1, "BLOCK": BLOCK},
            num_warps=THREADS // target.warp_size,
        )


def partial_sum(out: Tensor, own: Tensor, received: Tensor, own_rank: int) -> None:
    """Write to `out` the sum of `own` and all of `received`, `own` being number `own_rank` of them.

    out: [...] in bf16, fp16 or fp32. own: [...], received: [n, ...], both in one of these dtypes; all
    contiguous. Raises UsageError on anything else.
    """
    check("out", out, DTYPES, out.shape, out.device, contiguous="all")
    check("own", own, DTYPES, out.shape, out.device, contiguous="all")
    check("received", received, (own.dtype,), (None, *out.shape), out.device, contiguous="all")
    if not 0 <= own_rank <= received.size(0):
        raise UsageError(f"own_rank is {own_rank}; expected 0 to {received.size(0)}")
    if out.numel() == 0:
        return
    with torch.cuda.device_of(out):  # Triton launches on the current device, whatever the tensors' own
        partial_sum_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            out,
            own,
            received,
            out.numel(),
            own_rank,
            RECEIVED=received.size(0),
            BLOCK=BLOCK,
            num_warps=THREADS // target_of(out.device).warp_size,
        )
