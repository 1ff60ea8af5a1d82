"""The benchmarks of the optimizer: contenders take the same step, and the work is counted rightly."""

from __future__ import annotations

import math
import sysconfig
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paracore.bench import runner, streams
from paracore.bench.adamw import AdamW
from paracore.bench.case import Case, Contender, Inputs, Prepared, Setting
from paracore.bench.measure import Rotation, Task, measure
from paracore.bench.optimizer_inputs import (
    BETAS,
    EPS,
    LR,
    SMALL,
    STEPS,
    WEIGHT_DECAY,
    decoder_shapes,
    parameter_shapes,
    views,
)
from paracore.bench.optimizer_step import MAX_NORM, OptimizerStep
from paracore.bench.timers import CudaTimer, WallTimer
from paracore.errors import UsageError
from tests.bench_doubles import Clock, LaunchQueue
from tests.numerics import assert_close

CPU = torch.device("cpu")
ELEMENTS = 9000  # three pieces
# torch clips by max_norm / (norm + 1e-6), which shows in float64.
EXACT = {torch.float32: 1e-6, torch.float64: 1e-10}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def setting_of(variant: str, dtype: torch.dtype, elements: int = ELEMENTS) -> Setting:
    return Setting((elements,), dtype, "forward", variant, CPU)


def inputs_of(case: Case, setting: Setting) -> Inputs:
    return case.inputs(setting, torch.Generator().manual_seed(0))


def expected(arguments: dict[str, Tensor], *, max_norm: float = math.inf) -> Tensor:
    """Return the parameter, or its master, after torch's step in float64."""
    exact = {name: x.double().clone() for name, x in arguments.items()}
    parameter = torch.nn.Parameter(exact.get("master", exact["parameter"]))
    parameter.grad = exact.get("source", exact["gradient"])
    torch.nn.utils.clip_grad_norm_(parameter, max_norm)
    optimizer = torch.optim.AdamW([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(STEPS)),
        "exp_avg": exact["first_moment"],
        "exp_avg_sq": exact["second_moment"],
    }
    optimizer.step()
    return parameter.detach()


def call(contender: Contender, setting: Setting, inputs: Inputs) -> Tensor:
    """Call it as the runner does; return all parameters, flat."""
    function: Any = contender.build(setting)
    if isinstance(function, Prepared):
        function.prepare(**inputs.arguments)
    outputs = function(**inputs.arguments)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.cat([x.detach().flatten() for x in outputs])


