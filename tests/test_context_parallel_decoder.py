"""Over the cp axis the decoder, its loss, its gradients and its training are those of the dense model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paracore import reference
from paracore.errors import UsageError
from paracore.nn import Decoder, DecoderConfig, SequenceContext
from paracore.nn.decoder import DecoderStack
from paracore.nn.initialization import perturb_constants_
from paracore.nn.vocabulary import LMHead
from paracore.optim import clip_gradients_, gradient_norm
from paracore.parallel import GradientSync, Ledger, MeshAxis, ParameterPlacement
from paracore.parallel.layout import contiguous, parse_layout, striped, zigzag
from paracore.parallel.masks import Mask, causal, documents, full, prefix_lm, sliding_window
from paracore.training import Trainer
from paracore.validation import ValidationSettings, validate
from tests.conftest import Launch, axis_over_all, tp_and_cp, training_axes
from tests.numerics import relative_error

CONFIG = DecoderConfig(
    vocab_size=13,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=37,  # uneven over tp
    qkv_bias=True,
    output_bias=True,
)
Labels = str  # "next", "next in documents", "on rank 0", "none"


@dataclasses.dataclass(frozen=True)
class Case:
    layout: str
    length: int
    mask: Mask
    labels: Labels = "next"
    strategy: str = "ring"
    restart_positions: bool = False


def packed(*boundaries: int) -> Mask:
    return causal() & documents(boundaries)


CASES = [
    Case("zigzag", 33, causal()),
    Case("contiguous", 17, causal()),
    Case("striped:1", 17, sliding_window(4, 0)),
    Case("striped:4", 33, packed(0, 2, 3, 24, 33), "next in documents"),
    Case("balanced:4", 33, packed(0, 2, 3, 24, 33), "next in documents", restart_positions=True),
    Case("zigzag", 5, prefix_lm(3)),
    Case("zigzag", 17, full()),
    Case("zigzag", 33, causal(), "on rank 0"),
    Case("contiguous", 17, sliding_window(2, 0), "on rank 0"),
    Case("zigzag", 5, causal(), "none"),
    Case("zigzag", 1, causal(), "on rank 0"),  # the other ranks hold nothing
    Case("striped:3", 17, causal(), strategy="all_gather"),
    Case("zigzag", 16, causal(), strategy="ulysses"),
]
BOUNDARIES = [0, 2, 3, 24, 33]


def dense_labels(case: Case, tokens: Tensor, held_by_first: Tensor) -> Tensor:
    labels = tokens.roll(-1, 1).clone()
    ends = BOUNDARIES[1:] if case.labels == "next in documents" else [case.length]
    if case.labels in ("next", "next in documents"):
        labels[:, [end - 1 for end in ends]] = -100
    else:
        kept = torch.zeros_like(labels, dtype=torch.bool)
        if case.labels == "on rank 0":
            kept[0, held_by_first[: 1 + len(held_by_first) // 2]] = True  # one sequence only, and part of it
        labels.masked_fill_(~kept, -100)
    return labels


def errors_of(case: Case, tp: MeshAxis, cp: MeshAxis) -> dict[str, float]:
    """Relative errors of everything to the dense model in float64; 0 against 0 counts as 0."""
    dense = Decoder(CONFIG, MeshAxis.alone("tp"), dtype=torch.float64)
    perturb_constants_(dense, seed=0)
    model = Decoder(CONFIG, tp, cp, dtype=torch.float64)
    placements = model.parameter_placements()
    model.load_state_dict({n: placements[n].take(p, tp.rank) for n, p in dense.state_dict().items()})

    sequence = SequenceContext(
        parse_layout(case.layout)(case.mask, case.length, cp.size), case.mask, case.strategy
    )
    layout = sequence.layout
    tokens = torch.arange(2 * case.length).mul(7).remainder(13).view(2, case.length)
    labels = dense_labels(case, tokens, layout.ranks[0].tensor())
    positions = torch.arange(case.length)
    if case.restart_positions:
        positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(BOUNDARIES)])
    whole = SequenceContext(contiguous(case.length, 1), case.mask)
    exact_logits = dense(tokens, positions, sequence=whole)
    exact_loss = dense.loss(tokens, labels, whole, positions=positions)
    exact_loss.backward()

    mine, mine_labels = (layout.shard(x, cp.rank, 1) for x in (tokens, labels))
    if case.labels in ("next", "next in documents"):
        boundaries = BOUNDARIES if case.labels == "next in documents" else None
        across = layout.next_token_labels(mine, cp, 1, boundaries=boundaries)
        assert torch.equal(across, mine_labels)
    mine_positions = layout.shard(positions, cp.rank, 0) if case.restart_positions else None
    logits = layout.unshard(model(mine, mine_positions, sequence=sequence), cp, 1)
    loss = model.loss(mine, mine_labels, sequence, positions=mine_positions)
    loss.backward()
    GradientSync(model, tp, cp)()

    errors = {"logits": relative_error(logits, exact_logits), "loss": relative_error(loss, exact_loss)}
    assert loss.dtype == torch.float64
    exact_gradients = {name: p.grad for name, p in dense.named_parameters()}
    for name, parameter in model.named_parameters():
        exact = exact_gradients[name]
        assert parameter.grad is not None
        assert exact is not None
        # A gradient that cancels to nothing, that of k_proj's bias, is judged beside the weight's.
        scale = max(float(exact.norm()), float(dense.lm_head.weight.grad.norm()) * 1e-3)  # type: ignore[union-attr]
        off = float((parameter.grad - placements[name].take(exact, tp.rank)).norm())
        errors[f"gradient of {name}"] = off / scale if off else 0.0
    exact_norm = torch.nn.utils.get_total_norm([g for g in exact_gradients.values() if g is not None])
    errors["gradient norm"] = relative_error(gradient_norm(model, tp), exact_norm)
    if exact_norm:
        clip_gradients_(model, tp, exact_norm.item() / 3)
        errors["clipped norm"] = relative_error(gradient_norm(model, tp), exact_norm / 3)
    return errors


def errors_of_all(tp_size: int, cp_size: int) -> list[dict[str, float]]:
    axes = tp_and_cp(tp_size, cp_size)
    return [errors_of(case, *axes) for case in CASES if case.strategy != "ulysses" or tp_size * cp_size == 2]


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 3), (2, 2)])
def test_logits_loss_and_gradients_are_those_of_the_dense_model(launch: Launch, tp: int, cp: int) -> None:
    for of_rank in launch(tp * cp, errors_of_all, tp, cp):
        for case, errors in zip(CASES, of_rank, strict=False):
            worst = {name: error for name, error in errors.items() if not error < 1e-12}
            assert not worst, f"{case}: {worst}"


# ---------------------------------------------------------------- the loss


class Total(nn.Module):
    """Stands for the LM head: its weight is the sum of this rank's losses."""

    def __init__(self, total: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(total))


