"""A model that `fuse` has changed computes what it did, and one changed back is bitwise what it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paracore
from paracore.dropin import leaves
from paracore.errors import UsageError
from paracore.hf import families, models
from paracore.parallel import masks
from tests.hf_cases import (
    MODELS,
    assert_equal,
    assert_gradients,
    assert_logits,
    batches,
    config_of,
    evaluate,
    model_of,
    outcome,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def fused(model: Any) -> Any:
    changed = copy.deepcopy(model)
    paracore.fuse(changed)
    return changed


@pytest.mark.parametrize("batch", ["plain", "padded", "packed", "cu_seq_lens"])
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_the_untouched_model(name: str, batch: str) -> None:
    model, given = model_of(config_of(name)), batches()[batch]
    assert_equal(given, outcome(fused(model), given), outcome(model, given), name)


@pytest.mark.parametrize("name", MODELS)
def test_everything_is_replaced_and_reported(name: str) -> None:
    model = model_of(config_of(name))
    report = paracore.fuse(model)
    assert report.left == []
    by_kind = {entry.kind.removeprefix(MODELS[name][0]) for entry in report.replaced}
    assert by_kind == {"ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm"}
    assert f"model.layers.*.mlp: {MODELS[name][0]}MLP -> SwiGLU (2 of them)" in str(report).splitlines()
    own = {type(module).__mro__[1].__module__.partition(".")[0] for module in model.modules()}
    assert own <= {"paracore", "torch", "transformers"}


@pytest.mark.parametrize("name", MODELS)
def test_undo_gives_back_the_same_bits_and_classes(name: str) -> None:
    model, given = model_of(config_of(name)), batches()["padded"]
    before = outcome(model, given)
    classes = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    parameters = list(map(id, model.parameters()))
    report = paracore.fuse(model)
    assert [type(module) for module in model.modules()] != classes
    report.undo()
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert list(map(id, model.parameters())) == parameters
    after = outcome(model, given)
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.loss, before.loss)
    assert all(torch.equal(after.gradients[n], before.gradients[n]) for n in before.gradients)


def test_classes_and_other_instances_stay_as_they_are() -> None:
    model, other = model_of(config_of("qwen2")), model_of(config_of("qwen2"))
    forward = type(model).forward
    paracore.fuse(model)
    assert type(other).forward is forward
    assert isinstance(model, type(other))
    assert type(model).__name__ == type(other).__name__
    assert list(model.state_dict()) == list(other.state_dict())


def test_a_second_fuse_finds_nothing_more_and_undoing_out_of_order_is_refused() -> None:
    model = nn.Sequential(nn.RMSNorm(4))
    first = paracore.fuse(model)
    assert paracore.fuse(model).replaced == []
    later = paracore.fuse(nn.Sequential())
    later.adopt("0", model[0], leaves.Linear, "something else")
    with pytest.raises(UsageError, match="changed again"):
        first.undo()
    later.undo()
    first.undo()
    assert type(model[0]) is nn.RMSNorm


# ---------------------------------------------------------------- calls


def test_hidden_states_are_those_of_the_untouched_model() -> None:
    model, given = model_of(config_of("llama")), batches()["plain"]
    with torch.no_grad():
        expected = model(**given.arguments, output_hidden_states=True).hidden_states
        found = fused(model)(**given.arguments, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 3
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_loss_options_of_trainers_are_served() -> None:
    model, given = model_of(config_of("qwen2")), batches()["plain"]
    changed = fused(model)
    for arguments in ({"num_items_in_batch": torch.tensor(17)}, {"num_items_in_batch": 17}):
        expected, found = train(model, given, **arguments), train(changed, given, **arguments)
        torch.testing.assert_close(found[0], expected[0])
        assert_gradients(found[1], expected[1], str(arguments))
    shifted = given.labels.roll(-3, 1)
    expected_loss = model(**given.arguments, labels=given.labels, shift_labels=shifted).loss
    torch.testing.assert_close(
        changed(**given.arguments, labels=given.labels, shift_labels=shifted).loss, expected_loss
    )


def test_logits_exist_in_evaluation_and_not_in_training_with_labels() -> None:
    model, given = fused(model_of(config_of("qwen2"))), batches()["plain"]
    assert model(**given.arguments, labels=given.labels).logits is None
    assert model.eval()(**given.arguments, labels=given.labels).logits.shape == (2, 13, 61)
    assert model(**given.arguments, logits_to_keep=3).logits.shape == (2, 3, 61)
    torch.testing.assert_close(
        model(**given.arguments, logits_to_keep=torch.tensor([2, 5])).logits,
        model(**given.arguments).logits[:, [2, 5]],
    )
    loss, logits = model(**given.arguments, labels=given.labels, return_dict=False, use_cache=False)
    assert loss.dim() == 0
    assert logits.shape == (2, 13, 61)


def test_embeddings_may_be_given_in_place_of_tokens() -> None:
    model, given = model_of(config_of("qwen2")).eval(), batches()["plain"]
    embedded = model.get_input_embeddings()(given.ids).detach()
    assert_logits(
        given, fused(model)(inputs_embeds=embedded).logits, model(inputs_embeds=embedded).logits, "embeddings"
    )


def test_a_mask_object_may_be_given() -> None:
    model, given = fused(model_of(config_of("qwen2"))), batches()["packed"]
    row = {"input_ids": given.ids[:1]}
    expected = model(**row, position_ids=given.arguments["position_ids"][:1]).logits
    positions = given.arguments["position_ids"][:1]
    # An attention_mask says all of who sees whom; positions are then rotary embedding's alone.
    found = model(**row, position_ids=positions, attention_mask=masks.documents([0, 5, 6, 13])).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks_of_four_dims_are_served(kind: str) -> None:
    model, given = model_of(config_of("llama")), batches()["plain"]
    visible = torch.ones(13, 13, dtype=torch.bool).tril(2)[None, None]
    mask = visible if kind == "boolean" else torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    assert_logits(
        given,
        fused(model)(given.ids, attention_mask=mask).logits,
        model(given.ids, attention_mask=mask).logits,
        kind,
    )


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "qwen3, windows in one layer", "mistral"])
def test_generate_gives_the_same_tokens(name: str, cache: str | None) -> None:
    model, given = model_of(config_of(name)).eval(), batches(length=9)["plain"]
    left = torch.ones_like(given.ids)
    left[0, :4] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    expected = model.generate(given.ids, attention_mask=left, **options)
    found = fused(model).generate(given.ids, attention_mask=left, **options)
    assert torch.equal(found, expected)


def test_dropout_of_attention_follows_torchs_seed_and_drops_nothing_in_evaluation() -> None:
    model, given = model_of(config_of("llama", attention_dropout=0.3)), batches()["plain"]
    changed = fused(model)
    assert_logits(given, evaluate(changed, given), evaluate(model, given), "evaluation")

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = changed(**given.arguments).logits
        return found.detach()

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))


@pytest.mark.parametrize("name", ["llama", "qwen3, windows in one layer"])
def test_activation_checkpointing_computes_the_same(name: str) -> None:
    model, given = model_of(config_of(name, attention_dropout=0.1)), batches()["padded"]
    changed = fused(model)
    torch.manual_seed(0)
    expected = train(changed, given)
    changed.activation_checkpointing_enable()
    calls = []
    changed.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    found = train(changed, given)
    assert len(calls) == 2  # once more in backward
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][n], expected[1][n]) for n in expected[1])


@pytest.mark.parametrize("batch", ["plain", "padded", "packed"])
def test_it_compiles_without_graph_breaks(batch: str) -> None:
    torch._dynamo.reset()
    model, given = fused(model_of(config_of("qwen3, one key head"))), batches()[batch]
    expected = train(model, given)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad(set_to_none=True)
    loss = compiled(**given.arguments, labels=given.labels).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected[0])
    assert_gradients(
        {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}, expected[1], batch
    )


@pytest.mark.parametrize("path", ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"])
def test_hooks_see_what_they_saw(path: str) -> None:
    model, given = model_of(config_of("llama")), batches()["plain"]
    seen: list[Tensor] = []

    def look(module: nn.Module, arguments: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)
        seen.extend(argument for argument in arguments if isinstance(argument, Tensor))

    for of in (model, fused(model)):
        of.model.layers[1].get_submodule(path).register_forward_hook(look)
        evaluate(of, given)
    half = len(seen) // 2
    ours = seen[-half:] if path != "self_attn" else seen[-2:-1]  # transformers gives it names, we places
    for found, expected in zip(ours, seen[:half], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_fused_model_can_be_copied_and_pickled() -> None:
    model, given = fused(model_of(config_of("qwen2"))), batches()["plain"]
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made) is type(model)
        assert torch.equal(evaluate(made, given), evaluate(model, given))


# ---------------------------------------------------------------- what is left, and why


def test_other_modules_are_left_and_named() -> None:
    class OddRMSNorm(nn.Module):
        pass

    model = nn.ModuleDict(
        {"a": nn.RMSNorm(8), "b": OddRMSNorm(), "c": nn.MultiheadAttention(8, 2), "d": nn.LayerNorm(8)}
    )
    report = paracore.fuse(model)
    assert [entry.name for entry in report.replaced] == ["a"]
    assert {entry.name for entry in report.left} == {"b", "c"}
    assert "a: RMSNorm -> RMSNorm" in str(report).splitlines()
    assert "OddRMSNorm is not a class that we know" in str(report)


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_norm_is_served(eps: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = nn.RMSNorm(16, eps=eps, dtype=dtype), torch.randn(3, 5, 16).to(dtype) * 0.01
    nn.init.normal_(norm.weight)
    expected = norm(x)
    paracore.fuse(norm)
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("llama", {"hidden_act": "gelu"}, "activation is GELUActivation"),
    ],
)
def test_a_config_that_we_lack_is_left_by_name_and_still_right(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    model, given = model_of(config_of(name, **changes)), batches()["padded"]
    changed = copy.deepcopy(model)
    report = paracore.fuse(changed)
    assert any(entry.name == "model" and reason in entry.reason for entry in report.left)
    assert any(entry.by == "RMSNorm" for entry in report.replaced)
    assert_equal(given, outcome(changed, given), outcome(model, given), reason)


def test_what_a_config_says_of_rope_and_we_do_not_know_does_not_go_unnoticed() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    assert families.rotary(model_of(config_of("llama", rope_parameters=yarn)).model)[1] > 1
    config = config_of("llama", rope_parameters={**yarn, "attention_factor": 3.0})
    with pytest.raises(UsageError, match="attention_factor"):
        families.rotary(model_of(config).model)


def test_a_head_that_is_not_plain_is_left_and_its_model_is_not() -> None:
    model, given = model_of(config_of("llama")), batches()["plain"]
    model.lm_head = nn.Linear(32, 61, bias=True)
    changed = copy.deepcopy(model)
    report = paracore.fuse(changed)
    assert [entry.name for entry in report.left] == [""]
    assert "lm_head" in report.left[0].reason
    assert isinstance(changed.model, models.Model)
    assert_equal(given, outcome(changed, given), outcome(model, given), "head with bias")


def test_a_layer_whose_forward_somebody_replaced_is_left() -> None:
    model = model_of(config_of("llama"))
    layer = model.model.layers[1].mlp
    layer.forward = layer.forward
    report = paracore.fuse(model)
    assert any("layers.1.mlp: its forward was replaced" in entry.reason for entry in report.left)


def test_adapters_in_place_of_linear_layers_go_on_working() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.mean(-1, keepdim=True)

    model, given = model_of(config_of("llama")), batches()["plain"]
    plain = model.model.layers[0].self_attn.q_proj
    model.model.layers[0].self_attn.q_proj = Adapted(32, 32)
    model.model.layers[0].self_attn.q_proj.load_state_dict(plain.state_dict())
    assert_equal(given, outcome(fused(model), given), outcome(model, given), "adapter")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, "output_attentions=True"),
        ({"head_mask": torch.ones(1)}, "head_mask"),
        ({"attention_mask": torch.ones(3, 13)}, r"attention_mask is \[3, 13\], must be \[2, 13\]"),
        ({"attention_mask": torch.ones(2, 14)}, r"attention_mask is \[2, 14\], must be \[2, 13\]"),
        ({"position_ids": torch.arange(12)}, r"position_ids is torch.int64 \[12\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 13])}, "batch of 2"),
        ({"labels": torch.ones(2, 12, dtype=torch.int64)}, r"labels are torch.int64 \[2, 12\]"),
        ({"inputs_embeds": torch.ones(2, 13, 32)}, "exactly one"),
        ({"labels": torch.ones(2, 13)}, r"labels are torch.float32"),
        ({"labels": torch.ones(2, 13, dtype=torch.int64), "logits_to_keep": 1}, "logits_to_keep=1"),
    ],
)
def test_calls_that_cannot_be_served_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = fused(model_of(config_of("qwen2")))
    with pytest.raises(UsageError, match=message):
        model(**{"input_ids": batches()["plain"].ids, **arguments})


def test_boundaries_must_end_where_the_row_does() -> None:
    model = fused(model_of(config_of("qwen2")))
    with pytest.raises(UsageError, match="cu_seq_lens_q must end at 13"):
        model(batches()["plain"].ids[:1], cu_seq_lens_q=torch.tensor([0, 12]))


def test_a_cache_that_backward_would_fill_again_is_refused() -> None:
    model, given = fused(model_of(config_of("qwen2"))), batches()["plain"]
    model.activation_checkpointing_enable()
    with pytest.raises(UsageError, match="would fill it twice"):
        model(given.ids, labels=given.labels, use_cache=True)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_decoding_goes_on_behind_a_cache_under_either_of_its_names(name: str) -> None:
    model, given = fused(model_of(config_of("mistral"))).eval(), batches()["plain"]
    expected = model(given.ids).logits
    cache = model(given.ids[:, :7], use_cache=True).cache
    positions = torch.arange(7, 13)[None]
    found = model(given.ids[:, 7:], position_ids=positions, **{name: cache}).logits
    torch.testing.assert_close(found, expected[:, 7:])


def test_padding_within_a_row_is_refused() -> None:
    given = batches()["plain"]
    mask = torch.ones_like(given.ids)
    mask[1, 5] = 0
    with pytest.raises(UsageError, match="row 1 has padding between its tokens"):
        fused(model_of(config_of("qwen2")))(given.ids, attention_mask=mask)


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_16_bit_models_are_at_least_as_exact(how: str) -> None:
    config, given = config_of("qwen3, one key head"), batches()["padded"]
    model = model_of(config, torch.bfloat16 if how == "weights" else torch.float32)
    same = model_of(config)
    same.load_state_dict(model.state_dict())
    exact = outcome(same, given)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found, theirs = outcome(fused(model), given), outcome(model, given)

    def error(of: Tensor, beside: Tensor) -> float:
        return float((of.float() - beside).norm() / beside.norm())

    assert error(found.loss, exact.loss) <= 2 * error(theirs.loss, exact.loss) + 1e-3
    for name, gradient in exact.gradients.items():
        ours, others = error(found.gradients[name], gradient), error(theirs.gradients[name], gradient)
        assert found.gradients[name].dtype == theirs.gradients[name].dtype
        assert 0 < ours <= 2 * others, f"{name}: {ours:.3e}, theirs {others:.3e}"


# ---------------------------------------------------------------- plans, for modules of other classes


class OtherNorm(nn.Module):
    def __init__(self, features: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.rand(features)), 1e-5, offset

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.weight + self.offset)


class OtherMLP(nn.Module):
    def __init__(self, features: int, activation: Any = nn.functional.silu) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(features, 24), nn.Linear(features, 24)
        self.w2, self.activation = nn.Linear(24, features), activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(self.activation(self.w1(x)) * self.w3(x))
        return y


def other_model(**changes: Any) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(OtherNorm(16), nn.Dropout(0.5), OtherMLP(16)) for _ in range(2)]
    return nn.Sequential(*blocks, OtherNorm(16, **changes))


PLAN: dict[str, Any] = {"*.0": "rms_norm", "2": "rms_norm", "*.2": leaves.swiglu_of("w1", "w3", "w2")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_says_what_modules_of_other_classes_are(dtype: torch.dtype) -> None:
    model = other_model().to(dtype)
    model.get_submodule("0.2").eval()
    modes = [part.training for part in model.modules()]
    changed = copy.deepcopy(model)
    report = paracore.fuse(changed, PLAN)
    ours = {entry.name for entry in report.replaced if entry.kind != "Linear"}
    assert ours == {"0.0", "0.2", "1.0", "1.2", "2"}
    assert [part.training for part in changed.modules()] == modes
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = changed.eval()(x), model.eval()(x)
    assert (found - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()
    report.undo()
    assert torch.equal(changed(x), model(x))
    assert [type(module) for module in changed.modules()] == [type(module) for module in model.modules()]


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (other_model(offset=1.0), {"2": "rms_norm"}, "2: OtherNorm computes something else than RMSNorm"),
        (
            nn.Sequential(OtherMLP(16, torch.tanh)),
            {"0": leaves.swiglu_of("w1", "w3", "w2")},
            "something else",
        ),
        (other_model(), {"0.2": leaves.swiglu_of("w3", "w1", "w2")}, "computes something else than SwiGLU"),
        (other_model(), {"0.2": "swiglu"}, "has not the parts of SwiGLU"),
        (other_model(), {"0.1": "rms_norm"}, "has not the parts of RMSNorm"),
        (other_model(), {"*.norm": "rms_norm"}, "matches no module"),
        (other_model(), {"2": "layer_norm"}, "'layer_norm' is no style; must be one of rms_norm, swiglu"),
    ],
)
def test_a_plan_that_is_not_true_is_refused_and_changes_nothing(
    model: nn.Module, plan: dict[str, Any], message: str
) -> None:
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UsageError, match=message):
        paracore.fuse(model, {"0.0": "rms_norm", **plan} if "0.2" in plan else plan)
    assert [type(module) for module in model.modules()] == classes
