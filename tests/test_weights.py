"""Checkpoints onto the ranks of tp: the right parts, no more of them than needed, or a clear refusal."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from paracore.checkpoint import shard_state_dict
from paracore.dropin.parallelize import parallelize
from paracore.dropin.plan import apply_styles, check, resolve
from paracore.dropin.report import Changes
from paracore.dropin.weights import Recompute, Source, load_shards
from paracore.errors import UsageError
from paracore.parallel.mesh import TrainingAxes
from paracore.parallel.placement import ParameterPlacement
from tests.conftest import Launch
from tests.cut_decoders import axis_of
from tests.numerics import LiveMemory
from tests.plain_transformer import Transformer, batch, build, plan_over

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def cut(model: nn.Module, size: int, rank: int) -> dict[str, ParameterPlacement]:
    tp = axis_of(size, rank)
    styles = resolve(model, plan_over(size))
    placements = check(model, styles, tp)
    apply_styles(model, styles, tp, Changes())
    return placements


def on_meta(tied: bool, dtype: torch.dtype = torch.float32) -> Transformer:
    with torch.device("meta"):
        return Transformer(tied).to(dtype)


def dense_state(tied: bool) -> dict[str, Tensor]:
    return dict(build(tied, torch.float32).state_dict())


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What checkpoints of tied models hold: one of the two names."""
    is_tied = tensors["head.weight"] is tensors["embed.weight"] or torch.equal(
        tensors["head.weight"], tensors["embed.weight"]
    )
    return {name: tensor for name, tensor in tensors.items() if not (is_tied and name == "head.weight")}


# ---------------------------------------------------------------- sources of one checkpoint


def as_mapping(tensors: dict[str, Tensor], folder: Path) -> Source:
    return tensors


def as_file(tensors: dict[str, Tensor], folder: Path) -> Source:
    save_file(tensors, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_folder(tensors: dict[str, Tensor], folder: Path) -> Source:
    save_file(tensors, folder / "model.safetensors")
    save_file({}, folder / "other.safetensors")  # beside it, and not meant
    return str(folder)


def as_several_files(tensors: dict[str, Tensor], folder: Path) -> Source:
    names = [f"model-{number}.safetensors" for number in range(3)]
    file_of = {name: names[index % 3] for index, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


SOURCES = [as_mapping, as_file, as_folder, as_several_files]


@pytest.mark.parametrize("source_of", SOURCES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])  # over 4 two ranks share each key/value head, 17 rows are uneven
def test_each_rank_gets_its_part_of_every_weight(
    source_of: Callable[[dict[str, Tensor], Path], Source], tied: bool, size: int, tmp_path: Path
) -> None:
    dense = dense_state(tied)
    source = source_of(stored(dense), tmp_path)
    for rank in range(size):
        fresh, used = on_meta(tied), build(tied, torch.float32)
        with torch.no_grad():
            for parameter in used.parameters():
                parameter.zero_()
        fresh.norm.weight.requires_grad_(False)
        for model in (fresh, used):
            kept = model.norm.weight
            placements = cut(model, size, rank)
            load_shards(model, placements, source, axis_of(size, rank), CPU)
            expected = shard_state_dict(dense, placements, rank)
            found = model.state_dict()
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            assert (model.head.weight is model.embed.weight) == tied
            assert (model.norm.weight is kept) == (model is used)  # optimizers of it stay good
        assert not fresh.norm.weight.requires_grad
        assert fresh.head.weight.requires_grad


# ---------------------------------------------------------------- how much is read


class Spy:
    """Stands for what safetensors.safe_open returns; notes how many bytes of each tensor are read."""

    def __init__(self, opened: Any, read: dict[str, int]) -> None:
        self._opened, self._read = opened, read

    def keys(self) -> list[str]:
        return list(self._opened.keys())

    def get_slice(self, name: str) -> SpiedSlice:
        return SpiedSlice(name, self._opened.get_slice(name), self._read)


class SpiedSlice:
    def __init__(self, name: str, entry: Any, read: dict[str, int]) -> None:
        self._name, self._entry, self._read = name, entry, read
        self.get_shape, self.get_dtype = entry.get_shape, entry.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        part: Tensor = self._entry[index]
        self._read[self._name] = self._read.get(self._name, 0) + part.nbytes
        return part


def test_no_more_is_read_than_the_rank_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = dense_state(False)
    save_file(dense, tmp_path / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in dense.values())
    read: dict[str, int] = {}
    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *args: Spy(original(*args), read))
    totals = []
    for rank in range(4):
        read.clear()
        model = on_meta(False)
        placements = cut(model, 4, rank)
        load_shards(model, placements, tmp_path, axis_of(4, rank), CPU)
        held = {name: p.nbytes for name, p in model.named_parameters() if p.numel()}
        assert read == held
        for name, p in model.named_parameters():
            assert p.nbytes == 4 * math.prod(placements[name].local_shape(rank)), name
            assert p.untyped_storage().nbytes() == p.nbytes, name  # no view of the file's memory
        totals.append(sum(held.values()))
    assert max(totals) < 0.45 * whole  # norms, biases and shared key/value heads are held by several


