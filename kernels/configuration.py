"""What a kernel declares about itself: the configurations it ships in, and what their machine code must be.

A kernel's file holds the kernel, its launcher, the table the launcher chooses from, and a function
`configurations(target)` that lists that table's entries as `Configuration`s. `paracore kernels`
compiles each of them without a GPU and holds the machine code against the `Requirements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A GPU architecture that kernels are compiled for.

    `backend`, `arch` and `warp_size` are what Triton's `GPUTarget` takes. `multiprocessors` is the
    number on the architecture's usual data-centre part: grids of persistent programs are sized by
    it and not by the device at hand, so that the order of additions, and with it every bit of the
    result, is the same on all parts of one architecture.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    multiprocessors: int
    shared_bytes: int


SM_80 = Target("sm_80", "cuda", 80, warp_size=32, multiprocessors=108, shared_bytes=163 << 10)  # A100
SM_90 = Target("sm_90", "cuda", 90, warp_size=32, multiprocessors=132, shared_bytes=228 << 10)  # H100, H200
SM_100 = Target("sm_100", "cuda", 100, warp_size=32, multiprocessors=148, shared_bytes=228 << 10)  # B200
GFX942 = Target("gfx942", "hip", "gfx942", warp_size=64, multiprocessors=304, shared_bytes=64 << 10)  # MI300X
TARGETS = {target.name: target for target in (SM_80, SM_90, SM_100, GFX942)}


def target_of(device: torch.device) -> Target:
    """Return the target whose configurations serve `device`: the newest that is not newer than it.

    The CPU, where only Triton's interpreter runs kernels, uses the configurations of sm_90.
    """
    if device.type != "cuda":
        return SM_90
    if torch.version.hip is not None:
        return GFX942
    major, _ = torch.cuda.get_device_capability(device)
    return SM_80 if major < 9 else SM_90 if major < 10 else SM_100


@dataclass(frozen=True)
class Requirements:
    """What a configuration's machine code must satisfy.

    max_spill_bytes: bytes per thread that may be spilled; None where spills are reported, not limited.
    matrix_instructions: True if tensor or matrix cores must be used, False if they must not be
        (IEEE float32 products), None if the kernel multiplies no matrices.
    loop_async_copies: whether the hottest loop must copy asynchronously to shared memory.
    max_loop_instructions: limit on the machine instructions of the hottest loop, all classes together.
    max_shared_bytes: shared memory that one program may take; a kernel that takes more cannot be launched.
    """

    max_spill_bytes: int | None = 0
    matrix_instructions: bool | None = None
    loop_async_copies: bool = False
    max_loop_instructions: int | None = None
    max_shared_bytes: int | None = None


@dataclass(frozen=True)
class Configuration:
    """One specialisation of a kernel as its launcher launches it.

    kernel: the `triton.jit` function.
    name: unique among the kernel's configurations.
    signature: per run-time argument Triton's type, followed by ":16" where the launcher passes only
        multiples of 16 (of bytes, for pointers), e.g. {"x": "*bf16:16", "D": "i32:16"}; for a tensor
        descriptor with its block, "tensordesc<bf16[1, 1, 64, 128]>".
    constants: the compile-time arguments, absent tensors (None) included.
    enable_fp_fusion: whether the compiler may join products and sums, each with one rounding.
    debug: whether device asserts are compiled.
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    enable_fp_fusion: bool = True
    debug: bool = False
    requirements: Requirements = field(default_factory=Requirements)

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told beside the source."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.enable_fp_fusion,
            "debug": self.debug,
        }

    @property
    def kernel_name(self) -> str:
        """The name of the kernel's function."""
        return str(self.kernel.fn.__name__)
