"""Embedding and LM head are torch's own and its cross entropy, however vocabulary and sequence are cut."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paracore.checkpoint import gather_copies
from paracore.nn import Embedding, LMHead
from paracore.ops.cross_entropy import Objective
from paracore.parallel import GradientSync, Ledger, MeshAxis, collect_placements, shard_range
from paracore.parallel.collectives import gather_shards, take_shard
from paracore.reference import accumulation_dtype
from tests.conftest import Launch, tp_axis
from tests.numerics import all_equal, assert_as_exact_as, nan_in_fresh_memory, randn

B, H = 2, 5
IGNORED = -1
WEIGHT = 0.7  # of the loss


@dataclasses.dataclass(frozen=True)
class Case:
    """cuts: of the vocabulary, and of the sequence."""

    vocab_size: int
    length: int
    cuts: tuple[bool, bool]
    tied: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def sequence_parallel(self) -> bool:
        return self.cuts[1]


CUTS = [(False, False), (False, True), (True, False), (True, True)]
CASES = [
    *(Case(V, S, cuts) for V, S, cuts in itertools.product((3, 17), (1, 5, 64), CUTS)),
    *(Case(V, 5, cuts, tied=True) for V, cuts in itertools.product((3, 17), CUTS)),
    *(
        Case(17, 5, cuts, tied, dtype)
        for cuts in CUTS
        for tied, dtype in ((True, torch.float32), (False, torch.bfloat16))
    ),
    Case(6400, 5, (True, True), tied=True),
]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


class Layers(nn.Module):
    def __init__(self, case: Case, tp: MeshAxis) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "vocab_parallel": case.cuts[0],
            "sequence_parallel": case.cuts[1],
            "dtype": case.dtype,
        }
        self.embedding = Embedding(case.vocab_size, H, tp, **options)
        self.head = LMHead(case.vocab_size, H, tp, seed=1, **options)
        if case.tied:
            self.head.weight = self.embedding.weight


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def labels_of(case: Case) -> Tensor:
    """Every word of a small vocabulary, from its end on; every third token has no label."""
    index = torch.arange(case.length * B)
    words = (case.vocab_size - 1 - index).remainder(case.vocab_size)
    return words.masked_fill(index % 3 == 1, IGNORED).view(case.length, B)


def whole(layers: nn.Module, held: dict[str, Tensor], tp: MeshAxis) -> dict[str, Tensor]:
    """Rebuild what ranks hold; every replica must hold the same bits."""
    copies = gather_copies(held, collect_placements(layers, tp.size), tp)
    assert all(all_equal(of_ranks) for of_ranks in copies.values())
    return {name: of_ranks[0] for name, of_ranks in copies.items()}


def named(layers: nn.Module) -> dict[str, nn.Parameter]:
    return dict(layers.named_parameters(remove_duplicate=False))


def outcome(case: Case, layers: Layers, tp: MeshAxis) -> dict[str, Tensor]:
    """What the layers compute, rebuilt where it is cut: values, and gradients of sums weighted at random."""
    S, V, cut = case.length, case.vocab_size, case.sequence_parallel
    sync = GradientSync(layers, tp)
    tokens = torch.arange(S * B).mul(2).remainder(V).view(S, B)
    embedding, head = layers.embedding, layers.head
    embedded = embedding(tokens)
    dy = randn(S, B, H, seed=2, dtype=case.dtype)
    embedded.backward(take_shard(dy, tp, 0) if cut else dy)
    of_embedding = leaf(gradient(embedding.weight))
    layers.zero_grad()

    hidden = randn(S, B, H, seed=3, dtype=case.dtype)
    hidden = leaf(take_shard(hidden, tp, 0) if cut else hidden)
    logits = head(hidden, S)
    logits.backward(randn(S, B, V, seed=4, dtype=case.dtype))
    of_logits, dhidden = leaf(gradient(head.weight)), leaf(gradient(hidden))
    layers.zero_grad()
    hidden.grad = None

    loss, labels = head.sum_of_losses(hidden, labels_of(case), Objective(case.vocab_size, IGNORED))
    assert torch.equal(labels, take_shard(labels_of(case), tp, 0) if head.cuts_tokens else labels_of(case))
    loss.backward(torch.tensor(WEIGHT, dtype=torch.float64))
    layers.embedding(tokens).sum().backward()  # a tied weight has a gradient from both
    sync()

    placement = head.placement
    if placement.partial_gradient:  # what GradientSync would have done
        of_embedding, of_logits = (sum_of(x, tp) for x in (of_embedding, of_logits))
    gradients = whole(layers, {name: gradient(p) for name, p in named(layers).items()}, tp)
    one = {"embedding.weight": of_embedding, "head.weight": of_logits}
    once = whole(layers, one, tp)

    def tokens_of_all(x: Tensor) -> Tensor:
        return gather_shards(x, tp, 0, S) if cut else x

    return {
        "embedded": tokens_of_all(embedded),
        "gradient of embedding": once["embedding.weight"],
        "logits": logits,
        "gradient of head by logits": once["head.weight"],
        "dhidden by logits": tokens_of_all(dhidden),
        "loss": (sum_of(loss, tp) if head.cuts_tokens else loss).to(accumulation_dtype(case.dtype)),
        "dhidden by loss": tokens_of_all(gradient(hidden)),
        "gradient of embedding and loss": gradients["embedding.weight"],
        "gradient of loss": gradients["head.weight"],
    }


def sum_of(x: Tensor, tp: MeshAxis) -> Tensor:
    return gather_shards(x[None], tp, 0, tp.size).sum(0)


def torch_outcome(case: Case, weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same by torch's own operations over whole weights, in `dtype`."""
    S, V = case.length, case.vocab_size
    table, matrix = (leaf(weights[f"{name}.weight"].to(dtype)) for name in ("embedding", "head"))
    matrix = table if case.tied else matrix
    tokens = torch.arange(S * B).mul(2).remainder(V).view(S, B)
    embedded = F.embedding(tokens, table)
    (of_embedding,) = torch.autograd.grad(embedded, table, randn(S, B, H, seed=2, dtype=case.dtype).to(dtype))
    hidden = leaf(randn(S, B, H, seed=3, dtype=case.dtype).to(dtype))
    logits = F.linear(hidden, matrix)
    seeds = randn(S, B, V, seed=4, dtype=case.dtype).to(dtype)
    of_logits, dhidden = torch.autograd.grad(logits, (matrix, hidden), seeds)
    wide = F.linear(hidden, matrix).to(torch.promote_types(dtype, torch.float32))
    loss = F.cross_entropy(
        wide.flatten(0, 1), labels_of(case).flatten(), reduction="sum", ignore_index=IGNORED
    )
    loss.backward(torch.tensor(WEIGHT, dtype=loss.dtype))
    F.embedding(tokens, table).sum().backward()
    return {
        "embedded": embedded,
        "gradient of embedding": of_embedding,
        "logits": logits,
        "gradient of head by logits": of_logits,
        "dhidden by logits": dhidden,
        "loss": loss,
        "dhidden by loss": gradient(hidden),
        "gradient of embedding and loss": gradient(table),
        "gradient of loss": gradient(matrix),
    }


