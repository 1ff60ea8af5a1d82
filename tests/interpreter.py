"""Runs Triton kernels on the CPU, and mends what Triton 3.7.1's interpreter gets wrong.

- bf16 values are kept as raw 16-bit integers, and `tl.dot` and arithmetic work on those integers;
- casts to bf16 truncate where the hardware rounds to nearest even; other casts take the raw bits for numbers;
- `tl.device_assert`, and with it the check of integer overflow, does nothing.

`mended()` is for tests alone: no kernel knows that it is interpreted. tests/test_interpreter.py fails
once the interpreter no longer needs mending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


def prepare_interpreter(environment: MutableMapping[str, str]) -> None:
    """Choose the interpreter where there is no GPU; must run before any kernel is imported."""
    if not torch.cuda.is_available():
        environment.setdefault("TRITON_INTERPRET", "1")


def interpreting(environment: MutableMapping[str, str]) -> bool:
    return environment.get("TRITON_INTERPRET", "0") not in ("", "0")


@contextmanager
def mended() -> Iterator[None]:
    """Within, interpreted kernels treat bf16 as the hardware does, and failed device asserts raise."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "cast_impl", _cast(builder.cast_impl))
        patch.setattr(builder, "create_fp_to_fp", _convert(builder.create_fp_to_fp))
        patch.setattr(builder, "create_dot", _dot(builder.create_dot))
        patch.setattr(builder, "binary_op", _arithmetic(builder.binary_op))
        patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
        yield


# ---------------------------------------------------------------- bf16 as the hardware has it


def _widen(bits: np.ndarray) -> np.ndarray:
    """Raw bf16 as float32: the upper half of the same number."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(values: np.ndarray) -> np.ndarray:
    """float32 as raw bf16, rounded to nearest even by torch."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy()


def _is_bf16(dtype: Any) -> bool:
    return str(dtype.scalar) == "bf16"


def _wide_handle(handle: Any) -> Any:
    """The same values in float32, if the handle holds bf16."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(_widen(handle.data), tl.float32) if _is_bf16(handle.dtype) else handle


def _narrow_handle(handle: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(_narrow(handle.data), tl.bfloat16)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        import triton.language as tl

        if not _is_bf16(dst_type):
            return original(self, _wide_handle(src), dst_type)
        return src if _is_bf16(src.dtype) else _narrow_handle(original(self, src, tl.float32))

    return cast_impl


def _convert(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        from triton.runtime.interpreter import _ir

        if not (_is_bf16(src.dtype) or _is_bf16(dst_type)):
            return original(self, src, dst_type, rounding_mode)
        if rounding_mode not in (None, _ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"bf16 with rounding mode {rounding_mode}")
        return self.cast_impl(src, dst_type)

    return create_fp_to_fp


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        # Products of 16-bit floats are exact in float32, and matrix units add them up in float32.
        return original(self, _wide_handle(a), _wide_handle(b), d, *options)

    return create_dot


def _arithmetic(original: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        if not (_is_bf16(lhs.dtype) or _is_bf16(rhs.dtype)):
            return original(self, lhs, rhs, op)
        result = original(self, _wide_handle(lhs), _wide_handle(rhs), op)
        return result if result.data.dtype == np.bool_ else _narrow_handle(result)

    return binary_op
