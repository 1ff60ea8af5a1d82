"""validate over a cut sequence and vocabulary: passes for what is right, fails for what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paracore.nn import (
    Decoder,
    DecoderConfig,
    DropoutDraw,
    Embedding,
    GroupedQueryAttention,
    LMHead,
    RowParallelLinear,
    decoder,
    vocabulary,
)
from paracore.nn.decoder import DecoderStack
from paracore.ops import cross_entropy, linear
from paracore.parallel import MeshAxis, reduce_from, reduce_scatter
from paracore.parallel.collectives import start_sum_in_place, start_sum_to_shards, take_shard
from paracore.validation import ValidationSettings, validate
from tests.conftest import Launch, training_axes

CONFIG = DecoderConfig(
    vocab_size=17,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=37,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
Cuts = tuple[bool, bool]  # the sequence, the vocabulary
SP, VP, BOTH = (True, False), (False, True), (True, True)


def settings(cuts: Cuts, **changes: Any) -> ValidationSettings:
    model = {k: changes.pop(k) for k in list(changes) if hasattr(CONFIG, k)}
    chosen: dict[str, Any] = {"seq_len": 9, "batch_size": 2, "steps": 0} | changes
    return ValidationSettings(
        dataclasses.replace(CONFIG, **model), sequence_parallel=cuts[0], vocab_parallel=cuts[1], **chosen
    )


def reports(sizes: dict[str, int], runs: list[ValidationSettings]) -> list[dict[str, Any] | None]:
    axes = training_axes(**sizes)
    return [validate(chosen, axes, torch.device("cpu")) for chosen in runs]


TWO_STEPS: dict[str, Any] = {"steps": 2, "log_every": 2}
DROPPING: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.1}
RUNS: dict[str, tuple[dict[str, int], list[ValidationSettings]]] = {
    "tp=2": (
        {"tp": 2},
        [
            *(settings(cuts, **TWO_STEPS) for cuts in (SP, VP, BOTH)),
            *(settings(cuts, dtype=torch.bfloat16, mask="packed", seq_len=33) for cuts in (SP, VP, BOTH)),
            *(settings(cuts, dtype=torch.float64, seed=1, **DROPPING) for cuts in (SP, VP, BOTH)),
            settings(BOTH, tie_word_embeddings=True, vocab_size=3, seq_len=5, **TWO_STEPS),
            settings(BOTH, num_kv_heads=1, seq_len=1),
        ],
    ),
    "cp=2,tp=2": (
        {"cp": 2, "tp": 2},
        [
            settings(SP, mask="packed", seq_len=33, **TWO_STEPS),
            settings(BOTH, layout="contiguous", **TWO_STEPS),
            settings(BOTH, dtype=torch.float64, layout="striped:2", **DROPPING),
        ],
    ),
    "dp=2,tp=2": (
        {"dp": 2, "tp": 2},
        [
            settings(BOTH, steps=3, log_every=3),
            *(settings(BOTH, zero=zero, steps=3, log_every=3) for zero in (1, 2, 3)),
            settings(SP, zero=2, steps=3, log_every=3, tie_word_embeddings=True),
            settings(BOTH, zero=1, dtype=torch.float64, **DROPPING),
        ],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_passes_over_every_mesh(launch: Launch, name: str) -> None:
    sizes, runs = RUNS[name]
    world = torch.tensor(list(sizes.values())).prod().item()
    for chosen, report in zip(runs, launch(world, reports, sizes, runs)[0], strict=True):
        assert report["failures"] == [], chosen
        assert report["config"]["sequence_parallel"] == chosen.sequence_parallel
        assert report["config"]["vocab_parallel"] == chosen.vocab_parallel
        if chosen.dtype == torch.float64:
            assert report["forward"]["max_logit_diff"] < 1e-13
            assert report["backward"]["max_grad_diff"] < 1e-12


# ---------------------------------------------------------------- faults put in on purpose
#
# The dense runs live in the same process, on the first rank: a fault must not reach them.


def norm_gradients_not_summed() -> Any:
    """Every rank keeps the norms' gradients of its own tokens."""
    original = decoder._norm
    return mock.patch.object(decoder, "_norm", lambda config, tp, cut: original(config, tp, False))