def loss_of_unequal_counts() -> tuple[float, float | None]:
    """Rank 0 has one valid token of loss 2, rank 1 three of loss 9 in all."""
    cp = axis_over_all("cp")
    total, count = ((2.0, 1), (9.0, 3))[cp.rank]
    model, stub = Decoder(CONFIG, MeshAxis.alone("tp"), cp), Total(total)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    labels = torch.tensor([0] * count + [-100] * (4 - count))
    with (
        mock.patch.object(Decoder, "_hidden", return_value=torch.zeros(1)),
        mock.patch.object(LMHead, "sum_of_losses", return_value=(stub.weight, labels)),
    ):
        loss = model.loss(tokens, tokens)
    loss.backward()
    return loss.item(), None if stub.weight.grad is None else stub.weight.grad.item()


def test_worked_example_of_unequal_token_counts(launch: Launch) -> None:
    # (2 + 9) / (1 + 3), where a mean of local means gives 2.5; and each summand's weight in it is 1/4.
    assert launch(2, loss_of_unequal_counts) == [(2.75, 0.25)] * 2


def test_a_sequence_that_does_not_fit_is_refused_before_any_communication() -> None:
    cp = MeshAxis("cp", 2, 0, None, Ledger())
    model, tokens = Decoder(CONFIG, MeshAxis.alone("tp"), cp), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"sequence=None over cp=2 ranks: 4 .*\(zigzag\(total_length, 2\)"):
        model(tokens)
    with pytest.raises(UsageError, match="the layout is for 3 ranks, but axis cp has 2"):
        model(tokens, sequence=SequenceContext(zigzag(12, 3)))
    with pytest.raises(UsageError, match="rank 0 of axis cp was given 4 tokens of each sequence, must be 2"):
        model(tokens, sequence=SequenceContext(contiguous(4, 2)))
    with pytest.raises(UsageError, match=r"labels are \[1, 8\], must be \[1, 4\] like tokens"):
        model.loss(tokens, torch.zeros(1, 8, dtype=torch.int64), SequenceContext(striped(8, 2, block=1)))
    with pytest.raises(UsageError, match="strategy='rings': must be one of ring, all_gather, ulysses"):
        SequenceContext(contiguous(4, 2), strategy="rings")
    with pytest.raises(UsageError, match="boundaries end at 3, must end at 4 or beyond"):
        SequenceContext(contiguous(4, 2), packed(0, 3))


