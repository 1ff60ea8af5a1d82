"""Ring attention over processes of one machine against the same attention in one process with all threads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from paracore.bench.attention import Attention, mask_of
from paracore.bench.case import Case, Contender, Function, Inputs, Setting, Work
from paracore.bench.ranks import Ranks
from paracore.errors import UsageError
from paracore.ops.attention import attention
from paracore.ops.ring_attention import ring_attention
from paracore.parallel import layout as layouts
from paracore.parallel.layout import Layout
from paracore.parallel.mesh import MeshAxis

Tensors = dict[str, Tensor]

STRIPE = 128


def _layout(name: str, variant: str, length: int, size: int) -> Layout:
    if name == "balanced":
        return layouts.balanced(mask_of(variant, length), length, size)
    if name == "striped":
        return layouts.striped(length, size, STRIPE)
    return {"contiguous": layouts.contiguous, "zigzag": layouts.zigzag}[name](length, size)


def attend(axis: MeshAxis, layout_name: str, strategy: str, variant: str, length: int) -> Callable[..., None]:
    """Return a rank's turns: load tensors under a number, then go forward and backward with them."""
    layout, mask = _layout(layout_name, variant, length, axis.size), mask_of(variant, length)
    index = layout.ranks[axis.rank].tensor()
    shared: dict[int, Tensors] = {}
    held: dict[int, Tensors] = {}

    def load(number: int, tensors: Tensors) -> None:
        shared[number] = tensors
        held[number] = {name: layout.shard(tensors[name], axis.rank, 2) for name in ("q", "k", "v")}

    def load_gradient(number: int, dout: Tensor) -> None:
        held[number]["dout"] = layout.shard(dout, axis.rank, 2)

    def forward(number: int, requires_grad: bool) -> None:
        q, k, v = (held[number][name].requires_grad_(requires_grad) for name in ("q", "k", "v"))
        out = ring_attention(q, k, v, mask, layout, axis, strategy=strategy)
        held[number]["out"] = out

    def backward(number: int) -> None:
        tensors = held[number]
        leaves = [tensors[name] for name in ("q", "k", "v")]
        tensors["dq"], tensors["dk"], tensors["dv"] = torch.autograd.grad(
            tensors["out"], leaves, tensors["dout"]
        )

    def collect(number: int) -> None:
        for name in ("out", "dq", "dk", "dv"):
            if name in held[number]:
                shared[number][name].index_copy_(2, index, held[number][name].detach())

    turns: dict[str, Callable[..., None]] = {
        "load": load,
        "load_gradient": load_gradient,
        "forward": forward,
        "backward": backward,
        "collect": collect,
    }
    return lambda name, *arguments: turns[name](*arguments)


class _Distributed:
    """Attention computed by `Ranks`, as a function of tensors in this process.

    Results stay with the ranks, as they would in training, until `collect`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._shared: dict[int, Tensors] = {}  # by number
        self._numbers: dict[int, int] = {}  # by the address of q
        self._has_gradient: set[int] = set()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Remote.apply(q, k, v, self)
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, requires_grad: bool) -> tuple[int, Tensor]:
        """Return the number under which the ranks know these inputs, and out."""
        number = self._load({"q": q, "k": k, "v": v})
        self._ranks.turn("forward", number, requires_grad)
        return number, self._shared[number]["out"]

    def backward(self, number: int, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv; `dout` is always the same for one number."""
        if number not in self._has_gradient:
            self._has_gradient.add(number)
            self._ranks.turn("load_gradient", number, dout.share_memory_())
        self._ranks.turn("backward", number)
        shared = self._shared[number]
        return shared["dq"], shared["dk"], shared["dv"]

    def collect(self) -> None:
        """Bring the results of all calls to the tensors that the calls returned."""
        for number in self._shared:
            self._ranks.turn("collect", number)

    def _load(self, inputs: Tensors) -> int:
        tensors = {name: x.detach().share_memory_() for name, x in inputs.items()}
        address = tensors["q"].data_ptr()
        if address not in self._numbers:
            number = self._numbers[address] = len(self._numbers)
            like = {"out": "q", "dq": "q", "dk": "k", "dv": "v"}
            results = {name: torch.zeros_like(tensors[x]).share_memory_() for name, x in like.items()}
            self._shared[number] = tensors | results  # and so the address stays theirs
            self._ranks.turn("load", number, self._shared[number])
        return self._numbers[address]


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranks: _Distributed) -> Tensor:
        ctx.ranks = ranks
        ctx.number, out = ranks.forward(q, k, v, q.requires_grad)
        return out.detach()  # another tensor each time: autograd writes to it

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *ctx.ranks.backward(ctx.number, dout), None


def _one_process(setting: Setting) -> Function:
    return functools.partial(attention, mask=mask_of(setting.variant, setting.shape[4]))


def _distributed(layout_name: str, strategy: str = "ring") -> Contender:
    def build(setting: Setting) -> Function:
        size, _, query_heads, kv_heads, length, _ = setting.shape
        if setting.device.type != "cpu":
            raise UsageError("it measures processes on CPUs; on GPUs every rank needs one of its own")
        if strategy == "ulysses" and (query_heads % size or kv_heads % size):
            raise UsageError(f"{query_heads} and {kv_heads} heads cannot be divided over {size} ranks")
        arguments = (layout_name, strategy, setting.variant, length)
        return _Distributed(Ranks(size, torch.get_num_threads(), attend, *arguments))

    return Contender(build, elsewhere=True)


class RingAttention(Case):
    """Attention over `ranks` processes, each with its share of the threads.

    ratio: the throughput of one process with all threads, that of the ranks by it.
    """

    name = "ring_attention"
    dims = ("ranks", "batch", "query_heads", "kv_heads", "sequence", "head_dim")
    shapes = ((2, 1, 8, 8, 4096, 64),)
    variants = ("causal", "documents")
    bound = "compute"
    baseline = "one_process"
    contenders: ClassVar[dict[str, Contender]] = {
        "one_process": Contender(_one_process),
        "ring_contiguous": _distributed("contiguous"),
        "ring_zigzag": _distributed("zigzag"),
        "ring_striped": _distributed("striped"),
        "ring_balanced": _distributed("balanced"),
        "all_gather_zigzag": _distributed("zigzag", "all_gather"),
        "ulysses_contiguous": _distributed("contiguous", "ulysses"),
    }

    def inputs(self, setting: Setting, generator: torch.Generator) -> Inputs:
        """q, k and v of the whole sequence, and the gradient of the output."""
        return Attention().inputs(_whole(setting), generator)

    def work(self, setting: Setting) -> Work:
        """The same as on one device."""
        return Attention().work(_whole(setting))


def _whole(setting: Setting) -> Setting:
    return dataclasses.replace(setting, shape=setting.shape[1:])