def check_values(case: Case, tp: MeshAxis) -> None:
    layers = Layers(case, tp)
    weights = whole(layers, {name: p.detach() for name, p in named(layers).items()}, tp)
    alone = named(Layers(case, MeshAxis.alone("tp")))
    assert all(torch.equal(weight, alone[name]) for name, weight in weights.items()), case
    got = outcome(case, layers, tp)
    exact, plain = (torch_outcome(case, weights, dtype) for dtype in (torch.float64, case.dtype))
    if tp.size > 1:
        assert all_equal(gather_shards(got["logits"].detach()[None], tp, 0, tp.size).unbind()), case
    floor = 1e-14 if case.dtype == torch.float64 else torch.finfo(case.dtype).eps
    for name, tensor in got.items():
        assert tensor.shape == exact[name].shape, (case, name)
        assert tensor.dtype == plain[name].dtype, (case, name)
        assert_as_exact_as(tensor, plain[name], exact[name], floor=floor, name=f"{case}: {name}")


def check_all_values() -> None:
    tp = tp_axis()
    with nan_in_fresh_memory():
        for case in CASES:
            check_values(case, tp)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_values_and_gradients_are_those_of_torch(launch: Launch, size: int) -> None:
    launch(size, check_all_values)


# ---------------------------------------------------------------- what travels


def traffic(tp: MeshAxis) -> dict[str, tuple[int, int]]:
    return {row.kind: (row.count, row.bytes) for row in tp.ledger.take()}


