"""Sinks of ranges that tests look into, and the training step that they look at."""

from __future__ import annotations

import threading
from typing import Any

import torch

from paracore import trace
from paracore.nn import Decoder, DecoderConfig, SequenceContext
from paracore.parallel.layout import parse_layout
from paracore.parallel.masks import causal
from paracore.parallel.mesh import TrainingAxes
from paracore.training import Trainer

CONFIG = DecoderConfig(vocab_size=13, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2)
LENGTH = 16


class Recorded(trace.Sink):
    """Keeps what it is told: ("begin" or "end", name, facts, thread)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any], int]] = []

    def open(self, name: str, facts: trace.Facts) -> trace.Context:
        return _Recording(self, name, dict(facts))

    @property
    def names(self) -> list[str]:
        """Ranges in the order in which they begin."""
        return [name for what, name, _, _ in self.events if what == "begin"]

    @property
    def total(self) -> dict[str, int]:
        """Bytes by name of the ranges that say so."""
        totals: dict[str, int] = {}
        for what, name, facts, _ in self.events:
            if what == "begin" and "bytes" in facts:
                totals[name] = totals.get(name, 0) + facts["bytes"]
        return totals

    def outer(self) -> dict[str, set[str]]:
        """Return the ranges directly around those of each name; fails where they do not nest."""
        found: dict[str, set[str]] = {}
        stacks: dict[int, list[str]] = {}
        for what, name, _, thread in self.events:
            stack = stacks.setdefault(thread, [])
            if what == "begin":
                found.setdefault(name, set()).add(stack[-1] if stack else "")
                stack.append(name)
            else:
                assert stack.pop() == name
        assert not any(stacks.values())
        return found


class _Recording:
    def __init__(self, sink: Recorded, name: str, facts: dict[str, Any]) -> None:
        self._sink, self._event = sink, (name, facts, threading.get_ident())

    def __enter__(self) -> None:
        self._sink.events.append(("begin", *self._event))

    def __exit__(self, *_: object) -> None:
        self._sink.events.append(("end", *self._event))


def trainer_of(axes: TrainingAxes, *, zero: int | None = None, **options: Any) -> Trainer:
    """Return the trainer of a small decoder over `axes`."""
    model = Decoder(CONFIG, axes.tp, axes.cp, **options)
    return Trainer(model, lr=1e-3, max_norm=1.0, axes=axes, zero=zero)


def take_step(trainer: Trainer, axes: TrainingAxes) -> None:
    """Take one step on a batch that is the same on every rank of tp."""
    sequence = SequenceContext(parse_layout("zigzag")(causal(), LENGTH, axes.cp.size), causal())
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % CONFIG.vocab_size
    part = sequence.part(tokens.repeat(axes.dp.size, 1), axes.dp, axes.cp)
    trainer.step(part, part, sequence)
