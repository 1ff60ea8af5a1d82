"""One declaration per parameter: shards, replicas, conversion between tp sizes, gradient sync, norm."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from paracore.checkpoint import merge_state_dicts, shard_state_dict
from paracore.errors import UsageError
from paracore.nn import Decoder, DecoderConfig, complete_state_dict
from paracore.optim import clip_gradients_, gradient_norm
from paracore.parallel import GradientSync, MeshAxis, ParameterPlacement, collect_placements
from tests.conftest import Launch, tp_axis
from tests.numerics import assert_close, randn

CONFIG = DecoderConfig(
    vocab_size=11,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=19,  # not a multiple of any tp size
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)


def unconnected(size: int, rank: int) -> MeshAxis:
    """A tp axis for building a rank's model without communicating."""
    return dataclasses.replace(MeshAxis.alone("tp"), size=size, rank=rank)


@given(rows=st.integers(0, 9), shards=st.integers(1, 4), replicas=st.integers(1, 3), dim=st.integers(0, 1))
def test_taking_and_rebuilding_is_bitwise_the_identity(
    rows: int, shards: int, replicas: int, dim: int
) -> None:
    full = torch.arange(rows * 5.0).view((rows, 5) if dim == 0 else (5, rows))
    placement = ParameterPlacement.shard(full.shape, shards * replicas, dim, replicas=replicas)
    held = [placement.take(full, rank) for rank in range(shards * replicas)]
    copies = placement.copies(held)
    assert len(copies) == replicas
    assert all(torch.equal(copy, full) for copy in copies)
    assert (
        sum(held[rank].numel() for rank in range(len(held)) if placement.counts_in_norm(rank)) == full.numel()
    )


def test_a_replica_gone_astray_shows_in_its_copy() -> None:
    full = torch.arange(8.0).view(4, 2)
    placement = ParameterPlacement.shard(full.shape, 4, 0, replicas=2)
    held = [placement.take(full, rank) for rank in range(4)]
    held[3][0, 0] = -1.0
    first, second = placement.copies(held)
    assert torch.equal(first, full)
    assert not torch.equal(second, full)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 4, 1), (1, 2, 4, 1), (1, 4, 2, 1)])
def test_state_dict_round_trip_is_bitwise(config: DecoderConfig, sizes: tuple[int, ...]) -> None:
    state = Decoder(config, MeshAxis.alone("tp"), seed=5).state_dict()
    full = {name: tensor.clone() for name, tensor in state.items()}
    for size in sizes:
        placements = Decoder(config, unconnected(size, 0)).parameter_placements()
        ranks = [shard_state_dict(full, placements, rank) for rank in range(size)]
        for rank, held in enumerate(ranks):
            Decoder(config, unconnected(size, rank)).load_state_dict(held)  # names and shapes fit
        full = merge_state_dicts(ranks, placements)
    assert full.keys() == state.keys()
    assert all(torch.equal(full[name], state[name]) for name in state)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [2, 4])