def declared_whole(kind: type[nn.Module]) -> Any:
    """The gradients of replicated parameters count as whole on every rank, though they are partial."""
    original = kind.__init__

    def broken(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        for module in (self, *self.children()):
            for name, placement in getattr(module, "placements", {}).items():
                if placement.num_shards == 1:
                    module.placements[name] = dataclasses.replace(placement, partial_gradient=False)

    return mock.patch.object(kind, "__init__", broken)


def row_bias_gradient_not_summed() -> Any:
    return declared_whole(RowParallelLinear)


def query_and_key_norms_not_summed() -> Any:
    return declared_whole(GroupedQueryAttention)


def embedding_gradient_not_summed() -> Any:
    return declared_whole(Embedding)


def head_gradient_not_summed() -> Any:
    return declared_whole(LMHead)


def row_bias_before_the_reduction() -> Any:
    """The bias counts tp times."""

    def broken(self: RowParallelLinear, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return reduce_scatter(y, self.tp, 0) if self.sequence_parallel else reduce_from(y, self.tp)

    return mock.patch.object(RowParallelLinear, "forward", broken)


def embedding_not_reduced() -> Any:
    """Every rank goes on with the tokens of its own vocabulary."""
    return mock.patch.multiple(
        vocabulary,
        reduce_from=lambda x, axis: x,
        reduce_scatter=lambda x, axis, dim: x.chunk(axis.size)[axis.rank],
    )


def embedding_reduced_twice() -> Any:
    return mock.patch.multiple(
        vocabulary,
        reduce_from=lambda x, axis: reduce_from(reduce_from(x, axis), axis),
        reduce_scatter=lambda x, axis, dim: reduce_scatter(reduce_from(x, axis), axis, dim),
    )


def input_not_gathered_again() -> Any:
    """For dW every rank repeats its own shard of X."""

    def broken(x: Tensor, axis: MeshAxis, dim: int, total: int) -> Callable[[], Tensor]:
        return lambda: x.repeat(axis.size, *[1] * (x.dim() - 1))[:1].expand(total, *x.shape[1:])

    return mock.patch.object(linear, "start_gather", broken)


@contextlib.contextmanager
def input_gradients_with(**changes: Any) -> Iterator[None]:
    """Change how dX is summed; row-parallel layers, which sum likewise in forward, stay right."""
    right = {name: getattr(linear, name) for name in changes}
    forward = linear._RowLinear.forward

    def as_it_was(*args: Any) -> Any:
        with mock.patch.multiple(linear, **right):
            return forward(*args)

    with mock.patch.object(linear._RowLinear, "forward", as_it_was), mock.patch.multiple(linear, **changes):
        yield


def input_gradient_not_reduced() -> Any:
    """Every rank keeps its own part of dX."""

    def of_shards(x: Tensor, axis: MeshAxis, dim: int) -> Callable[[], Tensor]:
        return lambda: take_shard(x, axis, dim)

    return input_gradients_with(start_sum_to_shards=of_shards, start_sum_in_place=lambda x, axis: lambda: x)


def input_gradient_divided_by_tp() -> Any:
    """dX is averaged where it must be summed."""

    def of_shards(x: Tensor, axis: MeshAxis, dim: int) -> Callable[[], Tensor]:
        return lambda: start_sum_to_shards(x, axis, dim)() / axis.size

    def in_place(x: Tensor, axis: MeshAxis) -> Callable[[], Tensor]:
        return lambda: start_sum_in_place(x, axis)() / axis.size

    return input_gradients_with(start_sum_to_shards=of_shards, start_sum_in_place=in_place)


def loss_not_summed() -> Any:
    """The loss is that of a rank's own tokens."""

    def broken(x: Tensor, axis: MeshAxis) -> Tensor:
        return x if axis.name == "tp" else reduce_from(x, axis)

    return mock.patch.object(cross_entropy, "reduce_from", broken)


def loss_counted_by_each_rank() -> Any:
    """Losses that every rank of tp has alike are added up over them, as if each had others."""
    original = Decoder.loss

    def broken(self: Decoder, *args: Any, **options: Any) -> Tensor:
        def again(x: Tensor, axis: MeshAxis) -> Tensor:
            return reduce_from(reduce_from(x, axis), self.tp)

        with mock.patch.object(cross_entropy, "reduce_from", again):
            return original(self, *args, **options)

    return mock.patch.object(Decoder, "loss", broken)


def loss_scaled_by_tp() -> Any:
    """The loss is right, its gradient tp times too large."""
    original = Decoder.loss

    def broken(self: Decoder, *args: Any, **options: Any) -> Tensor:
        loss = original(self, *args, **options)
        return loss * self.tp.size - loss.detach() * (self.tp.size - 1)

    return mock.patch.object(Decoder, "loss", broken)


def cross_entropy_of_own_shard() -> Any:
    """Each rank takes its own vocabulary for that of every other."""
    return mock.patch.object(cross_entropy, "gather_list", lambda x, axis, lengths, dim: [x] * axis.size)


def label_on_every_rank() -> Any:
    """Each rank takes some logit of its own for the label's, and all of them are added up."""
    original = cross_entropy._statistics

    def broken(logits: Tensor, labels: Tensor, impl: str | None) -> Tensor:
        statistics: Tensor = original(logits, labels.clamp(0, logits.size(-1) - 1), impl)
        return statistics

    return mock.patch.object(cross_entropy, "_statistics", broken)


def stack_with(change: Callable[..., dict[str, Any]]) -> Any:
    """Over tp, change what the stack is given, by name."""
    original = DecoderStack.forward

    def broken(
        self: DecoderStack, tokens: Tensor, places: Tensor, positions: Tensor, sequence: Any, draw: Any
    ) -> Tensor:
        given = {
            "tokens": tokens,
            "places": places,
            "positions": positions,
            "sequence": sequence,
            "draw": draw,
        }
        if self.tp.size > 1:
            given |= change(self.tp, **given)
        return original(self, **given)

    return mock.patch.object(DecoderStack, "forward", broken)


def dropout_differs_by_rank() -> Any:
    """Each rank of tp has a seed of its own."""

    def change(tp: MeshAxis, draw: DropoutDraw | None, **rest: Any) -> dict[str, Any]:
        return {"draw": None if draw is None else dataclasses.replace(draw, seed=draw.seed + tp.rank)}

    return stack_with(change)


def dropout_by_local_places() -> Any:
    """Each rank counts its own tokens from 0: all of them drop alike."""

    def change(tp: MeshAxis, places: Tensor, **rest: Any) -> dict[str, Any]:
        return {"places": repeated(places, tp)}

    return stack_with(change)


def rope_by_own_positions() -> Any:
    """RoPE turns by the positions of a rank's own tokens, though the projections hold all of them."""

    def change(tp: MeshAxis, positions: Tensor, **rest: Any) -> dict[str, Any]:
        return {"positions": repeated(positions, tp)}

    return stack_with(change)


def repeated(x: Tensor, tp: MeshAxis) -> Tensor:
    return x[: -(-len(x) // tp.size)].repeat(tp.size)[: len(x)]


FAULTS: list[tuple[Callable[[], Any], Cuts, str]] = [  # and what shows first
    (norm_gradients_not_summed, SP, "gradient of model.layers.0.input_layernorm.weight"),
    (norm_gradients_not_summed, BOTH, "gradient of model.norm.weight"),
    (row_bias_gradient_not_summed, SP, "gradient of model.layers.0.self_attn.o_proj.bias"),
    (row_bias_gradient_not_summed, BOTH, "gradient of model.layers.0.mlp.down_proj.bias"),
    (query_and_key_norms_not_summed, SP, "gradient of model.layers.0.self_attn.q_norm.weight"),
    (query_and_key_norms_not_summed, VP, "gradient of model.layers.0.self_attn.k_norm.weight"),
    (embedding_gradient_not_summed, SP, "gradient of model.embed_tokens.weight"),
    (head_gradient_not_summed, SP, "gradient of lm_head.weight"),
    (row_bias_before_the_reduction, BOTH, "logits"),
    (row_bias_before_the_reduction, SP, "logits"),
    (embedding_not_reduced, VP, "logits"),
    (embedding_not_reduced, BOTH, "logits"),
    (embedding_reduced_twice, VP, "logits"),
    (embedding_reduced_twice, BOTH, "logits"),
    (input_not_gathered_again, SP, "gradient of model.layers.0.self_attn.q_proj.weight"),
    (input_not_gathered_again, BOTH, "gradient of model.layers.0.mlp.up_proj.weight"),
    (input_gradient_not_reduced, SP, "gradient of model.embed_tokens.weight"),
    (input_gradient_not_reduced, VP, "gradient of model.embed_tokens.weight"),
    (input_gradient_not_reduced, BOTH, "gradient of model.norm.weight"),
    (input_gradient_divided_by_tp, SP, "gradient of model.embed_tokens.weight"),
    (input_gradient_divided_by_tp, VP, "gradient of model.norm.weight"),
    (input_gradient_divided_by_tp, BOTH, "gradient of model.norm.weight"),
    (loss_not_summed, SP, "loss"),
    (loss_counted_by_each_rank, VP, "gradient of lm_head.weight"),
    (loss_counted_by_each_rank, BOTH, "gradient of lm_head.weight"),
    (loss_scaled_by_tp, SP, "gradient of lm_head.weight"),
    (loss_scaled_by_tp, BOTH, "gradient of lm_head.weight"),
    (cross_entropy_of_own_shard, VP, "loss"),
    (cross_entropy_of_own_shard, BOTH, "loss"),
    (label_on_every_rank, VP, "loss"),
    (label_on_every_rank, BOTH, "loss"),
    (dropout_differs_by_rank, SP, "loss"),
    (dropout_differs_by_rank, VP, "loss"),
    (dropout_by_local_places, BOTH, "loss"),
    (rope_by_own_positions, SP, "logits"),
    (rope_by_own_positions, BOTH, "logits"),
]


def reports_with_faults() -> list[dict[str, Any] | None]:
    axes, found = training_axes(tp=2), []
    for fault, cuts, _ in FAULTS:
        options = DROPPING if "dropout" in fault.__name__ else {}
        with fault():
            found.append(validate(settings(cuts, num_layers=1, **options), axes, torch.device("cpu")))
    return found


def test_fails_for_every_fault(launch: Launch) -> None:
    for (fault, cuts, expected), report in zip(FAULTS, launch(2, reports_with_faults)[0], strict=True):
        failures = report["failures"]
        assert not report["passed"], f"{fault.__name__} over {cuts}"
        assert any(failure.startswith(expected) for failure in failures), f"{fault.__name__}: {failures}"
        if expected != "logits":
            assert not any(failure.startswith("logits") for failure in failures), fault.__name__
