"""The native CPU kernels, compiled from csrc/. Import torch first: its libraries must be loaded.

`capability` selects the instruction set of one call, by a name among `capabilities()`; the default is
the best one. It lets tests run them all; users have no need of it.
"""

from typing import TypedDict

from torch import Tensor

class BuildInfo(TypedDict):
    """What the extension was built from: torch's version, the compiler's, whether CUDA sources are in it."""

    torch: str
    compiler: str
    cuda: bool

def capabilities() -> list[str]:
    """Return the instruction sets that are built and that this processor has, best last."""

def count_threads() -> int:
    """Return the number of threads that take part in a kernel with enough work for all."""

def build_info() -> BuildInfo:
    """Return what the extension was built from."""

def rms_norm_forward(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    *,
    out: Tensor | None = None,
    capability: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + residual, y = weight * h * rstd, rstd = 1 / sqrt(mean(h^2) + eps) over each row.

    x, residual: [rows, D] float32 or bfloat16, any row stride, last dim contiguous; weight: [D]
    float32 or x's dtype. Returns y [rows, D], h [rows, D] (x itself without a residual), rstd [rows]
    float32, taken from h as rounded to x's dtype. `out` is written and returned as y.
    Raises ValueError naming the argument that is otherwise.
    """

def rms_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    out: Tensor | None = None,
    capability: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dx [rows, D], the gradient of x and of the residual alike, and dweight [D] in weight's dtype.

    dy and dh are the gradients that arrive at y and at h, [rows, D] in h's dtype, any row stride, last
    dim contiguous. dweight is summed in float32 in an order that depends on the number of rows alone.
    `out` is written and returned as dx. Raises ValueError naming the argument that is otherwise.
    """
