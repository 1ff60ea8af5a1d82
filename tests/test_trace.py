"""Ranges: who sees which, that they nest, and that nobody notices them where they are off."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paracore import attention, cross_entropy, linear_cross_entropy, trace
from paracore.errors import UsageError
from paracore.ops.dropout import dropout
from paracore.ops.embedding import embedding
from paracore.ops.linear import column_linear, row_linear
from paracore.ops.rms_norm import rms_norm
from paracore.ops.rotary import rotary_embedding
from paracore.ops.swiglu import swiglu
from paracore.parallel.mesh import MeshAxis, TrainingAxes
from tests.conftest import Launch, training_axes
from tests.ranges import Recorded, take_step, trainer_of

ALONE = MeshAxis.alone("tp")


def x(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


def test_without_a_sink_every_range_is_one_and_the_same() -> None:
    ranges = (trace.range("a"), trace.range("b", 1, bytes=2), trace.post("c", "tp", 3), trace.wait("c", "tp"))
    assert len({id(each) for each in ranges}) == 1
    with trace.enabled(Recorded()):
        assert trace.range("a") is not ranges[0]
    assert trace.range("a") is ranges[0]


def test_a_sink_sees_ranges_only_while_it_is_enabled_and_with_others() -> None:
    first, second = Recorded(), Recorded()
    with trace.enabled(first):
        with trace.enabled(second), trace.range("paracore.both", 3, bytes=5):
            pass
        with trace.range("paracore.first"):
            pass
    with trace.range("paracore.none"):
        pass
    assert first.names == ["paracore.both3", "paracore.first"]
    assert second.names == ["paracore.both3"]
    assert first.events[0][2] == {"bytes": 5}


def test_ranges_are_seen_in_every_thread() -> None:
    recorded = Recorded()

    def run() -> None:
        with trace.range("paracore.thread"):
            pass

    with trace.enabled(recorded):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(timeout=10)
    assert recorded.names == ["paracore.thread"]
    assert recorded.events[0][3] != threading.get_ident()


def test_a_range_ends_where_its_body_fails() -> None:
    recorded = Recorded()

    @trace.ranged("paracore.outer")
    def fail() -> None:
        with trace.range("paracore.inner"):
            raise ValueError("says the test")

    with trace.enabled(recorded), pytest.raises(ValueError, match="says the test"):
        fail()
    assert recorded.outer() == {"paracore.outer": {""}, "paracore.inner": {"paracore.outer"}}


LABELS = torch.arange(6) % 5

OPERATIONS: dict[str, Callable[[], Any]] = {
    "rms_norm": lambda: rms_norm(x(3, 4), torch.ones(4)),
    "swiglu": lambda: swiglu(x(3, 4), x(3, 4)),
    "rotary": lambda: rotary_embedding(x(3, 1, 2, 4), x(3, 1, 2, 4), torch.ones(3, 2), torch.ones(3, 2))[0],
    "embedding": lambda: embedding(torch.tensor([0, 1]), x(3, 4)),
    "dropout": lambda: dropout(x(3, 1, 4), 0.5, 1, torch.arange(3)),
    "attention": lambda: attention(x(1, 2, 5, 8), x(1, 2, 5, 8), x(1, 2, 5, 8)),
    "linear_cross_entropy": lambda: linear_cross_entropy(x(6, 4), x(5, 4), LABELS),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_name_their_forward_and_backward(name: str) -> None:
    recorded = Recorded()
    with trace.enabled(recorded):
        OPERATIONS[name]().sum().backward()
    assert {f"paracore.{name}.forward", f"paracore.{name}.backward"} <= set(recorded.names)
    recorded.outer()


def test_other_operations_have_names_of_their_own() -> None:
    recorded = Recorded()
    with trace.enabled(recorded):
        cross_entropy(x(6, 5), LABELS).backward()
        column_linear(x(3, 4), [x(5, 4)], [None], ALONE)
        row_linear(x(3, 4), x(5, 4), ALONE)
    assert recorded.names == [
        "paracore.cross_entropy.statistics",
        "paracore.cross_entropy.gradient",
        "paracore.column_linear.forward",
        "paracore.row_linear.forward",
    ]


def test_compiled_code_has_no_ranges_but_the_operations_that_it_calls_do() -> None:
    def step(rows: Tensor, weight: Tensor) -> Tensor:
        with trace.range("paracore.compiled"), trace.post("all_reduce", "tp", 1):
            return rms_norm(rows, weight)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    rows, weight, recorded = x(3, 4), torch.ones(4), Recorded()
    plain = compiled(rows, weight)
    with trace.enabled(recorded):
        watched = compiled(rows, weight)
        watched.sum().backward()
    torch.testing.assert_close(watched, plain, rtol=0, atol=0)
    assert recorded.names == ["paracore.rms_norm.forward", "paracore.rms_norm.backward"]


def test_turning_ranges_on_compiles_nothing_anew() -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    @trace.ranged("paracore.outer")
    def step(rows: Tensor) -> Tensor:
        with (
            trace.range("paracore.compiled"),
            trace.post("all_reduce", "tp", 1),
            trace.wait("all_reduce", "tp"),
        ):
            return rows + 1

    compiled = torch.compile(step, fullgraph=True, backend=count)
    compiled(x(3))
    for sinks in ([Recorded()], [Recorded(), Recorded()]):
        with trace.enabled(*sinks):
            compiled(x(3))
    assert len(compilations) == 1


# ---------------------------------------------------------------- a training step

OPTIMIZER = {f"paracore.adamw.{phase}" for phase in ("reduce", "norm", "clip", "step", "write_out")}


def step_on_one_rank() -> Recorded:
    axes, recorded = TrainingAxes.alone(), Recorded()
    trainer = trainer_of(axes, zero=0)
    with trace.enabled(recorded):
        take_step(trainer, axes)
    return recorded


def test_a_step_holds_forward_backward_and_update_in_turn() -> None:
    recorded = step_on_one_rank()
    outer = recorded.outer()
    assert outer["paracore.training.step"] == {""}
    for phase in ("forward", "backward", "update"):
        assert outer[f"paracore.training.{phase}"] == {"paracore.training.step"}
    assert outer["paracore.decoder.layer1"] == {"paracore.training.forward"}
    for name in OPTIMIZER:
        assert outer[name] == {"paracore.training.update"}, name


def step_over(sizes: dict[str, int], zero: int | None, options: dict[str, Any]) -> tuple[Any, ...]:
    axes, recorded = training_axes(**sizes), Recorded()
    trainer = trainer_of(axes, zero=zero, **options)
    axes.tp.ledger.take()
    with trace.enabled(recorded):
        take_step(trainer, axes)
        if zero is not None:
            trainer.optimizer.synchronize()  # type: ignore[union-attr]
    traffic = {(row.kind, row.axis): (row.count, row.bytes) for row in axes.tp.ledger.take()}
    return recorded.names, recorded.total, recorded.outer(), traffic


CUTS = [
    ({"tp": 2, "cp": 2}, None, {"sequence_parallel": True, "vocab_parallel": True}),
    ({"tp": 2, "cp": 2}, None, {}),
    ({"tp": 2, "dp": 2}, 2, {}),
]


@pytest.mark.parametrize(("sizes", "zero", "options"), CUTS)
def test_the_collectives_of_a_step_have_ranges_with_the_bytes_of_the_ledger(
    launch: Launch, sizes: dict[str, int], zero: int | None, options: dict[str, Any]
) -> None:
    for names, total, outer, traffic in launch(4, step_over, sizes, zero, options):
        for (kind, axis), (count, bytes_) in traffic.items():
            name = f"paracore.collectives.{'exchange' if kind == 'send' else kind}.{axis}"
            assert total[f"{name}.post"] == bytes_, name
            assert names.count(f"{name}.post") == names.count(f"{name}.wait"), name
            if kind != "send":  # of which several make an exchange
                assert names.count(f"{name}.post") == count, name
        assert sum(name.endswith(".post") for name in total) == len(traffic)
        assert outer["paracore.training.step"] == {""}
        if "cp" in sizes:
            for phase in ("forward", "backward"):
                for step in range(2):
                    ring = f"paracore.ring_attention.{phase}"
                    assert outer[f"{ring}.step{step}"] == {ring}
            assert "paracore.ring_attention.forward.step1" in outer["paracore.attention.continue"]
            for layer in ("column", "row"):
                assert f"paracore.{layer}_linear.backward" in outer["paracore.linear.product"]
            assert {"paracore.gradient_sync.sum", "paracore.gradient_norm.clip"} <= set(names)
        else:
            assert set(names) >= OPTIMIZER


# ---------------------------------------------------------------- tools


class FakeNvtx(types.ModuleType):
    """The package nvtx, with a domain that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.domains: dict[str, FakeDomain] = {}

    def get_domain(self, name: str) -> FakeDomain:
        return self.domains.setdefault(name, FakeDomain())


