"""`paracore env` says what is there, what is not, and why."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paracore import _C
from paracore.cli import env
from paracore.ops.catalog import OPERATIONS


def run_env(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    env.add_arguments(parser)
    return env.run(parser.parse_args(arguments))


@pytest.fixture
def report(tmp_path: Path) -> Any:
    assert run_env("--json", str(tmp_path / "env.json")) == 0
    return json.loads((tmp_path / "env.json").read_text())


def test_versions_and_machine(report: Any) -> None:
    assert report["versions"]["torch"] == torch.__version__
    assert report["cpu"] == {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    assert report["devices"][0] == "cpu"


def test_what_is_built(report: Any) -> None:
    native = report["native"]
    assert native["missing"] is None
    assert torch.__version__.startswith(native["torch"])
    assert native["capabilities"] == _C.capabilities()
    assert native["threads"] == torch.get_num_threads()


def test_every_operation_and_why_implementations_are_not_available(report: Any) -> None:
    assert set(report["operations"]) == {operation.name for operation in OPERATIONS}
    entry = report["operations"]["rms_norm"]
    assert entry["native"]["available_on"] == ["cpu"]
    assert entry["native"]["default_on"] == ["cpu"]
    assert entry["native"]["dtypes"] == "float32, bfloat16"
    assert entry["reference"]["refusals"] == {}
    assert set(entry) == {"triton", "native", "reference"}


def test_a_missing_extension_is_reported_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "paracore._C", None)
    assert run_env() == 0
    printed = capsys.readouterr().out
    assert "native     not available: the extension cannot be loaded" in printed
    assert "not on cpu: the extension cannot be loaded" in printed
    assert "pip install --no-build-isolation -e ." in printed


def test_a_missing_triton_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    run_env()
    assert "not on cpu: triton cannot be imported" in capsys.readouterr().out


def test_environment_variables_and_the_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARACORE_IMPL", "reference")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run_env()
    printed = capsys.readouterr().out
    assert "PARACORE_IMPL=reference" in printed
    assert "TRITON_INTERPRET=not set" in printed
    assert "any other refusal is an error" in printed
