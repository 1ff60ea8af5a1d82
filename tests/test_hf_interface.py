"""paracore's attention in models of transformers, against the same models with their own attention."""

from __future__ import annotations

import copy
import importlib.metadata
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import paracore
import paracore.hf
from paracore import masks
from paracore.errors import UsageError
from paracore.hf import attention_function as module_under_test
from paracore.hf.attention_function import attention_function
from tests.hf_models import DECODERS, ENCODERS, B, Pair, S, packed, padded, pair, relative, tokens

TOLERANCE = 5e-6  # of a few layers in float32


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    paracore.hf.register()


def run(model: nn.Module, real: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of tokens that are not padding, and the gradients of all weights."""
    model.zero_grad()
    labels = tokens(*inputs["input_ids"].shape).roll(1)[real]
    logits = model(**inputs).logits[real]
    nn.functional.cross_entropy(logits, labels).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def require_equal(models: Pair, real: Tensor, **inputs: Any) -> None:
    logits, gradients = run(models.ours, real, **inputs)
    their_logits, their_gradients = run(models.eager, real, **inputs)
    assert relative(logits, their_logits) < TOLERANCE
    assert gradients.keys() == their_gradients.keys()
    for name, theirs in their_gradients.items():
        if not name.endswith("key.bias"):  # it moves all scores of a query alike: the gradient is 0
            assert relative(gradients[name], theirs) < TOLERANCE, name


def uses_our_attention(model: Any) -> bool:
    return bool(model.config._attn_implementation == "paracore")


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits_and_all_gradients_are_those_of_eager_attention(name: str) -> None:
    """Without padding, and with padding on either side: what padding itself gets is garbage there, 0 here."""
    models = pair({**DECODERS, **ENCODERS}[name])
    assert uses_our_attention(models.ours)
    assert not uses_our_attention(models.eager)
    inputs: dict[str, Any] = {"input_ids": tokens(), **({"use_cache": False} if name in DECODERS else {})}
    require_equal(models, torch.ones(B, S, dtype=torch.bool), **inputs)
    for side in ("left", "right"):
        mask = padded(side)
        require_equal(models, mask.bool(), **inputs, attention_mask=mask)


@pytest.mark.parametrize("name", ["Llama", "Mistral, window", "Llama 4, chunks"])
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    models, real = pair(DECODERS[name]), torch.ones(2, S, dtype=torch.bool)
    ids, position_ids = tokens(2), packed(4, 10, 5, S)
    require_equal(models, real, input_ids=ids, position_ids=position_ids, use_cache=False)
    alone = models.ours(ids[:1, 4:14]).logits
    together = models.ours(ids, position_ids=position_ids, use_cache=False).logits
    assert relative(together[:1, 4:14], alone) < TOLERANCE


def test_boundaries_of_packed_sequences_are_respected() -> None:
    """As `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` gives them; eager ignores them."""
    models = pair(DECODERS["Llama"])
    boundaries = torch.tensor([0, 4, 14, S], dtype=torch.int32)
    inputs = {"input_ids": tokens(1), "position_ids": packed(4, 10, 5)}
    ends = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries.clone(), "max_length_q": 10}
    expected = models.eager(**inputs, use_cache=False).logits
    cached = {"use_cache": True}  # then transformers does not look at position_ids for packing
    assert relative(models.ours(**inputs, **cached).logits, expected) > 1e-2
    assert relative(models.ours(**inputs, **cached, **ends).logits, expected) < TOLERANCE


def test_without_the_mask_function_padding_would_count() -> None:
    """Why `register` registers both: transformers makes no mask for a name that has attention alone."""
    models, mask = pair(DECODERS["Llama"]), padded("left")
    expected = models.eager(tokens(), attention_mask=mask).logits[mask.bool()]
    mapping = {k: v for k, v in AttentionMaskInterface._global_mapping.items() if k != "paracore"}
    with patch.object(AttentionMaskInterface, "_global_mapping", mapping):
        wrong = models.ours(tokens(), attention_mask=mask).logits[mask.bool()]
    right = models.ours(tokens(), attention_mask=mask).logits[mask.bool()]
    assert (wrong - expected).abs().max() > 0.1
    assert relative(right, expected) < TOLERANCE


# ---------------------------------------------------------------- generation


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "name", ["Llama", "Mistral, window", "Gemma 2, soft caps, alternating windows", "Llama 4, chunks"]
)
def test_prompts_of_unequal_lengths_are_continued_as_by_eager_attention(name: str, cache: str) -> None:
    """Padded on the left; windows and chunks are shorter than the prompts, and so are their caches."""
    models, mask = pair(DECODERS[name]), padded("left", [9, 4, 7], total=9)
    new: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    new |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    ours, eager = (m.generate(tokens(3, 9), attention_mask=mask, **new) for m in (models.ours, models.eager))
    assert torch.equal(ours.sequences, eager.sequences)
    assert relative(torch.stack(ours.logits), torch.stack(eager.logits)) < TOLERANCE


@pytest.mark.parametrize("name", ["Llama", "gpt-oss, sinks, alternating windows"])
def test_a_prompt_may_come_in_pieces(name: str) -> None:
    """Several queries behind keys that are in a cache already."""
    models, ids = pair(DECODERS[name]), tokens()
    cache, pieces = None, []
    for piece in ids.split([8, 1, 7, 3], -1):
        out = models.ours(piece, cache=cache, use_cache=True)
        cache = out.cache
        pieces.append(out.logits)
    assert relative(torch.cat(pieces, 1), models.eager(ids).logits) < TOLERANCE


# ---------------------------------------------------------------- masks given by the caller


def four_dims(mask: Tensor) -> Tensor:
    """What each query sees under causal attention, [B, 1, S, S]."""
    return torch.ones(S, S, dtype=torch.bool).tril() & mask[:, None, None, :].bool()


def test_a_callers_mask_of_four_dims_is_served_boolean_or_additive() -> None:
    models, mask = pair(DECODERS["Llama"]), padded("right")
    visible = four_dims(mask)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = models.eager(tokens(), attention_mask=additive).logits[mask.bool()]
    for given in (visible, additive, additive.clamp_min(-3e38), torch.where(visible, 0.0, -torch.inf)):
        assert relative(models.ours(tokens(), attention_mask=given).logits[mask.bool()], expected) < TOLERANCE
    one = models.eager(tokens(), attention_mask=additive[:1]).logits
    assert relative(models.ours(tokens(), attention_mask=visible[:1]).logits, one) < TOLERANCE


def test_a_mask_is_looked_at_once_for_all_layers_and_again_when_it_was_written_to() -> None:
    models, visible = pair(DECODERS["Llama"]), four_dims(torch.ones(B, S))
    with patch.object(module_under_test, "from_boolean", side_effect=masks.from_boolean) as looks:
        before = models.ours(tokens(), attention_mask=visible).logits
        models.ours(tokens(), attention_mask=visible)
        assert looks.call_count == 1
        visible[..., 0] = False
        after = models.ours(tokens(), attention_mask=visible).logits
        assert looks.call_count == 2
    assert relative(after, before) > 1e-2


def with_value(value: float) -> Tensor:
    mask = torch.zeros(B, 1, S, S)
    mask[1, 0, 2, 3] = value
    return mask


ONES = torch.ones(B, S, dtype=torch.int64)
GAP = ONES.clone()
GAP[1, 5] = 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": GAP}, "hides keys between those that query 6 of batch row 1 sees"),
        ({"attention_mask": four_dims(GAP)}, r"visible\[1, 6\]: the keys .* not an interval"),
        (
            {"attention_mask": with_value(-1.5)},
            r"attention_mask\[1, 0, 2, 3\] is -1.5: must be 0, or",
        ),
        ({"attention_mask": with_value(torch.nan)}, r"attention_mask\[1, 0, 2, 3\] is nan: must be 0"),
        ({"attention_mask": four_dims(ONES).long()}, "attention_mask is int64, must be bool or float"),
        (
            {"attention_mask": torch.zeros(B, 1, S, S, requires_grad=True)},
            "attention_mask is float32, must be bool or float without a gradient",
        ),
        ({"attention_mask": four_dims(ONES).expand(-1, 4, -1, -1)}, "must be .* the same for all heads"),
        ({"attention_mask": four_dims(ONES)[..., :-1]}, rf"is bool \[{B}, 1, {S}, {S - 1}\], must be"),
        ({"output_attentions": True}, "output_attentions was given .* never exist here"),
        ({"head_mask": torch.ones(4)}, "head_mask was given to attention: weights of heads are not served"),
        ({"temperature": 2.0}, "temperature was given to attention: paracore's attention does not know it"),
        ({"cu_seq_lens_q": torch.tensor([0, S])}, "cu_seq_lens_q and cu_seq_lens_k must be given both"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    model = pair(DECODERS["Llama"]).ours
    with pytest.raises(UsageError, match=message):
        model(tokens(), **given)


def heads(queries: int = S, keys: int = S, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, 4, queries, 16), (batch, 2, keys, 16), (batch, 2, keys, 16)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


ENDS = torch.tensor([0, 5, S])


@pytest.mark.parametrize(
    ("qkv", "given", "message"),
    [
        (heads(), {"position_bias": torch.zeros(1, 4, S, S)}, "position_bias was given to attention: a bias"),
        (heads(), {"cache": object()}, "cache was given to attention: a paged cache"),
        (heads(), {"attention_mask": "causal"}, "attention_mask is a str, must be a tensor, a Mask or None"),
        (heads(4), {}, f"attention_mask=None for causal attention of 4 queries and {S} keys"),
        (heads(), {"is_causal": False, "sliding_window": 4}, "sliding_window=4 .* must be causal"),
        (heads(), {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS + 1}, "must be the same"),
        (heads(), {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS[1:]}, r"\[3\], but cu_seq_lens_k \[2\]"),
        (heads(), {"cu_seq_lens_q": ENDS[:2], "cu_seq_lens_k": ENDS[:2]}, f"must end at {S} or beyond"),
        (heads(batch=2), {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}, "for a batch of 2 .* batch of 1"),
    ],
)
def test_what_the_attention_function_does_not_serve_is_refused_by_name(
    qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        attention_function(nn.Module(), *qkv, **{"attention_mask": None, **given})


# ---------------------------------------------------------------- the attention function by itself


@pytest.mark.parametrize(
    ("qkv", "given", "mask"),
    [
        (heads(), {}, masks.causal()),
        (heads(), {"sliding_window": 4}, masks.sliding_window(3, 0)),
        (heads(), {"is_causal": False}, masks.full()),
        (heads(4), {"is_causal": False}, masks.full()),
        (heads(1), {}, masks.full()),
        (heads(), {"attention_mask": masks.prefix_lm(5)}, masks.prefix_lm(5)),
    ],
)
def test_without_a_mask_in_a_tensor(
    qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], mask: masks.Mask
) -> None:
    """Models without a mask function, such as those of images, give none: then the module decides."""
    out, weights = attention_function(nn.Module(), *qkv, **{"attention_mask": None, "scaling": 0.3, **given})
    assert weights is None
    assert out.is_contiguous()
    assert torch.equal(out.transpose(1, 2), paracore.attention(*qkv, mask, scale=0.3))


def test_dropout_is_drawn_from_torchs_generator() -> None:
    q, k, v = heads()

    def dropped(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return attention_function(nn.Module(), q, k, v, None, dropout=0.5)[0]

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))
    torch.manual_seed(1)
    seed = int(torch.randint(1 << 62, ()))
    assert torch.equal(dropped(1).transpose(1, 2), paracore.attention(q, k, v, dropout_p=0.5, seed=seed))


def test_gradient_checkpointing_draws_the_same_dropout_again() -> None:
    models = pair(DECODERS["Llama"])
    for layer in models.ours.model.layers:
        layer.self_attn.attention_dropout = 0.3
    real = torch.ones(B, S, dtype=torch.bool)
    results = []
    for checkpointing in (False, True):
        models.ours.train()
        if checkpointing:
            models.ours.activation_checkpointing_enable()
        torch.manual_seed(5)
        results.append(
            run(models.ours, real, input_ids=tokens(), attention_mask=padded("left"), use_cache=False)
        )
    (logits, gradients), (again, recomputed) = results
    assert torch.equal(logits, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)
    assert relative(logits, run(models.eager, real, input_ids=tokens(), use_cache=False)[0]) > 1e-2


def test_a_model_compiles_without_graph_breaks() -> None:
    config = copy.deepcopy(DECODERS["Mistral, window"])
    config.num_hidden_layers = 1
    models, mask = pair(config), padded("left")
    models.ours.compile(backend="aot_eager", fullgraph=True)
    for given in ({"attention_mask": mask}, {"position_ids": packed(*[4, 10, 5] * B)}):
        real = mask.bool() if "attention_mask" in given else torch.ones(B, S, dtype=torch.bool)
        require_equal(models, real, input_ids=tokens(), use_cache=False, **given)
    with pytest.raises(RuntimeError, match="hides keys between those that a query sees"):
        models.ours(tokens(), attention_mask=GAP, use_cache=False)


# ---------------------------------------------------------------- registration


def test_a_model_that_exists_may_be_switched() -> None:
    model = pair(DECODERS["Llama"]).eager
    expected = model(tokens()).logits
    model.set_attn_implementation("paracore")
    with patch.object(module_under_test, "attention", side_effect=paracore.attention) as called:
        assert relative(model(tokens()).logits, expected) < TOLERANCE
    assert called.call_count == 2  # layers


def test_registering_again_changes_nothing() -> None:
    before = [dict(interface._global_mapping) for interface in (AttentionInterface, AttentionMaskInterface)]
    paracore.hf.register()
    assert before == [i._global_mapping for i in (AttentionInterface, AttentionMaskInterface)]


@pytest.mark.parametrize("version", ["5.23.0", "4.57.1", "6.0.0", "unknown"])
def test_a_transformers_that_is_not_known_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(UsageError, match=f"transformers is {version}, must be >=5.24,<6"):
        paracore.hf.register()


def test_a_missing_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError, match=r"transformers is not installed, must be >=5\.24,<6: pip install"):
        paracore.hf.register()


def test_importing_does_not_import_transformers_nor_register_anything() -> None:
    code = "import sys, paracore, paracore.hf; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
