"""Dropout goes by where an element lies in the whole batch: cut in any way, models drop the same elements."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.nn import Decoder, DecoderConfig, DropoutDraw, SequenceContext
from paracore.nn.decoder import DecoderStack
from paracore.nn.dropout import Dropout
from paracore.ops.dropout import dropout
from paracore.parallel import GradientSync, MeshAxis, shard_range
from paracore.parallel.collectives import gather_shards, take_shard
from paracore.parallel.layout import zigzag
from paracore.training import Trainer
from tests.conftest import Launch, tp_axis, training_axes
from tests.numerics import randn, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = -(1 << 62) + 12345
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def mask(S: int, B: int, H: int, p: float = 0.3, seed: int = SEED) -> Tensor:
    """Which elements of [S, B, H] are kept."""
    return dropout(torch.ones(S, B, H), p, seed, torch.arange(S)) != 0


@pytest.mark.parametrize(("S", "B", "H"), [(1, 1, 1), (7, 3, 5), (64, 2, 33)])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_a_part_drops_what_the_whole_does(S: int, B: int, H: int, parts: int) -> None:
    x = randn(S, B, H, seed=0, dtype=torch.float32)
    whole = dropout(x, 0.3, SEED, torch.arange(S))
    for part in range(parts):
        own, sequences = shard_range(S, parts, part), shard_range(B, parts, part)
        in_order = torch.arange(S)[own.start : own.stop]
        assert torch.equal(dropout(x[in_order], 0.3, SEED, in_order), whole[in_order])
        dealt = torch.arange(S)[part::parts].flip(0)  # any positions, in any order
        assert torch.equal(dropout(x[dealt], 0.3, SEED, dealt), whole[dealt])
        some = slice(sequences.start, sequences.stop)
        cut = dropout(x[in_order, some], 0.3, SEED, in_order, first_sequence=sequences.start)
        assert torch.equal(cut, whole[in_order, some])


def test_what_is_drawn_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = mask(64, 2, 33)
    monkeypatch.setattr("paracore.ops.dropout._WORDS", 3 * 2 * 33)
    assert torch.equal(mask(64, 2, 33), at_once)


def test_positions_beyond_31_bits_and_sequences_are_told_apart() -> None:
    positions = torch.tensor([0, 1, 1 << 31, (1 << 32) - 1])
    kept = dropout(torch.ones(4, 2, 256), 0.5, SEED, positions, first_sequence=1 << 20) != 0
    rows = kept.flatten(0, 1)
    for one, other in itertools.combinations(rows, 2):
        assert 0.3 < float((one == other).double().mean()) < 0.7


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p: float) -> None:
    S, B, H = 50, 4, 501
    kept = mask(S, B, H, p)
    count = kept.numel()
    # Five standard deviations of a binomial distribution; a word that served two elements shows in pairs.
    assert abs(kept.sum().item() - (1 - p) * count) < 5 * (count * p * (1 - p)) ** 0.5
    for dim in range(3):
        both = kept.narrow(dim, 0, kept.size(dim) - 1) & kept.narrow(dim, 1, kept.size(dim) - 1)
        q = (1 - p) ** 2
        assert abs(both.sum().item() - q * both.numel()) < 8 * (both.numel() * q * (1 - q)) ** 0.5


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_kept_is_divided_and_the_gradient_has_the_same_mask(dtype: torch.dtype) -> None:
    p, positions = 0.3, torch.arange(9)
    x, dy = (randn(9, 2, 7, seed=seed, dtype=dtype) for seed in (0, 1))
    x.requires_grad_()
    y = dropout(x, p, SEED, positions)
    y.backward(dy)
    assert x.grad is not None
    kept = mask(9, 2, 7)
    assert 0 < kept.sum() < kept.numel()
    for got, given in ((y.detach(), x.detach()), (x.grad, dy)):
        assert got.dtype == dtype
        assert torch.equal(got, torch.where(kept, given / (1 - p), 0.0))


def test_strided_inputs_and_gradients() -> None:
    x, dy = (randn(2, 9, 7, seed=seed).transpose(0, 1) for seed in (0, 1))
    x.requires_grad_()
    y = dropout(x, 0.3, SEED, torch.arange(9))
    y.backward(dy)
    assert torch.equal(y, torch.where(mask(9, 2, 7), x / 0.7, 0.0))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(mask(9, 2, 7), dy / 0.7, 0.0))


def test_not_a_number_does_not_survive_where_it_is_dropped() -> None:
    y = dropout(torch.full((9, 2, 7), torch.nan), 0.3, SEED, torch.arange(9))
    assert torch.equal(y.isnan(), mask(9, 2, 7))
    assert torch.equal(y == 0, ~mask(9, 2, 7))


def test_nothing_is_dropped_with_p_0_and_nothing_fails_when_empty() -> None:
    x = randn(3, 2, 5, seed=0)
    assert dropout(x, 0.0, 0, torch.arange(3)) is x
    for shape in ((0, 2, 5), (3, 0, 5), (3, 2, 0)):
        assert dropout(torch.ones(shape), 0.5, 0, torch.arange(shape[0])).shape == shape


def test_backward_keeps_positions_only() -> None:
    x, kept = randn(40, 2, 16, seed=0).requires_grad_(), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = dropout(x, 0.5, SEED, torch.arange(40))
    assert [list(tensor.shape) for tensor in kept] == [[40]]
    del x
    y.sum().backward()


@pytest.mark.parametrize(
    ("shape", "positions", "p", "seed", "message"),
    [
        ((3, 2, 5), 3, 1.0, 0, "p=1.0: must be at least 0 and less than 1"),
        ((3, 2, 5), 3, -0.1, 0, "p=-0.1: must be"),
        ((3, 2, 5), 3, float("nan"), 0, "p=nan: must be"),
        ((3, 2, 5), 2, 0.5, 0, r"x is \[3, 2, 5\] and positions \[2\], must be \[S, B, H\] and \[S\]"),
        ((3, 5), 3, 0.5, 0, r"x is \[3, 5\]"),
        ((3, 2, 5), 3, 0.5, 1 << 63, "seed=9223372036854775808: must be a signed 64-bit integer"),
    ],
)
def test_what_has_no_meaning_is_refused(
    shape: tuple[int, ...], positions: int, p: float, seed: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        dropout(torch.ones(shape), p, seed, torch.arange(positions))


def test_every_layer_place_and_step_has_masks_of_its_own() -> None:
    draws = [DropoutDraw(seed) for seed in (0, 1, -5)]
    draws += [draw.of(name) for draw in draws for name in ("layers.0", "layers.1", "embedding")]
    draws += [draw.of("mlp") for draw in draws] + [draw.of("attention") for draw in draws]
    assert len({draw.seed for draw in draws}) == len(draws)
    assert all(-(1 << 63) <= draw.seed < 1 << 63 for draw in draws)
    masks = [mask(8, 2, 64, 0.5, draw.seed) for draw in draws]
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < float((one == other).double().mean()) < 0.6
    assert DropoutDraw(3, first_sequence=7).of("x") == DropoutDraw(DropoutDraw(3).of("x").seed, 7)


# ---------------------------------------------------------------- the decoder

CONFIG = DecoderConfig(
    vocab_size=13,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=37,
    output_bias=True,
    dropout=0.2,
    attention_dropout=0.3,
)
TEXT = torch.arange(4 * 10).mul(7).add(3).remainder(13).view(4, 10)
DRAW = DropoutDraw(seed=11)


def decoder(**changes: Any) -> Decoder:
    return Decoder(dataclasses.replace(CONFIG, **changes), MeshAxis.alone("tp"), dtype=torch.float64)


def cut_masks() -> list[Tensor]:
    """The masks of each part of the model, rebuilt from what the ranks drop of their own tokens."""
    tp, found = tp_axis(), []
    for S in (1, 5, 64):
        own = take_shard(torch.arange(S), tp, 0)
        part = Dropout(CONFIG, DRAW, own)
        for of, name in ((part, "embedding"), (part.of("layers.0"), "mlp"), (part.of("layers.1"), "mlp")):
            found.append(gather_shards(of.hidden(torch.ones(len(own), 2, 24), name), tp, 0, S))
    return found


def test_masks_are_bitwise_the_same_over_any_number_of_ranks(launch: Launch) -> None:
    [one] = launch(1, cut_masks)
    for size in (2, 4):
        for found in launch(size, cut_masks):
            assert all(torch.equal(x, y) for x, y in zip(found, one, strict=True))
    assert not torch.equal(one[-1], one[-2])


MESHES = [  # sizes, and how the sequence and the vocabulary are cut over tp
    ({"tp": 2}, [(False, False), (True, False), (True, True)]),
    ({"tp": 4}, [(True, True)]),  # key/value heads are shared
    ({"cp": 2, "tp": 2}, [(False, False), (True, True)]),
    ({"dp": 2}, [(False, False)]),
]


def errors_over(sizes: dict[str, int], cuts: list[tuple[bool, bool]]) -> list[float]:
    """Of the loss and of each gradient, to the dense model in float64."""
    axes, errors = training_axes(**sizes), []
    dense = decoder()
    exact = dense.loss(TEXT[:, :-1], TEXT[:, 1:], draw=DRAW)
    exact.backward()
    sequence = SequenceContext(zigzag(9, axes.cp.size))
    tokens, labels = (sequence.part(x, axes.dp, axes.cp) for x in (TEXT[:, :-1], TEXT[:, 1:]))
    draw = DropoutDraw(DRAW.seed, first_sequence=axes.dp.rank * len(tokens))
    for cut, vocabulary in cuts:
        options: dict[str, Any] = {"sequence_parallel": cut, "vocab_parallel": vocabulary}
        model = Decoder(CONFIG, axes.tp, axes.cp, dtype=torch.float64, **options)
        loss = model.loss(tokens, labels, sequence, over=axes.data, draw=draw)
        loss.backward()
        GradientSync(model, axes.tp, axes.data)()
        errors.append(relative_error(loss, exact))
        placements = model.parameter_placements()
        for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            expected = placements[name].take(q.grad, axes.tp.rank)
            errors.append(float((p.grad - expected).norm() / q.grad.norm()))
    return errors


@pytest.mark.parametrize(("sizes", "cuts"), MESHES, ids=lambda x: str(x))
def test_loss_and_gradients_are_those_of_the_dense_model(
    launch: Launch, sizes: dict[str, int], cuts: list[tuple[bool, bool]]
) -> None:
    plain = decoder().eval().loss(TEXT[:, :-1], TEXT[:, 1:])
    assert relative_error(decoder().loss(TEXT[:, :-1], TEXT[:, 1:], draw=DRAW), plain) > 1e-6
    world = torch.tensor(list(sizes.values())).prod().item()
    for errors in launch(world, errors_over, sizes, cuts):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("changes", [{"dropout": 0.0}, {"attention_dropout": 0.0}, {}])
def test_only_training_drops(changes: dict[str, float]) -> None:
    model, tokens = decoder(**changes), TEXT[:, :-1]
    plain = decoder(dropout=0.0, attention_dropout=0.0)
    assert torch.equal(model.eval()(tokens), plain(tokens))
    assert torch.equal(model.eval()(tokens, draw=DRAW), plain(tokens))
    model.train()
    dropped = model(tokens, draw=DRAW)
    assert relative_error(dropped, plain(tokens)) > 0.01
    assert torch.equal(model(tokens, draw=DRAW), dropped)
    assert not torch.equal(model(tokens, draw=DropoutDraw(12)), dropped)
    for function in (model, lambda x: model.loss(x, x)):
        with pytest.raises(UsageError, match=r"draw=None: dropout=.* need a DropoutDraw in training"):
            function(tokens)


def test_blocks_drop_by_places_in_the_sequence_whatever_the_positions_of_rope() -> None:
    stack = decoder(attention_dropout=0.0).model
    assert isinstance(stack, DecoderStack)
    tokens, places = TEXT[:, :-1], torch.arange(9)
    shifted = stack(tokens, places, places + 100, None, DRAW)
    assert relative_error(shifted, stack(tokens, places, places, None, DRAW)) < 1e-9
    assert relative_error(stack(tokens, places + 100, places, None, DRAW), shifted) > 0.01


# ---------------------------------------------------------------- training


def trained(trainer: Trainer, steps: int, **options: Any) -> list[float]:
    return [trainer.step(TEXT[:2, :-1], TEXT[:2, 1:], **options).item() for _ in range(steps)]


def test_microbatches_drop_what_the_whole_batch_does_and_steps_differ() -> None:
    whole, parts, other = (Trainer(decoder(), lr=1e-2, seed=seed) for seed in (1, 1, 2))
    losses = trained(whole, 3)
    assert trained(parts, 3, microbatches=2) == pytest.approx(losses, rel=1e-12)
    for p, q in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)  # Adam divides by roots of tiny squares
    assert trained(other, 1) != pytest.approx(losses[:1], rel=1e-6)
    still = Trainer(decoder(), lr=0.0)
    first, second = trained(still, 2)
    assert first != pytest.approx(second, rel=1e-6)
    assert trained(still, 1, first_sequence=2) != pytest.approx([second], rel=1e-6)


def test_equal_sequences_of_two_microbatches_drop_differently() -> None:
    twice = TEXT[:1].expand(2, -1)

    def losses(microbatches: int, first: int, count: int) -> float:
        trainer, text = Trainer(decoder(), lr=0.0), twice[:count]
        return trainer.step(text[:, :-1], text[:, 1:], microbatches=microbatches, first_sequence=first).item()

    one, other = losses(1, 0, 1), losses(1, 1, 1)
    assert one != pytest.approx(other, rel=1e-6)
    assert losses(2, 0, 2) == pytest.approx((one + other) / 2, rel=1e-12)


def two_ranks_of_dp() -> tuple[list[float], list[Tensor]]:
    axes, found = training_axes(dp=2), list[float]()
    for zero in (None, 1):
        model = Decoder(CONFIG, axes.tp, axes.cp, dtype=torch.float64)
        trainer = Trainer(model, lr=1e-2, axes=axes, zero=zero, seed=1)
        own = TEXT[axes.dp.rank][None]
        found += [trainer.step(own[:, :-1], own[:, 1:]).item() for _ in range(3)]
    return found, [p.clone() for p in trainer.parameters().values()]


def test_two_ranks_with_a_sequence_each_train_as_one_with_both(launch: Launch) -> None:
    trainer = Trainer(decoder(), lr=1e-2, seed=1)
    expected = trained(trainer, 3)
    for losses, parameters in launch(2, two_ranks_of_dp):
        assert losses == pytest.approx(expected * 2, rel=1e-9)
        for p, q in zip(parameters, trainer.parameters().values(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
