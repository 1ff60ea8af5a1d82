"""What a benchmark must state: its inputs, its contenders, and the work that one call does.

A case states them once. How the work is timed, rotated, compared and reported is the same for all
cases and not its business; nor is the backward pass, which `as_call` derives from the forward one.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.ops.implementations import dtype_name

DIRECTIONS = ("forward", "forward_backward")

Bound: TypeAlias = Literal["memory", "compute"]
Output: TypeAlias = Literal["fresh", "existing"]
Outputs: TypeAlias = Tensor | tuple[Tensor, ...]
Function: TypeAlias = Callable[..., Outputs]


@dataclass(frozen=True)
class Setting:
    """One thing to measure; every contender does the same work in it.

    direction: "forward" runs on tensors that need no gradients, as inference does;
    "forward_backward" computes the outputs and the gradients of all inputs that have one.
    variant: one of the case's own, say "residual".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    direction: str
    variant: str
    device: torch.device

    @property
    def needs_gradients(self) -> bool:
        """Whether the inputs require gradients."""
        return self.direction == "forward_backward"

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype)
        return f"{format_shape(self.shape)} {dtype} {self.direction} {self.variant} on {self.device}"


@dataclass(frozen=True)
class Inputs:
    """One copy of what a call reads and of what it may write to.

    arguments: by name. output_gradients: for a backward pass, one per output. out: where contenders
    with an existing output write it.
    """

    arguments: dict[str, Tensor]
    output_gradients: tuple[Tensor, ...] = ()
    out: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (*self.arguments.values(), *self.output_gradients)
        return sum(tensor.nbytes for tensor in tensors) + (0 if self.out is None else self.out.nbytes)

    def clone(self) -> Inputs:
        """Return a copy with the same values at other addresses."""
        return Inputs(
            {name: _clone(tensor) for name, tensor in self.arguments.items()},
            tuple(_clone(tensor) for tensor in self.output_gradients),
            None if self.out is None else _clone(self.out),
        )


@dataclass(frozen=True)
class Work:
    """The least work that a call must do, whoever does it; rates are of this, so faster is always higher.

    bytes: read and written when everything is read or written once. flops: floating-point operations.
    """

    bytes: int
    flops: int


@runtime_checkable
class Prepared(Protocol):
    """A `Function` that wants each copy of the inputs made ready for one call, outside the time.

    So optimizers get the gradients that their last step has zeroed, and the state that they keep.
    """

    def prepare(self, **arguments: Tensor) -> None:
        """Make ready for one call with the same `arguments`."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    build: makes the function for a setting. It is called with the arguments of `Inputs` by name and
        returns the outputs. Building or calling it raises UsageError with the reason when it cannot serve.
        It may be `Prepared`.
    output: whether the output lies in "fresh" memory or in an "existing" tensor, which the function
        then takes as `out`. It decides which copy is the limit: on CPUs the page faults of fresh
        memory can cost more than the work.
    elsewhere: whether other processes, or threads that are not torch's, do the work. Torch's threads, which
        look out for more work for a while after another contender's, then sleep before the sample, so as not
        to take their cores.
    """

    build: Callable[[Setting], Function]
    output: Output = "fresh"
    elsewhere: bool = False


class Case(abc.ABC):
    """A benchmark: subclasses state what is class-wide as class variables, the rest as methods."""

    name: ClassVar[str]
    dims: ClassVar[tuple[str, ...]]  # what the numbers of a shape mean
    shapes: ClassVar[tuple[tuple[int, ...], ...]]  # measured unless others are asked for
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    directions: ClassVar[tuple[str, ...]] = DIRECTIONS
    variants: ClassVar[tuple[str, ...]] = ("plain",)
    bound: ClassVar[Bound] = "memory"  # what limits a perfect implementation: moving data, or matrix products
    baseline: ClassVar[str]  # the contender that the others are compared with
    contenders: ClassVar[Mapping[str, Contender]]
    # The contender that does nothing but what bounds the work, if copies and matmuls do not tell.
    limit: ClassVar[tuple[str, Contender] | None] = None

    @abc.abstractmethod
    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """Return random inputs; in settings that need gradients, the differentiable ones require them."""

    @abc.abstractmethod
    def work(self, setting: Setting) -> Work:
        """Count the least work of one call."""


def as_call(function: Function, direction: str, output: Output = "fresh") -> Callable[[Inputs], object]:
    """Return what one timed call does with one copy of the inputs, in `direction`.

    Raises UsageError for a backward pass with an existing output: autograd has none.
    """
    if output == "existing" and direction != "forward":
        raise UsageError("autograd writes outputs to fresh memory only")

    def forward(inputs: Inputs) -> object:
        return function(**inputs.arguments)

    def forward_into(inputs: Inputs) -> object:
        return function(**inputs.arguments, out=inputs.out)

    def forward_backward(inputs: Inputs) -> object:
        outputs = function(**inputs.arguments)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        differentiable = [tensor for tensor in inputs.arguments.values() if tensor.requires_grad]
        return torch.autograd.grad(outputs, differentiable, inputs.output_gradients)

    if direction == "forward_backward":
        return forward_backward
    return forward_into if output == "existing" else forward


def implementation(name: str, function: Function) -> Contender:
    """Return the contender that calls an operation of paracore with `impl=name`."""

    def build(setting: Setting) -> Function:
        refuse_interpreter(name, setting)
        return functools.partial(function, impl=name)

    return Contender(build)


def refuse_interpreter(name: str, setting: Setting) -> None:
    """Raise UsageError for the implementation whose time on this device would say nothing."""
    if name == "triton" and setting.device.type == "cpu":
        raise UsageError("triton runs on CPUs in its interpreter, whose time says nothing about a GPU's")


def compiled(contender: Contender) -> Contender:
    """Return `contender` under torch.compile, one graph per setting; it refuses where compilation fails."""

    def build(setting: Setting) -> Function:
        from torch._dynamo.exc import TorchDynamoException  # takes a second to import

        # Without the reset, the ninth setting would find the limit of recompilations used up.
        torch._dynamo.reset()
        function = torch.compile(contender.build(setting), fullgraph=True, dynamic=False)

        def call(**arguments: Tensor) -> Outputs:
            try:
                return function(**arguments)
            except TorchDynamoException as error:
                raise UsageError(f"torch.compile failed: {str(error).strip().splitlines()[0]}") from error

        return call

    return Contender(build, contender.output)


def random_tensor(
    shape: tuple[int, ...], setting: Setting, generator: torch.Generator, *, requires_grad: bool = False
) -> Tensor:
    """Return normally distributed values: zeros and constants would flatter caches and spare power.

    Tensors to be written are made so too: their pages are then there, and no fault is left to time.
    """
    return torch.randn(
        shape, dtype=setting.dtype, device=setting.device, generator=generator, requires_grad=requires_grad
    )


def format_shape(shape: Sequence[int]) -> str:
    """Return `shape` as the command line takes it, as in 8192x4096."""
    return "x".join(map(str, shape))


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
