"""The decoder computes what Hugging Face's Qwen3 and Llama compute, and what its definition says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from paracore import reference
from paracore.errors import UsageError
from paracore.nn import (
    Decoder,
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    rope_frequencies,
)
from paracore.nn.decoder import DecoderBlock
from paracore.parallel import MeshAxis
from tests.conftest import Launch, tp_axis
from tests.numerics import assert_as_exact_as, assert_close, randn, relative_error

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


def hugging_face(family: str, tied: bool, bias: bool, seed: int) -> torch.nn.Module:
    """A small random model of `family`, every parameter moved so that none is 0 or 1 everywhere."""
    kind = {"qwen3": "Qwen3", "llama": "Llama"}[family]
    extra = {"mlp_bias": bias} if family == "llama" else {}
    rope = {"rope_theta": SHAPE["rope_theta"], "rope_type": "default"}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["hidden_size"],
        intermediate_size=SHAPE["intermediate_size"],
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,  # not hidden_size / heads
        rms_norm_eps=SHAPE["rms_norm_eps"],
        rope_parameters=rope,
        attention_bias=bias,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        **extra,
    )
    model: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(randn(*parameter.shape, seed=seed + index, dtype=torch.float32), alpha=0.1)
    return model


def ours(family: str, tied: bool, bias: bool, dtype: torch.dtype) -> Decoder:
    config = DecoderConfig(
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        qk_norm=family == "qwen3",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias and family == "llama",
        tie_word_embeddings=tied,
        **SHAPE,
    )
    return Decoder(config, MeshAxis.alone("tp"), dtype=dtype)


def logits_and_gradients(model: torch.nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(tokens)
    logits = out if isinstance(out, Tensor) else out.logits
    labels = tokens.roll(-1, dims=1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_logits_and_every_gradient_are_those_of_transformers(family: str, tied: bool, bias: bool) -> None:
    theirs = hugging_face(family, tied, bias, seed=100)
    model, exact = ours(family, tied, bias, torch.float32), ours(family, tied, bias, torch.float64)
    model.load_state_dict(theirs.state_dict())  # the same names, all of them
    exact.load_state_dict(theirs.state_dict())
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(0))
    logits, gradients = logits_and_gradients(model, tokens)
    their_logits, their_gradients = logits_and_gradients(theirs, tokens)
    exact_logits, exact_gradients = logits_and_gradients(exact, tokens)
    assert relative_error(their_logits, exact_logits) < 1e-5, "transformers computes something else"
    assert_as_exact_as(logits, their_logits, exact_logits, floor=1e-7)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(their_gradients[name], exact_gradients[name]) < 1e-4, name
        assert_as_exact_as(gradient, their_gradients[name], exact_gradients[name], floor=1e-6, name=name)


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (None, {"rope_type": "default"}),
        (LinearScaling(7.8), {"rope_type": "linear", "factor": 7.8}),
        (
            Llama3Scaling(8.0, 64),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        (
            YarnScaling(7.8, original_context=2048),
            {"rope_type": "yarn", "factor": 7.8, "original_max_position_embeddings": 2048},
        ),
        (
            LongRopeScaling(tuple(1.0 + i for i in range(8)), 4.0, original_context=2048),
            {
                "rope_type": "longrope",
                "long_factor": [1.0 + i for i in range(8)],
                "short_factor": [1.0] * 8,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
        ),
    ],
    ids=["plain", "linear", "llama3", "yarn", "longrope"],
)
def test_rope_frequencies_are_those_of_transformers(
    scaling: RopeScaling | None, parameters: dict[str, Any]
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 1e4, **parameters},
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    # Beyond the original context, which is where LongRoPE takes its long factors.
    positions = torch.arange(4096)
    cos, sin = rotary(torch.zeros(1), positions[None])
    frequencies, magnitude = rope_frequencies(16, 1e4, scaling)
    our_cos, our_sin = (table * magnitude for table in reference.rotary_tables(positions, frequencies))
    # transformers multiplies positions and frequencies in float32: 4096 * 2^-24 off, and more.
    torch.testing.assert_close(our_cos.float(), cos[0, :, :8], atol=2e-3, rtol=0)
    torch.testing.assert_close(our_sin.float(), sin[0, :, :8], atol=2e-3, rtol=0)


def small(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**{"vocab_size": 13, "hidden_size": 32, "num_layers": 2, "num_heads": 4} | changes)


def test_norms_of_queries_and_keys_can_be_hooked() -> None:
    """What RoPE may overwrite is given it by modules, which hooks make views of."""
    model, seen = Decoder(small(qk_norm=True, num_kv_heads=2), MeshAxis.alone("tp")), list[str]()
    tokens = torch.arange(12).view(2, 6)
    loss = model.loss(tokens, tokens)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    norm = model.get_submodule("model.layers.0.self_attn.q_norm")
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    model.loss(tokens, tokens).backward()
    assert seen == ["backward"]
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, expected[name])


def test_a_later_token_changes_no_earlier_logits() -> None:
    model = Decoder(small(num_kv_heads=2), MeshAxis.alone("tp"))
    tokens = torch.arange(12).view(1, 12)
    changed = tokens.clone()
    changed[0, 7] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_only_differences_of_positions_matter() -> None:
    model = Decoder(small(num_kv_heads=2), MeshAxis.alone("tp"), dtype=torch.float64)
    tokens = torch.arange(12).view(1, 12)
    assert_close(model(tokens, torch.arange(12) + 100_000), model(tokens), eps=1e-9)
    assert relative_error(model(tokens, torch.arange(12) * 2), model(tokens)) > 1e-3


def test_loss_is_the_mean_over_valid_labels_and_zero_without_any() -> None:
    model = Decoder(small(num_kv_heads=2), MeshAxis.alone("tp"), dtype=torch.float64)
    tokens = torch.arange(12).view(2, 6)
    labels = tokens.roll(-1, 1).clone()
    labels[0, 2:] = -100
    log_probabilities = model(tokens).log_softmax(-1)
    valid = labels != -100
    expected = -log_probabilities[valid].gather(1, labels[valid][:, None]).mean()
    assert_close(model.loss(tokens, labels), expected)
    nothing = model.loss(tokens, torch.full_like(labels, -100))
    nothing.backward()
    assert nothing.item() == 0.0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def block_traffic(kv_heads: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    tp = tp_axis()
    block = DecoderBlock(small(num_kv_heads=kv_heads, qkv_bias=True, output_bias=True), tp)
    x = randn(5, 2, 32, seed=0, dtype=torch.float32).requires_grad_()
    cos, sin = torch.ones(5, 4), torch.zeros(5, 4)
    y = block(x, cos, sin)
    forward = [(row.kind, row.count) for row in tp.ledger.take()]
    y.sum().backward()
    return forward, [(row.kind, row.count) for row in tp.ledger.take()]


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 4), (4, 2)])
def test_a_block_costs_two_all_reduces_forward_and_two_backward(
    launch: Launch, size: int, kv_heads: int
) -> None:
    for forward, backward in launch(size, block_traffic, kv_heads):
        assert forward == [("all_reduce", 2)]
        assert backward == [("all_reduce", 2)]


def replicated_gradients(config: DecoderConfig) -> dict[str, Tensor]:
    tp = tp_axis()
    model = Decoder(config, tp)
    tokens = torch.arange(12).view(2, 6)
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    placements = model.parameter_placements()
    names = [n for n, p in placements.items() if p.replicas == tp.size and not p.partial_gradient]
    return {n: p.grad for n, p in model.named_parameters() if n in names and p.grad is not None}


def test_identical_replicated_gradients_are_bitwise_identical_on_all_ranks(launch: Launch) -> None:
    first, *others = launch(4, replicated_gradients, small(num_kv_heads=4, output_bias=True))
    assert "model.embed_tokens.weight" in first
    assert "model.layers.0.self_attn.o_proj.bias" in first
    for other in others:
        assert all(torch.equal(other[name], gradient) for name, gradient in first.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"num_kv_heads": 4, "hidden_size": 30}, "hidden_size=30 is not a multiple of num_heads=4"),
        ({"num_kv_heads": 4, "head_dim": 5}, "head_dim=5 is odd"),
        ({"num_kv_heads": 0}, "num_kv_heads=0: must be at least 1"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small(**changes)


class TestReference:
    """The definitions agree with torch's own in float64 and lose nothing in 16 bits."""

    def test_rms_norm(self) -> None:
        x, weight = randn(3, 7, seed=0), randn(7, seed=1)
        assert_close(reference.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (7,), weight, 1e-5))

    @pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (6, 2), (3, 1)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_attention(self, Hq: int, Hkv: int, causal: bool) -> None:
        q, k, v = randn(2, Hq, 5, 8, seed=0), randn(2, Hkv, 5, 8, seed=1), randn(2, Hkv, 5, 3, seed=2)
        ours = reference.attention(q, k, v, causal=causal)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        assert_close(ours, theirs)

    def test_attention_survives_huge_logits(self) -> None:
        q = k = 1e4 * randn(1, 1, 5, 4, seed=0)
        assert reference.attention(q, k, randn(1, 1, 5, 4, seed=1), causal=True).isfinite().all()

    def test_cross_entropy_returns_sum_and_count(self) -> None:
        logits, labels = randn(4, 3, 9, seed=0), torch.tensor([[0, 1, -100]] * 4)
        total, valid = reference.cross_entropy(logits, labels)
        assert valid.item() == 8
        assert_close(total / valid, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    @pytest.mark.parametrize("name", ["rms_norm", "rotate", "attention", "swiglu", "cross_entropy"])
    def test_gradients_by_finite_differences(self, name: str) -> None:
        x = randn(1, 2, 3, 4, seed=0).requires_grad_()
        y, z = randn(1, 2, 3, 4, seed=1).requires_grad_(), randn(1, 2, 3, 4, seed=2).requires_grad_()
        cos, sin = randn(3, 2, seed=3), randn(3, 2, seed=4)
        labels = torch.tensor([[[0, 3, -100], [1, 1, 2]]])
        functions: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
            "rms_norm": (lambda x, w: reference.rms_norm(x, w[0, 0, 0], 1e-5), (x, y)),
            "rotate": (lambda x: reference.rotate(x, cos, sin), (x,)),
            "attention": (lambda q, k, v: reference.attention(q, k, v, causal=True), (x, y, z)),
            "swiglu": (reference.swiglu, (x, y)),
            "cross_entropy": (lambda x: reference.cross_entropy(x, labels)[0], (x,)),
        }
        function, inputs = functions[name]
        assert torch.autograd.gradcheck(function, inputs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sixteen_bit_results_are_rounded_once(self, dtype: torch.dtype) -> None:
        x, weight = randn(3, 64, seed=0, dtype=dtype), randn(64, seed=1, dtype=dtype)
        exact = reference.rms_norm(x.double(), weight.double(), 1e-6)
        y = reference.rms_norm(x, weight, 1e-6)
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.51).all()


def test_a_copy_of_the_decoder_is_independent() -> None:
    model = Decoder(small(num_kv_heads=4), MeshAxis.alone("tp"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert model.lm_head.weight.abs().max() > 0
