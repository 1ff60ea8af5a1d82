"""What libraries around transformers, and careless callers, do to models that were changed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers.utils.generic import find_labels

import paracore
from paracore.errors import UsageError
from paracore.parallel import MeshShape
from tests.conftest import Launch
from tests.hf_cases import assert_gradients, batches, config_of, gradients_of, model_of, train
from tests.test_parallelize_hf import OPTIONS, parallel, whole

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = batches()["plain"]


def both(name: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """Return an untouched model, and a copy that is fused."""
    model = model_of(config_of(name, **changes))
    changed = copy.deepcopy(model)
    paracore.fuse(changed)
    return model, changed


# ---------------------------------------------------------------- how others tell what they have


def test_trainers_find_what_they_look_for() -> None:
    """transformers' Trainer goes by the names of arguments, for labels, and by the name of the model."""
    model, changed = both()
    own, found = inspect.signature(model.forward), inspect.signature(changed.forward)
    assert list(found.parameters) == list(own.parameters)
    assert find_labels(type(changed)) == find_labels(type(model)) == ["labels"]
    assert changed._get_name() == model._get_name() == "LlamaForCausalLM"
    assert repr(changed).startswith("LlamaForCausalLM[paracore](\n  (model): LlamaModel[paracore](")


def test_what_trainers_hand_to_every_model_is_taken_by_a_classifier() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config_of("llama"))
    changed = copy.deepcopy(model)
    paracore.fuse(changed)
    given = {"labels": torch.tensor([0, 1]), "num_items_in_batch": torch.tensor(2)}
    torch.testing.assert_close(changed(PLAIN.ids, **given).loss, model(PLAIN.ids, **given).loss)
    nothing = {"token_type_ids": torch.zeros_like(PLAIN.ids), "output_router_logits": False}
    torch.testing.assert_close(changed(PLAIN.ids, **nothing).logits, model(PLAIN.ids, **nothing).logits)


def test_the_cache_may_be_given_by_its_old_name() -> None:
    model, changed = both()
    expected = model.eval()(PLAIN.ids, use_cache=False).logits[:, 6:]
    cache = changed.eval()(PLAIN.ids[:, :6]).cache
    found = changed(PLAIN.ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_outputs_may_be_asked_for_by_the_config() -> None:
    model, changed = both(attn_implementation="eager")
    model.config.output_hidden_states = changed.config.output_hidden_states = True
    assert len(changed(PLAIN.ids).hidden_states) == len(model(PLAIN.ids).hidden_states) == 3
    changed.config.output_attentions = True
    with pytest.raises(UsageError, match="output_attentions=True"):
        changed(PLAIN.ids)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (None, [0, 5, 13], "cu_seq_lens_k is given without"),
        ([0, 5, 13], [0, 13], r"\[3\], but cu_seq_lens_k \[2\]"),
        ([0, 5, 13], [0, 6, 13], "must be the same"),
    ],
)
def test_boundaries_of_queries_and_keys_must_be_the_same(first: Any, second: Any, message: str) -> None:
    given = {"cu_seq_lens_q": first, "cu_seq_lens_k": second}
    tensors = {name: torch.tensor(value) for name, value in given.items() if value is not None}
    _, changed = both()
    with pytest.raises(UsageError, match=message):
        changed(PLAIN.ids[:1], **tensors)


# ---------------------------------------------------------------- heads that change later


