"""A model of plain torch modules, made parallel by a plan, is the model that it was."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from paracore import nn as layers
from paracore.dropin import leaves
from paracore.dropin.parallelize import Parallel, parallelize
from paracore.dropin.plan import SHORT, Plan, resolve
from paracore.dropin.report import Changes
from paracore.dropin.styles import (
    ColumnParallel,
    Replicated,
    RowParallel,
    VocabularyEmbedding,
    VocabularyHead,
)
from paracore.errors import UsageError
from paracore.optim import AdamW, shard_parameters
from paracore.parallel.collectives import take_shard
from paracore.parallel.mesh import MeshShape, TrainingAxes
from paracore.parallel.overlap import Overlap
from tests.conftest import Launch
from tests.cut_decoders import axis_of
from tests.numerics import relative_error
from tests.plain_transformer import HIDDEN, PADDING, Transformer, batch, build, loss_of, plan_over

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 4
BOUND = {torch.float64: 1e-12, torch.float32: 2e-5}


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    """A mesh that has the axes it needs, and no others."""
    sizes = {name: size for name, size in (("dp", dp), ("tp", tp)) if size > 1} or {"tp": 1}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def own_rows(x: Tensor, axes: TrainingAxes) -> Tensor:
    return x.chunk(axes.dp.size)[axes.dp.rank]


def train_step(model: nn.Module, axes: TrainingAxes) -> tuple[Tensor, Tensor]:
    """Backward of the mean loss of the whole batch; returns this rank's logits and part of the loss."""
    tokens, labels = batch(ROWS)
    logits = model(own_rows(tokens, axes))
    loss = loss_of(logits, own_rows(labels, axes), int((labels != -100).sum()))
    loss.backward()
    return logits.detach(), loss.detach()


def total(x: Tensor, axes: TrainingAxes) -> Tensor:
    summed = x.clone()
    if axes.dp.group is not None:
        dist.all_reduce(summed, group=axes.dp.group)
    return summed


# ---------------------------------------------------------------- values


def check_values(mesh: DeviceMesh, tied: bool, dtype: torch.dtype) -> None:
    model = build(tied, dtype)
    exact = copy.deepcopy(model).double()
    expected_logits, expected_loss = train_step(exact, TrainingAxes.alone())
    before = copy.deepcopy(model.state_dict())
    parallel = parallelize(model, mesh, plan_over(parallel_size(mesh)))
    logits, loss = train_step(model, parallel.axes)
    parallel.sync_gradients()

    case, bound = f"{mesh} tied={tied} {dtype}", BOUND[dtype]
    assert relative_error(logits, own_rows(expected_logits, parallel.axes)) < bound, case
    assert relative_error(total(loss, parallel.axes), expected_loss) < bound, case
    dense = dict(exact.named_parameters(remove_duplicate=False))
    ours = dict(model.named_parameters(remove_duplicate=False))
    assert list(ours) == list(dense), case
    for name, parameter in ours.items():
        gradient = dense[name].grad
        assert gradient is not None
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        expected = parallel.placements[name].take(gradient, parallel.axes.tp.rank)
        assert relative_error(parameter.grad, expected) < bound or not expected.numel(), f"{case}: {name}"
    whole = parallel.full_state_dict()
    assert list(whole) == list(before)
    assert all(torch.equal(whole[name], tensor) for name, tensor in before.items()), case
    assert (whole["head.weight"] is whole["embed.weight"]) == tied


def has(mesh: DeviceMesh, name: str) -> bool:
    return name in (mesh.mesh_dim_names or ())


def check_undo(mesh: DeviceMesh) -> None:
    for tied in (True, False):
        model = build(tied)
        tree, parameters = repr(model), dict(model.named_parameters(remove_duplicate=False))
        before = {name: p.detach().clone() for name, p in parameters.items()}
        tokens, _ = batch(ROWS)
        expected = model(tokens)
        model.blocks[0].get_parameter("up.weight").requires_grad_(False)
        parallel = parallelize(model, mesh, plan_over(parallel_size(mesh)))
        assert not model.blocks[0].get_parameter("up.weight").requires_grad
        model.eval()
        if parallel.axes.tp.size > 1:  # nothing is held twice
            assert parameters["blocks.0.up.weight"].untyped_storage().nbytes() == 0
        parallel.undo()
        assert not any(module.training for module in model.modules())
        assert repr(model) == tree
        after = dict(model.named_parameters(remove_duplicate=False))
        assert list(after) == list(parameters)
        assert all(after[name] is parameters[name] for name in parameters)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert torch.equal(model(tokens), expected)
        with pytest.raises(UsageError, match="after undo"):
            parallel.full_state_dict()
        parallelize(model, mesh, plan_over(parallel_size(mesh)))  # and again