class FakeDomain:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def get_event_attributes(self, **attributes: Any) -> dict[str, Any]:
        return attributes

    def push_range(self, attributes: dict[str, Any]) -> None:
        self.log.append(attributes)

    def pop_range(self) -> None:
        self.log.append("pop")


def test_nvtx_has_a_domain_colours_by_category_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = FakeNvtx()
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    with trace.enabled(trace.NvtxRanges()):
        with trace.range("paracore.adamw.step"), trace.post("all_reduce", "tp", 7):
            pass
        with trace.range("paracore.swiglu.forward"):
            pass
    log = nvtx.domains["paracore"].log
    assert [entry if entry == "pop" else (entry["message"], entry["payload"]) for entry in log] == [
        ("paracore.adamw.step", None),
        ("paracore.collectives.all_reduce.tp.post", 7),
        "pop",
        "pop",
        ("paracore.swiglu.forward", None),
        "pop",
    ]
    pushed = [entry for entry in log if entry != "pop"]
    assert [entry["category"] for entry in pushed] == ["optimizer", "communication", "compute"]
    assert len({entry["color"] for entry in pushed}) == 3


def test_the_real_nvtx_takes_the_ranges() -> None:
    pytest.importorskip("nvtx", reason="the optional package nvtx is not installed")
    with trace.enabled(trace.NvtxRanges()), trace.range("paracore.a"), trace.post("all_reduce", "tp", 7):
        pass


def test_without_the_package_nvtx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(UsageError, match=r"need the package nvtx.*pip install nvtx"):
        trace.NvtxRanges()


def test_a_step_has_ranges_of_every_category_but_communication() -> None:
    names = step_on_one_rank().names
    found = {kind: {name for name in names if trace.category(name) == kind} for kind in trace.COLORS}
    assert found["optimizer"] >= OPTIMIZER
    assert found["training"] >= {"paracore.training.step", "paracore.decoder.layer1"}
    assert found["compute"] >= {"paracore.rms_norm.forward", "paracore.swiglu.backward"}
    assert found["communication"] == {name for name in names if ".collectives." in name}
