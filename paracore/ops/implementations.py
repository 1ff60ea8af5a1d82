"""Choice of implementation: by the tensor's device, by an argument, or by the environment.

The rule, the same for every operation:

1. `impl`, or else the environment variable PARACORE_IMPL, names the implementation. If it cannot
   serve, that is an error with the reason.
2. Otherwise the device decides: cuda takes triton, cpu takes native, every other device reference.
3. A dtype that the device's kernel is not written for takes reference, the definition in plain torch.
4. Any other refusal (not installed, not built, a size beyond the kernel's limits) is an error with the
   reason: a slow path must be asked for, by `impl="reference"`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from paracore.errors import UsageError

ENVIRONMENT_VARIABLE = "PARACORE_IMPL"
NAMES = ("triton", "native", "reference")

Kernels = TypeVar("Kernels")


def default_name(device_type: str) -> str:
    """Return the implementation that a device of this type takes by default (point 2 of the rule)."""
    return {"cuda": "triton", "cpu": "native"}.get(device_type, "reference")


def missing(name: str, device_type: str) -> str | None:
    """Return why implementation `name` cannot run on this machine for such a device, or None if it can."""
    if name == "triton":
        return _triton_missing(device_type)
    if name == "native":
        return _native_missing(device_type)
    return None


def _triton_missing(device_type: str) -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error}); install triton 3.6 or 3.7"
    if device_type == "cuda" or (device_type == "cpu" and triton.knobs.runtime.interpret):
        return None
    return f"triton compiles for GPUs, not for device {device_type!r}; on a CPU it needs TRITON_INTERPRET=1"


def _native_missing(device_type: str) -> str | None:
    if device_type != "cpu":
        return f"the native kernels run on the CPU, not on device {device_type!r}"
    try:
        importlib.import_module("paracore._C")
    except ImportError as error:
        return f"the extension cannot be loaded ({error}); build it: pip install --no-build-isolation -e ."
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation, for the dtypes that it lists.

    module: where the kernels are, imported when first chosen. dtypes: those of the operation's main
    tensor; None means all. limits: called with the operation's arguments, returns why they are beyond
    this implementation, or None.
    """

    module: str
    dtypes: tuple[torch.dtype, ...] | None = None
    limits: Callable[..., str | None] | None = None

    def dtype_refusal(self, dtype: torch.dtype) -> str | None:
        """Return why `dtype` is not served, or None if it is."""
        if self.dtypes is None or dtype in self.dtypes:
            return None
        return f"it is not written for {dtype_name(dtype)}, only for {self.dtype_names()}"

    def dtype_names(self) -> str:
        """Return the dtypes served, for people."""
        return "any float dtype" if self.dtypes is None else ", ".join(map(dtype_name, self.dtypes))


@dataclass(frozen=True)
class Operation(Generic[Kernels]):
    """An operation and its implementations by name; each one's module satisfies the protocol `Kernels`."""

    name: str
    implementations: Mapping[str, Implementation]

    def choose(self, impl: str | None, tensor: Tensor, *arguments: Any) -> Kernels:
        """Return the kernels that serve this call, by the rule above.

        impl: one of NAMES, or None for PARACORE_IMPL or the default. tensor: the main one, whose
        device and dtype decide. arguments: whatever else the implementations' `limits` look at.
        Raises UsageError with the reason when the implementation asked for, or the default, refuses.
        """
        asked = requested_name(impl)
        name = asked or default_name(tensor.device.type)
        implementation = self.implementations.get(name)
        if implementation is None:
            raise UsageError(
                f"{self.name} has no implementation {name!r}; it has {', '.join(self.implementations)}"
            )
        reason = implementation.dtype_refusal(tensor.dtype)
        if reason is not None and asked is None:
            return self._load(self.implementations["reference"])
        reason = reason or missing(name, tensor.device.type)
        if reason is None and implementation.limits is not None:
            reason = implementation.limits(tensor, *arguments)
        if reason is not None:
            raise UsageError(
                f"{self.name}: implementation {name!r} ({_origin(impl, asked)}) cannot serve this call: "
                f"{reason}. Plain torch is impl='reference' or {ENVIRONMENT_VARIABLE}=reference."
            )
        return self._load(implementation)

    def _load(self, implementation: Implementation) -> Kernels:
        return cast(Kernels, importlib.import_module(implementation.module))


def requested_name(impl: str | None) -> str | None:
    """Return the implementation asked for by argument or environment, or None.

    Raises UsageError if it is not one of NAMES.
    """
    name = impl or os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in NAMES:
        raise UsageError(f"{_origin(impl, name)} is {name!r}, must be one of {', '.join(NAMES)}")
    return name


def _origin(impl: str | None, asked: str | None) -> str:
    """Say who chose the implementation."""
    if asked is None:
        return "the device's default"
    return "argument impl" if impl else f"environment variable {ENVIRONMENT_VARIABLE}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module: float32."""
    return str(dtype).removeprefix("torch.")
