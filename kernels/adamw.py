"""AdamW over flat memory, and sums of squares: launchers, and how their kernels are compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.kernels.adamw_kernels import adamw_kernel, sum_of_squares_kernel
from paracore.kernels.configuration import Configuration, Target, target_of
from paracore.reference_adamw import Column, Draw

PARAMETER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOMENT_DTYPES = (torch.bfloat16, torch.float32)
THREADS = 128
BLOCKS = {"BLOCK": 1024, "SCALARS": 128}  # elements at a time: in vectors, 8 a thread; one by one, 1 a thread

# ---------------------------------------------------------------- configurations


def _aligned(*dtypes: torch.dtype) -> int:
    """Elements of the widest dtype in 16 bytes."""
    return 16 // max(dtype.itemsize for dtype in dtypes)


def configurations(target: Target) -> Iterator[Configuration]:
    """List what the launchers launch on `target`; fp16 differs from bf16 in the conversions alone.

    Named by the dtypes of parameter and gradient, moments, and master.
    """
    for name, dtype, moment, master, draws, amsgrad, alignment in (
        ("fp32", "fp32", "fp32", None, False, False, ":16"),
        ("fp32 amsgrad", "fp32", "fp32", None, False, True, ":16"),
        ("bf16 fp32 fp32", "bf16", "fp32", "fp32", False, False, ":16"),
        ("bf16 fp32 fp32 amsgrad", "bf16", "fp32", "fp32", False, True, ":16"),
        ("bf16 fp32 int16", "bf16", "fp32", "i16", False, False, ":16"),
        ("bf16 bf16 int16", "bf16", "bf16", "i16", False, False, ":16"),
        ("bf16 bf16 drawn", "bf16", "bf16", None, True, False, ":16"),
        ("bf16 bf16 drawn amsgrad", "bf16", "bf16", None, True, True, ":16"),
        ("bf16 bf16 unaligned", "bf16", "bf16", None, False, False, ""),
    ):
        wide = "fp32" in (dtype, moment, master)
        pointers = {"parameter": dtype, "gradient": dtype, "first_moment": moment, "second_moment": moment}
        optional = {"max_second_moment": moment if amsgrad else None, "master": master}
        pointers |= {argument: kind for argument, kind in optional.items() if kind is not None}
        signature = {argument: f"*{kind}{alignment}" for argument, kind in pointers.items()}
        signature |= {"pieces": "*i64", "coefficients": "*fp64", "gradient_scale": "*fp64"}
        signature |= {"draws": "*i64"} if draws else {}
        absent = {argument: None for argument in (*optional, "draws") if argument not in signature}
        yield Configuration(
            kernel=adamw_kernel,
            name=name,
            signature=signature,
            constants=absent | {"ZERO_GRADIENT": True, "ALIGNED": 4 if wide else 8} | BLOCKS,
            num_warps=THREADS // target.warp_size,
            enable_fp_fusion=False,
        )
    for dtype, aligned in (("fp32", 4), ("bf16", 8)):
        yield Configuration(
            kernel=sum_of_squares_kernel,
            name=dtype,
            signature={"sums": "*fp64:16", "gradient": f"*{dtype}:16", "pieces": "*i64"},
            constants={"ALIGNED": aligned, "BLOCK": BLOCKS["BLOCK"]},
            num_warps=THREADS // target.warp_size,
        )


# ---------------------------------------------------------------- launchers


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
) -> None:
    """Take one step for the elements that `pieces` covers, in place; see `reference_adamw`.

    parameter, gradient: bf16, fp16 or fp32. Moments: bf16 or fp32. master: fp32, int16 or None; int16 beside
    a bf16 parameter alone. All [n] and contiguous. The tables' contents are not checked: that would wait for
    the device.
    Raises UsageError on any other dtype, shape or device.
    """
    _check_flat("parameter", parameter, PARAMETER_DTYPES)
    shape, device = parameter.shape, parameter.device
    _check("gradient", gradient, PARAMETER_DTYPES, shape, device)
    _check("first_moment", first_moment, MOMENT_DTYPES, shape, device)
    _check("second_moment", second_moment, (first_moment.dtype,), shape, device)
    if max_second_moment is not None:
        _check("max_second_moment", max_second_moment, (first_moment.dtype,), shape, device)
    if master is not None:
        remainder = (torch.int16,) if parameter.dtype == torch.bfloat16 else ()
        _check("master", master, (torch.float32, *remainder), shape, device)
    _check("pieces", pieces, (torch.int64,), (None, 3), device)
    _check("coefficients", coefficients, (torch.float64,), (None, len(Column)), device)
    _check("gradient_scale", gradient_scale, (torch.float64,), (1,), device)
    if draws is not None:
        _check("draws", draws, (torch.int64,), (coefficients.size(0), len(Draw)), device)
    if pieces.size(0) == 0:
        return
    data = [parameter, gradient, first_moment, second_moment, max_second_moment, master]
    with torch.cuda.device_of(parameter):  # Triton launches on the current device, whatever the tensors' own
        adamw_kernel[(pieces.size(0),)](
            *data,
            pieces,
            coefficients,
            gradient_scale,
            draws,
            ZERO_GRADIENT=zero_gradient,
            ALIGNED=_aligned(*(tensor.dtype for tensor in data if tensor is not None)),
            **BLOCKS,
            num_warps=THREADS // target_of(device).warp_size,
            num_stages=1,
            enable_fp_fusion=False,
        )


def sum_of_squares(gradient: Tensor, pieces: Tensor) -> Tensor:
    """Return the sum of squares of each piece, float64 [n]; see `reference_adamw`.

    gradient: [elements] in bf16, fp16 or fp32, contiguous. The sums' bits are the same on all devices.
    Raises UsageError on any other dtype, shape or device.
    """
    _check_flat("gradient", gradient, PARAMETER_DTYPES)
    _check("pieces", pieces, (torch.int64,), (None, 3), gradient.device)
    sums = torch.empty(pieces.size(0), dtype=torch.float64, device=gradient.device)
    if pieces.size(0) == 0:
        return sums
    with torch.cuda.device_of(gradient):
        sum_of_squares_kernel[(pieces.size(0),)](
            sums,
            gradient,
            pieces,
            ALIGNED=_aligned(gradient.dtype),
            BLOCK=BLOCKS["BLOCK"],
            num_warps=THREADS // target_of(gradient.device).warp_size,
            num_stages=1,
        )
    return sums


def _check_flat(name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    _check(name, x, dtypes, (None,), x.device)


def _check(
    name: str, x: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None], device: torch.device
) -> None:
    """Raise UsageError unless x is as expected, and contiguous; None in `shape` is any size."""
    fits = len(shape) == x.dim() and all(
        size in (None, have) for size, have in zip(shape, x.shape, strict=True)
    )
    if not fits or x.dtype not in dtypes or x.device != device:
        kinds = " or ".join(map(str, dtypes))
        sizes = ", ".join("n" if size is None else str(size) for size in shape)
        raise UsageError(
            f"{name} is {x.dtype} of shape {list(x.shape)} on {x.device}; "
            f"expected {kinds} of shape [{sizes}] on {device}"
        )
    if not x.is_contiguous():
        raise UsageError(f"{name} has strides {x.stride()}; expected a contiguous tensor")
