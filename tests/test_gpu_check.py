"""make gpu-check runs the gpu tests everywhere, and measures only where there is a GPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paracore.bench import gpu_check

Status = Callable[[list[str]], int]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each returns status 0."""
    return record(monkeypatch, lambda command: 0)


def returning(status: int) -> Status:
    return lambda command: status


def record(monkeypatch: pytest.MonkeyPatch, status: Status) -> list[list[str]]:
    found: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        found.append(command)
        return subprocess.CompletedProcess(command, status(command))

    monkeypatch.setattr(subprocess, "run", run)
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pretend that there is a GPU; return where results go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_without_a_gpu_the_tests_decide_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for status in (0, 1, 5):  # 5: pytest found no test
        commands = record(monkeypatch, returning(status))
        assert gpu_check.main() == status
        assert [command[1:] for command in commands] == [["-m", "pytest", "-m", "gpu", "tests"]]
    assert "no GPU here" in capsys.readouterr().out


def test_with_a_gpu_tests_then_benchmarks_run_and_are_summed_up(commands: list[list[str]], gpu: Path) -> None:
    assert gpu_check.main() == 0
    assert [command[2] for command in commands] == ["pytest", *["paracore"] * len(gpu_check.BENCHMARKS)]
    (summary,) = gpu.glob("*-nvidia-h200-check.json")
    report = json.loads(summary.read_text())
    assert report["tests"]["status"] == 0
    assert report["failed_benchmarks"] == []


def test_failing_tests_or_benchmarks_fail_the_check(monkeypatch: pytest.MonkeyPatch, gpu: Path) -> None:
    record(monkeypatch, lambda command: int("pytest" in command))
    assert gpu_check.main() == 1
    record(monkeypatch, lambda command: int("bench" in command))
    assert gpu_check.main() == 1
    (summary,) = gpu.glob("*-check.json")
    assert json.loads(summary.read_text())["failed_benchmarks"] == list(gpu_check.BENCHMARKS)


def test_a_hang_fails_the_check(monkeypatch: pytest.MonkeyPatch, gpu: Path) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert gpu_check.main() == 1


def test_tests_and_benchmarks_fit_into_six_minutes() -> None:
    benchmarks = len(gpu_check.BENCHMARKS) * gpu_check.LONGEST_BENCHMARK_SECONDS
    assert gpu_check.TEST_SECONDS + benchmarks <= 300  # a minute is left for the build