def parallel_size(mesh: DeviceMesh) -> int:
    return mesh["tp"].size() if has(mesh, "tp") else 1


# ---------------------------------------------------------------- optimizers

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def trained_dense() -> dict[str, Tensor]:
    model = build(True)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for _ in range(STEPS):
        train_step(model, TrainingAxes.alone())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def check_optimizers(mesh: DeviceMesh) -> None:
    expected = trained_dense()
    for zero in (None, 0, 1, 2, 3):
        model = build(True)
        parallel = parallelize(model, mesh, plan_over(parallel_size(mesh)), zero=zero or 0)
        theirs = torch.optim.AdamW(model.parameters(), **OPTIONS)
        with mock.patch("paracore.dropin.parallelize.AdamW", wraps=AdamW) as made:
            optimizer = theirs if zero is None else parallel.optimizer(**OPTIONS)
        assert [call.kwargs["stage"] for call in made.call_args_list] == ([] if zero is None else [zero])
        for _ in range(STEPS):
            train_step(model, parallel.axes)
            if zero is None:
                parallel.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
        if zero is not None:
            check_optimizer(parallel, zero)
        sharded = zero == 3 and parallel.axes.data.size > 1
        found = [parallel.full_state_dict()] if zero != 1 else []  # undo, too, has to wait for the step
        if not sharded:
            parallel.undo()
            found.append(model.state_dict())
        for whole in found:
            assert list(whole) == list(expected)
            for name, tensor in expected.items():
                assert relative_error(whole[name], tensor) < 1e-9, f"{mesh} zero={zero}: {name}"


def check_optimizer(parallel: Parallel, zero: int) -> None:
    """The stage is that which was asked for, and nobody sums what the optimizer has summed."""
    sharded = zero == 3 and parallel.axes.data.size > 1
    assert sharded == isinstance(next(parallel.model.parameters()), DTensor)
    with pytest.raises(UsageError, match=r"sync_gradients\(\): the AdamW of optimizer\(\) sums"):
        parallel.sync_gradients()
    with pytest.raises(UsageError, match="one was made already"):
        parallel.optimizer()
    if sharded:
        with pytest.raises(UsageError, match="FSDP2 does not give parameters back"):
            parallel.undo()


def check_meshes(meshes: list[tuple[int, int]]) -> None:
    for dp, tp in meshes:
        mesh = mesh_of(dp, tp)
        for tied in (True, False):
            for dtype in (torch.float64, torch.float32):
                check_values(mesh, tied, dtype)
        check_undo(mesh)
        check_optimizers(mesh)


@pytest.mark.parametrize(("size", "meshes"), [(1, [(1, 1)]), (2, [(1, 2), (2, 1)]), (4, [(1, 4), (2, 2)])])
def test_the_model_trains_as_it_did_and_can_be_had_back(
    launch: Launch, size: int, meshes: list[tuple[int, int]]
) -> None:
    launch(size, check_meshes, meshes)


# ---------------------------------------------------------------- a cut sequence


