"""The command line, as a user runs it: real processes, real exit statuses, one clear message."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paracore.cli import exit_codes, validate
from paracore.cli.main import main
from paracore.cli.train import learning_rate_scale
from tests.command_ranks import Ended, run_launcher, run_on_ranks

TINY = [
    "--hidden-size",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--kv-heads",
    "2",
    "--seq-len",
    "8",
    "--batch-size",
    "2",
]
WAIT = 120  # seconds that any process may take

PARACORE = (sys.executable, "-m", "paracore")
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "paracore",
)


def run(
    *argv: object, command: tuple[str, ...] = PARACORE, **extra_env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, argv)], capture_output=True, text=True, timeout=WAIT, env=os.environ | extra_env
    )


def first_on_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def columns(path: Path) -> dict[str, list[float]]:
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def test_validate_starts_its_own_ranks_and_writes_json(tmp_path: Path) -> None:
    done = run("validate", "--tp", 2, *TINY, "--steps", 4, "--log-every", 2, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("passed")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["passed"]
    assert report["config"]["tp"] == 2
    assert {r["axis"] for r in report["comm"]} == {"tp"}


@pytest.mark.parametrize(
    ("mesh", "ways"),
    [
        ("--cp 2", "--layout zigzag --mask causal --strategy ring"),
        ("--cp 3", "--layout striped:2 --mask window:3"),
        ("--tp 2 --cp 2", "--layout striped:1 --mask packed"),
    ],
)
def test_validate_over_context_parallel_ranks(tmp_path: Path, mesh: str, ways: str) -> None:
    flags = ("--seq-len", 9, "--steps", 1, "--json", tmp_path / "out.json")
    ranks = 4 if "tp" in mesh else int(mesh[-1])
    first, *others = run_on_ranks(ranks, "validate", *mesh.split(), *ways.split(), *TINY, *flags)
    assert first.status == 0, first.err
    assert first.out.rstrip().endswith("passed")
    assert others == [Ended(0, "", "")] * (ranks - 1)
    report = json.loads((tmp_path / "out.json").read_text())
    asked = dict(zip(ways.split()[::2], ways.split()[1::2], strict=True))
    for flag in ("--layout", "--mask", "--strategy"):
        assert report["config"][flag[2:]] == asked.get(flag, "ring")
    assert [report["config"][axis] for axis in ("tp", "cp")] == [2 if "tp" in mesh else 1, int(mesh[-1])]
    sent = {(r["phase"], r["kind"]) for r in report["comm"] if r["axis"] == "cp"}
    assert sent == {
        ("forward", "all_gather"),  # do all ranks mean the same?
        ("forward", "send"),
        ("forward", "all_reduce"),
        ("backward", "send"),
        ("gradient_sync", "all_reduce"),
    }


def test_validate_and_train_over_data_parallel_ranks(tmp_path: Path) -> None:
    mesh = ("--dp", 2, "--zero", 2)
    first, second = run_on_ranks(2, "validate", *mesh, *TINY, "--steps", 1, "--json", tmp_path / "out.json")
    assert first.status == 0, first.err
    assert second == Ended(0, "", "")
    assert "dp=2, ZeRO stage 2" in first.out.splitlines()[0]
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["kind"] for row in report["memory"]] == ["parameters", "gradients", "states", "transfers"]
    options = ("--steps", 2, "--log-every", 1, "--compare-dense", "--out", tmp_path / "out")
    first, second = run_on_ranks(2, "train", *mesh, *TINY, *options)
    assert first.status == 0, first.err
    assert second == Ended(0, "", "")
    assert "tp=1, dp=2 beside the dense model" in first.out


def test_validate_joins_the_ranks_of_torchrun() -> None:
    done = run("validate", "--tp", 2, *TINY, "--steps", 1, command=TORCHRUN, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed") == 1


def test_a_wrong_world_size_ends_every_rank_with_one_message() -> None:
    first, second = run_on_ranks(2, "validate", "--tp", 1, *TINY)
    message = "world size 2 is not the product of the mesh, pp=1 * dp=1 * cp=1 * tp=1 = 1"
    assert first == Ended(exit_codes.USAGE, "", f"paracore: error: {message}\n")
    assert second == Ended(exit_codes.USAGE, "", "")


def test_validate_ends_with_status_one_when_it_fails(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            from paracore.parallel import GradientSync
            GradientSync.__call__ = lambda self: None
            """
        )
    )
    status, out, err = run_launcher(
        "validate", "--tp", 2, *TINY, "--steps", 0, PYTHONPATH=first_on_path(tmp_path)
    )
    assert status == exit_codes.FAILED
    assert "FAILED  gradient of model.layers.0.self_attn.q_norm.weight" in out
    assert err == ""


