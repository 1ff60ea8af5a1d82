"""What `paracore bench` reports, and what it refuses: on contenders that take given times."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

from paracore import reference
from paracore.bench import runner
from paracore.bench.case import Case, Contender, Function, Inputs, Setting, as_call, compiled
from paracore.bench.cases import CASES
from paracore.bench.limits import limits
from paracore.bench.measure import MIN_ROUNDS
from paracore.bench.report import format_table
from paracore.bench.results import Refusal, Result
from paracore.bench.rms_norm import EPS, RMSNorm
from paracore.bench.runner import Options, run_setting
from paracore.bench.timers import WallTimer
from paracore.cli import bench as command
from paracore.cli import bench_operations
from paracore.cli.main import build_parser
from paracore.errors import UsageError
from tests.bench_doubles import Clock, TimedCase, setting_of

CACHE = 10_000
OPTIONS = Options(seconds=0.0, seed=0, memory_limit=2**20, cache_bytes=CACHE)


class Run:
    """One setting of a `TimedCase`, measured on its clock together with limits of known speed."""

    options = OPTIONS

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds: dict[str, float],
        refusing: dict[str, Function] | None = None,
        case_type: type[TimedCase] = TimedCase,
    ) -> None:
        self.clock = Clock()
        case = case_type(self.clock, seconds, refusing)
        monkeypatch.setattr(runner, "limits", case.limits)
        rows, self.refusals = run_setting(
            case, setting_of(), case.all, self.options, WallTimer(self.clock.now)
        )
        self.rows = {row.contender: row for row in rows}
        self.table = format_table(case.name, setting_of(), rows, self.refusals)


def refuse(**_: Tensor) -> Tensor:
    raise UsageError("features 4097 is not a multiple of 8")


def test_units_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Run(monkeypatch, {"base": 0.5}).rows["base"]  # 1e9 bytes, 2e12 operations
    assert base.median_ms == pytest.approx(500.0)
    assert base.gb_per_s == pytest.approx(2.0)  # GB are 1e9 bytes; 1.86 would be GiB
    assert base.tflop_per_s == pytest.approx(4.0)


def test_memory_is_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "peak_bytes", lambda call, device: 3 * 2**20)
    assert Run(monkeypatch, {"base": 0.5}).rows["base"].peak_mib == 3.0


def test_a_ratio_above_one_is_faster_than_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Run(monkeypatch, {"fast": 0.25, "base": 0.5, "slow": 1.0}).rows
    ratios = {name: rows[name].ratio for name in ("fast", "base", "slow")}
    assert ratios == pytest.approx({"fast": 2.0, "base": 1.0, "slow": 0.5})
    assert {row.contender for row in rows.values() if row.kind == "baseline"} == {"base"}


def test_fractions_are_rates_over_those_of_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 GB/s against copies of 10 and 5 GB/s, 4 TFLOP/s against 8.
    base = Run(monkeypatch, {"base": 0.5}).rows["base"]
    assert base.fraction_of_copy == pytest.approx(0.2)
    assert base.fraction_of_clone == pytest.approx(0.4)
    assert base.fraction_of_matmul == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("bound", "output", "fraction"),
    [("memory", "fresh", 0.4), ("memory", "existing", 0.2), ("compute", "fresh", 0.5)],
)
def test_the_limit_is_the_one_that_binds(
    monkeypatch: pytest.MonkeyPatch, bound: str, output: Literal["fresh", "existing"], fraction: float
) -> None:
    class Bound(TimedCase):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.all["base"] = dataclasses.replace(self.all["base"], output=output)

    monkeypatch.setattr(Bound, "bound", bound)
    row = Run(monkeypatch, {"base": 0.5}, case_type=Bound).rows["base"]
    assert row.fraction_of_limit == pytest.approx(fraction)


def test_limits_are_measured_in_the_same_rounds_as_the_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, {"base": 0.5, "other": 0.5})
    names = [name for name, _ in run.clock.log][-5 * MIN_ROUNDS :]
    for i in range(0, len(names), 5):
        assert Counter(names[i : i + 5]) == Counter(["copy_", "clone", "matmul", "base", "other"])


def test_inputs_are_random_copies_that_no_cache_holds() -> None:
    rotation = runner._rotation(RMSNorm().inputs, setting_of(), OPTIONS)
    first, *rest = rotation.take(1 + 2 * CACHE // 288)
    tensors = [copy.arguments["x"] for copy in (first, *rest)]
    assert len({tensor.data_ptr() for tensor in tensors}) * 288 > 2 * CACHE  # x, out, weight: 72 float32
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    assert tensors[0].unique().numel() == tensors[0].numel()


def test_contenders_share_the_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, {"base": 0.5, "other": 0.5})
    addresses = [address for name, address in run.clock.log if name in ("base", "other")]
    timed = addresses[4:]  # before, each was tried and its memory measured on one copy
    assert len(set(timed)) == len(timed)  # 157 copies: none came twice


def test_who_refuses_is_listed_with_the_reason_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, {"base": 0.5, "other": 0.5}, {"picky": refuse})
    assert run.refusals == [
        Refusal("picky", (4, 8), "float32", "forward", "plain", "features 4097 is not a multiple of 8")
    ]
    assert run.rows.keys() >= {"base", "other"}
    assert "picky refuses: features 4097 is not a multiple of 8" in run.table


def test_a_contender_that_fails_otherwise_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Tensor) -> Tensor:
        raise RuntimeError("illegal access")

    with pytest.raises(RuntimeError, match="illegal access"):
        Run(monkeypatch, {"base": 0.5}, {"broken": broken})


def test_a_setting_that_does_not_fit_the_memory_is_refused_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Run, "options", dataclasses.replace(OPTIONS, memory_limit=2 * CACHE))
    run = Run(monkeypatch, {"base": 0.5, "other": 0.5})
    assert [refused.contender for refused in run.refusals] == ["base", "other"]
    assert all("memory limit" in refused.reason for refused in run.refusals)
    assert "0 samples" in run.table


def test_without_a_baseline_there_is_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, {"other": 0.5}, {"base": refuse})
    assert run.rows["other"].ratio is None
    assert run.rows["other"].gb_per_s == pytest.approx(2.0)


def test_launches_that_may_be_part_of_a_time_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Run(monkeypatch, {"base": 0.5}).rows["base"]
    text = format_table("timed", setting_of(), [dataclasses.replace(row, host_bound=True)], [])
    assert "base: launches may be part of its time" in text
    assert "launches" not in format_table("timed", setting_of(), [row], [])


def test_forward_backward_returns_the_gradients_of_all_inputs() -> None:
    x, weight = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    inputs = Inputs({"x": x, "weight": weight}, (torch.tensor([1.0, 10.0]), torch.tensor([100.0, 100.0])))
    call = as_call(lambda x, weight: (x * weight, x + 0), "forward_backward")
    gradients = cast(tuple[Tensor, Tensor], call(inputs))
    assert [gradient.tolist() for gradient in gradients] == [[103.0, 140.0], [1.0, 20.0]]


def test_an_existing_output_is_written_to_and_has_no_backward_pass() -> None:
    inputs = Inputs({"x": torch.tensor([1.0])}, out=torch.tensor([0.0])).clone()
    as_call(lambda x, out: out.copy_(x), "forward", "existing")(inputs)
    assert inputs.out == torch.tensor([1.0])
    with pytest.raises(UsageError, match="autograd"):
        as_call(lambda x, out: out.copy_(x), "forward_backward", "existing")


def test_a_baseline_that_does_not_compile_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Tensor) -> Tensor:
        raise torch._dynamo.exc.TorchDynamoException("no C++ compiler\nlong story")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fails)
    call = compiled(Contender(lambda _: refuse)).build(setting_of())
    with pytest.raises(UsageError, match=r"torch\.compile failed: no C\+\+ compiler$"):
        call(x=torch.ones(1))


def test_copies_move_as_many_bytes_as_the_case_until_they_exceed_the_cache_manifold() -> None:
    setting = setting_of()
    for bytes_of_case, moved in [(8000, 8000), (10**9, 8 * CACHE)]:
        found = limits(setting, bytes_of_case, CACHE, WallTimer())
        for name in ("copy_", "clone"):
            assert found[name].work.bytes == moved
            source = found[name].inputs(setting, torch.Generator()).arguments["source"]
            assert 2 * source.nbytes == moved


def rms_norm_setting(direction: str, variant: str) -> Setting:
    return Setting((3, 5), torch.float64, direction, variant, torch.device("cpu"))


@pytest.mark.parametrize(
    ("direction", "variant", "tensors", "weights", "flops"),
    [
        ("forward", "plain", 2, 1, 4),  # x -> y
        ("forward", "residual", 4, 1, 5),  # x, residual -> y, h
        ("forward_backward", "plain", 5, 3, 13),  # and dy, h -> dx
        ("forward_backward", "residual", 8, 3, 15),  # and dy, dh, h -> dx
    ],
)
def test_the_work_of_rms_norm(direction: str, variant: str, tensors: int, weights: int, flops: int) -> None:
    work = RMSNorm().work(rms_norm_setting(direction, variant))
    assert work.bytes == 8 * (tensors * 15 + weights * 5)
    assert work.flops == flops * 15


@pytest.mark.parametrize("name", ["torch", "reference"])
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
@pytest.mark.parametrize("variant", ["plain", "residual"])
def test_contenders_of_rms_norm_do_the_same_work(name: str, direction: str, variant: str) -> None:
    setting = rms_norm_setting(direction, variant)
    inputs = RMSNorm().inputs(setting, torch.Generator().manual_seed(1))

    def definition(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
        h = x if residual is None else x + residual
        y = reference.rms_norm(h, weight, EPS)
        return y if residual is None else (y, h)

    expected = as_call(definition, direction)(inputs)
    actual = as_call(RMSNorm.contenders[name].build(setting), direction)(inputs)
    torch.testing.assert_close(actual, expected)
    if direction == "forward_backward":
        assert len(actual) == len(inputs.arguments)  # type: ignore[arg-type]


def test_the_native_kernel_writes_to_an_existing_output() -> None:
    setting = dataclasses.replace(rms_norm_setting("forward", "plain"), dtype=torch.float32)
    inputs = RMSNorm().inputs(setting, torch.Generator().manual_seed(1))
    function = RMSNorm.contenders["native_existing"].build(setting)
    as_call(function, "forward", "existing")(inputs)
    torch.testing.assert_close(inputs.out, reference.rms_norm(**inputs.arguments, eps=EPS))


def test_the_native_kernel_has_no_existing_output_for_the_residual() -> None:
    with pytest.raises(UsageError, match="none for h"):
        RMSNorm.contenders["native_existing"].build(rms_norm_setting("forward", "residual"))


def test_the_interpreter_of_triton_is_not_timed() -> None:
    with pytest.raises(UsageError, match="interpreter"):
        RMSNorm.contenders["triton"].build(setting_of())


def bench(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few copies then suffice."""
    monkeypatch.setattr(runner, "last_level_cache_bytes", lambda device: 2**16)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), {"torch", "native", "native_existing", "triton", "reference"}),
        (("--impl", "native"), {"torch", "native"}),  # the baseline always
        (("--impl", "native", "--compile"), {"torch", "native", "torch_compiled"}),
    ],
)
def test_the_contenders_are_those_asked_for(
    arguments: tuple[str, ...], names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: set[str] = set()

    def run(case: Case, setting: Setting, contenders: dict[str, Contender], options: Options) -> Any:
        measured.update(contenders)
        return [], []

    monkeypatch.setattr(bench_operations, "run_setting", run)
    bench("rms_norm", *arguments)
    assert measured == names


SMALL = ("rms_norm", "--shapes", "8x64", "--dtype", "float32", "--seconds", "0.001", "--threads", "1")


@pytest.mark.usefixtures("small_cache")
def test_rms_norm_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "png")}
    outputs = ("--json", files["json"], "--csv", files["csv"], "--plot", files["png"])
    threads = torch.get_num_threads()
    assert bench(*SMALL, "--impl", "torch", *outputs) == 0
    assert torch.get_num_threads() == threads

    document = json.loads(files["json"].read_text())
    rows = document["results"]
    assert document["machine"]["torch"] == torch.__version__
    assert document["machine"]["threads"] == 1
    assert set(rows[0]) == {field.name for field in dataclasses.fields(Result)}
    settings = [(row["direction"], row["variant"]) for row in rows if row["contender"] == "torch"]
    assert settings == [(d, v) for d in ("forward", "forward_backward") for v in ("plain", "residual")]
    for row in rows:
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6)
        assert row["samples"] >= MIN_ROUNDS

    with files["csv"].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["contender"] for line in lines] == [row["contender"] for row in rows]
    assert lines[0]["shape"] == "8x64"
    assert math.isclose(float(lines[0]["median_ms"]), rows[0]["median_ms"])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}" in text
    assert "rms_norm 8x64 float32 forward_backward residual on cpu" in text


