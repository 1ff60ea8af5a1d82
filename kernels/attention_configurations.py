"""Sizes of attention's tiles, and how many warps and stages work on them, per architecture and head dim."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

from paracore.kernels.attention_backward import (
    attention_backward_key_kernel,
    attention_backward_query_kernel,
    attention_delta_kernel,
)
from paracore.kernels.attention_forward import attention_finish_kernel, attention_forward_kernel
from paracore.kernels.attention_tiles import RUN_TIME_NUMBERS
from paracore.kernels.configuration import Configuration, Requirements, Target


@dataclass(frozen=True)
class Blocks:
    """A tile's size in queries and keys, and the warps and pipeline stages that work on it.

    descriptors: whether tiles of the main loop are loaded through tensor descriptors where the tensors allow.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    descriptors: bool = False


KERNELS = {
    "forward": attention_forward_kernel,
    "backward_query": attention_backward_query_kernel,
    "backward_key": attention_backward_key_kernel,
}
# By target, kernel and width: the widest head dim that the entry serves, keys' and values' alike, save
# for 192, which stands for keys up to 192 beside values up to 128. bf16 and fp16. Where 96 has an entry, its
# two parts take more registers or instructions than the one of 128.
#
# Descriptors (TMA) are used where they lower the instructions of a whole tile. Measured with Triton 3.7.1 on
# sm_90, pointers -> descriptors, instructions and registers:
#   forward         64 291, 164 -> 311, 125   96 356, 198 -> 412, 151   128 356, 219 -> 340, 164
#                   192/128 389, 223 -> 382, 172   256 472, 255 -> 461, 255
#   backward_query  64 251, 163 -> 271, 132   96 304, 212 -> 367, 192   128 316, 235 -> 299, 204
#                   192/128 355, 253 -> 377, 255   256 307, 250 -> 334, 255 and 72 bytes spilled
#   backward_key    64 343, 227 -> 367, 204   128 275, 246 -> 292, 240
# Each load through a descriptor takes some 20 instructions however large it is, which is more than pointers
# take for a small tile or for a head dim's second part; the entry of 256 serves such, too. In backward_key,
# 64 queries at 128 spill 64 -> 16 bytes. On sm_100, forward takes 367 -> 376 instructions, backward_key
# 442 -> 473, and backward_query spills 32 bytes. sm_80 has no TMA.
BLOCKS: dict[str, dict[str, dict[int, Blocks]]] = {
    "sm_80": {
        "forward": {
            64: Blocks(128, 64, 8, 2),
            128: Blocks(128, 64, 8, 2),
            192: Blocks(64, 64, 4, 2),
            256: Blocks(64, 64, 8, 2),
        },
        "backward_query": {
            64: Blocks(128, 64, 8, 2),
            128: Blocks(64, 64, 4, 2),
            192: Blocks(32, 64, 4, 2),
            256: Blocks(64, 32, 8, 2),
        },
        "backward_key": {
            64: Blocks(64, 128, 8, 2),
            96: Blocks(32, 64, 8, 2),
            128: Blocks(64, 64, 8, 2),
            192: Blocks(16, 64, 8, 2),
            256: Blocks(16, 64, 8, 2),
        },
    },
    "sm_90": {
        "forward": {
            64: Blocks(128, 64, 8, 3),
            96: Blocks(128, 64, 8, 3),
            128: Blocks(128, 64, 8, 3, descriptors=True),
            192: Blocks(128, 64, 8, 3, descriptors=True),
            256: Blocks(128, 64, 8, 2),
        },
        "backward_query": {
            64: Blocks(128, 64, 8, 2),
            96: Blocks(128, 64, 8, 2),
            128: Blocks(128, 64, 8, 2, descriptors=True),
            192: Blocks(128, 64, 8, 2),
            256: Blocks(128, 32, 8, 2),
        },
        "backward_key": {
            64: Blocks(64, 128, 8, 2),
            128: Blocks(32, 128, 8, 2),
            192: Blocks(32, 64, 8, 2),
            256: Blocks(32, 64, 8, 2),
        },
    },
    "sm_100": {
        "forward": {
            64: Blocks(128, 64, 8, 3),
            128: Blocks(128, 64, 8, 3),
            192: Blocks(128, 64, 8, 2),
            256: Blocks(128, 32, 8, 2),
        },
        "backward_query": {
            64: Blocks(128, 64, 8, 2),
            128: Blocks(128, 64, 8, 2),
            192: Blocks(128, 64, 8, 2),
            256: Blocks(128, 32, 8, 2),
        },
        "backward_key": {
            64: Blocks(64, 128, 8, 2),
            128: Blocks(64, 128, 8, 2),
            192: Blocks(32, 128, 8, 2),
            256: Blocks(32, 64, 8, 2),
        },
    },
    "gfx942": {
        "forward": {
            64: Blocks(128, 64, 4, 1),
            96: Blocks(128, 32, 4, 1),
            128: Blocks(128, 64, 4, 1),
            192: Blocks(128, 32, 4, 1),
            256: Blocks(64, 32, 4, 1),
        },
        "backward_query": {
            64: Blocks(64, 64, 4, 1),
            128: Blocks(64, 64, 4, 1),
            192: Blocks(64, 32, 4, 1),
            256: Blocks(32, 32, 4, 1),
        },
        "backward_key": {
            64: Blocks(32, 128, 4, 1),
            128: Blocks(32, 128, 4, 1),
            192: Blocks(16, 64, 4, 1),
            256: Blocks(16, 64, 4, 1),
        },
    },
}
# Where more must be kept in registers, for further terms of the logits or to add to gradients that are
# there, head dims from 65 to 128 take these tiles, which do not spill.
BLOCKS_WITH_MORE: dict[str, dict[str, Blocks]] = {
    "sm_80": {"backward_query": Blocks(32, 64, 4, 2)},
    "sm_90": {"backward_key": Blocks(32, 64, 8, 2)},
    "sm_100": {"forward": Blocks(64, 64, 8, 3), "backward_key": Blocks(32, 128, 8, 2)},
    "gfx942": {},  # scalar registers alone spill there, to vector registers
}
# float32 products with IEEE rounding run on the ordinary units, from registers: small tiles everywhere.
FLOAT32_BLOCKS = {
    64: Blocks(64, 32, 8, 1),
    128: Blocks(32, 32, 8, 1),
    192: Blocks(32, 32, 8, 1),
    256: Blocks(16, 32, 8, 1),
}
ROW_TILE = 4096  # elements that a program of finish and delta holds
ROW_WARPS = 4


