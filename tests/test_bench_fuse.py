"""The benchmark of fuse: ratios are those of the rounds, and a model that computes something else fails."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paracore.bench import fuse
from paracore.bench.fuse import EAGER, FUSED, MIN_ROUNDS, OWN_PRODUCTS, PRODUCTS, Model, measure, summary
from paracore.dropin import fuse as fusing
from paracore.errors import UsageError
from paracore.ops import product
from tests.bench_doubles import Clock
from tests.test_bench import bench

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Model(
    layers=2, hidden=32, intermediate=48, heads=2, kv_heads=1, head_dim=16, vocabulary=300, sequence=32
)
FLAGS = [
    *("--layers", "2", "--hidden", "32", "--intermediate", "48", "--heads", "2", "--kv-heads", "1"),
    *("--head-dim", "16", "--vocabulary", "300", "--sequence", "32", "--seconds", "0.01"),
]


# ---------------------------------------------------------------- turns and figures


def test_every_round_has_a_turn_of_each_and_the_first_does_not_count() -> None:
    clock = Clock()
    cold = {"a": 10.0, "b": 10.0}

    def turn(name: str, seconds: float) -> Callable[[], object]:
        return lambda: clock.work(name, cold.pop(name, seconds))(None)

    samples = measure({"a": turn("a", 1.0), "b": turn("b", 3.0)}, seconds=20.0, seed=0, clock=clock.now)
    assert samples == {"a": [1.0] * 5, "b": [3.0] * 5}  # a sixth round would end at 24 s
    rounds = [{name for name, _ in clock.log[i : i + 2]} for i in range(0, len(clock.log), 2)]
    assert rounds == [{"a", "b"}] * 6
    orders = {tuple(name for name, _ in clock.log[i : i + 2]) for i in range(2, len(clock.log), 2)}
    assert len(orders) == 2  # in another order now and then


def test_rounds_are_taken_however_long_they_are() -> None:
    clock = Clock()
    samples = measure({"a": lambda: clock.work("a", 50.0)(None)}, seconds=1.0, seed=0, clock=clock.now)
    assert samples == {"a": [50.0] * MIN_ROUNDS}


def test_ratios_are_those_of_rounds() -> None:
    samples = {EAGER: [2.0, 40.0, 3.0], FUSED: [1.0, 10.0, 3.0], PRODUCTS: [1.0, 8.0, 1.0]}
    found = summary(samples)
    assert found["rounds"] == 3
    assert found["ratio"] == {"p25": 1.5, "median": 2.0, "p75": 3.0}  # of medians it would be 1
    assert found["limit"] == {"p25": 2.5, "median": 3.0, "p75": 4.0}
    assert found["seconds"][EAGER] == {"p25": 2.5, "median": 3.0, "p75": 21.5}
    assert summary(samples | {OWN_PRODUCTS: [0.5, 8.0, 3.0]})["limit"]["median"] == 4.0


def test_the_products_are_three_of_each_linear_layer_and_the_head() -> None:
    model = TINY.build(torch.float32, torch.device("cpu"), 0)
    shapes = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        shapes.append((a.size(0), a.size(1), b.size(1)))
        return a @ b

    fuse.Products(model, 32, seed=0).run(multiply)
    layer = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]  # in, out: q, k, v, o, MLP
    expected = [
        shape for k, m in [*layer, *layer, (32, 300)] for shape in [(32, k, m), (32, m, k), (m, 32, k)]
    ]
    assert shapes == expected


# ---------------------------------------------------------------- the command


def test_the_report_has_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "SLOW_DTYPES", (torch.bfloat16,))
    file = tmp_path / "fuse.json"
    assert bench(fuse.NAME, *FLAGS, "--json", str(file)) == 0
    document = json.loads(file.read_text())
    assert (document["case"], document["units"]) == (fuse.NAME, fuse.UNITS)
    narrow, wide = document["results"][1], document["results"][0]
    assert (wide["dtype"], narrow["dtype"]) == ("float32", "bfloat16")
    assert set(wide["samples"]) == {EAGER, FUSED, PRODUCTS}
    assert set(narrow["samples"]) == {EAGER, FUSED, PRODUCTS, OWN_PRODUCTS}
    for found in document["results"]:
        assert Model(**found["model"]) == TINY
        assert found["passed"]
        assert found["replaced"] > 0
        samples = found["samples"]
        ratios = [a / b for a, b in zip(samples[EAGER], samples[FUSED], strict=True)]
        assert found["rounds"] == len(ratios) >= MIN_ROUNDS
        assert found["ratio"]["median"] == statistics.median(ratios)
        gradients = sum(p.numel() for p in TINY.build(torch.float32, torch.device("cpu"), 0).parameters())
        size = 4 if found is wide else 2
        for peak in found["peak_mib"].values():  # at the end all gradients are there
            assert gradients * size <= peak * 2**20 <= 20 * gradients * size
    printed = capsys.readouterr().out
    assert printed.count("PASSED") == 2
    assert "FAILED" not in printed
    assert printed.count("this CPU has no units for bfloat16: products by torch take ") == 1


def off_by(change: Callable[[Any], None]) -> Callable[[nn.Module], Any]:
    """A `fuse` that goes wrong."""
    original = fusing.fuse

    def wrong(model: nn.Module) -> Any:
        report = original(model)
        change(model)
        return report

    return wrong


class _Twice(torch.autograd.Function):
    """The same number, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return 2 * dx


def wrong_loss(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)


def wrong_gradient(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, y: _Twice.apply(y))


def no_number(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (wrong_loss, "loss off by "),
        (wrong_gradient, "gradients off by "),
        (no_number, "off by nothing finite"),
    ],
)
def test_a_fused_model_that_computes_something_else_fails(
    change: Callable[[Any], None],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fusing, "fuse", off_by(change))
    file = tmp_path / "fuse.json"
    assert bench(fuse.NAME, *FLAGS, "--dtype", "float32", "--json", str(file)) == 1
    [found] = json.loads(file.read_text())["results"]
    assert not found["passed"]
    if change is wrong_gradient:  # which the loss does not tell
        assert found["difference"]["loss"] <= found["allowed"]["loss"]
        assert found["difference"]["gradients"] > found["allowed"]["gradients"]
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert text in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "layers=0: must be at least 1"),
        (["--heads", "3", "--kv-heads", "2"], "kv_heads=2: must divide heads=3"),
        (["--head-dim", "5"], "head_dim=5: must be even"),
        (["--sequence", "1"], "sequence=1: must be at least 2"),
        (["--seconds", "0"], "--seconds 0.0: must be greater than 0"),
        (["--device", "tpu"], "--device tpu: unknown; choose from cpu, cuda"),
        (["--dtype", "float64"], "--dtype float64: unknown; choose from float32, bfloat16"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_measured(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "run", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(UsageError, match=message):
        bench(fuse.NAME, *arguments)


def test_without_transformers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="fuse needs transformers, which cannot be imported: "):
        TINY.build(torch.float32, torch.device("cpu"), 0)