def assert_stepped(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """A bfloat16 parameter is the exact one, rounded; those at a midpoint may go either way."""
    if dtype == torch.bfloat16:
        torch.testing.assert_close(actual.double(), wanted, rtol=2**-8, atol=1e-6)
        assert (actual == wanted.bfloat16()).double().mean() > 0.99
    else:
        assert_close(actual.double(), wanted, eps=EXACT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", AdamW.variants)
@pytest.mark.parametrize("name", ["torch", "torch_foreach", "native", "reference"])
def test_contenders_of_adamw_take_the_same_step(name: str, variant: str, dtype: torch.dtype) -> None:
    if name == "native" and dtype == torch.float64:
        pytest.skip("the native kernels take no float64")
    case, setting = AdamW(), setting_of(variant, dtype)
    inputs = inputs_of(case, setting)
    wanted, gradient = expected(inputs.arguments), inputs.arguments["gradient"].clone()
    before = inputs.arguments["parameter"].clone()
    actual = call(case.contenders[name], setting, inputs)
    assert_stepped(actual, wanted, dtype)
    assert not torch.equal(actual, before)
    assert torch.equal(inputs.arguments["gradient"], gradient)  # the bare update leaves it
    if dtype == torch.bfloat16:
        assert_close(inputs.arguments["master"].double(), wanted, eps=EXACT[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", OptimizerStep.variants)
@pytest.mark.parametrize("name", ["torch", "torch_set_to_none", "native", "reference"])
def test_contenders_of_a_whole_step_take_the_same_one(name: str, variant: str, dtype: torch.dtype) -> None:
    if name == "native" and dtype == torch.float64:
        pytest.skip("the native kernels take no float64")
    case, setting = OptimizerStep(), setting_of(variant, dtype)
    inputs = inputs_of(case, setting)
    wanted = expected(inputs.arguments, max_norm=MAX_NORM)
    # Clipped gradients are rounded to bfloat16 by torch, which may move a few rounded parameters.
    assert_stepped(call(case.contenders[name], setting, inputs), wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["torch", "torch_set_to_none", "native"])
def test_gradients_are_there_before_each_call_and_gone_after_it(name: str, dtype: torch.dtype) -> None:
    case, setting = OptimizerStep(), setting_of("decoder", dtype)
    function: Any = case.contenders[name].build(setting)
    first = inputs_of(case, setting)
    for inputs in (first, first.clone(), first, first):  # a rotation of copies, and one twice in a row
        function.prepare(**inputs.arguments)
        parameters, _ = function._held[inputs.arguments["parameter"].data_ptr()]
        found = torch.cat([parameter.grad.flatten() for parameter in parameters])
        assert torch.equal(found, inputs.arguments["source"])
        function(**inputs.arguments)
        assert all(p.grad is None or not p.grad.any() for p in parameters)
        assert (name == "torch_set_to_none") == (parameters[0].grad is None)


def test_a_step_of_paracore_counts_in_every_call() -> None:
    """Were gradients not seen, parameters would be left alone, in no time."""
    case, setting = OptimizerStep(), setting_of("small", torch.float32)
    function: Any = case.contenders["native"].build(setting)
    inputs = inputs_of(case, setting)
    seen = []
    for _ in range(3):
        function.prepare(**inputs.arguments)
        seen.append(torch.cat([x.detach().flatten() for x in function(**inputs.arguments)]).clone())
    assert (seen[0] != seen[1]).double().mean() > 0.9
    assert (seen[1] != seen[2]).double().mean() > 0.9


@pytest.mark.parametrize(
    ("case", "dtype", "bytes_", "flops"),
    [
        (AdamW(), torch.float32, 28, 14),  # p, m, v read and written, g read
        (AdamW(), torch.bfloat16, 28, 14),  # master, m, v likewise, g read, p written
        (OptimizerStep(), torch.float32, 36, 17),  # g read twice and written
        (OptimizerStep(), torch.bfloat16, 32, 17),
    ],
)
def test_the_work_of_a_step(case: Case, dtype: torch.dtype, bytes_: int, flops: int) -> None:
    work = case.work(setting_of("small", dtype))
    assert (work.bytes, work.flops) == (bytes_ * ELEMENTS, flops * ELEMENTS)


_BYTES = {"read": 1, "rewrite": 2, "overwrite": 1, "clear": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [AdamW(), OptimizerStep()])
def test_the_limit_moves_the_bytes_of_the_work(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    def record(moves: Any) -> None:
        moved.extend(x.nbytes * _BYTES[kind] for x, kind in moves)

    for module in ("adamw", "optimizer_step"):
        monkeypatch.setattr(f"paracore.bench.{module}.move", record)
    setting = setting_of("small", dtype)
    assert case.limit is not None
    call(case.limit[1], setting, inputs_of(case, setting))
    assert sum(moved) == case.work(setting).bytes


@pytest.mark.parametrize("case", [AdamW(), OptimizerStep()])
def test_the_limit_leaves_the_state_as_it_is(case: Case) -> None:
    setting = setting_of("small", torch.float32)
    inputs = inputs_of(case, setting)
    before = inputs.clone().arguments
    assert case.limit is not None
    call(case.limit[1], setting, inputs)
    assert all(torch.equal(x, before[name]) for name, x in inputs.arguments.items())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_streams_do_to_memory_what_they_say(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    kinds: tuple[streams.Kind, ...] = ("read", "rewrite", "overwrite", "clear")
    tensors = [torch.randn(1001, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in kinds]
    tensors[1] = tensors[1].float()  # dtypes may differ
    whole = [torch.cat([x, x[:1]]) for x in tensors]  # what lies behind is not touched
    streams.move([(x[:1001], kind) for x, kind in zip(whole, kinds, strict=True)])
    torch.set_num_threads(before)
    for x, kind, old in zip(whole, kinds, tensors, strict=True):
        cleared = kind in ("overwrite", "clear")
        assert torch.equal(x[:1001], torch.zeros_like(old) if cleared else old)
        assert x[1001] == old[0]
        one_by_one = old.clone()
        streams._move_one(one_by_one, kind)  # as on a GPU
        assert torch.equal(one_by_one, x[:1001])


def test_without_a_compiler_the_limit_refuses_and_contenders_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: "no-such-compiler -pthread")
    monkeypatch.setattr(runner, "limits", lambda *_: {})
    streams._compile.cache_clear()
    case, options = AdamW(), runner.Options(0.0, 0, 2**28, 2**16)
    contenders = {"torch": case.contenders["torch"]}
    rows, refusals = runner.run_setting(case, setting_of("flat", torch.float32), contenders, options)
    assert [row.contender for row in rows] == ["torch"]
    assert rows[0].fraction_of_limit is None
    [refused] = refusals
    assert refused.contender == "streams"
    assert "compiled by no-such-compiler, which fails: " in refused.reason


def test_the_fraction_is_that_of_the_cases_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "limits", lambda *_: {})
    case, options = OptimizerStep(), runner.Options(0.0, 0, 2**28, 2**16)
    contenders = {name: case.contenders[name] for name in ("torch", "native")}
    rows, refusals = runner.run_setting(case, setting_of("decoder", torch.float32), contenders, options)
    assert not refusals
    by_name = {row.contender: row for row in rows}
    assert by_name["streams"].kind == "limit"
    for name in contenders:
        row = by_name[name]
        assert row.fraction_of_limit == pytest.approx(by_name["streams"].median_ms / row.median_ms)


def test_what_would_not_be_a_measurement_is_refused() -> None:
    for case in (AdamW(), OptimizerStep()):
        with pytest.raises(UsageError, match="interpreter"):
            case.contenders["triton"].build(setting_of("small", torch.float32))
        with pytest.raises(UsageError, match="over 1048576 elements take too long"):
            case.contenders["reference"].build(setting_of("small", torch.float32, 10**7))
    setting = setting_of("flat", torch.float32)
    with pytest.raises(UsageError, match="DeepSpeed is not installed"):
        call(AdamW.contenders["deepspeed"], setting, inputs_of(AdamW(), setting))
    setting = setting_of("flat", torch.float64)
    for case in (AdamW(), OptimizerStep()):
        with pytest.raises(UsageError, match="float64"):
            call(case.contenders["native"], setting, inputs_of(case, setting))


@pytest.mark.parametrize("elements", [1, 7, 399, 401, 100_000, 50_000_000])
@pytest.mark.parametrize("variant", ["flat", "small", "decoder"])
def test_parameters_have_as_many_elements_as_asked_for(variant: str, elements: int) -> None:
    shapes = parameter_shapes(variant, elements)
    assert sum(math.prod(shape) for shape in shapes) == elements
    assert all(math.prod(shape) for shape in shapes)
    if variant == "small":
        assert len(shapes) == min(SMALL, elements)
        assert max(shapes)[0] - min(shapes)[0] <= 1


def test_a_decoder_has_blocks_and_an_embedding() -> None:
    shapes = decoder_shapes(50_000_000)
    assert shapes.count((1365, 512)) == 24  # gate and up of 12 blocks
    assert max(shapes, key=math.prod) == shapes[0]
    flat = torch.arange(50.0)
    assert torch.equal(torch.cat([x.flatten() for x in views(flat, decoder_shapes(50))]), flat)


def test_copies_are_made_ready_outside_the_time_once_for_each_call() -> None:
    clock, ready = Clock(), []

    def prepare(copy: int) -> None:
        clock.time += 100.0
        ready.append(copy)

    def step(copy: int) -> None:
        ready.remove(copy)  # fails for one that was not made ready
        clock.time += 1e-6

    task = Task("step", step, Rotation([1, 2, 3]), prepare=prepare)
    samples = measure([task], WallTimer(clock.now), seconds=0.0, seed=0, clock=clock.now)["step"]
    assert samples.percentile(50) == pytest.approx(1e-6)
    assert samples.calls_per_sample == 3  # no copy twice, however short a call
    assert ready == []


def test_a_sample_that_is_taken_again_is_made_ready_again(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LaunchQueue()
    monkeypatch.setattr(torch, "cuda", queue.cuda)
    log: list[str] = []

    def step(_: int) -> None:
        log.append("call")
        queue.launch(1e-3, 1e-4)

    timer = CudaTimer(cast(torch.device, None))
    timer.sample(step, [0, 1], lambda _: log.append("prepare"))
    assert len(log) > 4
    assert log == ["prepare", "prepare", "call", "call"] * (len(log) // 4)
