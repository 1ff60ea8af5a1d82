"""The examples run as their docstrings say, and train as torch and transformers do on one device."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from examples import train_plain_torch as plain
from paracore.data import ByteCorpus, standard_library_sources
from tests.conftest import Launch
from tests.numerics import relative_error

ROOT = Path(__file__).parent.parent
FALL = 0.97  # to which part of itself a loss must fall over a few steps


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def torchrun(example: str, *options: str) -> list[float]:
    """Run an example on two ranks; return the losses it prints."""
    output = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        f"examples/{example}.py",
        *options,
    )
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\d+\.\d+)", output, re.MULTILINE)]


def train_plain_torch(options: list[str]) -> list[float]:
    return plain.train(plain.parse(options), torch.device("cpu"))


def train_long_context(options: list[str]) -> list[float]:
    from examples import long_context_qwen3

    return long_context_qwen3.train(long_context_qwen3.parse(options), torch.device("cpu"))


def trained(model: nn.Module, losses: Iterable[Callable[[], Tensor]], lr: float) -> list[float]:
    """Train by torch alone, with torch's AdamW and clipping."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=lr), []
    for compute in losses:
        loss = compute()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_before_and_after() -> None:
    output = run(
        *(sys.executable, "examples/before_after.py", "--layers", "1", "--hidden", "64", "--steps", "1"),
        *("--vocabulary", "20000", "--sequence", "128"),
    )
    assert "Qwen3Attention -> attention, rotary embedding" in output
    figures = r"(before|after): loss (\d+\.\d+), (\d+\.\d+) s and (\d+) MiB a step"
    (_, before, _, mib), (_, after, _, less) = re.findall(figures, output)
    assert float(after) == pytest.approx(float(before), rel=1e-6)
    assert int(less) < int(mib)  # the logits of a large vocabulary are most of it
    assert re.search(r"the loss differs by \d\.\de[-+]\d\d, the step is \d+\.\d\d times as fast", output)


def test_plain_torch_trains_over_tp_and_dp_as_on_one_device(launch: Launch) -> None:
    small = ["--layers", "1", "--hidden", "64", "--sequence", "32", "--batch", "4", "--steps", "8"]
    torch.manual_seed(0)
    model, corpus = plain.Decoder(1, 64, 32), ByteCorpus(standard_library_sources(), 32)

    def loss_of(step: int) -> Tensor:
        tokens, labels = corpus.training_batch(step, 4, 0)
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    expected = trained(model, [partial(loss_of, step) for step in range(8)], plain.parse(small).lr)
    losses = torchrun("train_plain_torch", *small, "--tp", "2")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < FALL * losses[0]
    for over_dp in launch(2, train_plain_torch, [*small, "--zero", "1"]):
        assert over_dp == pytest.approx(expected, rel=1e-5)


def texts(folder: Path) -> list[str]:
    """Documents longer and shorter than the part of a rank."""
    paths = []
    for number, length in enumerate((150, 20, 330, 75, 200)):
        paths.append(folder / f"{number}.txt")
        paths[-1].write_text("".join(chr(32 + (number + 1) * i % 90) for i in range(length)))
    return [str(path) for path in paths]


def test_long_context_trains_over_cp_as_on_one_device_and_saves_what_transformers_loads(
    launch: Launch, tmp_path: Path
) -> None:
    from examples import long_context_qwen3 as example

    length, steps, out = 256, 4, tmp_path / "tuned"
    files = texts(tmp_path)
    small = ["--sequence", str(length), "--text", *files]

    def losses_of(model: Any, tokenize: Callable[[str], list[int]], count: int) -> list[Callable[[], Tensor]]:
        """What transformers alone makes of the first rows."""
        rows = example.packed_rows([Path(file) for file in files], tokenize, length, 0, 1)
        return [partial(loss_of, model, row) for row in itertools.islice(rows, count)]

    def loss_of(model: Any, row: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**row, use_cache=False).loss
        return loss

    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(example.little_config()).train()
    computed = losses_of(model, lambda text: list(text.encode()), steps)
    expected = trained(model, computed, example.parse(small).lr)
    losses = torchrun(
        "long_context_qwen3", *small, "--cp", "2", "--steps", str(steps), "--out", str(out), "--checkpointing"
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < FALL * losses[0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(out)
    for (name, tensor), trained_alone in zip(saved.named_parameters(), model.parameters(), strict=True):
        assert relative_error(tensor, trained_alone) < 1e-3, name  # training moves them by a tenth and more

    # And on from the checkpoint, of which each rank reads its part; bytes moved by three are tokens here.
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    tokenizer.save_pretrained(out)
    (first,) = losses_of(saved, lambda text: tokenizer(text)["input_ids"], 1)
    for found in launch(2, train_long_context, [*small, "--model", str(out), "--tp", "2", "--steps", "1"]):
        assert found == pytest.approx([first().item()], rel=1e-5)


def test_documents_are_packed_whole_and_rows_dealt_out(tmp_path: Path) -> None:
    from examples.long_context_qwen3 import packed_rows

    files = []
    for name, text in {"a": "abc", "b": "defgh", "c": "ij"}.items():
        files.append(tmp_path / name)
        files[-1].write_text(text)

    def first(rank: int, ranks: int, count: int) -> list[dict[str, list[list[int]]]]:
        rows = packed_rows(files, lambda text: [ord(letter) for letter in text], 7, rank, ranks)
        return [{name: x.tolist() for name, x in next(rows).items()} for _ in range(count)]

    alone = first(0, 1, 4)
    assert alone[0] == {
        "input_ids": [[*map(ord, "abcdefg")]],
        "position_ids": [[0, 1, 2, 0, 1, 2, 3]],
        "labels": [[-100, *map(ord, "bc"), -100, *map(ord, "efg")]],
    }
    assert alone[1]["input_ids"] == [[*map(ord, "ijabcde")]]
    assert first(0, 2, 2) == alone[::2]
    assert first(1, 2, 2) == alone[1::2]