@pytest.mark.parametrize("sequence", [None, SequenceContext(contiguous(10, 1), packed(0, 3, 10))])
def test_on_one_rank_the_decoder_compiles_to_one_graph(sequence: SequenceContext | None) -> None:
    model, tokens = Decoder(CONFIG, MeshAxis.alone("tp")), torch.arange(20).remainder(13).view(2, 10)

    def loss(tokens: Tensor) -> Tensor:
        return model.loss(tokens, tokens, sequence)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), loss(tokens))


# ---------------------------------------------------------------- the gradient sync


class Cut(nn.Module):
    """Uneven shards, replicas and two dtypes: what places in a buffer could differ by."""

    def __init__(self, tp: MeshAxis) -> None:
        super().__init__()
        self.placements = {
            "shard": ParameterPlacement.shard((tp.size * 50 + 1, 3), tp.size, 0),
            "norm": ParameterPlacement.replicate((700,), tp.size, partial_gradient=True),
            "same": ParameterPlacement.replicate((901,), tp.size),
            "wide": ParameterPlacement.replicate((5,), tp.size),
            "unused": ParameterPlacement.replicate((5,), tp.size),
        }
        for name, placement in self.placements.items():
            dtype = torch.float64 if name == "wide" else torch.float32
            self.register_parameter(
                name, nn.Parameter(torch.zeros(placement.local_shape(tp.rank), dtype=dtype))
            )