def choose_blocks(
    kernel: str, target: Target, dtype: torch.dtype, D: int, DV: int, more: bool = False
) -> Blocks:
    """Return the tile of a kernel, a key of KERNELS, for head dims D of keys and DV of values.

    more: whether there are softcap, ALiBi or dropout, or gradients to add to. The forward kernel's tiles have
    as many keys either way: states continue bitwise whatever the terms of a call are.
    """
    table = FLOAT32_BLOCKS if dtype == torch.float32 else BLOCKS[target.name][kernel]
    keys, values = sum(head_dim_parts(D)), sum(head_dim_parts(DV))
    with_more = BLOCKS_WITH_MORE[target.name].get(kernel)
    if more and with_more is not None and dtype != torch.float32 and 64 < max(keys, values) <= 128:
        return with_more
    return next(
        blocks
        for width, blocks in sorted(table.items())
        if keys <= width and values <= (128 if width == 192 else width)
    )


def head_dim_parts(D: int) -> tuple[int, int]:
    """Cut D into two powers of two, the smaller at least 16, that reach D; (size, 0) where one does."""
    large = max(16, 1 << (D.bit_length() - 1))
    if large >= D:
        return large, 0
    small = max(16, 1 << (D - large - 1).bit_length())
    return (2 * large, 0) if small == large else (large, small)


