"""What torch.compile leaves out of its graphs: whatever communicates.

Messages between products, and what is counted of them, cannot be traced. Between such calls graphs begin and
end, and what lies there is compiled. Imports torch's compiler, which takes a while: import it where ranks
communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from paracore.dropin.report import Derived

P = ParamSpec("P")
R = TypeVar("R")


@torch.compiler.disable(reason="it communicates")  # type: ignore[untyped-decorator]
def eagerly(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function, never traced."""
    return function(*args, **kwargs)


class Untraced(Derived):
    """A layer over several ranks, never traced."""

    @torch.compiler.disable(reason="it communicates")  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]