class Adapted(nn.Module):
    """An adapter as PEFT puts it: it has the weight of the layer that it wraps, and adds to its output."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.tensor(0.3))

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.layer.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.scale * y.tanh()


def adapt(model: Any) -> None:
    model.lm_head = Adapted(model.lm_head)


def hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, given, logits: 0.5 * logits)


def replace_forward(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 0.5 * forward(hidden)


@pytest.mark.parametrize("first", [True, False], ids=["fused before", "fused after"])
@pytest.mark.parametrize("change", [hook, replace_forward, adapt])
def test_the_loss_is_that_of_the_head_as_it_is_now(change: Callable[[Any], None], first: bool) -> None:
    model = model_of(config_of("llama"))
    changed = copy.deepcopy(model)
    change(model)
    if first:
        paracore.fuse(changed)
        change(changed)
    else:
        change(changed)
        paracore.fuse(changed)
    expected, found = train(model, PLAIN), train(changed, PLAIN)
    torch.testing.assert_close(found[0], expected[0])
    assert_gradients(found[1], expected[1], change.__name__)


def test_a_loss_that_is_set_later_is_not_passed_over() -> None:
    _, changed = both()
    changed.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    with pytest.raises(UsageError, match="loss_function is <lambda>"):
        changed(PLAIN.ids, labels=PLAIN.labels)


def check_a_head_that_fsdp_has() -> None:
    model, changed = both("qwen3, one key head")
    expected = model(PLAIN.ids, labels=PLAIN.labels).loss
    for part in (*changed.model.layers, changed.lm_head, changed):
        fully_shard(part)
    found = changed(PLAIN.ids, labels=PLAIN.labels).loss
    found.backward()
    torch.testing.assert_close(found, expected)


def test_a_head_that_is_sharded_by_itself_is_gathered_for_the_loss(launch: Launch) -> None:
    launch(2, check_a_head_that_fsdp_has)


# ---------------------------------------------------------------- over a mesh


def check_over_tp() -> None:
    dense = model_of(config_of("llama"))
    expected = train(dense, PLAIN)
    for options in OPTIONS[:3]:
        model = copy.deepcopy(dense)
        calls: list[Any] = []
        report = parallel(model, MeshShape(tp=2), **options)
        layer = model.model.layers[0]
        for module in (layer.self_attn.k_proj, layer.mlp.up_proj, model.lm_head):
            module.register_forward_hook(lambda module, given, y, calls=calls: calls.append(module))
        loss, _ = train(model, PLAIN)
        assert len(calls) == 3, options
        report.sync_gradients()
        torch.testing.assert_close(loss, expected[0])
        assert_gradients(whole(gradients_of(model), report), expected[1], str(options))
        # One rank's token only: were it alone to refuse it, the other would wait for ever.
        labels = PLAIN.labels.clone()
        labels[0, 1] = 61
        with pytest.raises(RuntimeError, match="a label is outside"):
            model(PLAIN.ids, labels=labels)
        dist.barrier()
    for name, value in (("loss_function", lambda **_: 0.0), ("forward", dense.forward)):
        other = copy.deepcopy(dense)
        setattr(other, name, value)
        with pytest.raises(UsageError, match="LlamaForCausalLM: its "):
            parallel(other, MeshShape(tp=2))
        assert type(other) is type(dense)
        assert type(other.lm_head) is nn.Linear


def test_hooks_run_and_what_cannot_be_served_is_refused_over_tp(launch: Launch) -> None:
    launch(2, check_over_tp)


def check_over_cp() -> None:
    dense = model_of(config_of("qwen3, one key head"), torch.float64)  # of few tokens gradients cancel
    for strategy in ("ring", "all_gather"):
        model = copy.deepcopy(dense)
        report = parallel(model, MeshShape(cp=2), strategy=strategy)
        for length in (1, 2, 3):
            ids = PLAIN.ids[:, :length]
            torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)
        short = batches(length=7)["plain"]
        short.arguments["input_ids"], labels = short.ids[:, :2], short.labels[:, :2]
        dense.zero_grad()
        model.zero_grad()
        for each in (dense, model):
            each(short.ids, labels=labels).loss.backward()
        report.sync_gradients()
        assert_gradients(gradients_of(model), gradients_of(dense), strategy)
    for token, label in ((61, 0), (0, 61)):  # of one rank's part only
        ids = torch.zeros(1, 8, dtype=torch.int64)
        ids[0, 1], given = token, ids.clone()
        given[0, 1] = label
        with pytest.raises((UsageError, RuntimeError), match=r"must be from 0 to 60|a label is outside"):
            model(ids, labels=given)
        dist.barrier()


def test_ranks_of_cp_without_tokens_and_wrong_tokens_of_one_rank_hang_nobody(launch: Launch) -> None:
    launch(2, check_over_cp)
