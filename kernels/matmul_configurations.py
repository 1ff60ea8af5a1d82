"""Sizes of the matrix product's tiles, and the warps and stages that work on them, per target and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

from paracore.kernels.configuration import Configuration, Requirements, Target
from paracore.kernels.flags import fail_if_late_kernel
from paracore.kernels.matmul_kernels import RUN_TIME_NUMBERS, matmul_kernel


@dataclass(frozen=True)
class Tile:
    """A tile's rows and columns of the result, and the depth of one step of its sum; its warps and stages.

    descriptors: whether a and b are loaded through tensor descriptors where the tensors allow.
    parts: in which results are written, 1, 2 or 4.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    descriptors: bool = False
    parts: int = 1


# 16-bit products, by target: the tile for large results, and the one for results that the large tiles would
# cut into fewer pieces than there are multiprocessors. Both have the same rows and sum in the same order.
#
# Measured with Triton 3.7.1, bf16, instructions per step of the sum and registers, pointers -> descriptors:
#   sm_90   128 x 256 x 64  136, 222 -> 89, 212   a step's 4 wgmma take 1,024 cycles, in which the four
#                                                 schedulers issue 89 instructions of 8 warps in 178
#   sm_100  128 x 256 x 64  147, 176 -> 100, 162
# Written in one part instead of two, results take 236 registers on sm_90; on sm_100, two parts instead of
# four spill up to 32 bytes where there is an activation.
# On sm_80, with depth 32 instead of 64 a step takes 2.2 instead of 1.9 instructions per matrix instruction.
# The loops over tiles and over the sum could be one (`flatten`), which hides the first loads of each tile;
# with a table of tiles that loop loses its asynchronous copies, so neither form uses it.
TILES: dict[str, tuple[Tile, Tile]] = {
    "sm_80": (Tile(128, 256, 64, 8, 3, parts=2), Tile(128, 128, 64, 8, 3)),
    "sm_90": (
        Tile(128, 256, 64, 8, 4, descriptors=True, parts=2),
        Tile(128, 128, 64, 8, 4, descriptors=True),
    ),
    "sm_100": (
        Tile(128, 256, 64, 8, 4, descriptors=True, parts=4),
        Tile(128, 128, 64, 8, 4, descriptors=True, parts=2),
    ),
    "gfx942": (Tile(128, 128, 64, 4, 2), Tile(128, 64, 64, 4, 2)),
}
# float32 products with IEEE rounding run on the ordinary units, from registers.
FLOAT32_TILES = Tile(128, 128, 16, 8, 1), Tile(128, 64, 16, 8, 1)
TF32_TILES = Tile(128, 128, 32, 8, 3, parts=2), Tile(128, 64, 32, 8, 3)
GROUP = 16  # row tiles whose columns are computed together, see `matmul_kernels.place`


def choose_tile(target: Target, dtype: torch.dtype, precision: str, row_tiles: int, N: int) -> Tile:
    """Return the tile for a result of this many row tiles and N columns."""
    if dtype != torch.float32:
        large, small = TILES[target.name]
    else:
        large, small = TF32_TILES if precision == "tf32" else FLOAT32_TILES
    return large if row_tiles * triton.cdiv(N, large.columns) >= target.multiprocessors else small


def for_single_elements(tile: Tile, dtype: torch.dtype) -> Tile:
    """Return the tile in which 16-bit a and b are loaded that are not aligned.

    Each element then takes an address and a mask: of deep tiles, up to 4,608 bytes of these spill.
    """
    return tile if dtype == torch.float32 else replace(tile, depth=16, stages=2)


def rows_per_tile(target: Target, dtype: torch.dtype) -> int:
    """Return the rows of the tiles that `choose_tile` returns, the same for results of any size."""
    return (FLOAT32_TILES if dtype == torch.float32 else TILES[target.name])[0].rows


# ---------------------------------------------------------------- what `paracore kernels` compiles