def test_one_tensor_is_in_memory_at_a_time() -> None:
    dense = dense_state(False)
    model = build(False, torch.float32)
    placements = cut(model, 2, 0)
    with LiveMemory(*dense.values(), *model.parameters()) as live:
        load_shards(model, placements, dense, axis_of(2, 0), CPU)
    largest = max(p.nbytes for p in model.parameters())
    assert largest <= live.peak <= 2 * largest


# ---------------------------------------------------------------- buffers


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def recomputed(module: nn.Module, name: str) -> Tensor | None:
    return torch.arange(4.0) if name == "angles" else None


def load_buffers(weights: dict[str, Tensor], recompute: Recompute | None, device: str) -> WithBuffers:
    with torch.device(device):
        model = WithBuffers()
    placements = check(model, {}, axis_of(1, 0))
    load_shards(model, placements, weights, axis_of(1, 0), CPU, recompute)
    return model


def test_buffers_are_read_or_computed_and_none_is_left_undefined() -> None:
    weights = {"layer.weight": torch.eye(4), "layer.bias": torch.zeros(4), "scale": torch.full((4,), 3.0)}
    for device, recompute in (("meta", recomputed), ("cpu", None)):
        model = load_buffers(weights, recompute, device)
        assert torch.equal(model.get_buffer("scale"), weights["scale"])
        assert torch.equal(model.get_buffer("angles"), torch.arange(4.0))
    with pytest.raises(UsageError, match=r"lacks, as nobody computes them here, the buffers: angles$"):
        load_buffers(weights, None, "meta")
    del weights["scale"]
    with pytest.raises(UsageError, match=r"it lacks: scale$"):
        load_buffers(weights, recomputed, "cpu")


# ---------------------------------------------------------------- refusals


def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_changed() -> None:
    model = build(False, torch.float32)
    tree, before = repr(model), {name: x.clone() for name, x in model.state_dict().items()}
    weights = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    del weights["blocks.1.up.bias"]
    weights["blocks.0.rotary.inv_freq"] = torch.ones(3)
    weights["embed.weight"] = torch.zeros(16, 24)
    weights["norm.weight"] = weights["norm.weight"].bfloat16()
    with pytest.raises(UsageError) as refusal:
        parallelize(model, TrainingAxes.alone(), {"blocks.*.up": "column"}, weights=weights)
    message = str(refusal.value)
    for part in (
        "it lacks: blocks.1.up.bias",
        "it has unknown: blocks.0.rotary.inv_freq",
        "it has other shapes: embed.weight [16, 24], must be [17, 24]",
        "other dtypes (model.to(dtype) first): norm.weight torch.bfloat16, must be torch.float32",
    ):
        assert part in message
    assert repr(model) == tree
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_many_names_are_not_all_listed() -> None:
    with pytest.raises(UsageError, match=r"lacks: .*, and \d+ more$"):
        load_shards(build(False), check(build(False), {}, axis_of(1, 0)), {}, axis_of(1, 0), CPU)


