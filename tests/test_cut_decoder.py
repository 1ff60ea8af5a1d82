"""With the sequence, the vocabulary or both cut over tp, the decoder is the dense one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paracore.checkpoint import merge_state_dicts
from paracore.errors import UsageError
from paracore.nn import Decoder
from paracore.optim import AdamW
from paracore.parallel import MeshAxis
from paracore.parallel.collectives import gather_list
from paracore.parallel.mesh import ShardingAxes
from paracore.validation import _perturbed
from tests.conftest import Launch, tp_axis
from tests.cut_decoders import CUTS, Case, Outcome, axis_of, dense_outcome, outcome, states
from tests.numerics import all_equal, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")


Tensors = dict[str, Tensor]

SHAPES = [  # vocabulary, length, tied
    (3, 1, False),
    (3, 5, True),
    (3, 64, False),
    (17, 1, True),
    (17, 5, False),
    (17, 5, True),
    (17, 64, True),
    (6400, 5, False),
]


def groups(size: int) -> list[list[Case]]:
    """Cases that one dense model is compared with, cut in every way."""
    shared = 2 if size in (2, 4) else 12  # over four ranks pairs of them share a key/value head
    shapes = [(V, S, tied, shared if S == 5 else 12, torch.float64) for V, S, tied in SHAPES]
    shapes += [(17, S, S == 5, shared, torch.float32) for S in (5, 64)]
    shapes += [(17, 64, False, shared, torch.bfloat16)]
    return [
        [Case(V, S, cuts, tied, heads, dtype) for cuts in (CUTS if V < 100 else [(True, True)])]
        for V, S, tied, heads, dtype in shapes
    ]


def check_bits(case: Case, tp: MeshAxis, found: Outcome) -> None:
    """What ranks hold in common is bitwise the same."""
    outputs = torch.cat([x.reshape(-1).double() for x in (found.logits, found.loss, found.norm)])
    for replicas in sorted({p.replicas for p in found.placements.values()} - {1}):
        shared = torch.cat([outputs, found.shared(replicas).double()])
        held = gather_list(shared, tp, [len(shared)] * tp.size, 0)
        assert all(all_equal(held[i : i + replicas]) for i in range(0, tp.size, replicas)), case
        assert all_equal([of_rank[: len(outputs)] for of_rank in held]), case


def check_values(case: Case, tp: MeshAxis, found: Outcome, exact: Tensors, rounded: list[Tensors]) -> None:
    """By the rule of the project, the worst of `rounded` being the other implementation's error.

    A gradient that cancels to nothing, that of k_proj's bias, is judged beside that of the whole model.
    """
    least = 1e-3 * float(exact["norm"])
    for name, tensor in found.named().items():
        scale = max(float(exact[name].norm()), least, 1e-300)
        placement = found.placements.get(name)
        expected = exact[name] if placement is None else placement.take(exact[name], tp.rank)
        assert tensor.shape == expected.shape, f"{case}: {name}"
        assert tensor.dtype == rounded[0][name].dtype, f"{case}: {name}"
        error = float((tensor.double() - expected).norm()) / scale
        others = [float((run[name].double() - exact[name]).norm()) / scale for run in rounded]
        allowed = 1e-12 if case.dtype == torch.float64 else 2 * max(others) + torch.finfo(case.dtype).eps
        assert error <= allowed, f"{case}: {name} is off by {error:.3e}, allowed {allowed:.3e}"


def check_group(cases: list[Case], tp: MeshAxis) -> None:
    dense = cases[0].dense()
    exact = dense_outcome(cases[0], dense, torch.float64)
    rounded = [exact]
    if cases[0].dtype != torch.float64:
        # Where a sum cancels, rounding leads as far as chance has it: see paracore.verdict.
        runs = [dense, *(_perturbed(dense, 0, run) for run in range(3))]
        rounded = [dense_outcome(cases[0], run, cases[0].dtype) for run in runs]
    for case in cases:
        found = outcome(case, case.cut(tp, dense), tp)
        check_bits(case, tp, found)
        check_values(case, tp, found, exact, rounded)


def check_all() -> None:
    tp = tp_axis()
    for cases in groups(tp.size):
        check_group(cases, tp)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_logits_loss_and_every_gradient_are_those_of_the_dense_model(launch: Launch, size: int) -> None:
    launch(size, check_all)


# ---------------------------------------------------------------- no labels


def without_labels() -> None:
    tp = tp_axis()
    for cuts in CUTS:
        case = Case(17, 5, cuts, labels=False)
        found = outcome(case, case.cut(tp, case.dense()), tp)
        check_bits(case, tp, found)
        assert found.loss.item() == 0.0
        assert found.norm.item() == 0.0
        assert all(not gradient.any() for gradient in found.gradients.values())


def test_without_any_label_the_loss_and_all_gradients_are_zero(launch: Launch) -> None:
    launch(3, without_labels)


# ---------------------------------------------------------------- weights and checkpoints


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_are_bitwise_the_same_over_any_number_of_ranks(
    cuts: tuple[bool, bool], tied: bool
) -> None:
    case = Case(17, 5, cuts, tied, kv_heads=2, dtype=torch.float32)
    dense = case.cut(axis_of(1, 0)).state_dict()
    for size in (2, 4):
        models = [case.cut(axis_of(size, rank)) for rank in range(size)]
        merged = merge_state_dicts([m.state_dict() for m in models], models[0].parameter_placements())
        assert merged.keys() == dense.keys()
        assert all(torch.equal(merged[name], tensor) for name, tensor in dense.items())


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [3, 17])
def test_checkpoints_go_to_any_number_of_ranks_and_back(
    cuts: tuple[bool, bool], tied: bool, vocab_size: int
) -> None:
    case = Case(vocab_size, 5, cuts, tied, kv_heads=2, dtype=torch.float32)
    dense = case.dense().state_dict()
    full = dict(dense)
    for size in (1, 2, 4, 1):
        held = states(case, size, full)
        rows = {len(state["lm_head.weight"]) for state in held}
        assert len(rows) == (2 if cuts[1] and size > 1 else 1)  # uneven shards, empty ones among them
        full = merge_state_dicts(held, case.cut(axis_of(size, 0)).parameter_placements())
    assert full.keys() == dense.keys()
    assert all(torch.equal(full[name], tensor) for name, tensor in dense.items())


def test_a_state_dict_of_another_rank_is_refused_where_shards_differ() -> None:
    case = Case(17, 5, (True, True), dtype=torch.float32)
    first, last = states(case, 4, case.dense().state_dict())[::3]
    model = case.cut(axis_of(4, 3))
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.embed_tokens\.weight"):
        model.load_state_dict(first)
    placements = model.parameter_placements()
    with pytest.raises(UsageError, match="rank 1 holds shape"):
        merge_state_dicts([first, last, last, last], placements)


def test_replicas_that_went_astray_are_refused() -> None:
    case = Case(17, 5, (True, True), dtype=torch.float32)
    held = states(case, 2, case.dense().state_dict())
    held[1]["model.norm.weight"] = held[1]["model.norm.weight"] + 1
    with pytest.raises(UsageError, match=r"model\.norm\.weight: the 2 ranks that share it hold different"):
        merge_state_dicts(held, case.cut(axis_of(2, 0)).parameter_placements())


# ---------------------------------------------------------------- the optimizer

STEPS = 3


def steps_of(case: Case, model: Decoder, tp: MeshAxis, optimizer: AdamW, steps: int) -> list[float]:
    tokens, labels = case.batch()
    losses = []
    for _ in range(steps):
        loss = model.loss(tokens, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_of(model: Decoder, tp: MeshAxis) -> AdamW:
    return AdamW(model, lr=1e-2, mesh=ShardingAxes(MeshAxis.alone("data"), tp))


MOMENTS = ("exp_avg", "exp_avg_sq")


def continued(tied: bool) -> tuple[list[float], dict[str, dict[str, Tensor]], list[float]]:
    """Train over two ranks, save; load the moments that the dense run has saved, and go on."""
    tp, case = tp_axis(), Case(17, 5, (True, True), tied, kv_heads=2)
    dense = case.dense()
    alone = MeshAxis.alone("tp")
    model, theirs = case.cut(tp, dense), optimizer_of(dense, alone)
    ours = optimizer_of(model, tp)
    losses = steps_of(case, model, tp, ours, STEPS)
    expected = steps_of(case, dense, alone, theirs, STEPS)
    assert losses == pytest.approx(expected, rel=1e-10)

    placements, saved, whole = model.parameter_placements(), ours.state_dict(), theirs.state_dict()
    for name, state in saved["state"].items():
        for kind in MOMENTS:
            taken = placements[name].take(whole["state"][name][kind], tp.rank)
            assert relative_error(state[kind], taken) < 1e-9 or state[kind].norm() < 1e-12
            state[kind] = taken
    fresh = case.cut(tp, dense)
    again = optimizer_of(fresh, tp)
    again.load_state_dict(saved)
    return steps_of(case, fresh, tp, again, 2), saved["state"], steps_of(case, dense, alone, theirs, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_state_of_the_optimizer_goes_by_the_same_placements(launch: Launch, tied: bool) -> None:
    for losses, state, expected in launch(2, continued, tied):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert ("lm_head.weight" in state) != tied


def test_under_autocast_the_decoder_is_near_to_itself() -> None:
    case = Case(17, 5, (False, False), dtype=torch.float32)
    model = case.cut(MeshAxis.alone("tp"))
    tokens = torch.arange(10).remainder(17).view(2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(tokens, tokens)
    loss.backward()
    assert loss.item() == pytest.approx(model.loss(tokens, tokens).item(), rel=1e-2)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
