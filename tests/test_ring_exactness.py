"""The error of ring attention does not grow with the ring, and neither does its memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paracore import masks
from paracore.bench.memory import peak_bytes
from paracore.ops.attention_state import backward_, continue_, finish, row_delta, start_state
from paracore.ops.attention_terms import PackedTerms
from paracore.ops.ring_attention import ring_attention
from paracore.parallel import Ledger, MeshAxis, MeshShape
from paracore.parallel import layout as layouts
from paracore.parallel.masks import Mask
from paracore.parallel.positions import Positions
from paracore.parallel.ring_plan import plan_ring
from tests.attention_op_cases import packed, qkv
from tests.conftest import Launch
from tests.numerics import randn, relative_error

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LENGTH = 768
NAMES = ("out", "dq", "dk", "dv")


def ring_in_one_process(size: int, mask: Mask, dtype: torch.dtype) -> list[Tensor]:
    """What all ranks of a ring compute, step by step as they do, and in the same order."""
    layout = layouts.zigzag(LENGTH, size)
    plan = plan_ring(mask, layout)
    q, k, v = qkv(B=1, Sq=LENGTH, Sk=LENGTH, D=32, Dv=32, dtype=dtype)
    dout = randn(1, 4, LENGTH, 32, seed=5, dtype=dtype)
    wide = torch.promote_types(dtype, F32)
    out, dq = torch.empty_like(q), torch.zeros(q.shape, dtype=wide)
    sums = [[torch.zeros(x.shape, dtype=wide) for x in (k, v)] for _ in range(2)]  # at home, and under way
    rows = {}
    for rank in range(size):
        at = layout.ranks[rank].tensor()
        state = start_state(q[:, :, at], 32)
        for step in plan.steps[rank]:
            keys, terms = step.positions.tensor(), packed_for(q, mask, layout.ranks[rank], step.positions)
            continue_(state, q[:, :, at], k[:, :, keys], v[:, :, keys], terms)
        out[:, :, at], lse = finish(state, q[:, :, at])
        rows[rank] = lse, row_delta(out[:, :, at], dout[:, :, at])
    for index in range(size):
        for rank in range(size):
            step, at = plan.steps[rank][index], layout.ranks[rank].tensor()
            keys, terms = step.positions.tensor(), packed_for(q, mask, layout.ranks[rank], step.positions)
            mine = [torch.zeros(1, 4, len(at), 32, dtype=wide)]
            mine += [torch.zeros(1, 2, len(keys), 32, dtype=wide) for _ in range(2)]
            lse, delta = rows[rank]
            one = (dout[:, :, at], q[:, :, at], k[:, :, keys], v[:, :, keys])
            backward_(*one, lse, delta, mine[0], mine[1], mine[2], terms)
            dq[:, :, at] += mine[0]
            for total, part in zip(sums[int(index > 0)], mine[1:], strict=True):
                total[:, :, keys] += part
    dk, dv = (home + under_way for home, under_way in zip(*sums, strict=True))
    return [out, dq.to(dtype), dk.to(dtype), dv.to(dtype)]


def packed_for(q: Tensor, mask: Mask, queries: Positions, keys: Positions) -> PackedTerms:
    at, length = queries.tensor(), len(keys)
    return packed(
        q[:, :, at], q[:, :, :1].expand(-1, -1, length, -1), mask, query_positions=queries, key_positions=keys
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("mask", [masks.causal(), masks.full()], ids=["causal", "full"])
def test_the_error_does_not_grow_with_the_ring(dtype: torch.dtype, mask: Mask) -> None:
    """Kind of fault: bf16 partial results whose error grows with every step of the ring.

    In units of one device's own error, 1.05 at most.
    """
    exact = ring_in_one_process(1, mask, F64)
    dense = [relative_error(x, y) for x, y in zip(ring_in_one_process(1, mask, dtype), exact, strict=True)]
    for size in (2, 8, 16):
        ring = ring_in_one_process(size, mask, dtype)
        for name, x, y, error in zip(NAMES, ring, exact, dense, strict=True):
            assert relative_error(x, y) <= 1.05 * error, f"{name} over {size} ranks"


def peaks(local: int, mask_name: str) -> tuple[int, int]:
    """Bytes at once, forward beside its outputs, backward while the keys travel: its outputs come later."""
    size = dist.get_world_size()
    axis = MeshAxis.of(MeshShape(cp=size).build("cpu"), "cp", Ledger())
    layout = layouts.zigzag(local * size, size)
    mask = masks.causal() if mask_name == "causal" else masks.full()
    q, k, v = (x.requires_grad_() for x in qkv(B=1, Sq=local, Sk=local, D=32, Dv=32, dtype=BF16))
    dout = torch.ones_like(q)

    def forward() -> Tensor:
        return ring_attention(q, k, v, mask, layout, axis)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    out = forward()
    backward()  # so that masks and plans are kept already
    saved = out.nbytes + q.size(1) * local * 4
    cpu = torch.device("cpu")
    return peak_bytes(forward, cpu) - saved, peak_bytes(backward, cpu)


@pytest.mark.parametrize("mask_name", ["causal", "full"])
def test_memory_does_not_grow_with_the_ring(launch: Launch, mask_name: str) -> None:
    """Forward: one state and two buffers of keys; backward: five buffers, dq, and the own sums in float32."""
    local, tolerance = 256, 1000
    keys, query_rows = 2 * local * 64, 4 * local  # numbers in a block of keys and values; rows
    forward = 2 * 2 * keys + 4 * query_rows * (32 + 2)  # two blocks in bf16, and the state
    backward = 2 * 2 * keys + 4 * 4 * keys + 4 * query_rows * 32 + 4 * query_rows  # dq and delta, too
    for size in (2, 3, 4):
        for used_forward, used_backward in launch(size, peaks, local, mask_name):
            assert abs(used_forward - forward) <= tolerance
            assert abs(used_backward - backward) <= tolerance
