"""Records matrix products as they happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Appends to `events` each product, called as `name` calls its result."""

    def __init__(self, events: list[str], name: Callable[[Tensor], str]) -> None:
        super().__init__()
        self.events, self.name = events, name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.events.append(self.name(result))
        return result
