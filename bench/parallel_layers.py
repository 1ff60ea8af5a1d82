"""What `paracore bench linear_overlap` measures: linear layers of real models under sequence parallelism.

Of each model the four products of a block that communicate, as `paracore.ops.linear` computes them, and a
training step of a small decoder of these sizes. Each can go with plain collectives and overlapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.nn.decoder import Decoder
from paracore.ops.linear import column_linear, row_linear
from paracore.parallel.gradient_sync import GradientSync
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.overlap import Overlap
from paracore.parallel.placement import shard_range

FORWARD, BOTH = "forward", "forward+backward"
STEP = "step"
LAYERS = ("qkv", "gate_up", "o", "down", STEP)
"""qkv and gate_up are column parallel, o and down row parallel; the step is that of a decoder."""

STEP_LAYERS = 2
STEP_VOCABULARY = 1024

Run = Callable[[Overlap | None, bool], object]
"""Computes, overlapped as given or, for None, with plain collectives; forward alone, or backward as well."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a decoder, and the tokens of all ranks of tp together."""

    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    tokens: int

    def require(self, tp: int) -> None:
        """Raise UsageError unless every rank of tp has as much to do as the others."""
        if self.hidden % self.query_heads:
            raise UsageError(f"hidden={self.hidden}: must be a multiple of query_heads={self.query_heads}")
        for name in ("intermediate", "query_heads", "kv_heads"):
            if getattr(self, name) % tp:
                raise UsageError(f"{name}={getattr(self, name)} cannot be divided over tp={tp} ranks")
        self.config()

    def config(self) -> DecoderConfig:
        """Return the decoder whose step is measured."""
        return DecoderConfig(
            STEP_VOCABULARY,
            self.hidden,
            STEP_LAYERS,
            self.query_heads,
            self.kv_heads,
            intermediate_size=self.intermediate,
            qk_norm=False,
        )


MODELS = {
    # For two cores: so large that the threads that move messages, which must wait for a core, matter little.
    "small": Model(hidden=1024, intermediate=2816, query_heads=16, kv_heads=16, tokens=4096),
    "7b": Model(hidden=4096, intermediate=11008, query_heads=32, kv_heads=32, tokens=8192),
    "70b": Model(hidden=8192, intermediate=28672, query_heads=64, kv_heads=8, tokens=8192),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model, or its step, in a dtype. Weights and inputs are drawn from seed."""

    name: str
    model: Model
    dtype: torch.dtype
    seed: int = 0

    @property
    def directions(self) -> tuple[str, ...]:
        """Return what can be measured of it."""
        return (BOTH,) if self.name == STEP else (FORWARD, BOTH)

    def build(self, tp: MeshAxis, device: torch.device) -> Run:
        """Return what a rank runs."""
        if self.name == STEP:
            return _step(self, tp, device)
        model, generator = self.model, torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, self.dtype)

        head = model.hidden // model.query_heads
        queries, keys = (count // tp.size * head for count in (model.query_heads, model.kv_heads))
        intermediate = model.intermediate // tp.size
        if self.name in ("qkv", "gate_up"):
            widths = [queries, keys, keys] if self.name == "qkv" else [intermediate] * 2
            return _column(model, widths, tp, draw)
        return _row(model, queries if self.name == "o" else intermediate, tp, draw)


def _column(model: Model, widths: Sequence[int], tp: MeshAxis, draw: Callable[..., Tensor]) -> Run:
    own = len(shard_range(model.tokens, tp.size, tp.rank))
    x = draw(own, 1, model.hidden).requires_grad_()
    weights = [draw(width, model.hidden).requires_grad_() for width in widths]
    dys = [draw(model.tokens, 1, width) for width in widths]

    def run(overlap: Overlap | None, backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            ys = column_linear(x, weights, [None] * len(weights), tp, length=model.tokens, overlap=overlap)
        return torch.autograd.grad(ys, [x, *weights], dys) if backward else ys

    return run


def _row(model: Model, width: int, tp: MeshAxis, draw: Callable[..., Tensor]) -> Run:
    own = len(shard_range(model.tokens, tp.size, tp.rank))
    x = draw(model.tokens, 1, width).requires_grad_()
    weight = draw(model.hidden, width).requires_grad_()
    dy = draw(own, 1, model.hidden)

    def run(overlap: Overlap | None, backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            y = row_linear(x, weight, tp, overlap=overlap)
        return torch.autograd.grad(y, [x, weight], dy) if backward else y

    return run


def _step(layer: Layer, tp: MeshAxis, device: torch.device) -> Run:
    model, generator = layer.model, torch.Generator().manual_seed(layer.seed)
    tokens = torch.randint(STEP_VOCABULARY, (1, model.tokens), generator=generator).to(device)
    trained: dict[Overlap | None, tuple[Decoder, GradientSync]] = {}

    def run(overlap: Overlap | None, backward: bool) -> object:
        if overlap not in trained:
            decoder = Decoder(
                model.config(),
                tp,
                seed=layer.seed,
                device=device,
                dtype=layer.dtype,
                sequence_parallel=True,
                overlap=overlap,
            )
            trained[overlap] = decoder, GradientSync(decoder, tp)
        decoder, sync_gradients = trained[overlap]
        loss = decoder.loss(tokens, tokens)
        loss.backward()
        sync_gradients()
        decoder.zero_grad()
        return loss

    return run