def sums_over_both_axes() -> tuple[dict[str, Tensor | None], dict[str, Tensor], list[tuple[str, int]]]:
    tp, cp = tp_and_cp(2, 3)
    model = Cut(tp)
    generator = torch.Generator().manual_seed(cp.rank)  # the same for the ranks of one tp group
    given = {}
    for name, parameter in model.named_parameters():
        if name == "unused" or (name == "wide" and cp.rank != 1):
            continue
        full = torch.randn(model.placements[name].full_shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = model.placements[name].take(full, tp.rank)
        given[name] = full
    GradientSync(model, tp, cp)()
    traffic = [(row.axis, row.count) for row in tp.ledger.take()]
    return {name: p.grad for name, p in model.named_parameters()}, given, traffic


def test_each_axis_is_summed_once_to_the_same_bits_on_all_ranks(launch: Launch) -> None:
    results = launch(6, sums_over_both_axes)
    for rank, (sums, _, traffic) in enumerate(results):
        assert traffic == [("cp", 2), ("tp", 1)]  # float32 and float64 over cp; the norm over tp
        assert sums["unused"] is None
        for name in ("norm", "same", "wide"):
            expected = sum(results[2 * cp][1][name].double() for cp in range(3) if name in results[2 * cp][1])
            sum_, first = sums[name], results[0][0][name]
            assert sum_ is not None
            assert first is not None
            assert relative_error(sum_, expected * (2 if name == "norm" else 1)) < 1e-6
            assert torch.equal(sum_, first), f"{name} on rank {rank}"
        shard, of_first = sums["shard"], results[rank % 2][0]["shard"]
        assert shard is not None
        assert of_first is not None
        assert torch.equal(shard, of_first)


# ---------------------------------------------------------------- validate


def settings(dtype: torch.dtype = torch.float32, **changes: Any) -> ValidationSettings:
    chosen: dict[str, Any] = {"seq_len": 17, "batch_size": 2, "steps": 2, "log_every": 1}
    return ValidationSettings(CONFIG, dtype=dtype, **(chosen | changes))


RUNS = [
    settings(),
    settings(torch.bfloat16, mask="packed", layout="striped:1", steps=0),
    settings(torch.float64, mask="window:5", layout="balanced:2", steps=0),
    settings(mask="packed", layout="contiguous", seq_len=3, seed=1, steps=1),
]


def reports(tp_size: int, cp_size: int) -> list[dict[str, Any] | None]:
    axes = training_axes(tp=tp_size, cp=cp_size)
    return [validate(chosen, axes, torch.device("cpu")) for chosen in RUNS]


@pytest.mark.parametrize(("tp", "cp"), [(1, 3), (2, 2)])
def test_validate_passes(launch: Launch, tp: int, cp: int) -> None:
    first, *others = launch(tp * cp, reports, tp, cp)
    assert others == [[None] * len(RUNS)] * (tp * cp - 1)
    for chosen, report in zip(RUNS, first, strict=True):
        assert report["failures"] == [], chosen
        assert report["config"]["cp"] == cp
        for name in ("layout", "mask", "strategy"):
            assert report["config"][name] == getattr(chosen, name)
    traffic = {(row["phase"], row["kind"], row["axis"]): row["count"] for row in first[0]["comm"]}
    assert traffic["forward", "send", "cp"] == CONFIG.num_layers * (cp - 1)
    assert traffic["forward", "all_reduce", "cp"] == 1  # the loss and the number of its tokens
    assert traffic["gradient_sync", "all_reduce", "cp"] == 1
    assert ("backward", "all_reduce", "cp") not in traffic
    assert first[2]["backward"]["max_grad_diff"] < 1e-13


def without_sync_over_cp() -> Any:
    """Every rank keeps the gradients of its own tokens."""
    original = GradientSync.__init__

    def broken(self: GradientSync, model: nn.Module, tp: MeshAxis, *token_axes: MeshAxis) -> None:
        original(self, model, tp)

    return mock.patch.object(GradientSync, "__init__", broken)


def synced_wrongly_on_one_rank() -> Any:
    """The gradients of the last rank are off by a unit in the last place, and so will be its parameters."""
    original = GradientSync.__call__

    def broken(self: GradientSync) -> None:
        original(self)
        for parameter in self._buckets[0].parameters if self._buckets and self._buckets[0].axis.rank else []:
            assert parameter.grad is not None
            parameter.grad.copy_(torch.nextafter(parameter.grad, torch.tensor(torch.inf)))

    return mock.patch.object(GradientSync, "__call__", broken)


def positions_ignore_the_layout() -> Any:
    """RoPE takes rank * length for the position of a rank's first token."""
    original = DecoderStack.forward

    def broken(
        self: DecoderStack, tokens: Tensor, places: Tensor, positions: Tensor, sequence: Any, draw: Any
    ) -> Tensor:
        if sequence.layout.size > 1:
            positions = torch.arange(tokens.size(1)) + dist.get_rank() * tokens.size(1)
        return original(self, tokens, places, positions, sequence, draw)

    return mock.patch.object(DecoderStack, "forward", broken)


def mean_of_local_means() -> Any:
    """Ranks weigh alike, however many labels they have."""
    original = Decoder.loss

    def broken(self: Decoder, tokens: Tensor, labels: Tensor, sequence: Any = None, **options: Any) -> Tensor:
        if self.cp.size == 1:
            return original(self, tokens, labels, sequence, **options)
        total, valid = reference.cross_entropy(self(tokens, sequence=sequence), labels)
        from paracore.parallel import reduce_from

        return reduce_from(total / valid.clamp(min=1), self.cp) / self.cp.size

    return mock.patch.object(Decoder, "loss", broken)


def loss_scaled_by_cp() -> Any:
    """The loss is right, its gradient cp times too large."""
    original = Decoder.loss

    def broken(self: Decoder, *args: Any, **options: Any) -> Tensor:
        loss = original(self, *args, **options)
        return loss * self.cp.size - loss.detach() * (self.cp.size - 1)

    return mock.patch.object(Decoder, "loss", broken)


def mask_ignored() -> Any:
    """Over cp attention is causal, whatever the mask."""
    original = DecoderStack.forward

    def broken(
        self: DecoderStack, tokens: Tensor, places: Tensor, positions: Tensor, sequence: Any, draw: Any
    ) -> Tensor:
        if sequence.layout.size > 1:
            sequence = dataclasses.replace(sequence, mask=causal())
        return original(self, tokens, places, positions, sequence, draw)

    return mock.patch.object(DecoderStack, "forward", broken)


def labels_end_at_borders() -> Any:
    """Each rank shifts its own tokens, and its last one has no label."""
    original = Decoder.loss

    def broken(self: Decoder, tokens: Tensor, labels: Tensor, *args: Any, **options: Any) -> Tensor:
        if self.cp.size > 1:
            labels = labels.clone()
            labels[:, -1:] = -100
        return original(self, tokens, labels, *args, **options)

    return mock.patch.object(Decoder, "loss", broken)


def not_synced_after_the_first_step() -> Any:
    """What the first backward shows is right; parameters then drift apart."""
    original, called = GradientSync.__call__, list[GradientSync]()

    def broken(self: GradientSync) -> None:
        if self._buckets and not called:
            called.append(self)
            original(self)

    return mock.patch.object(GradientSync, "__call__", broken)


FAULTS: list[tuple[Callable[[], Any], str]] = [
    (without_sync_over_cp, "gradient of model.embed_tokens.weight"),
    (synced_wrongly_on_one_rank, "gradient of lm_head.weight: differs between ranks"),
    (positions_ignore_the_layout, "logits: relative error"),
    (mean_of_local_means, "loss: relative error"),
    (loss_scaled_by_cp, "gradient of lm_head.weight: relative error"),
    (mask_ignored, "logits: relative error"),
    (labels_end_at_borders, "loss: relative error"),
    (not_synced_after_the_first_step, "final lm_head.weight: differs between ranks"),
]


def reports_with_faults() -> list[dict[str, Any] | None]:
    axes = training_axes(cp=2)
    found = []
    for fault, _ in FAULTS:
        with fault():
            steps = 1 if fault is not_synced_after_the_first_step else 0
            chosen = settings(mask="packed", layout="contiguous", steps=steps)
            found.append(validate(chosen, axes, torch.device("cpu")))
    return found


def test_validate_fails_for_every_fault(launch: Launch) -> None:
    for (fault, expected), report in zip(FAULTS, launch(2, reports_with_faults)[0], strict=True):
        failures = report["failures"]
        assert any(failure.startswith(expected) for failure in failures), f"{fault.__name__}: {failures}"
        if fault is not_synced_after_the_first_step:
            assert not any(failure.startswith("gradient") for failure in failures)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "window"}, "mask='window': must be causal, packed, or window:N with N at least 1"),
        ({"mask": "window:0"}, "mask='window:0'"),
        ({"layout": "spiral"}, "layout 'spiral': must be"),
        ({"strategy": "tree"}, "strategy='tree': must be one of"),
    ],
)
def test_settings_without_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(**changes)


