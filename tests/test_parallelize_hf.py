"""Over any mesh, a model of transformers that `parallelize` has changed is the untouched one."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor

import paracore
from paracore.dropin.parallelize import Parallel
from paracore.errors import UsageError
from paracore.parallel import MeshShape, Overlap
from paracore.parallel.collectives import gather_list
from tests.conftest import Launch
from tests.hf_cases import (
    MODELS,
    Batch,
    Outcome,
    assert_equal,
    assert_gradients,
    batches,
    config_of,
    evaluate,
    gradients_of,
    model_of,
    outcome,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def parallel(model: Any, shape: MeshShape, **options: Any) -> Parallel:
    return paracore.parallelize(model, shape.build("cpu"), **options)


def whole(tensors: dict[str, Tensor], report: Parallel) -> dict[str, Tensor]:
    """Return what all ranks of tp hold, put together; replicas must agree to the bit."""
    found = {}
    for name, held in tensors.items():
        placement, tp = report.placements[name], report.axes.tp
        dim = placement.cut_dim or 0
        lengths = [placement.local_shape(rank)[dim] for rank in range(tp.size)]
        first, *others = placement.copies(gather_list(held, tp, lengths, dim))
        assert all(torch.equal(first, other) for other in others), name
        found[name] = first
    return found


def parallel_outcome(model: Any, report: Parallel, batch: Batch) -> Outcome:
    logits = evaluate(model, batch)
    loss, _ = train(model, batch)
    report.sync_gradients()
    return Outcome(logits, loss, whole(gradients_of(model), report))


# ---------------------------------------------------------------- values

OPTIONS: list[dict[str, Any]] = [
    {},
    {"sequence_parallel": True, "vocab_parallel": True},
    {"sequence_parallel": True},
    {"vocab_parallel": True, "strategy": "all_gather", "layout": "striped:2"},
]


def check_models(shape: MeshShape, names: list[str]) -> int:
    """Every batch over every model, each model with another way to cut."""
    checked = 0
    for name, options in zip(names, itertools.cycle(OPTIONS)):
        dense = model_of(config_of(name))
        model = copy.deepcopy(dense)
        report = parallel(model, shape, **options)
        for kind, batch in batches().items():
            found, expected = parallel_outcome(model, report, batch), outcome(dense, batch)
            assert_equal(batch, found, expected, f"{shape} {name}, {kind}, {options}")
            checked += 1
    return checked


@pytest.mark.parametrize(
    "shape",
    [MeshShape(), MeshShape(tp=2), MeshShape(tp=4), MeshShape(cp=2), MeshShape(cp=2, tp=2)],
    ids=["alone", "tp2", "tp4", "cp2", "cp2_tp2"],
)
def test_it_equals_the_untouched_model(launch: Launch, shape: MeshShape) -> None:
    names = list(MODELS) * (2 if shape.world_size == 2 else 1)
    assert launch(shape.world_size, check_models, shape, names) == [4 * len(names)] * shape.world_size


def check_over_data(stage: int) -> None:
    """Each rank of dp has sequences, and numbers of labels, of its own."""
    dense = model_of(config_of("qwen2"))
    dense_optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-2, weight_decay=0.1)
    model = model_of(config_of("qwen2"))
    report = parallel(model, MeshShape(dp=2, tp=2), sequence_parallel=True, vocab_parallel=True, zero=stage)
    optimizer = report.optimizer(lr=1e-2, weight_decay=0.1)
    of_all = [batches(seed=seed)["padded"] for seed in range(2)]
    of_all[1].labels[:, 2:5] = -100
    own = of_all[report.axes.dp.rank]
    for _ in range(2):
        dense_optimizer.zero_grad()
        both = {name: torch.cat([batch.arguments[name] for batch in of_all]) for name in own.arguments}
        expected = dense(**both, labels=torch.cat([batch.labels for batch in of_all])).loss
        expected.backward()
        dense_optimizer.step()
        loss = model(**own.arguments, labels=own.labels).loss
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    state = report.full_state_dict()
    for name, parameter in dense.state_dict().items():
        torch.testing.assert_close(state[name], parameter, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_over_dp_is_that_of_all_sequences(launch: Launch, stage: int) -> None:
    launch(4, check_over_data, stage)


# ---------------------------------------------------------------- calls and the way back


def check_calls() -> None:
    dense = model_of(config_of("qwen3, one key head", attention_dropout=0.2)).eval()
    given = batches(length=9)["plain"]
    left = torch.ones_like(given.ids)
    left[0, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = dense.generate(given.ids, attention_mask=left, **options)
    for cuts in OPTIONS[:3]:
        model = copy.deepcopy(dense.eval())
        report = parallel(model, MeshShape(tp=2), **cuts)
        for cache in (None, "static"):
            found = model.generate(given.ids, attention_mask=left, cache_implementation=cache, **options)
            assert torch.equal(found, expected), f"{cuts} {cache}"
        cached = model(given.ids, use_cache=True).cache.layers[0].keys
        assert cached.shape == (2, 1, 9, 12)
        _hidden_states_are_whole(model, dense, given)
        _dropout_is_the_same_on_all_ranks(model, report, given)
        _checkpointing_changes_nothing(model, given)
        before = {name: parameter.clone() for name, parameter in dense.state_dict().items()}
        report.undo()
        assert type(model) is type(dense)
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.state_dict().items())
        assert torch.equal(evaluate(model.eval(), given), evaluate(dense, given))


def _hidden_states_are_whole(model: Any, dense: Any, given: Batch) -> None:
    with torch.no_grad():
        found = model(given.ids, output_hidden_states=True).hidden_states
        expected = dense(given.ids, output_hidden_states=True).hidden_states
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def _dropout_is_the_same_on_all_ranks(model: Any, report: Parallel, given: Batch) -> None:
    torch.manual_seed(dist.get_rank())  # ranks whose generators have gone apart
    model.train()
    loss, _ = train(model, given)
    again, _ = train(model, given)
    assert not torch.equal(loss, again)
    losses = gather_list(loss.view(1), report.axes.tp, [1, 1], 0)
    assert torch.equal(*losses)
    report.sync_gradients()
    whole(gradients_of(model), report)  # replicas agree
    model.eval()


def _checkpointing_changes_nothing(model: Any, given: Batch) -> None:
    model.train()
    torch.manual_seed(3)
    expected = train(model, given)
    model.activation_checkpointing_enable()
    torch.manual_seed(3)
    found = train(model, given)
    model.activation_checkpointing_disable()
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    model.eval()


def test_generation_dropout_checkpointing_and_undo_over_tp(launch: Launch) -> None:
    launch(2, check_calls)


def check_compiled() -> None:
    config, given = config_of("qwen2", num_hidden_layers=1), batches()["padded"]
    expected = train(model_of(config), given)
    for shape, cuts in ((MeshShape(tp=2), OPTIONS[1]), (MeshShape(cp=2), {})):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = model_of(config)
        report = parallel(model, shape, **cuts)
        loss = torch.compile(model, backend="aot_eager")(**given.arguments, labels=given.labels).loss
        loss.backward()
        report.sync_gradients()
        torch.testing.assert_close(loss.detach(), expected[0], rtol=2e-6, atol=0)
        assert_gradients(whole(gradients_of(model), report), expected[1], f"{shape} {cuts}, compiled")
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert breaks
        assert all("it communicates" in reason for reason in breaks), breaks
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3  # what lies between


def test_what_does_not_communicate_is_compiled(launch: Launch) -> None:
    launch(2, check_compiled)


def check_overlap() -> None:
    dense, given = model_of(config_of("llama")), batches()["padded"]
    model = copy.deepcopy(dense)
    report = parallel(model, MeshShape(tp=2), sequence_parallel=True, overlap=Overlap(2))
    assert_equal(given, parallel_outcome(model, report, given), outcome(dense, given), "overlap")


def test_layers_overlap_with_their_communication(launch: Launch) -> None:
    launch(2, check_overlap)


def check_saving(folder: str) -> None:
    dense, given = model_of(config_of("mistral")), batches()["padded"]
    model = copy.deepcopy(dense)
    report = parallel(model, MeshShape(tp=2), vocab_parallel=True)
    with pytest.raises(UsageError, match="full_state_dict"):
        model.save_pretrained(folder)
    state = report.full_state_dict()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    loaded = type(dense).from_pretrained(folder)
    assert torch.equal(evaluate(loaded, given), evaluate(dense, given))


def test_what_is_saved_is_whole(launch: Launch, tmp_path: Any) -> None:
    launch(2, check_saving, str(tmp_path))


def check_from_files(folder: str) -> None:
    for name in ("llama", "qwen2"):
        config, given = config_of(name), batches()["plain"]
        with torch.device("meta"):
            model = type(model_of(config))(config)
        assert all(parameter.is_meta for parameter in model.parameters())
        report = parallel(model, MeshShape(tp=2), vocab_parallel=True, weights=f"{folder}/{name}.safetensors")
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert_equal(
            given, parallel_outcome(model.train(), report, given), outcome(model_of(config), given), name
        )


def test_a_model_on_the_meta_device_is_read_shard_by_shard(launch: Launch, tmp_path: Any) -> None:
    for name in ("llama", "qwen2"):
        state = model_of(config_of(name)).state_dict()
        if name == "qwen2":
            del state["lm_head.weight"]  # tied, as checkpoints leave it out
        save_file(state, tmp_path / f"{name}.safetensors")
    launch(2, check_from_files, str(tmp_path))


# ---------------------------------------------------------------- what is refused

REFUSED: list[tuple[str, dict[str, Any], MeshShape, dict[str, Any], str]] = [
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        MeshShape(tp=2),
        {},
        "rope_type='dynamic'",
    ),
    ("llama", {"hidden_act": "relu"}, MeshShape(tp=2), {}, "activation is ReLU"),
    ("llama", {}, MeshShape(tp=2), {"overlap": Overlap(2)}, "without sequence_parallel"),
    ("llama", {}, MeshShape(cp=2), {"layout": "spiral"}, "layout 'spiral'"),
    ("llama", {}, MeshShape(cp=2), {"strategy": "pigeon"}, "strategy='pigeon'"),
    ("llama", {}, MeshShape(pp=2), {}, "pp=2"),
    ("llama", {}, MeshShape(tp=2), {"zero": 4}, "zero=4"),
    ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, MeshShape(tp=2), {}, "num_heads=1"),
]


def check_refusals() -> None:
    for name, changes, shape, options, message in REFUSED:
        model = model_of(config_of(name, **changes))
        classes = [type(module) for module in model.modules()]
        with pytest.raises(UsageError, match=message):
            parallel(model, shape, **options)
        assert [type(module) for module in model.modules()] == classes, message
    model = model_of(config_of("llama"))
    model.model.layers[0].mlp.up_proj = type("Linear4bit", (torch.nn.Linear,), {})(32, 44)
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp\.up_proj: .*Linear4bit"):
        parallel(model, MeshShape(tp=2))
    fused = model_of(config_of("llama"))
    paracore.fuse(fused)
    with pytest.raises(UsageError, match="changed by paracore before"):
        parallel(fused, MeshShape(tp=2))
    over_cp = model_of(config_of("llama"))
    parallel(over_cp, MeshShape(cp=2))
    with pytest.raises(UsageError, match="use_cache=True over cp=2"):
        over_cp(batches()["plain"].ids, use_cache=True)


def check_disagreement() -> None:
    rank = dist.get_rank()
    model = model_of(config_of("llama"))
    with torch.no_grad():
        model.model.norm.weight += rank  # as where each rank draws weights of its own
    for shape in (MeshShape(tp=2), MeshShape(dp=2), MeshShape(cp=2)):
        with pytest.raises(UsageError, match=r"ranks disagree on the values of model\.norm\.weight: rank 0"):
            parallel(model, shape)
    with pytest.raises(UsageError, match="ranks disagree on layout: rank 0: 'zigzag', rank 1: 'striped'"):
        parallel(model_of(config_of("llama")), MeshShape(cp=2), layout=["zigzag", "striped"][rank])
    classifier = transformers.LlamaForSequenceClassification(config_of("llama"))
    with pytest.raises(UsageError, match="its model is one, and can be parallelized by itself"):
        parallel(classifier, MeshShape(tp=2))


def test_ranks_that_have_other_weights_or_mean_something_else_are_refused(launch: Launch) -> None:
    launch(2, check_disagreement)


def test_what_cannot_be_served_is_refused_by_name_and_changes_nothing(launch: Launch) -> None:
    launch(2, check_refusals)


def check_gradients_without_sync_are_parts() -> bool:
    """If the sum were not needed, the tests above would not see that it is missing."""
    dense, given = model_of(config_of("llama")), batches()["plain"]
    model = copy.deepcopy(dense)
    report = parallel(model, MeshShape(cp=2))
    _, found = train(model, given)
    _, expected = train(dense, given)
    with pytest.raises(AssertionError, match="the gradient of"):
        assert_gradients(found, expected, "cp")
    report.sync_gradients()
    assert_gradients(gradients_of(model), expected, "cp")
    return True


def test_gradients_are_parts_until_they_are_summed(launch: Launch) -> None:
    assert launch(2, check_gradients_without_sync_are_parts) == [True, True]
