"""Pieces cover every item once, as views, and none is larger than allowed."""

from __future__ import annotations

import pytest
import torch

from paracore import chunks

SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (2, 3, 4), (5, 1, 4), (1, 30), (30, 1), (2, 2, 2, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("allowed", [1, 4, 10, 1000])  # items
@pytest.mark.parametrize("item_bytes", [4, 8])
def test_every_item_is_in_one_piece(
    shape: tuple[int, ...], allowed: int, item_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", allowed * item_bytes)
    times = torch.zeros(shape[::-1], dtype=torch.int64).permute(tuple(range(len(shape)))[::-1])
    pieces = [times[index] for index in chunks.chunks(shape, item_bytes)]
    for piece in pieces:
        piece += 1  # a view, else it would not arrive
    assert (times == 1).all()
    assert all(1 <= piece.numel() <= allowed for piece in pieces)


def test_an_item_larger_than_a_piece_is_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10)
    assert [torch.empty(2, 3)[index].numel() for index in chunks.chunks((2, 3), 11)] == [1] * 6


def test_what_fits_is_one_piece() -> None:
    assert len(list(chunks.chunks((3, 5), 8))) == 1