def test_initial_weights_are_bitwise_the_same_for_every_tp(config: DecoderConfig, size: int) -> None:
    dense = Decoder(config, MeshAxis.alone("tp"), seed=3)
    models = [Decoder(config, unconnected(size, rank), seed=3) for rank in range(size)]
    merged = merge_state_dicts([m.state_dict() for m in models], models[0].parameter_placements())
    assert all(torch.equal(merged[name], tensor) for name, tensor in dense.state_dict().items())
    other = Decoder(config, MeshAxis.alone("tp"), seed=4)
    assert not torch.equal(other.lm_head.weight, dense.lm_head.weight)
    layers = [dense.state_dict()[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_placements_of_the_decoder_over_more_ranks_than_key_value_heads() -> None:
    found = Decoder(CONFIG, unconnected(4, 0)).parameter_placements()
    attention = "model.layers.0.self_attn."
    assert found[attention + "q_proj.weight"].layout == Shard(0)
    assert not found[attention + "q_proj.weight"].partial_gradient
    assert found[attention + "o_proj.weight"].layout == Shard(1)
    assert found[attention + "o_proj.bias"].layout == Replicate()
    for name in ("k_proj.weight", "v_proj.bias"):
        assert (found[attention + name].replicas, found[attention + name].partial_gradient) == (2, True)
    for name in ("q_norm.weight", "k_norm.weight"):
        assert (found[attention + name].replicas, found[attention + name].partial_gradient) == (4, True)
    assert not found["model.norm.weight"].partial_gradient
    assert str(found[attention + "k_proj.weight"]) == "Shard(0) x2, gradient summed"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (6, 2, 4, "num_heads=6 cannot be divided over tp=4 ranks"),
        (12, 3, 2, "num_kv_heads=3 neither divides nor is divided by tp=2"),
        (12, 4, 6, "num_kv_heads=4 neither divides nor is divided by tp=6"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused_with_both_numbers(
    heads: int, kv_heads: int, size: int, message: str
) -> None:
    config = DecoderConfig(11, 24, 1, heads, kv_heads)
    with pytest.raises(UsageError, match=message):
        Decoder(config, unconnected(size, 0))


def test_wrong_names_and_shapes_are_refused() -> None:
    placements = Decoder(CONFIG, unconnected(2, 0)).parameter_placements()
    full = Decoder(CONFIG, MeshAxis.alone("tp")).state_dict()
    with pytest.raises(UsageError, match=r"lacks \['lm_head.weight'\] and has unknown \['head'\]"):
        shard_state_dict({n if n != "lm_head.weight" else "head": t for n, t in full.items()}, placements, 0)
    with pytest.raises(UsageError, match=r"\(10, 24\) is not the whole parameter's \(11, 24\)"):
        shard_state_dict(full | {"lm_head.weight": torch.ones(10, 24)}, placements, 0)
    with pytest.raises(UsageError, match="1 shards given, the axis has 2 ranks"):
        merge_state_dicts([shard_state_dict(full, placements, 0)], placements)


class Replicas(nn.Module):
    """A parameter replicated over all ranks, one over pairs, and two whose gradients are not partial."""

    def __init__(self, size: int, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm, self.head, self.same, self.unused = (
            nn.Parameter(torch.ones(n, dtype=dtype)) for n in (3, 2, 2, 4)
        )
        self.placements = {
            "norm": ParameterPlacement.replicate((3,), size, partial_gradient=True),
            "head": ParameterPlacement.shard((2 * (size // 2),), size, 0, replicas=2),
            "unused": ParameterPlacement.replicate((4,), size, partial_gradient=True),
        }
        self.norm.grad = torch.full((3,), 2.0**rank, dtype=dtype) if rank else None  # none on rank 0
        self.head.grad = torch.full((2,), 10.0**rank, dtype=dtype)
        self.same.grad = torch.full((2,), 7.0, dtype=dtype)


def synced(dtype: torch.dtype) -> dict[str, Any]:
    tp = tp_axis()
    model = Replicas(tp.size, tp.rank, dtype)
    GradientSync(model, tp)()
    traffic = [(row.axis, row.count) for row in tp.ledger.take()]
    return {"traffic": traffic} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_sync_sums_each_set_of_replicas_once(launch: Launch, dtype: torch.dtype) -> None:
    for rank, result in enumerate(launch(4, synced, dtype)):
        assert result["traffic"] == [("tp", 1), ("tp[2]", 1)]
        assert result["norm"].tolist() == [2.0 + 4.0 + 8.0] * 3
        assert torch.equal(
            result["head"].float(), torch.full((2,), 11.0 if rank < 2 else 1100.0).to(dtype).float()
        )
        assert result["same"].tolist() == [7.0] * 2
        assert result["unused"] is None
        assert result["norm"].dtype == dtype


def accumulated(microbatches: int) -> dict[str, Tensor]:
    tp = tp_axis()
    model = Decoder(CONFIG, tp, dtype=torch.float64)
    sync = GradientSync(model, tp)
    for _ in range(2):  # the second step starts from fresh gradients
        model.zero_grad()
        for tokens in torch.arange(20).remainder(11).view(4, 5).chunk(microbatches):
            (model.loss(tokens, tokens.roll(1, dims=1)) / microbatches).backward()
        sync()
    with pytest.raises(UsageError, match="summed already"):
        sync()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_accumulate_over_micro_batches_and_are_summed_once(launch: Launch) -> None:
    for whole, pieces in zip(launch(4, accumulated, 1), launch(4, accumulated, 2), strict=True):
        for name, gradient in whole.items():
            assert_close(pieces[name], gradient, eps=1e-10)


def unfrozen_later() -> Tensor:
    tp = tp_axis()
    model = Decoder(CONFIG, tp, dtype=torch.float64)
    norm = model.get_submodule("model.layers.0.self_attn.q_norm").weight
    assert isinstance(norm, nn.Parameter)
    norm.requires_grad_(False)
    sync = GradientSync(model, tp)
    norm.requires_grad_(True)
    tokens = torch.arange(10).view(2, 5)
    model.loss(tokens, tokens.roll(1)).backward()
    sync()
    assert norm.grad is not None
    return norm.grad


def test_a_parameter_unfrozen_later_is_synced_too(launch: Launch) -> None:
    dense = Decoder(CONFIG, MeshAxis.alone("tp"), dtype=torch.float64)
    tokens = torch.arange(10).view(2, 5)
    dense.loss(tokens, tokens.roll(1)).backward()
    expected = dense.get_parameter("model.layers.0.self_attn.q_norm.weight").grad
    assert expected is not None
    for gradient in launch(2, unfrozen_later):
        assert_close(gradient, expected, eps=1e-12)


def norm_of_decoder(config: DecoderConfig, max_norm: float) -> tuple[float, dict[str, Tensor]]:
    tp = tp_axis()
    model = Decoder(config, tp, dtype=torch.float64)
    tokens = torch.arange(10).view(2, 5)
    sync = GradientSync(model, tp)
    model.loss(tokens, tokens.roll(1)).backward()
    sync()
    norm = clip_gradients_(model, tp, max_norm).item()
    return norm, {"clipped": gradient_norm(model, tp)}


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [2, 4])
def test_gradient_norm_counts_every_element_once(launch: Launch, config: DecoderConfig, size: int) -> None:
    dense = Decoder(config, MeshAxis.alone("tp"), dtype=torch.float64)
    tokens = torch.arange(10).view(2, 5)
    dense.loss(tokens, tokens.roll(1)).backward()
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), 1e9)
    max_norm = expected.item() / 3
    for norm, result in launch(size, norm_of_decoder, config, max_norm):
        assert norm == pytest.approx(expected.item(), rel=1e-12)
        assert result["clipped"].item() == pytest.approx(max_norm, rel=1e-12)


def test_a_norm_that_is_not_finite_leaves_the_gradients() -> None:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = torch.inf
    assert clip_gradients_(model, MeshAxis.alone("tp"), 1.0).item() == torch.inf
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [1.0, 1.0]


def test_clipping_in_sixteen_bits_does_not_round_the_scale() -> None:
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    model.weight.grad = randn(64, 64, seed=0, dtype=torch.bfloat16)
    clip_gradients_(model, MeshAxis.alone("tp"), 0.7)
    assert gradient_norm(model, MeshAxis.alone("tp")).item() == pytest.approx(0.7, rel=2e-4)


def test_tied_checkpoints_may_leave_the_head_out_but_not_contradict_it() -> None:
    state = Decoder(TIED, MeshAxis.alone("tp"), seed=1).state_dict()
    head = state.pop("lm_head.weight")
    model = Decoder(TIED, MeshAxis.alone("tp"), seed=2)
    model.load_state_dict(state)
    assert torch.equal(model.lm_head.weight, head)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    placements = Decoder(TIED, unconnected(2, 0)).parameter_placements()
    assert shard_state_dict(complete_state_dict(state, TIED), placements, 1).keys() == placements.keys()
    with pytest.raises(UsageError, match=r"lm_head\.weight differs"):
        model.load_state_dict(state | {"lm_head.weight": head + 1})


def test_merging_refuses_replicas_that_disagree() -> None:
    placements = Decoder(CONFIG, unconnected(2, 0)).parameter_placements()
    full = Decoder(CONFIG, MeshAxis.alone("tp")).state_dict()
    ranks = [shard_state_dict(full, placements, rank) for rank in range(2)]
    ranks[1]["model.norm.weight"] += 1
    with pytest.raises(UsageError, match=r"model\.norm\.weight: the 2 ranks that share it"):
        merge_state_dicts(ranks, placements)


def test_declarations_that_do_not_fit_are_refused() -> None:
    model = Decoder(CONFIG, unconnected(2, 0))
    with pytest.raises(UsageError, match="is declared over an axis of 2 ranks, not over one of 4"):
        collect_placements(model, 4)
    model.lm_head.weight = nn.Parameter(torch.ones(3, 3))
    model.model.norm.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match=r"model\.norm\.weight has shape \(3,\)"):
        collect_placements(model, 2)


def copied_decoder() -> bool:
    tp = tp_axis()
    model = Decoder(CONFIG, tp)
    twin = copy.deepcopy(model)
    tokens = torch.arange(10).view(2, 5)
    return torch.equal(twin(tokens), model(tokens)) and twin.lm_head.weight is not model.lm_head.weight


def test_a_cut_model_can_be_copied(launch: Launch) -> None:
    assert launch(2, copied_decoder) == [True, True]


def test_an_axis_without_a_process_group_never_pretends_to_communicate() -> None:
    model = Decoder(CONFIG, unconnected(2, 0))
    with pytest.raises(UsageError, match="axis tp of 2 ranks has no process group"):
        model(torch.arange(10).view(2, 5))


def test_undeclared_parameters_are_replicated_with_identical_gradients() -> None:
    (placement,) = collect_placements(nn.Embedding(3, 4), 2).values()
    assert placement == ParameterPlacement((3, 4), 2, Replicate(), 2, False)
    assert_close(placement.take(randn(3, 4, seed=0), 1), randn(3, 4, seed=0))
