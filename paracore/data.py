"""Training text as bytes: memory-mapped files, cut into sequences, shuffled deterministically."""

from __future__ import annotations

import itertools
import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paracore.counter_random import permute
from paracore.errors import UsageError

BYTE_VOCABULARY = 256


def standard_library_sources() -> list[Path]:
    """Return the top-level source files of Python's standard library: real text that every machine has."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


class ByteCorpus:
    """Files read as one long text of bytes, cut into sequences of `seq_len` tokens and their labels.

    The last twentieth of the sequences, at least one, is held out. The text is memory-mapped: only
    the pages that are read occupy memory.

    Raises UsageError for files that are missing or unreadable, and for text shorter than two
    sequences (one to train on, one held out).
    """

    def __init__(self, paths: Sequence[Path], seq_len: int) -> None:
        self.seq_len = seq_len
        self._files = [mapped for mapped in map(_map_file, paths) if len(mapped)]
        self._starts = [0, *itertools.accumulate(map(len, self._files))]
        num_bytes = self._starts[-1]
        if num_bytes == 0:
            raise UsageError(f"text: {len(paths)} files hold no text")
        num_sequences = (num_bytes - 1) // seq_len  # the last label needs a byte of its own
        if num_sequences < 2:
            raise UsageError(
                f"text of {num_bytes} bytes is too short: seq_len={seq_len} needs {2 * seq_len + 1} "
                "or more, one sequence to train on and one held out"
            )
        self.num_held_out = max(1, num_sequences // 20)
        self.num_training = num_sequences - self.num_held_out

    def training_batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels, both [B, S] int64, of step 0, 1, ...

        Every sequence comes once per epoch, in an order that depends on `seed` and the epoch alone.
        """
        drawn = [divmod(step * batch_size + i, self.num_training) for i in range(batch_size)]
        return self._batch([permute(i, self.num_training, seed, f"epoch {epoch}") for epoch, i in drawn])

    def held_out_batch(self, index: int, count: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return batch `index` of `count`, spread evenly over the held-out sequences."""
        total = count * batch_size
        offsets = ((index * batch_size + i) * self.num_held_out // total for i in range(batch_size))
        return self._batch([self.num_training + offset for offset in offsets])

    def _batch(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        text = torch.stack([self._read(i * self.seq_len, self.seq_len + 1) for i in sequences]).long()
        return text[:, :-1], text[:, 1:]

    def _read(self, start: int, length: int) -> Tensor:
        """Return bytes [start, start + length) of the text, which may span several files."""
        pieces = []
        file = bisect_right(self._starts, start) - 1
        while length:
            piece = self._files[file][start - self._starts[file] :][:length]
            pieces.append(piece)
            start, length, file = start + len(piece), length - len(piece), file + 1
        return torch.cat(pieces)


def _map_file(path: Path) -> Tensor:
    if not path.exists():
        raise UsageError(f"text file {path}: there is no such file")
    if not path.is_file():
        raise UsageError(f"text file {path}: {'is a folder' if path.is_dir() else 'cannot be memory-mapped'}")
    size = path.stat().st_size
    try:
        return (
            torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
        )
    except RuntimeError as error:
        raise UsageError(f"text file {path}: cannot be read ({error})") from error
