"""`paracore kernels` from its arguments to its exit code."""

from __future__ import annotations

import argparse
import json

import pytest

from paracore.cli import kernels
from paracore.errors import UsageError
from paracore.inspection.machine_code import Measurement
from paracore.inspection.report import Row
from paracore.inspection.worker import Result

pytest.importorskip("triton")


def parse(*arguments):
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return parser.parse_args(arguments)


SMALL = ("--kernel", "sum_rows_kernel", "--jobs", "2")


def test_the_table_covers_every_target_and_goes_to_json(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    cache = tmp_path / "cache"
    assert kernels.run(parse(*SMALL, "--json", str(file), "--cache-dir", str(cache))) == 0
    rows = json.loads(file.read_text())["kernels"]
    assert [row["target"] for row in rows] == ["sm_80", "sm_90", "sm_100", "gfx942"]
    for row in rows:
        assert row["kernel"] == "sum_rows_kernel"
        assert row["registers"] > 0
        assert row["spill_bytes"] == row["matrix_instructions"] == row["async_copies"] == 0
        assert row["loop_instructions"]["float"] > 0
        assert row["missed"] == []
    printed = capsys.readouterr().out
    assert printed.count("sum_rows_kernel") == 4
    assert str(cache) in printed
    assert len(list(cache.glob("*.json"))) == 4


def test_a_missed_requirement_and_a_crash_fail_the_command(monkeypatch, tmp_path, capsys):
    loop = dict.fromkeys(("matrix", "memory", "float", "integer", "special", "control", "other"), 1)
    spilling = Measurement(255, 8, 0, 0, 0, loop | {"total": 7}, 0)

    def inspect(jobs, *, workers, cache):
        assert cache is None
        for job in jobs:
            crashed = job.target == "gfx942"
            yield Result(job, None if crashed else spilling, "crashed with SIGSEGV" if crashed else "")

    monkeypatch.setattr(kernels, "inspect", inspect)
    file = tmp_path / "kernels.json"
    targets = ("--target", "gfx942", "--target", "sm_90")
    assert kernels.run(parse(*SMALL, *targets, "--no-cache", "--json", str(file))) == 1
    crash, spill = json.loads(file.read_text())["kernels"]
    assert (crash["target"], crash["missed"]) == ("gfx942", ["crashed with SIGSEGV"])
    assert (spill["spill_bytes"], spill["missed"]) == (8, ["spills 8 bytes, at most 0 allowed"])
    assert "MISSED: spills 8 bytes" in capsys.readouterr().out


def test_cuda_sources_are_listed_beside_the_triton_kernels(monkeypatch, tmp_path):
    """Each source is compiled once per target that was asked for; without nvcc the command says so."""
    (tmp_path / "a.cu").touch()
    monkeypatch.setattr(kernels, "CUDA_SOURCES", tmp_path)
    monkeypatch.setattr(kernels, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(
        kernels, "inspect_cuda", lambda source, target, nvcc: [Row(nvcc, source.name, target, None, ())]
    )
    assert kernels._cuda_rows(["sm_80", "gfx942"], jobs=2) == [Row("nvcc", "a.cu", "sm_80", None, ())]


def test_cuda_sources_without_nvcc_are_named(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.cu").touch()
    monkeypatch.setattr(kernels, "CUDA_SOURCES", tmp_path)
    monkeypatch.setattr(kernels, "find_nvcc", lambda: None)
    assert kernels._cuda_rows(["sm_80"], jobs=1) == []
    assert "a.cu not compiled" in capsys.readouterr().out


def test_unknown_kernels_and_senseless_numbers_are_refused():
    with pytest.raises(
        UsageError, match=r"--kernel is 'softmax'; expected one of .*, rms_norm_backward_kernel"
    ):
        kernels.run(parse("--kernel", "softmax"))
    with pytest.raises(UsageError, match="--jobs is 0; expected at least 1"):
        kernels.run(parse("--jobs", "0"))