def test_tied_weights_that_differ_in_the_checkpoint_are_refused() -> None:
    weights = {name: tensor.clone() for name, tensor in dense_state(True).items()}
    model = on_meta(True)
    placements = cut(model, 1, 0)
    load_shards(model, placements, weights, axis_of(1, 0), CPU)  # both, and equal
    weights["head.weight"][16] += 1
    with pytest.raises(UsageError, match=r"embed\.weight and head\.weight are one parameter, but differ"):
        load_shards(model, placements, weights, axis_of(1, 0), CPU)


def test_sources_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, complaint: str) -> None:
        with pytest.raises(UsageError, match=complaint):
            parallelize(on_meta(False), TrainingAxes.alone(), {"head": "head"}, weights=path)

    refused(tmp_path / "none", "there is no such file or folder")
    refused(tmp_path, r"has 0 of \*\.safetensors\.index\.json or \*\.safetensors, must have one")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path / "pytorch_model.bin", r"must be a folder, \*\.safetensors or")
    as_several_files(dense_state(False), tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    refused(tmp_path, r"its files are missing: model-1\.safetensors$")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(tmp_path, r"needs safetensors; pip install 'paracore\[hf\]'")


# ---------------------------------------------------------------- on a mesh


def from_meta(folder: Path, zero: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = on_meta(True)
    parallel = parallelize(model, mesh, plan_over(2), zero=zero, weights=folder)
    tokens, _ = batch(2)
    whole = parallel.full_state_dict()
    dense = dense_state(True)
    assert list(whole) == list(dense)
    assert all(torch.equal(whole[name], tensor) for name, tensor in dense.items())
    logits = [model(tokens).detach()]
    if zero < 3:
        parallel.undo()  # Parameters on the meta device cannot take values: there are new ones
        assert model.head.weight is model.embed.weight
        assert all(torch.equal(x, dense[name]) for name, x in model.state_dict().items())
        logits.append(model(tokens).detach())
    return logits


@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_on_the_meta_device_comes_to_life_on_a_mesh(
    launch: Launch, zero: int, tmp_path: Path
) -> None:
    model = build(True, torch.float32)
    save_file(stored(dict(model.state_dict())), tmp_path / "model.safetensors")
    expected = model(batch(2)[0])
    for found in launch(4, from_meta, tmp_path, zero):
        for logits in found:
            torch.testing.assert_close(logits, expected)


# ---------------------------------------------------------------- Hugging Face


def test_checkpoints_of_transformers_are_read_as_they_are_saved(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    dense = transformers.Qwen3ForCausalLM(config)
    dense.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    plan = {
        "model.embed_tokens": "embedding",
        "lm_head": "head",
        "**.[qkv]_proj": "column",
        "**.o_proj": "row",
        "**.gate_proj": "column",
        "**.up_proj": "column",
        "**.down_proj": "row",
    }
    rotary = dense.model.rotary_emb
    for rank in range(2):
        with torch.device("meta"):
            model = transformers.Qwen3ForCausalLM(config)
        tp, styles = axis_of(2, rank), resolve(model, plan)
        placements = check(model, styles, tp)
        apply_styles(model, styles, tp, Changes())
        with pytest.raises(UsageError, match=r"the buffers: model\.rotary_emb\.inv_freq"):
            load_shards(model, placements, tmp_path, tp, CPU)
        load_shards(model, placements, tmp_path, tp, CPU, lambda _, name: rotary.get_buffer(name))
        expected = shard_state_dict(dense.state_dict(), placements, rank)
        assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