class Feedforward(nn.Module):
    """One that knows how long the whole sequence is, and tells; scale: of this rank's tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor, **length: int) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x * self.scale, **length)))
        return y


def cut_sequence() -> None:
    torch.manual_seed(0)
    dense, x = Feedforward().double(), torch.randn(37, 2, HIDDEN, dtype=torch.float64)
    model = copy.deepcopy(dense)
    expected = dense(x)
    expected.square().sum().backward()
    cut: dict[str, Any] = {"sequence_parallel": True, "overlap": Overlap(chunks=2)}
    plan: Plan = {"up": ColumnParallel(**cut), "down": RowParallel(**cut), "": "replicated_partial"}
    with mock.patch.object(Overlap, "on", autospec=True, side_effect=lambda overlap, *_: overlap) as asked:
        parallel = parallelize(model, mesh_of(1, 2), plan)
    assert asked.call_count == 1  # peer memory is reserved once, not for each layer
    y = model(take_shard(x, parallel.axes.tp, 0), length=37)
    assert relative_error(y, take_shard(expected, parallel.axes.tp, 0)) < 1e-14
    y.square().sum().backward()
    parallel.sync_gradients()
    for name, parameter in dense.named_parameters():
        assert parameter.grad is not None
        whole = parallel.placements[name].take(parameter.grad, parallel.axes.tp.rank)
        assert relative_error(cast(Tensor, model.get_parameter(name).grad), whole) < 1e-13, name
    with pytest.raises(UsageError, match="length=None with sequence_parallel"):
        model(take_shard(x, parallel.axes.tp, 0))
    with pytest.raises(UsageError, match=r"up: .*ColumnParallelLinear: which has been parallelized already"):
        parallelize(model, mesh_of(1, 2), {"up": "column"})


def test_styles_may_cut_the_sequence_where_the_model_tells_its_length(launch: Launch) -> None:
    launch(2, cut_sequence)


# ---------------------------------------------------------------- other meshes


def refused_meshes() -> None:
    model = build(False)
    for sizes, complaint in (
        ({"pp": 2}, r"mesh has pp=2: parallelize serves the axes dp, cp and tp alone"),
        ({"cp": 2}, r"cp=2 with a plan: .*those of this rank alone"),
    ):
        with pytest.raises(UsageError, match=complaint):
            parallelize(model, MeshShape(**sizes).build("cpu"), plan_over(1))
    with pytest.raises(UsageError, match=r"mesh has the axes \(\), must have one of dp, cp and tp"):
        parallelize(model, init_device_mesh("cpu", (2,)), plan_over(1))
    sharded = build(False)
    shard_parameters(sharded, TrainingAxes.of(mesh_of(2, 1)).data)
    with pytest.raises(UsageError, match=r"embed\.weight: a DTensor, must be a torch\.nn\.Parameter"):
        parallelize(sharded, mesh_of(1, 2), plan_over(2))
    parallel = parallelize(build(False), mesh_of(2, 1), plan_over(1), zero=3)
    with pytest.raises(UsageError, match="with zero=3: FSDP2 sums them in backward"):
        parallel.sync_gradients()
    # On one rank alone the plan is wrong: it says so, and the others, which had no part in it, do not wait.
    mesh = mesh_of(1, 2)
    if mesh.get_rank() == 0:
        with pytest.raises(UsageError, match="matches no module"):
            parallelize(model, mesh, {"nothing": "row"})


def test_meshes_that_a_plan_cannot_serve_are_refused(launch: Launch) -> None:
    launch(2, refused_meshes)


def axes_over(size: int, rank: int = 0) -> TrainingAxes:
    """A mesh of `size` ranks of tp that cannot communicate: whatever tried would raise."""
    return dataclasses.replace(TrainingAxes.alone(), tp=axis_of(size, rank))


# ---------------------------------------------------------------- plans


def test_a_pattern_means_the_modules_it_says() -> None:
    model = build(False)

    def matched(pattern: str) -> list[str]:
        return list(resolve(model, {pattern: "row"}))

    assert matched("blocks.*.up") == ["blocks.0.up", "blocks.1.up"]
    assert matched("blocks.1.attention.[qk]") == ["blocks.1.attention.q", "blocks.1.attention.k"]
    assert matched("*") == ["embed", "blocks", "norm", "head"]
    assert matched("**.norm") == ["blocks.0.norm", "blocks.1.norm", "norm"]
    assert matched("blocks.**.q") == ["blocks.0.attention.q", "blocks.1.attention.q"]
    assert matched("blocks.0.attention.?_norm") == ["blocks.0.attention.q_norm", "blocks.0.attention.k_norm"]
    assert matched("") == [""]


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ({"blocks.*.upp": "column"}, r"'blocks\.\*\.upp' matches no module \(near: blocks\.\*\.up"),
        ({"blocks.0": "column", "embd": "embedding"}, r"'embd' matches no module \(near: embed"),
        ({"up": "column"}, r"'up' matches no module"),  # whole names, not their ends
        ({"blocks.*.up": "colum"}, r"'blocks\.\*\.up': 'colum' is no style; must be one of column, "),
        ({"blocks.*.up": nn.Linear}, r"'blocks\.\*\.up': <class .*Linear'> is no style"),
        (
            {"blocks.*.up": "column", "blocks.1.*": "row"},
            r"blocks\.1\.up: 'blocks\.\*\.up' gives it ColumnParallel.*'blocks\.1\.\*' RowParallel",
        ),
        (
            {"norm": "column"},
            r"norm: ColumnParallel serves exactly torch\.nn\.Linear; this is torch.*RMSNorm",
        ),
        ({"blocks.0.attention": "column"}, r"this is .*Attention: .* of a block, name leaves"),
        ({"head": "embedding"}, r"head: VocabularyEmbedding serves exactly torch\.nn\.Embedding"),
        ({"blocks.0.up": "head"}, r"blocks\.0\.up: Linear with a bias cannot be an LM head; Column"),
        ({"blocks": "replicated"}, r"blocks: ModuleList has no parameters of its own"),
        ({"": "column"}, r"for the model itself, which nothing can take the place of"),
        ({"blocks.0.up": ColumnParallel(replicas=3)}, r"blocks\.0\.up: replicas=3 does not divide"),
        (
            {"blocks.0.up": ColumnParallel(gather_output=True, replicas=2)},
            r"blocks\.0\.up: gather_output=True with replicas=2",
        ),
        ({"blocks.0.up": ColumnParallel(overlap=Overlap())}, r"blocks\.0\.up: .*without sequence_parallel"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_nothing_is_changed(plan: Plan, complaint: str) -> None:
    model = build(False)
    tree, before = repr(model), copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=complaint):
        parallelize(model, axes_over(2), {"blocks.*.down": "row", **plan})
    assert repr(model) == tree
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_all_that_is_wrong_with_a_plan_is_said_at_once() -> None:
    with pytest.raises(UsageError, match=r"'a' matches no module.*; 'b': 'x' is no style"):
        resolve(build(False), {"a": "row", "b": "x"})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sequence_parallel": True}, "sequence_parallel=True with a plan: such options are of the families"),
        ({"vocab_parallel": True}, "vocab_parallel=True with a plan"),
        ({"overlap": Overlap()}, "overlap=Overlap.* with a plan"),
        ({"layout": "striped"}, "layout='striped' with a plan"),
        ({"strategy": "allgather"}, "strategy='allgather' with a plan"),
        ({"zero": 4}, "zero=4: must be 0, 1, 2 or 3"),
        ({"plan": None}, "no plan: Transformer is not one of LlamaForCausalLM"),
        ({"mesh": "cuda"}, "mesh is a str, must be a DeviceMesh or TrainingAxes"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(options: dict[str, Any], complaint: str) -> None:
    arguments: dict[str, Any] = {"mesh": axes_over(2), "plan": {"blocks.*.up": "column"}} | options
    with pytest.raises(UsageError, match=complaint):
        parallelize(build(False), **arguments)


class LowRank(nn.Linear):
    """As adapters are made: a subclass that computes something else."""


def spoiled(change: Callable[[Transformer], object]) -> Transformer:
    model = build(False)
    change(model)
    return model


def with_gradient(model: Transformer) -> None:
    model.head.weight.grad = torch.zeros_like(model.head.weight)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda m: setattr(m, "head", LowRank(24, 17, bias=False)),
            r"head: .*this is .*LowRank: parallelize before adapters",
        ),
        (
            lambda m: nn.utils.parametrizations.weight_norm(m.head),
            r"head: .*this is .*ParametrizedLinear: parallelize before",
        ),
        (lambda m: Changes().adopt(m.head, leaves.Linear), r"head: .*Linear: which paracore\.fuse has taken"),
        (lambda m: m.head.register_forward_hook(print), r"head: Linear has _forward_hooks, which the module"),
        (lambda m: setattr(m.head, "forward", print), r"head: Linear has a forward of its own"),
        (with_gradient, r"head\.weight: has a gradient, which would be lost"),
        (lambda m: m.head.weight.register_hook(print), r"head\.weight: has gradient hooks"),
        (lambda m: setattr(m.embed, "max_norm", 1.0), r"embed: Embedding with max_norm=1\.0, must be None"),
        (lambda m: setattr(m.embed, "sparse", True), r"embed: Embedding with sparse=True"),
        (lambda m: setattr(m.embed, "scale_grad_by_freq", True), r"embed: .*scale_grad_by_freq=True"),
    ],
)
def test_a_module_that_does_more_than_its_replacement_is_refused(
    change: Callable[[Transformer], object], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        parallelize(spoiled(change), axes_over(2), {"embed": "embedding", "head": "head"})


@pytest.mark.parametrize(
    ("plan", "as_what"),
    [
        ({"embed": "embedding"}, r"Shard\(0\) and as Replicate"),  # the head, not named, reads a whole weight
        ({"head": "head"}, r"Replicate and as Shard\(0\)"),
        ({"embed": "embedding", "head": "row"}, r"Shard\(0\) and as Shard\(1\)"),
        (
            {"embed": VocabularyEmbedding(False, sequence_parallel=True), "head": VocabularyHead(False)},
            r"Replicate, gradient summed and as Replicate",
        ),
    ],
)
def test_a_tied_weight_is_not_cut_in_two_ways(plan: Plan, as_what: str) -> None:
    with pytest.raises(
        UsageError, match=r"embed\.weight and head\.weight are one parameter, .* as " + as_what
    ):
        parallelize(build(True), axes_over(2), plan)


def test_a_module_in_two_places_stays_one() -> None:
    model = build(False)
    shared = model.blocks[1].up = model.blocks[0].up
    parallel = parallelize(model, axes_over(2), {"blocks.*.up": "column"})
    assert model.blocks[1].up is model.blocks[0].up is not shared
    assert [entry.name for entry in parallel.replaced] == ["blocks.0.up", "blocks.1.up"]
    assert "blocks.*.up: Linear -> ColumnParallelLinear over 2 ranks of tp (2 of them)" in str(parallel)


def test_what_is_not_cut_keeps_its_parameter_and_what_is_on_meta_stays_there() -> None:
    with torch.device("meta"):
        model = Transformer(tied=True).to(torch.bfloat16)
    down = model.blocks[0].get_submodule("down")
    bias = down.get_parameter("bias")
    parallel = parallelize(model, axes_over(2, rank=1), plan_over(2))
    assert model.blocks[0].get_submodule("down") is not down
    assert model.blocks[0].get_parameter("down.bias") is bias
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.embed.weight.shape == (8, 24)
    assert model.head.weight is model.embed.weight
    parallel.undo()
    assert model.blocks[0].get_submodule("down") is down
    assert down.get_parameter("weight").shape == (24, 37)
    assert model.head.weight is model.embed.weight


def test_short_names_stand_for_styles() -> None:
    assert SHORT["column"] == ColumnParallel()
    assert SHORT["row_scatter_input"] == RowParallel(input_is_parallel=False)
    assert SHORT["replicated_partial"] == Replicated(partial_gradient=True)


# ---------------------------------------------------------------- the vocabulary


def test_the_row_of_padding_gets_no_gradient_from_the_embedding_and_is_read_as_any_other() -> None:
    theirs = nn.Embedding(17, 5, padding_idx=PADDING)
    nn.init.normal_(theirs.weight)
    ours = VocabularyEmbedding().apply(theirs, "embed", axis_of(1, 0))
    assert isinstance(ours, layers.Embedding)
    assert ours.padding_idx == PADDING
    tokens = torch.tensor([[1, PADDING, 2], [PADDING, PADDING, 1]])
    assert torch.equal(ours(tokens), theirs(tokens))
    expected, gradient = (
        torch.autograd.grad(module(tokens).square().sum(), theirs.weight)[0] for module in (theirs, ours)
    )
    assert torch.equal(gradient, expected)
    assert not gradient[PADDING].any()
    assert gradient[1].all()


@pytest.mark.parametrize("rank", range(4))
def test_initially_the_row_of_padding_is_zero(rank: int) -> None:
    tp = axis_of(4, rank)
    made, plain = (layers.Embedding(17, 5, tp, padding_idx=index).weight for index in (-4, None))
    changed = (made != plain).any(1).nonzero().flatten().tolist()
    assert changed == ([13 - 10] if rank == 2 else [])
    assert not made[changed].any()
    with pytest.raises(UsageError, match="padding_idx=17: must be one of the 17 tokens"):
        layers.Embedding(17, 5, tp, padding_idx=17)


def test_a_head_needs_the_length_where_the_sequence_is_cut() -> None:
    head = layers.LMHead(17, 5, axis_of(2, 0), sequence_parallel=True)
    with pytest.raises(UsageError, match=r"length=None with sequence_parallel.*holds 3 on this rank of 2"):
        head(torch.zeros(3, 1, 5))