@dataclass(frozen=True)
class Variant:
    """One specialisation of the kernel. features: what it does besides the plain product.

    transposed: whether b's columns, and not its rows, are contiguous. small: see TILES. aligned: whether
    addresses and strides are multiples of 16. descriptors: see `Tile`.
    """

    dtype: str = "bf16"
    out: str = ""
    precision: str = "ieee"
    features: frozenset[str] = field(default_factory=frozenset)
    transposed: bool = False
    small: bool = False
    aligned: bool = True
    descriptors: bool = False

    @property
    def name(self) -> str:
        """Unique among the variants."""
        dtype = "tf32" if self.precision == "tf32" else self.dtype
        words = [dtype, f"to {self.out}" if self.out else "", *sorted(self.features)]
        words += ["b transposed" if self.transposed else "", "small" if self.small else ""]
        words += ["descriptors" if self.descriptors else "", "" if self.aligned else "unaligned"]
        return " ".join(word for word in words if word)

    def tile(self, target: Target) -> Tile:
        """The tile in which it is launched."""
        dtype = torch.float32 if self.dtype == "fp32" else torch.bfloat16
        row_tiles = 1 if self.small else target.multiprocessors
        tile = choose_tile(target, dtype, self.precision, row_tiles, 1)
        return tile if self.aligned else for_single_elements(tile, dtype)


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launchers launch on `target`: both layouts of b, with waiting and signalling or without.

    fp16 differs from bf16 in the conversions alone, and so do the activations from each other. Where
    descriptors are used, the plain product stands for those whose tensors they do not allow.
    """
    for variant in _variants(target):
        describes = variant.aligned and variant.tile(target).descriptors
        if describes:
            yield _configuration(target, replace(variant, descriptors=True))
        if not describes or not (variant.features or variant.out or variant.small):
            yield _configuration(target, variant)
    yield Configuration(fail_if_late_kernel, "", {"late": "*i32:16"}, {}, num_warps=1, debug=True)


def _variants(target: Target) -> Iterator[Variant]:
    for transposed in (False, True):
        for features in ((), ("arrivals",), ("completions",)):
            yield Variant(features=frozenset(features), transposed=transposed)
        yield Variant(small=True, transposed=transposed)
        yield Variant("fp32", transposed=transposed)
        if target.backend == "cuda":
            yield Variant("fp32", precision="tf32", transposed=transposed)
    yield Variant(features=frozenset(("arrivals", "completions", "bias", "gelu")))
    yield Variant(out="fp32", features=frozenset(("completions",)))
    yield Variant("fp16")
    yield Variant(aligned=False)
    yield Variant(aligned=False, transposed=True)


def _configuration(target: Target, variant: Variant) -> Configuration:
    tile = variant.tile(target)
    constants: dict[str, Any] = {
        "TRANSPOSED": variant.transposed,
        "ACTIVATION": "gelu" if "gelu" in variant.features else "none",
        "PRECISION": variant.precision,
        "ASSEMBLY": target.backend == "cuda",
    }
    constants |= tile_constants(tile)
    blocks = {
        "a_tiles": [tile.rows, tile.depth],
        "b_tiles": [tile.depth, tile.columns] if variant.transposed else [tile.columns, tile.depth],
    }
    absent = _absent(variant)
    signature = {}
    for name in matmul_kernel.arg_names:
        if name in absent:
            constants[name] = None
        elif name in blocks:
            signature[name] = f"tensordesc<{variant.dtype}{blocks[name]}>"
        elif name not in constants:
            signature[name] = _type_of(name, variant)
    return Configuration(
        kernel=matmul_kernel,
        name=variant.name,
        signature=signature,
        constants=constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        requirements=_requirements(target, variant),
    )


def tile_constants(tile: Tile) -> dict[str, int]:
    """Return the kernel's compile-time arguments that follow from the tile."""
    return {
        "PARTS": tile.parts,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "GROUP": GROUP,
    }


def _absent(variant: Variant) -> set[str]:
    """The arguments that are None."""
    absent = {"a", "b"} if variant.descriptors else {"a_tiles", "b_tiles"}
    needed_by = {
        "bias": {"bias"},
        "row_tiles": {"arrivals", "completions"},
        "groups": {"arrivals", "completions"},
        "late": {"arrivals"},
        "flags": {"arrivals"},
        "counters": {"completions"},
    }
    return absent | {name for name, features in needed_by.items() if not features & variant.features}


def _type_of(name: str, variant: Variant) -> str:
    """Triton's type of an argument, by its name."""
    if name in ("out", "a", "b", "bias"):
        return f"*{variant.out or variant.dtype if name == 'out' else variant.dtype}:16"
    if name in ("row_tiles", "groups", "late", "flags", "counters"):
        return "*i32:16"
    return "i32" if name in RUN_TIME_NUMBERS or not variant.aligned else "i32:16"


def _requirements(target: Target, variant: Variant) -> Requirements:
    """16-bit products: no spills, matrix units and, on NVIDIA's, asynchronous copies.

    Spills are reported, not limited, on gfx942 where nothing is aligned: they are of scalar registers.
    """
    if variant.dtype == "fp32":
        # gfx942 has matrix units that round as IEEE asks.
        matrix = True if variant.precision == "tf32" else False if target.backend == "cuda" else None
        return Requirements(
            max_spill_bytes=None, matrix_instructions=matrix, max_shared_bytes=target.shared_bytes
        )
    # Where each wgmma waits for the one before, which the compiler does not tell, there are 95 and more.
    limited = target.name == "sm_90" and variant.descriptors and not variant.small
    return Requirements(
        max_spill_bytes=0 if variant.aligned or target.backend == "cuda" else None,
        matrix_instructions=True,
        loop_async_copies=target.backend == "cuda" and variant.aligned,
        max_loop_instructions=92 if limited else None,
        max_shared_bytes=target.shared_bytes,
    )
