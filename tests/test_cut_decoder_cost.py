"""What a decoder sends with the sequence, the vocabulary or both cut over tp: exact numbers and bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paracore.nn.decoder import DecoderBlock
from paracore.parallel import MeshAxis, ParameterPlacement, Traffic, shard_range
from tests.conftest import Launch, tp_axis
from tests.cut_decoders import BATCH, CUTS, HIDDEN, LAYERS, Case, outcome
from tests.numerics import randn

Counts = dict[str, tuple[int, int]]  # of each kind, the number and the bytes
ITEM = 4  # float32


def counts(rows: list[Traffic]) -> Counts:
    assert {row.axis for row in rows} <= {"tp"}
    return {row.kind: (row.count, row.bytes) for row in rows}


def total(*parts: tuple[str, int, int]) -> Counts:
    """Add up (kind, number, bytes of each)."""
    found: Counts = {}
    for kind, number, size in parts:
        before = found.get(kind, (0, 0))
        found[kind] = (before[0] + number, before[1] + number * size)
    return {kind: value for kind, value in found.items() if value[0]}


def hidden_bytes(length: int, tp: MeshAxis, cut: bool) -> int:
    """Of hidden states as they travel: cut, every rank sends as many tokens as the first holds."""
    tokens = tp.size * len(shard_range(length, tp.size, 0)) if cut else length
    return tokens * BATCH * HIDDEN * ITEM


def check_block() -> None:
    tp = tp_axis()
    for length in (1, 5, 64):
        case = Case(17, length, (True, True), dtype=torch.float32)
        block = DecoderBlock(case.config, tp, sequence_parallel=True)
        own = len(shard_range(length, tp.size, tp.rank))
        x = randn(own, BATCH, HIDDEN, seed=0, dtype=torch.float32).requires_grad_()
        tables: list[Tensor] = [torch.ones(length, 2), torch.zeros(length, 2)]
        y = block(x, *tables)
        size = hidden_bytes(length, tp, True)
        assert counts(tp.ledger.take()) == total(("all_gather", 2, size), ("reduce_scatter", 2, size))
        y.sum().backward()
        assert counts(tp.ledger.take()) == total(("all_gather", 4, size), ("reduce_scatter", 2, size))


@pytest.mark.parametrize("size", [2, 3])
def test_a_block_gathers_two_inputs_and_scatters_two_outputs(launch: Launch, size: int) -> None:
    launch(size, check_block)


def expected(case: Case, tp: MeshAxis) -> tuple[Counts, Counts]:
    """Of the loss and of its backward."""
    cut, vocabulary = case.cuts
    size = hidden_bytes(case.length, tp, cut)
    reduce = "reduce_scatter" if cut else "all_reduce"
    forward = [(reduce, 2 * LAYERS, size), ("all_gather", 2 * LAYERS * cut, size)]
    backward = [(reduce, 2 * LAYERS, size), ("all_gather", 4 * LAYERS * cut, size)]
    if vocabulary:
        forward += [(reduce, 1, size), ("all_gather", int(cut), size)]  # embedded tokens; the head's input
        forward.append(("all_gather", 1, tp.size * 4 * case.length * BATCH * ITEM))  # for the cross entropy
        backward += [(reduce, 1, size), ("all_gather", int(cut), size)]  # the head's, and the embedding's
    else:
        forward.append(("all_reduce", 1, 2 * 8))  # the sum of losses and the number of labels, in float64
    return total(*forward), total(*backward)


def summed(placements: dict[str, ParameterPlacement]) -> Counts:
    """Of the sync: what is partial, and how many hold each, in one buffer."""
    partial = [p for p in placements.values() if p.partial_gradient]
    elements = sum(torch.Size(p.local_shape(0)).numel() + 1 for p in partial)
    return total(("all_reduce", 1, elements * ITEM))


def check_models() -> None:
    tp = tp_axis()
    for cuts in CUTS:
        for length in (5, 64):
            case = Case(17, length, cuts, dtype=torch.float32)
            model = case.cut(tp)
            found = [counts(rows) for rows in outcome(case, model, tp).traffic]
            placements = model.parameter_placements()
            assert found == [*expected(case, tp), summed(placements)], case
            partial = {name for name, p in placements.items() if p.partial_gradient}
            norms = {name for name in placements if name.endswith("norm.weight")}
            biases = {name for name in placements if name.endswith(("o_proj.bias", "down_proj.bias"))}
            tables = {"model.embed_tokens.weight", "lm_head.weight"}
            heads = {name for name in norms if "q_norm" in name or "k_norm" in name}
            # Of a rank's own tokens where it has no others; of its own heads in any case.
            of_tokens = norms | biases | (set() if cuts[1] else tables)
            assert partial == (of_tokens if cuts[0] else heads), case


@pytest.mark.parametrize("size", [2, 3])
def test_traffic_of_the_loss_its_backward_and_the_sync(launch: Launch, size: int) -> None:
    launch(size, check_models)