def head_dim_constants(D: int, DV: int) -> dict[str, int]:
    """Return the kernels' compile-time sizes of head dims: see `attention_tiles`."""
    D0, D1 = head_dim_parts(D)
    V0, V1 = head_dim_parts(DV)
    return {"D": D, "DV": DV, "D0": D0, "D1": D1, "V0": V0, "V1": V1}


# ---------------------------------------------------------------- what `paracore kernels` compiles


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel. features: what it does besides the plain kernel's work.

    aligned: whether addresses and strides are multiples of 16. descriptors: see `Blocks`.
    """

    kernel: str
    D: int = 128
    DV: int = 128
    dtype: str = "bf16"
    precision: str = "ieee"
    features: frozenset[str] = field(default_factory=frozenset)
    aligned: bool = True
    descriptors: bool = False

    @property
    def name(self) -> str:
        """Unique among the kernel's variants."""
        width = f"{self.D}" if self.D == self.DV else f"{self.D}/{self.DV}"
        dtype = "tf32" if self.precision == "tf32" else self.dtype
        loads = (["descriptors"] if self.descriptors else []) + ([] if self.aligned else ["unaligned"])
        return " ".join([dtype, f"D={width}", *sorted(self.features), *loads])

    def blocks(self, target: Target) -> Blocks:
        """The tile in which it is launched."""
        dtype = torch.float32 if self.dtype == "fp32" else torch.bfloat16
        more = bool(self.features & {"softcap", "ALiBi", "dropout", "accumulate"})
        return choose_blocks(self.kernel, target, dtype, self.D, self.DV, more)


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launchers launch on `target`: every width, and at D = 128 every term of a logit.

    fp16 differs from bf16 in the conversions alone; further head dims share the tiles of those listed. Where
    descriptors are used, one variant stands for those that load what descriptors do not allow.
    """
    for variant in _variants(target):
        describes = variant.aligned and variant.blocks(target).descriptors
        if describes:
            yield _configuration(target, replace(variant, descriptors=True))
        if not describes or variant == Variant(variant.kernel):
            yield _configuration(target, variant)
    yield from _row_configurations()


def _variants(target: Target) -> Iterator[Variant]:
    for kernel in KERNELS:
        for D, DV in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
            yield Variant(kernel, D, DV)
        yield Variant(kernel, 64, 64, "fp32")
        besides = {"state"} if kernel == "forward" else {"accumulate"}
        for features in (
            besides,
            {"softcap", "sink"} if kernel == "forward" else {"softcap"},
            {"ALiBi"},
            {"dropout"},
        ):
            yield Variant(kernel, features=frozenset(features))
    yield Variant("forward", dtype="fp16")
    yield Variant("forward", aligned=False)
    if target.backend == "cuda":
        yield Variant("forward", 64, 64, "fp32", "tf32")


def _configuration(target: Target, variant: Variant) -> Configuration:
    kernel = KERNELS[variant.kernel]
    blocks = variant.blocks(target)
    parts = head_dim_constants(variant.D, variant.DV)
    tiles = {"k_tiles": parts["D0"], "k_tiles1": parts["D1"], "v_tiles": parts["V0"], "v_tiles1": parts["V1"]}
    constants: dict[str, Any] = parts | {
        "GROUP": 4,
        "LINEAR": not variant.features & {"softcap", "ALiBi"},
        "PRECISION": variant.precision,
        "QUERIES": blocks.queries,
        "KEYS": blocks.keys,
    }
    if variant.kernel != "forward":
        constants["ACCUMULATE"] = "accumulate" in variant.features
    signature = {}
    for name in kernel.arg_names:
        part = tiles.get(name)
        if name in _absent(variant.features) or (part is not None and not (variant.descriptors and part)):
            constants[name] = None
        elif part is not None:
            signature[name] = f"tensordesc<{variant.dtype}[1, 1, {blocks.keys}, {part}]>"
        elif name not in constants:
            signature[name] = _type_of(name, variant)
    return Configuration(
        kernel=kernel,
        name=variant.name,
        signature=signature,
        constants=constants,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        requirements=_requirements(target, variant),
    )


def _absent(features: frozenset[str]) -> set[str]:
    """The arguments that are None without these features."""
    needed_by = {
        "sink": {"sink"},
        "softcap": {"softcap"},
        "slopes": {"ALiBi"},
        "query_positions": {"ALiBi", "dropout"},
        "key_positions": {"ALiBi", "dropout"},
        "keep_inverse": {"dropout"},
        "row_max": {"state"},
        "row_sum": {"state"},
        "acc": {"state"},
    }
    absent = {name for name, features_that_need in needed_by.items() if not features & features_that_need}
    return absent | ({"out", "lse"} if "state" in features else set())


def _type_of(name: str, variant: Variant) -> str:
    """Triton's type of an argument, by its name."""
    if name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        summed = name in ("dq", "dk", "dv") and "accumulate" in variant.features
        return "*fp32:16" if summed else f"*{variant.dtype}:16"
    if name in ("lse", "delta", "row_max", "row_sum", "acc", "sink", "slopes"):
        return "*fp32:16"
    if name in ("ranges", "first", "end", "query_positions", "key_positions"):
        return "*i32:16"
    if name in ("scale", "factor", "softcap", "keep_inverse"):
        return "fp32"
    counts = ("Hq", "Sq", "Sk", "units", "units_at_once", "ranges_batch", "mask_batch", "slopes_batch")
    if name in (*counts, *RUN_TIME_NUMBERS, "state_batch", "state_head") or not variant.aligned:
        return "i32"
    return "i32:16"


