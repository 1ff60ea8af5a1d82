"""The rule by which implementations are chosen, on an operation made up for the purpose."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from paracore.errors import UsageError
from paracore.ops import implementations
from paracore.ops.catalog import OPERATIONS
from paracore.ops.implementations import Implementation, Operation
from paracore.ops.rms_norm import rms_norm


def at_most_eight_columns(x: torch.Tensor) -> str | None:
    return None if x.size(-1) <= 8 else f"x has {x.size(-1)} columns, must be at most 8"


# The modules stand for kernels; what counts is which of them is returned.
OPERATION: Operation[Any] = Operation(
    "square",
    {
        "triton": Implementation("json", (torch.float32,)),
        "native": Implementation("math", (torch.float32, torch.bfloat16), at_most_eight_columns),
        "reference": Implementation("string"),
    },
)


@pytest.fixture(autouse=True)
def no_choice_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(implementations.ENVIRONMENT_VARIABLE, raising=False)


def chosen(
    impl: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu", D: int = 8
) -> str:
    kernels: str = OPERATION.choose(impl, torch.empty(2, D, dtype=dtype, device=device)).__name__
    return kernels


def test_the_device_decides() -> None:
    assert implementations.default_name("cuda") == "triton"
    assert implementations.default_name("cpu") == "native"
    assert implementations.default_name("meta") == "reference"
    assert chosen() == "math"
    assert chosen(device="meta") == "string"


def test_the_argument_overrides_the_device() -> None:
    assert chosen("reference") == "string"


def test_the_environment_overrides_the_device_and_the_argument_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARACORE_IMPL", "reference")
    assert chosen() == "string"
    assert chosen("native") == "math"


def test_an_empty_environment_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARACORE_IMPL", "")
    assert chosen() == "math"


def test_a_dtype_that_the_default_is_not_written_for_takes_the_reference() -> None:
    assert chosen(dtype=torch.float64) == "string"
    assert chosen(dtype=torch.bfloat16) == "math"


def test_asking_for_one_that_refuses_the_dtype_is_an_error() -> None:
    with pytest.raises(
        UsageError,
        match=r"square: implementation 'native' \(argument impl\).*not written for float64, only for float32",
    ):
        chosen("native", dtype=torch.float64)


def test_a_default_beyond_its_limits_is_an_error_not_a_slow_path() -> None:
    with pytest.raises(
        UsageError, match=r"the device's default.*x has 9 columns, must be at most 8.*'reference'"
    ):
        chosen(D=9)
    assert chosen("reference", D=9) == "string"


def test_a_default_that_is_not_built_is_an_error_not_a_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paracore._C", None)  # importing it now fails
    with pytest.raises(
        UsageError, match=r"extension cannot be loaded .*pip install --no-build-isolation -e ."
    ):
        rms_norm(torch.ones(2, 8), torch.ones(8))
    assert rms_norm(torch.ones(2, 8), torch.ones(8), impl="reference").shape == (2, 8)


def test_native_refuses_other_devices() -> None:
    with pytest.raises(UsageError, match="run on the CPU, not on device 'meta'"):
        chosen("native", device="meta")


def test_triton_refuses_a_cpu_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(UsageError, match="needs TRITON_INTERPRET=1"):
        chosen("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert chosen("triton") == "json"
    assert chosen() == "math"  # the interpreter is never a default


def test_triton_refuses_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UsageError, match=r"triton cannot be imported .*install triton"):
        chosen("triton")


@pytest.mark.parametrize("origin", ["argument", "environment"])
def test_an_unknown_name_is_an_error(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARACORE_IMPL", "numpy" if origin == "environment" else "")
    with pytest.raises(UsageError, match=f"{origin}.* is 'numpy', must be one of triton, native, reference"):
        chosen("numpy" if origin == "argument" else None)


def test_an_implementation_that_the_operation_lacks_is_an_error() -> None:
    operation: Operation[Any] = Operation("cube", {"reference": Implementation("string")})
    with pytest.raises(UsageError, match="cube has no implementation 'native'; it has reference"):
        operation.choose("native", torch.ones(1))


def test_the_choice_reaches_backward_and_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for an implementation that refuses fails in each, so each has looked at the choice."""
    x, weight = torch.ones(2, 8, dtype=torch.float64, requires_grad=True), torch.ones(8)
    y = rms_norm(x, weight)
    monkeypatch.setenv("PARACORE_IMPL", "native")
    with pytest.raises(UsageError, match=r"rms_norm: implementation 'native' .*float64"):
        y.sum().backward()
    with pytest.raises(UsageError, match=r"rms_norm: implementation 'native' .*float64"):
        torch.compile(rms_norm, fullgraph=True, backend="eager")(x, weight)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_has_a_reference_without_limits(operation: Operation[Any]) -> None:
    reference = operation.implementations["reference"]
    assert reference.dtypes is None
    assert reference.limits is None
    assert set(operation.implementations) <= set(implementations.NAMES)
