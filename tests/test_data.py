"""The training text: every byte where it belongs, every sequence once per epoch, held-out text apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paracore.data import ByteCorpus, standard_library_sources
from paracore.errors import UsageError


def corpus(tmp_path: Path, *texts: bytes, seq_len: int = 4) -> ByteCorpus:
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_bytes(text)
    return ByteCorpus(paths, seq_len)


def test_sequences_run_over_files_of_any_length(tmp_path: Path) -> None:
    text = bytes(range(250))
    made = corpus(tmp_path, text[:1], b"", text[1:3], text[3:100], text[100:])
    sequences = made.num_training + made.num_held_out
    assert sequences == 249 // 4
    batches = [made.training_batch(i, 1, seed=0) for i in range(made.num_training)]
    held_out = [made.held_out_batch(i, made.num_held_out, 1) for i in range(made.num_held_out)]
    starts = []
    for tokens, labels in batches + held_out:
        start = int(tokens[0, 0])
        assert tokens.tolist() == [list(range(start, start + 4))]
        assert labels.tolist() == [list(range(start + 1, start + 5))]
        starts.append(start)
    assert sorted(starts) == list(range(0, sequences * 4, 4))


def test_every_epoch_has_every_sequence_once_in_another_order(tmp_path: Path) -> None:
    made = corpus(tmp_path, bytes(range(200)))
    n = made.num_training

    def epoch(number: int, seed: int) -> list[int]:
        return [int(made.training_batch(number * n + i, 1, seed)[0][0, 0]) for i in range(n)]

    first, second, reseeded = epoch(0, 0), epoch(1, 0), epoch(0, 1)
    assert sorted(first) == sorted(second) == sorted(reseeded)
    assert len({tuple(first), tuple(second), tuple(reseeded), tuple(sorted(first))}) == 4
    assert epoch(0, 0) == first


def test_batches_do_not_depend_on_how_they_are_cut(tmp_path: Path) -> None:
    made = corpus(tmp_path, bytes(range(200)))
    whole, _ = made.training_batch(0, 6, seed=3)
    assert torch.equal(whole, torch.cat([made.training_batch(i, 2, seed=3)[0] for i in range(3)]))


def test_the_default_text_is_there() -> None:
    made = ByteCorpus(standard_library_sources(), 128)
    assert made.num_training > 1000
    assert made.num_held_out >= made.num_training // 20


@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_too_short_a_text_is_refused_with_both_numbers(tmp_path: Path, length: int) -> None:
    message = "hold no text" if length == 0 else f"text of {length} bytes is too short: seq_len=4 needs 9"
    with pytest.raises(UsageError, match=message):
        corpus(tmp_path, b"x" * length)
    corpus(tmp_path, b"x" * 9)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.txt: there is no such file"):
        ByteCorpus([tmp_path / "nowhere.txt"], 4)
    with pytest.raises(UsageError, match="is a folder"):
        ByteCorpus([tmp_path], 4)
