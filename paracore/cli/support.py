"""Which implementation serves each operation, by device and dtype, where nobody asks for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paracore.ops.catalog import OPERATIONS
from paracore.ops.implementations import Operation, default_name, dtype_name

DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def served_by(operation: Operation[Any], device_type: str, dtype: torch.dtype) -> str:
    """Return the implementation's name, as `Operation.choose` takes it for such a tensor."""
    name = default_name(device_type)
    return "reference" if operation.implementations[name].dtype_refusal(dtype) else name


def markdown() -> Iterator[str]:
    """Yield the lines of a Markdown table: a row for each operation, a column for each device and dtype."""
    places = [(device, dtype) for device in DEVICES for dtype in DTYPES]
    yield f"| operation | {' | '.join(f'{device} {dtype_name(dtype)}' for device, dtype in places)} |"
    yield "|---" * (1 + len(places)) + "|"
    for operation in OPERATIONS:
        cells = [served_by(operation, device, dtype) for device, dtype in places]
        yield f"| {operation.name} | {' | '.join(cells)} |"