def _requirements(target: Target, variant: Variant) -> Requirements:
    """16-bit products: no spills up to head dim 192, matrix units and, on NVIDIA's, asynchronous copies.

    Spills are reported, not limited, where elements are loaded one by one because nothing is aligned, and
    with further terms on gfx942, where they are of scalar registers.
    """
    if variant.dtype == "fp32":
        # gfx942 has matrix units that round as IEEE asks.
        matrix = True if variant.precision == "tf32" else False if target.backend == "cuda" else None
        return Requirements(
            max_spill_bytes=None, matrix_instructions=matrix, max_shared_bytes=target.shared_bytes
        )
    scalar_spills = target.backend == "hip" and bool(variant.features - {"state"})
    may_spill = variant.D > 192 or not variant.aligned or scalar_spills
    # Four schedulers issue 360 instructions of 8 warps in 3/4 of the time that the products take.
    limits = {Variant("forward"): 360, Variant("forward", descriptors=True): 345}
    return Requirements(
        max_spill_bytes=None if may_spill else 0,
        matrix_instructions=True,
        loop_async_copies=target.backend == "cuda" and variant.aligned,
        max_loop_instructions=limits.get(variant) if target.name == "sm_90" else None,
        max_shared_bytes=target.shared_bytes,
    )


def _row_configurations() -> Iterator[Configuration]:
    """finish and delta: row by row, limited by memory."""
    constants = {"DV": 128, "BLOCK_D": 128, "QUERIES": row_tile(128)[1]}
    for kernel in (attention_finish_kernel, attention_delta_kernel):
        types = {name: _type_of(name, Variant("")) for name in kernel.arg_names if name not in constants}
        yield Configuration(kernel, "bf16 D=128", types, constants, num_warps=ROW_WARPS)


def row_tile(DV: int) -> tuple[int, int]:
    """Return the columns and rows that a program of finish and delta holds."""
    block_d = triton.next_power_of_2(DV)
    return block_d, max(1, ROW_TILE // block_d)