def test_packed_documents_are_uneven_and_follow_from_the_seed() -> None:
    from paracore.validation import _packed

    for seed in range(5):
        boundaries = _packed(256, seed)
        sizes = sorted(b - a for a, b in itertools.pairwise(boundaries))
        assert sizes == [8, 24, 32, 56, 136]
    assert len({tuple(_packed(256, seed)) for seed in range(10)}) > 1
    assert _packed(1, 0)[-1] == 1


# ---------------------------------------------------------------- training


def losses_of_training() -> tuple[list[float], list[float]]:
    tp, cp = tp_and_cp(1, 2)
    layout = zigzag(9, 2)
    text = torch.arange(20).mul(5).remainder(13).view(2, 10)
    dense = Trainer(Decoder(CONFIG, MeshAxis.alone("tp"), dtype=torch.float64), lr=0.01, max_norm=0.5)
    parallel = Trainer(Decoder(CONFIG, tp, cp, dtype=torch.float64), lr=0.01, max_norm=0.5)
    tokens, labels = (layout.shard(x, cp.rank, 1) for x in (text[:, :-1], text[:, 1:]))
    steps = range(10)
    return (
        [parallel.step(tokens, labels, SequenceContext(layout)).item() for _ in steps],
        [dense.step(text[:, :-1], text[:, 1:]).item() for _ in steps],
    )


def test_training_with_clipping_follows_the_dense_run(launch: Launch) -> None:
    for parallel, dense in launch(2, losses_of_training):
        assert parallel == pytest.approx(dense, rel=1e-9)
        assert parallel[-1] < 0.8 * parallel[0]
