"""Words in memory through which a kernel, and copies on other streams, tell each other of what is there.

They only grow, and are compared as `cuStreamWaitValue32` compares: a has reached b if a - b, in 32 bits, is
not negative. So nothing is reset between calls, and to count on from 2^31 - 1 to -2^31 changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

# One statement, so that the compiler finds the loops around it as simple as without it, and no call, beside
# which ptxas lets each wgmma wait for the one before. Every thread polls for itself: what it reads, or asks
# TMA to read, then comes after its own acquire without a barrier. The pause keeps hundreds of warps from
# slowing down the copy that they wait for. The threads' opinions may differ at the last moment: what they
# return must not decide whether they meet at a barrier.
_WAIT = """{{
.reg .pred waited, reached, patient;
.reg .b32 value;
.reg .b64 start, now, limit;
mov.b32 $0, 0;
setp.ne.b32 waited, $5, 0;
@waited bra DONE;
cvt.s64.s32 limit, $4;
mul.lo.s64 limit, limit, 1000;
mov.u64 start, %globaltimer;
POLL:
ld.acquire.sys.global.b32 value, [$1];
sub.s32 value, value, $3;
setp.ge.s32 reached, value, 0;
@reached bra ARRIVED;
nanosleep.u32 64;
mov.u64 now, %globaltimer;
sub.s64 now, now, start;
setp.le.s64 patient, now, limit;
@patient bra POLL;
mov.b32 $0, 1;
st.relaxed.sys.global.b32 [$2], $0;
ARRIVED:
{proxy_fence}
DONE:
}}"""
WAIT = tl.constexpr(_WAIT.format(proxy_fence=""))
# TMA reads through a proxy of its own, which is ordered behind the acquire by this fence alone.
WAIT_FOR_TMA = tl.constexpr(_WAIT.format(proxy_fence="fence.proxy.async.global;"))


@triton.jit
def wait(flag, ticket, late, patience, waited, ASSEMBLY: tl.constexpr, TMA: tl.constexpr):
    """Return 0 when `flag` has reached `ticket`, and what was written before it can be read; or if `waited`.

    If it has not within `patience`, write 1 to `late` and return 1. patience: microseconds by the clock if
    ASSEMBLY, which is CUDA's, else polls. TMA: whether the tiles are read by TMA.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            WAIT_FOR_TMA if TMA else WAIT,
            "=r,l,l,r,r,r,~{memory}",
            [flag, late, ticket, patience, waited.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        behind = 1 - waited.to(tl.int32)
        while (behind != 0) & (patience > 0):
            patience -= 1
            value = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            behind = ((value.to(tl.int64) - ticket).to(tl.int32) < 0).to(tl.int32)
        tl.store(late, 1, mask=behind != 0)
        return behind


@triton.jit
def signal(counter, mask):
    """Add 1 to `counter`, if `mask`: whoever acquires it can read what the program has written until now."""
    tl.debug_barrier()  # the release is one thread's; what the others wrote comes before it only so
    tl.atomic_add(counter, 1, mask=mask, sem="release", scope="sys")


@triton.jit
def fail_if_late_kernel(late):
    """Trap with a message if `late` is not 0. A kernel of its own, since a trap's message is a call."""
    value = tl.atomic_xchg(late, 0)
    tl.device_assert(value == 0, "a chunk had not arrived when timeout_seconds were over")