def test_train_beside_dense_writes_curves_and_a_plot(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    flags = ("--steps", 30, "--log-every", 10, "--lr", 0.01, "--compare-dense", "--out", out)
    first, second = run_on_ranks(2, "train", "--tp", 2, *TINY, *flags)
    assert (first.status, first.err) == (0, ""), "progress is for terminals"
    assert second == Ended(0, "", "")
    assert str(out / "loss.png") in first.out
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows, dense = columns(out / "loss.csv"), columns(out / "dense_loss.csv")
    assert list(rows) == ["step", "loss", "held_out_loss", "tokens_per_s"]
    assert rows["step"] == [10, 20, 30]
    assert rows["loss"][-1] < rows["loss"][0] < 5.6  # log(256) = 5.55: it learns
    assert rows["loss"] == pytest.approx(dense["loss"], rel=1e-4)
    assert rows["held_out_loss"] == pytest.approx(dense["held_out_loss"], rel=1e-4)
    assert all(rate > 0 for rate in rows["tokens_per_s"])


def test_train_over_context_parallel_ranks_beside_dense(tmp_path: Path) -> None:
    flags = ("--seq-len", 9, "--steps", 10, "--log-every", 5, "--lr", 0.01, "--layout", "striped:2")
    first, _ = run_on_ranks(2, "train", "--cp", 2, *TINY, *flags, "--compare-dense", "--out", tmp_path)
    assert first.status == 0, first.err
    assert "tp=1, cp=2 beside the dense model" in first.out
    rows, dense = columns(tmp_path / "loss.csv"), columns(tmp_path / "dense_loss.csv")
    for name in ("loss", "held_out_loss"):
        assert rows[name] == pytest.approx(dense[name], rel=1e-4)
    assert rows["loss"][-1] < rows["loss"][0]


def test_training_is_the_same_every_time_and_for_every_seed_another(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(i * i % 251 for i in range(4000)))
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        flags = ["--steps", "3", "--log-every", "1", "--seed", str(seed), "--out", str(tmp_path / name)]
        assert main(["train", *TINY, *flags, "--text", str(text)]) == 0
        losses.append(columns(tmp_path / name / "loss.csv")["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    scales = [learning_rate_scale(step, 100) for step in range(100)]
    assert scales[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert scales[5:] == sorted(scales[5:], reverse=True)
    assert scales[-1] == pytest.approx(0.1, abs=0.01)
    assert learning_rate_scale(0, 1) == 1.0


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("train --text {tmp}/nowhere", "nowhere: there is no such file"),
        ("train --text {tmp}/empty", "hold no text"),
        ("train --text {tmp}/short", "text of 5 bytes is too short: seq_len=128 needs 257"),
        ("train --text {tmp}", "is a folder"),
        ("train --out {tmp}/short", "cannot be made a folder (File exists)"),
        ("train --vocab-size 200", "--vocab-size 200: bytes need at least 256"),
        ("train --steps 0", "--steps 0: must be at least 1"),
        ("train --log-every 0", "--log-every 0: must be at least 1"),
        ("validate --tp 3", "num_heads=8 cannot be divided over tp=3 ranks"),
        ("validate --tp 4 --heads 12 --kv-heads 6 --hidden-size 48", "num_kv_heads=6 neither divides nor"),
        ("validate --tp 0", "tp=0"),
        ("validate --cp 0", "cp=0: a mesh axis has at least one rank"),
        ("train --cp 2 --layout spiral", "layout 'spiral': must be contiguous, zigzag, striped"),
        ("validate --cp 2 --layout striped:0", "layout 'striped:0': a block is a number of positions"),
        ("validate --cp 2 --mask window:0", "mask='window:0': must be causal, packed, or window:N"),
        ("train --device cuda --cp 64", "GPUs for 64 local ranks"),
        ("validate --pp 2", "--pp 2: only --pp 1 is supported so far"),
        ("train --dp 0", "dp=0: a mesh axis has at least one rank"),
        ("validate --heads 6 --kv-heads 2", "hidden_size=128 is not a multiple of num_heads=6"),
        ("validate --seq-len 0", "--seq-len 0: must be at least 1"),
        ("validate --log-every 0", "log_every=0"),
        ("validate --json {tmp}/nowhere/out.json", "there is no folder"),
        ("validate --json {tmp}", "is a folder, not a file"),
        ("kernels --json {tmp}/nowhere/out.json", "there is no folder"),
        ("env --json {tmp}", "is a folder, not a file"),
        ("validate --timeout 0", "--timeout 0.0: must be positive"),
        ("train --lr -1", "--lr -1.0: must be positive"),
        ("validate --lr nan", "--lr nan: must be positive"),
        ("validate --intermediate-size 0", "intermediate_size=0: must be at least 1"),
        ("train --text /dev/null", "cannot be memory-mapped"),
        ("train --out {tmp}/short/sub", "cannot be made a folder"),
        ("validate --device cuda --tp 64 --heads 64 --kv-heads 64", "GPUs for 64 local ranks"),
    ],
)
def test_bad_input_is_refused_before_any_process_starts(
    argv: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    with mock.patch("paracore.cli.distributed._start_ranks", side_effect=AssertionError("started")):
        assert main(argv.format(tmp=tmp_path).split()) == exit_codes.USAGE
    printed = capsys.readouterr()
    assert printed.err.startswith("paracore: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert printed.out == ""


def test_unknown_commands_and_flags_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["unknown"], ["validate", "--unknown"], []):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == exit_codes.USAGE
    assert "invalid choice: 'unknown'" in capsys.readouterr().err


def started_training(tmp_path: Path, tp: int = 2) -> subprocess.Popen[str]:
    """Start a run that would last for ever, and wait until it trains."""
    flags = ["--steps", "10000000", "--log-every", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*PARACORE, "train", "--tp", str(tp), *TINY, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + WAIT
    losses = tmp_path / "loss.csv"
    while not (losses.exists() and losses.stat().st_size):  # of the first step
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"it does not train: {process.communicate()}")
        time.sleep(0.1)
    return process


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids by rank."""
    found: dict[int, int] = {}
    for task in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
            parent = int((task / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid:
                environment = (task / "environ").read_bytes().split(b"\0")
                found |= {int(v[5:]): int(task.name) for v in environment if v.startswith(b"RANK=")}
    assert sorted(found) == [0, 1]
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the ranks through /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_rank_dies_all_end_within_seconds_with_one_message(tmp_path: Path, victim: int) -> None:
    process = started_training(tmp_path)
    try:
        ranks = ranks_of(process)
        os.kill(ranks[victim], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - killed < 30
    finally:
        process.kill()
    assert process.returncode == exit_codes.CRASHED
    assert errors.strip() == f"paracore: error: rank {victim} was killed by SIGKILL"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the ranks through /proc")
def test_an_interrupt_ends_every_rank(tmp_path: Path) -> None:
    process = started_training(tmp_path)
    try:
        ranks = ranks_of(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == exit_codes.INTERRUPTED
    assert errors.strip() == "paracore: interrupted by SIGINT"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


def test_an_exception_on_one_rank_is_reported_once_for_all(tmp_path: Path) -> None:
    """With --traceback; without it, as in the test of a refusal below."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import os
            from paracore.training import Trainer
            step = Trainer.step
            def broken(self, *args, **kwargs):
                if os.environ.get("RANK") == "1":
                    raise MemoryError("out of memory, says the test")
                return step(self, *args, **kwargs)
            Trainer.step = broken
            """
        )
    )
    flags = ("--out", tmp_path, "--traceback")
    status, _, err = run_launcher("train", "--tp", 2, *TINY, *flags, PYTHONPATH=first_on_path(tmp_path))
    assert status == exit_codes.CRASHED
    first, *rest = err.strip().split("\n")
    assert first == "paracore: error: rank 1 failed: MemoryError: out of memory, says the test"
    assert "Traceback" in rest[0]
    assert err.count("Traceback") == 1


@pytest.mark.parametrize("traceback", [False, True])
def test_an_exception_in_a_run_of_one_rank_is_one_message_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], traceback: bool
) -> None:
    flags = ["--lr", "1e30", "--log-every", "1", "--out", str(tmp_path), *["--traceback"] * traceback]
    assert main(["train", *TINY, *flags]) == exit_codes.CRASHED
    first, *rest = capsys.readouterr().err.strip().split("\n")
    assert first.startswith("paracore: error: RuntimeError: the loss is nan at step")
    assert ("Traceback" in rest[0]) == traceback
    assert columns(tmp_path / "loss.csv")["step"], "what was measured before is kept"


def test_a_refusal_on_another_rank_than_the_first_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import os
            from paracore.errors import UsageError
            from paracore.training import Trainer
            def broken(self, *args, **kwargs):
                raise UsageError("refused, says the test")
            if os.environ.get("RANK") == "1":
                Trainer.step = broken
            """
        )
    )
    flags = ("--out", tmp_path)
    status, _, err = run_launcher("train", "--tp", 2, *TINY, *flags, PYTHONPATH=first_on_path(tmp_path))
    assert status == exit_codes.USAGE
    assert err.splitlines() == [
        "paracore: error: rank 1 failed: UsageError: refused, says the test",
        "(--traceback shows where)",
    ]


def test_report_without_finite_numbers_is_still_json() -> None:
    values = validate._json_values({"a": [float("nan"), 1.0], "b": -float("inf")})
    assert json.dumps(values, allow_nan=False) == '{"a": ["nan", 1.0], "b": "-inf"}'


def test_a_failing_report_is_status_one_in_one_process_too(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*args: Any) -> dict[str, Any]:
        from paracore.validation import validate as real

        report = real(*args)
        assert report is not None
        return report | {"passed": False, "failures": ["a difference"]}

    with mock.patch.object(validate, "validate", failing):
        assert main(["validate", *TINY, "--steps", "1"]) == exit_codes.FAILED
    assert "FAILED  a difference" in capsys.readouterr().out
