"""What `paracore.fuse` makes of a training step of transformers' Qwen3: its time, its memory, its loss.

Forward and backward of one batch with labels, by a model as transformers has it, with its default attention,
and by a copy that `paracore.fuse` has changed, in turn. Beside them the products of the linear layers alone,
forward and backward: by torch, and where it differs as paracore multiplies (`paracore.ops.product`). What
these take can be no part of what fusing saves: eager's time by theirs is the limit.

Judged as well: losses and gradients of both must agree, or the bench fails.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paracore.bench.memory import peak_bytes
from paracore.errors import UsageError
from paracore.ops import product

NAME = "fuse"
MIN_ROUNDS = 3
EAGER, FUSED, PRODUCTS, OWN_PRODUCTS = "eager", "fused", "products by torch", "products by paracore"

LOSS_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""By how much of itself the loss may differ: what two orders of summation do to it, some times over."""
GRADIENT_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""By how much of their norm all gradients together may."""

UNITS = {
    "seconds, samples": "s of forward and backward",
    "ratio, limit": "eager's s by fused's, by those of the products, in the same round",
    "peak_mib": "2**20 bytes beyond the parameters, gradients among them",
    "difference": "of eager's loss, of the norm of eager's gradients",
}

Turns = Mapping[str, Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder as Qwen3 has it, its embedding tied to its head, and a batch to train it on."""

    layers: int = 8
    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 32000
    sequence: int = 1024
    batch: int = 1

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise UsageError(f"{name}={value}: must be at least 1")
        if self.heads % self.kv_heads:
            raise UsageError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")
        if self.head_dim % 2:
            raise UsageError(f"head_dim={self.head_dim}: must be even, for rotary embedding")
        if self.sequence < 2:
            raise UsageError(f"sequence={self.sequence}: must be at least 2, for a token to have a next one")

    def build(self, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
        """Return the model with random weights, in training. Raises UsageError without transformers."""
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise UsageError(f"{NAME} needs transformers, which cannot be imported: {error}") from error
        config = transformers.Qwen3Config(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.sequence,
            tie_word_embeddings=True,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: nn.Module = transformers.Qwen3ForCausalLM(config)
        return model.to(device, dtype).train()

    def tokens(self, device: torch.device, seed: int) -> Tensor:
        """Return random tokens [batch, sequence]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (self.batch, self.sequence), generator=generator).to(device)


# ---------------------------------------------------------------- what is timed


def train(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss, when its gradients are there."""
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return loss.detach()


class Products:
    """The products of a model's linear layers, of random numbers in place of activations."""

    def __init__(self, model: nn.Module, tokens: int, seed: int) -> None:
        self.weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        features = {size for weight in self.weights for size in weight.shape}
        like = self.weights[0]
        generator = torch.Generator(like.device).manual_seed(seed)
        self._rows = {
            size: torch.randn(tokens, size, generator=generator, device=like.device).to(like.dtype)
            for size in sorted(features)
        }

    @torch.no_grad()
    def run(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Compute Y = X W^T, dX = dY W and dW = dY^T X of every layer."""
        for weight in self.weights:
            dy, x = self._rows[weight.size(0)], self._rows[weight.size(1)]
            multiply(x, weight.T)
            multiply(dy, weight)
            multiply(dy.T, x)
        if weight.is_cuda:
            torch.cuda.synchronize(weight.device)


def measure(
    turns: Turns, *, seconds: float, seed: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Take turns, in an order shuffled anew every round, until another round would pass `seconds`.

    Returns the seconds of each turn by name. A round before, which warms up, does not count.
    """
    for turn in turns.values():
        turn()
    samples: dict[str, list[float]] = {name: [] for name in turns}
    order, start, rounds = random.Random(seed), clock(), 0
    while rounds < MIN_ROUNDS or (clock() - start) * (rounds + 1) <= seconds * rounds:
        for name in order.sample(sorted(turns), len(turns)):
            before = clock()
            turns[name]()
            samples[name].append(clock() - before)
        rounds += 1
    return samples


# ---------------------------------------------------------------- the figures


def run(
    model: Model, dtype: torch.dtype, device: torch.device, *, seconds: float, seed: int
) -> dict[str, Any]:
    """Measure; return the figures, and what is to be known of how they came about."""
    from paracore.dropin.fuse import fuse  # it is for those who have transformers

    eager = model.build(dtype, device, seed)
    fused = copy.deepcopy(eager)
    report = fuse(fused)
    tokens = model.tokens(device, seed)
    steps = {name: first_step(each, tokens) for name, each in ((EAGER, eager), (FUSED, fused))}
    verdict = judge(eager, fused, steps[EAGER][0], steps[FUSED][0])
    products = Products(eager, tokens.numel(), seed)
    turns: dict[str, Callable[[], object]] = {
        EAGER: lambda: train(eager, tokens),
        FUSED: lambda: train(fused, tokens),
        PRODUCTS: lambda: products.run(torch.mm),
    }
    if product.is_widened(dtype, device):
        turns[OWN_PRODUCTS] = lambda: products.run(product.multiply)
    samples = measure(turns, seconds=seconds, seed=seed)
    return {
        "model": dataclasses.asdict(model),
        "dtype": str(dtype).removeprefix("torch."),
        "attention": getattr(eager.config, "_attn_implementation", None),
        "replaced": len(report.replaced),
        "left": [dataclasses.asdict(entry) for entry in report.left],
        **verdict,
        "peak_mib": {name: peak / 2**20 for name, (_, peak) in steps.items()},
        **summary(samples),
        "samples": samples,
    }


def first_step(model: nn.Module, tokens: Tensor) -> tuple[float, int]:
    """Return the loss, and the most bytes held at once beyond the parameters; gradients are part of it."""
    losses: list[Tensor] = []
    peak = peak_bytes(lambda: losses.append(train(model, tokens)), tokens.device)
    return float(losses[0]), peak


def judge(eager: nn.Module, fused: nn.Module, eager_loss: float, fused_loss: float) -> dict[str, Any]:
    """Compare losses, and the gradients that are there; return by how much they differ, and the verdict."""
    dtype = next(eager.parameters()).dtype
    pairs = list(zip(eager.parameters(), fused.parameters(), strict=True))
    error = sum(float((_grad(a) - _grad(b)).square().sum()) for a, b in pairs)
    whole = sum(float(_grad(a).square().sum()) for a, _ in pairs)
    differences = {
        "loss": abs(fused_loss - eager_loss) / abs(eager_loss),
        "gradients": (error / whole) ** 0.5,
    }
    limits = {"loss": LOSS_LIMITS[dtype], "gradients": GRADIENT_LIMITS[dtype]}
    # NaN passes no comparison.
    passed = all(differences[name] <= limits[name] for name in limits)
    losses = _finite({EAGER: eager_loss, FUSED: fused_loss})
    return {"loss": losses, "difference": _finite(differences), "allowed": limits, "passed": passed}


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else parameter.grad.double()


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """NaN and infinity are no JSON."""
    return {name: value if abs(value) < float("inf") else None for name, value in values.items()}


def summary(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return quartiles of the seconds, of eager's by fused's, and of eager's by those of the products.

    Ratios are taken round by round, so that what slows a whole round down does not show in them.
    """
    limit = OWN_PRODUCTS if OWN_PRODUCTS in samples else PRODUCTS
    return {
        "rounds": len(samples[EAGER]),
        "seconds": {name: _quartiles(values) for name, values in samples.items()},
        "ratio": _quartiles(_ratios(samples[EAGER], samples[FUSED])),
        "limit": _quartiles(_ratios(samples[EAGER], samples[limit])),
    }


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"p25": lower, "median": median, "p75": upper}
