"""Keys and values as rows of one buffer, [rows, B, Hkv, D + Dv]: any run of keys is one message."""

from __future__ import annotations

import torch
from torch import Tensor

from paracore.parallel.messages import Exchange
from paracore.parallel.ring_plan import Intervals


def empty_rows(k: Tensor, v: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised rows for the keys and values of k and v."""
    return k.new_empty(rows, k.size(0), k.size(1), k.size(3) + v.size(3), dtype=dtype)


def unpack(rows: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """View rows as k [B, Hkv, rows, D] and v [B, Hkv, rows, Dv]."""
    heads_first = rows.permute(1, 2, 0, 3)
    return heads_first[..., :key_dim], heads_first[..., key_dim:]


def pack_(buffer: Tensor, k: Tensor, v: Tensor, pieces: Intervals) -> None:
    """Copy the keys and values at these indices into the first rows of `buffer`, one piece behind another."""
    offset = 0
    for begin, end in pieces:
        keys, values = unpack(buffer[offset : offset + end - begin], k.size(3))
        keys.copy_(k[:, :, begin:end])
        values.copy_(v[:, :, begin:end])
        offset += end - begin


def receive_rows(exchange: Exchange, buffer: Tensor, pieces: Intervals, sender: int) -> None:
    """Receive what the sender cuts out at `pieces`, one behind another."""
    offset = 0
    for begin, end in pieces:
        exchange.receive(buffer[offset : offset + end - begin], sender)
        offset += end - begin


def send_rows(exchange: Exchange, buffer: Tensor, pieces: Intervals, receiver: int) -> None:
    """Send the rows at `pieces`, a message for each."""
    for begin, end in pieces:
        exchange.send(buffer[begin:end], receiver)
