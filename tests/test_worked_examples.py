"""The worked examples of the text on the mathematics of DP and TP hold exactly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paracore.nn import (
    ColumnParallelLinear,
    LinearScaling,
    LongRopeScaling,
    RowParallelLinear,
    YarnScaling,
    rope_frequencies,
)
from paracore.parallel import Ledger, MeshAxis, MeshShape
from paracore.parallel.collectives import sum_over
from tests.conftest import Launch, tp_axis

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
W = torch.tensor([[2.0], [-1.0]])
Y = torch.tensor([[1.0], [3.0]])


def squared_loss_gradient(x: Tensor, y: Tensor, samples: int) -> Tensor:
    """d/dW of sum((xW - y)^2) / (2 samples)."""
    w = W.clone().requires_grad_()
    ((x @ w - y).square().sum() / (2 * samples)).backward()
    assert w.grad is not None
    return w.grad


def test_batch_gradient_is_the_sum_over_samples() -> None:
    whole = squared_loss_gradient(X, Y, 2)
    assert whole.tolist() == [[-2.0], [-3.0]]
    per_sample = [squared_loss_gradient(X[i : i + 1], Y[i : i + 1], 2) for i in range(2)]
    assert [g.flatten().tolist() for g in per_sample] == [[-0.5, -1.0], [-1.5, -2.0]]
    torch.testing.assert_close(W - 0.1 * whole, torch.tensor([[2.2], [-0.7]]))


def dp_gradients() -> tuple[Tensor, Tensor]:
    dp = MeshAxis.of(MeshShape(dp=2).build("cpu"), "dp", Ledger())
    local = squared_loss_gradient(X[dp.rank : dp.rank + 1], Y[dp.rank : dp.rank + 1], 1)
    return local, sum_over(local, dp) / dp.size


def test_dp_mean_of_local_gradients_is_the_batch_gradient(launch: Launch) -> None:
    results = launch(2, dp_gradients)
    assert [local.tolist() for local, _ in results] == [[[-1.0], [-2.0]], [[-3.0], [-4.0]]]
    assert [mean.tolist() for _, mean in results] == [[[-2.0], [-3.0]]] * 2


def token_losses_of_two_ranks() -> tuple[float, float]:
    """Rank 0 has one valid token of loss 2, rank 1 three of loss 9 in all."""
    dp = MeshAxis.of(MeshShape(dp=2).build("cpu"), "dp", Ledger())
    total, count = ((2.0, 1.0), (9.0, 3.0))[dp.rank]
    sums = sum_over(torch.tensor([total, count, total / count]), dp)
    return (sums[0] / sums[1]).item(), (sums[2] / dp.size).item()


def test_unequal_token_counts_weigh_by_count(launch: Launch) -> None:
    for weighted, mean_of_means in launch(2, token_losses_of_two_ranks):
        assert weighted == 2.75  # (2 + 9) / (1 + 3)
        assert mean_of_means == 2.5  # the wrong answer


def column_parallel_example() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tp = tp_axis()
    layer = ColumnParallelLinear(2, 2, tp, bias=False)
    full = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).T  # torch holds W^T
    with torch.no_grad():
        layer.weight.copy_(full[tp.rank : tp.rank + 1])
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = layer(x)
    dy = torch.tensor([1.0, 2.0])[tp.rank : tp.rank + 1]
    y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return y.detach(), (dy @ layer.weight).detach(), x.grad, layer.weight.grad


def test_tp_input_gradient_is_a_sum_not_a_mean(launch: Launch) -> None:
    results = launch(2, column_parallel_example)
    assert torch.cat([y for y, *_ in results]).tolist() == [5.0, 11.0]
    assert [part.tolist() for _, part, _, _ in results] == [[1.0, 2.0], [6.0, 8.0]]
    assert [dx.tolist() for _, _, dx, _ in results] == [[7.0, 10.0]] * 2
    assert [dw.tolist() for *_, dw in results] == [[[1.0, 2.0]], [[2.0, 4.0]]]


def row_parallel_bias() -> Tensor:
    tp = tp_axis()
    layer = RowParallelLinear(2, 1, tp)
    assert layer.bias is not None
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(10.0)
    y: Tensor = layer(torch.tensor([3.0]))
    return y.detach()


def test_row_parallel_adds_its_bias_once(launch: Launch) -> None:
    assert [y.tolist() for y in launch(2, row_parallel_bias)] == [[16.0]] * 2


def test_adam_first_step_forgets_the_scale_of_the_gradient() -> None:
    parameter = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], lr=1.0, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0)
    parameter.grad = torch.tensor([100.0, 1.0], dtype=torch.float64)
    optimizer.step()
    state = optimizer.state[parameter]
    torch.testing.assert_close(state["exp_avg"] / (1 - 0.9), parameter.grad)  # m-hat
    torch.testing.assert_close(state["exp_avg_sq"] / (1 - 0.99), parameter.grad.square())  # v-hat
    torch.testing.assert_close(1.0 - parameter.detach(), torch.ones(2, dtype=torch.float64))


def groups_of_this_rank() -> dict[str, list[int]]:
    mesh = MeshShape(dp=2, tp=2).build("cpu")
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in ("tp", "dp")}


def test_tp_groups_are_neighbours(launch: Launch) -> None:
    groups = launch(4, groups_of_this_rank)
    assert [g["tp"] for g in groups] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [g["dp"] for g in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_stretching_128k_to_1m_positions() -> None:
    factor = 1_000_000 / 128_000
    assert factor == pytest.approx(7.8, abs=0.02)
    plain, _ = rope_frequencies(128, 1e4)
    linear, _ = rope_frequencies(128, 1e4, LinearScaling(factor))
    torch.testing.assert_close(linear * 1_000_000, plain * 128_000)  # position p is treated as p / factor
    for unequal in (
        YarnScaling(factor, original_context=128_000),
        LongRopeScaling(tuple(1 + i / 64 for i in range(64)), factor, original_context=128_000),
    ):
        ratios = plain / rope_frequencies(128, 1e4, unequal)[0]
        assert ratios[0] == pytest.approx(1.0)  # the fastest frequency stays
        assert ratios[-1] > 1.9  # the slowest falls