def check_traffic() -> None:
    tp, V, S = tp_axis(), 17, 5
    padded, padded_vocabulary = (tp.size * len(shard_range(n, tp.size, 0)) for n in (S, V))
    hidden_bytes, cut_bytes = S * B * H * 4, padded * B * H * 4
    statistics = tp.size * 4 * S * B * 4
    # Of the embedding, of the logits, and of the losses; forward and backward each.
    expected: dict[tuple[bool, bool], list[dict[str, tuple[int, int]]]] = {
        (False, False): [{}, {}, {}, {}, {}, {}],
        (False, True): [{}, {}, {"all_gather": (1, padded * B * V * 4)}, {}, {}, {}],
        (True, False): [
            {"all_reduce": (1, hidden_bytes)},
            {},
            {"all_gather": (1, S * B * padded_vocabulary * 4)},
            {"all_reduce": (1, hidden_bytes)},
            {"all_gather": (1, statistics)},
            {"all_reduce": (1, hidden_bytes)},
        ],
        (True, True): [
            {"reduce_scatter": (1, cut_bytes)},
            {"all_gather": (1, cut_bytes)},
            {"all_gather": (2, cut_bytes + S * B * padded_vocabulary * 4)},
            {"all_gather": (1, cut_bytes), "reduce_scatter": (1, cut_bytes)},
            {"all_gather": (2, cut_bytes + statistics)},
            {"reduce_scatter": (1, cut_bytes)},  # its products ran in forward
        ],
    }
    for cuts, rows in expected.items():
        case = Case(V, S, cuts, dtype=torch.float32)
        layers = Layers(case, tp)
        x = randn(S, B, H, seed=0, dtype=torch.float32)
        x = leaf(take_shard(x, tp, 0) if case.sequence_parallel else x)
        got = []
        for compute in (
            lambda: layers.embedding(labels_of(case).clamp(min=0)),  # noqa: B023
            lambda: layers.head(x, S),  # noqa: B023
            lambda: layers.head.sum_of_losses(x, labels_of(case), Objective(V, IGNORED))[0],  # noqa: B023
        ):
            y = compute()
            got.append(traffic(tp))
            y.sum().backward()
            got.append(traffic(tp))
        assert got == rows, case


@pytest.mark.parametrize("size", [2, 3])
def test_traffic_is_that_of_the_table(launch: Launch, size: int) -> None:
    launch(size, check_traffic)


# ---------------------------------------------------------------- without communication


def test_shards_without_rows_have_gradients_without_elements(launch: Launch) -> None:
    assert launch(4, shapes_over_four) == [[[1, H], [1, H]]] * 3 + [[[0, H], [0, H]]]


def shapes_over_four() -> list[list[int]]:
    tp = tp_axis()
    layers = Layers(Case(3, 5, (True, True)), tp)
    layers.embedding(torch.tensor([0, 1, 2, 0, 1])[:, None]).sum().backward()
    x = take_shard(randn(5, 1, H, seed=0), tp, 0).requires_grad_()
    layers.head.sum_of_losses(x, torch.zeros(5, 1, dtype=torch.int64), Objective(3))[0].backward()
    return [list(p.grad.shape) for p in layers.parameters() if p.grad is not None]


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"VP {cuts[0]}, SP {cuts[1]}")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("word", [-1, 17])
def test_tokens_outside_the_vocabulary_are_refused_on_every_rank(
    cuts: tuple[bool, bool], size: int, word: int
) -> None:
    # The axis cannot communicate: what would is an error of another kind. Only one rank's part has the word.
    for rank in range(size):
        tp = MeshAxis("tp", size, rank, None, Ledger())
        embedding = Layers(Case(17, 4, cuts), tp).embedding
        with pytest.raises(RuntimeError, match="tokens must be from 0 to 16"):
            embedding(torch.tensor([0, 16, 3, word])[:, None])


def test_the_initial_weights_are_those_of_torch_in_distribution() -> None:
    tp = MeshAxis.alone("tp")
    table, matrix = Embedding(500, 64, tp).weight, LMHead(500, 64, tp).weight
    assert table.std().item() == pytest.approx(1.0, rel=0.02)
    assert matrix.abs().max() <= 64**-0.5
    assert matrix.std().item() == pytest.approx(64**-0.5 / 3**0.5, rel=0.02)
    assert not torch.equal(Embedding(500, 64, tp, seed=1).weight, table)