@pytest.mark.usefixtures("small_cache")
def test_asking_for_a_contender_that_refuses_fails_after_the_report(tmp_path: Path) -> None:
    narrow = (*SMALL, "--direction", "forward", "--variant", "plain")
    files = ("--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv")
    assert bench(*narrow, "--impl", "torch") == 0
    assert bench(*narrow, "--impl", "triton", *files) == 1
    [refused] = json.loads((tmp_path / "a.json").read_text())["refused"]
    assert refused["contender"] == "triton"
    assert "interpreter" in refused["reason"]
    assert f"triton,,8x64,float32,forward,plain,{',' * 17}" in (tmp_path / "a.csv").read_text()


@pytest.mark.usefixtures("small_cache")
def test_when_nothing_fits_the_memory_all_is_written_and_the_command_fails(tmp_path: Path) -> None:
    files = ("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    assert bench("rms_norm", "--shapes", "4096x256", "--memory-limit", 1, "--impl", "torch", *files) == 1
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["results"] == []
    assert len(document["refused"]) == 8  # both dtypes, directions and variants
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rms_norm", "--shapes", "8192"], r"--shapes 8192: rms_norm takes rows x features.*8192x4096"),
        (["rms_norm", "--shapes", "8x4x2"], r"--shapes 8x4x2: "),
        (["rms_norm", "--shapes", "8x0"], r"--shapes 8x0: .*at least 1"),
        (["rms_norm", "--shapes", "8xa"], r"--shapes 8xa: "),
        (
            ["rms_norm", "--impl", "cuda"],
            r"--impl cuda: unknown; choose from torch, native, native_existing, triton, reference",
        ),
        (["rms_norm", "--dtype", "int8"], r"--dtype int8: unknown; choose from .*bfloat16"),
        (
            ["rms_norm", "--direction", "up"],
            r"--direction up: unknown; choose from forward, forward_backward",
        ),
        (["rms_norm", "--variant", "odd"], r"--variant odd: unknown; choose from plain, residual"),
        (["rms_norm", "--device", "tpu"], r"--device tpu: unknown; choose from cpu"),
        (["rms_norm", "--seconds", "nan"], r"--seconds nan: must be greater than 0"),
        (["rms_norm", "--threads", "0"], r"--threads 0: must be greater than 0"),
        (["rms_norm", "--memory-limit", "-1"], r"--memory-limit -1: must be greater than 0"),
        (
            ["rms_norm", "--json", "missing/a.json"],
            r"--json missing/a\.json: cannot be written \(No such file",
        ),
        (["rms_norm", "--csv", "."], r"--csv \.: cannot be written \(Is a directory"),
        (["rms_norm", "--plot", "a.doc"], r"--plot a\.doc: must end in one of .*png"),
        (["rms_norm", "--json", "a", "--csv", "a"], r"--json a: each output needs a file of its own"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_operations, "run_setting", lambda *_: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        bench(*arguments)
    assert list(tmp_path.iterdir()) == []  # nor is anything left behind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rms_nrom"], r"argument CASE: invalid choice: 'rms_nrom' \(choose from '?adamw'?, "),
        (["rms_norm", "--layers", "2"], "unrecognized arguments: --layers 2"),
        (["zero_overlap", "--dtype", "float32"], "unrecognized arguments: --dtype float32"),
        (["memory", "--seconds", "3"], "unrecognized arguments: --seconds 3"),
    ],
)
def test_unknown_cases_and_flags_of_other_cases_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(*arguments)
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_without_a_case_all_are_listed_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(
        [*CASES, "fuse", "linear_overlap", "memory", "throughput", "zero_overlap"]
    )
    assert all(len(line.split()) > 5 and line.endswith(".") for line in lines)


@pytest.mark.parametrize("arguments", [["--traceback", "rms_norm"], ["rms_norm", "--traceback"]])
def test_a_traceback_may_be_asked_for_before_the_case_and_after_it(arguments: list[str]) -> None:
    assert build_parser().parse_args(["bench", *arguments]).traceback


def test_checking_an_output_keeps_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_operations, "run_setting", lambda *_: pytest.fail("measured"))
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(UsageError, match="--csv"):
        bench("rms_norm", "--json", tmp_path / "a.json", "--csv", tmp_path)
    assert (tmp_path / "a.json").read_text() == "old"


def test_every_case_lists_its_baseline_among_its_contenders() -> None:
    assert CASES
    for name, case in CASES.items():
        assert case.name == name
        assert case.baseline in case.contenders
        assert all(len(shape) == len(case.dims) for shape in case.shapes)
