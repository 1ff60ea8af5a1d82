"""The CUDA sources compile for every architecture, alone, and setup.py makes an extension of them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paracore.cli.kernels import CUDA_SOURCES
from paracore.inspection.cuda import NVCC_ARCHITECTURES, find_nvcc, inspect_cuda, parse_spills

REPOSITORY = Path(__file__).parents[1]
NVCC = find_nvcc()

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no CUDA toolkit: nvcc is not on the path")

# setup.py as it runs where torch is a CUDA build: of this version, with the toolkit of this folder.
BUILD = """
import runpy, sys, setuptools, torch
from torch.utils import cpp_extension
torch.version.cuda, cpp_extension.CUDA_HOME = sys.argv[1:3]
def cuda_only(ext_modules, **arguments):
    only = [module for module in ext_modules if module.name == "paracore._CUDA"]
    setuptools_setup(ext_modules=only, **arguments)
setuptools_setup, setuptools.setup = setuptools.setup, cuda_only
sys.argv = ["setup.py", *sys.argv[3:]]
runpy.run_path("setup.py")
"""

# The extension without a device: what it has, and what it says of a wrong call and of one that cannot run.
PROBE = """
import sys, torch, importlib.util
spec = importlib.util.spec_from_file_location("paracore._CUDA", sys.argv[1])
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
print(*(name for name in dir(extension) if not name.startswith("_")))
for timeout_seconds in (0.0, float("nan"), 1.0):
    try:
        extension.wait_for_counter(stream=0, counters=0, chunk=0, expected=1, timeout_seconds=timeout_seconds)
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__, error)
"""


@needs_nvcc
@pytest.mark.parametrize("target", NVCC_ARCHITECTURES)
@pytest.mark.parametrize("source", sorted(CUDA_SOURCES.glob("*.cu")), ids=lambda source: source.name)
def test_every_source_compiles_without_spills(source, target):
    """Alone: nothing in it may include a header of torch."""
    rows = inspect_cuda(source, target, NVCC or "")
    assert rows
    for row in rows:
        assert row.missed == (), row
        assert row.measurement is not None
        assert row.measurement.spill_bytes == 0


@needs_nvcc
def test_a_stack_frame_is_no_spill(tmp_path):
    source = tmp_path / "print.cu"
    source.write_text(
        '#include <cstdio>\nextern "C" __global__ void print(int n) { printf("%d %d", n, threadIdx.x); }\n'
    )
    (row,) = inspect_cuda(source, "sm_90", NVCC or "")
    assert (row.kernel, row.missed) == ("print", ())


def test_spills_are_read_from_what_ptxas_prints():
    printed = """ptxas info    : Compiling entry function 'add' for 'sm_90a'
ptxas info    : Function properties for add
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for _Z3subPi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    assert parse_spills(printed) == {"add": 8, "_Z3subPi": 0}


def build(folder: Path, cuda: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py on a copy of the CUDA sources, as with torch for CUDA `cuda` and its toolkit in `home`."""
    shutil.copy(REPOSITORY / "setup.py", folder)
    shutil.copytree(REPOSITORY / "csrc", folder / "csrc")
    environment = os.environ | {"TORCH_CUDA_ARCH_LIST": "9.0"}
    return subprocess.run(
        [sys.executable, "-c", BUILD, cuda, str(home), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def toolkit() -> tuple[str, Path]:
    """The version of nvcc, and where it is installed: what is on the path may only lead there."""
    version, steps = (
        subprocess.run([NVCC or "", *arguments], capture_output=True, text=True, check=True)
        for arguments in (["--version"], ["--dryrun", "none.cu"])
    )
    home = steps.stderr.split("TOP=")[1].splitlines()[0]
    return version.stdout.split("release ")[1].split(",")[0], Path(home).resolve()


@needs_nvcc
def test_the_extension_is_built_and_is_what_its_stub_declares(tmp_path):
    version, home = toolkit()
    built = build(tmp_path, version, home, "build_ext", "--build-lib", str(tmp_path / "lib"))
    assert built.returncode == 0, built.stderr
    (extension,) = (tmp_path / "lib").rglob("_CUDA*.so")
    probed = subprocess.run(
        [sys.executable, "-c", PROBE, str(extension)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    names, *refusals = probed.stdout.splitlines()
    stub = ast.parse((REPOSITORY / "paracore" / "_CUDA.pyi").read_text())
    assert names.split() == [node.name for node in stub.body if isinstance(node, ast.FunctionDef)]
    zero, nan, launch = refusals
    assert "ValueError timeout_seconds is 0.0" in zero
    assert "ValueError timeout_seconds is nan" in nan
    assert launch.startswith("RuntimeError wait_for_counter cannot be launched: ")


@needs_nvcc
def test_a_toolkit_of_another_version_is_named_and_nothing_is_built(tmp_path):
    built = build(tmp_path, "11.8", toolkit()[1], "--version")
    assert built.returncode == 0, built.stderr
    home = toolkit()[1]
    assert f"paracore._CUDA is left out: torch is for CUDA 11, the toolkit in {home} is" in built.stdout


def test_without_a_toolkit_nothing_is_built(tmp_path):
    built = build(tmp_path, "13.0", tmp_path, "--version")
    assert built.returncode == 0, built.stderr
    assert f"the toolkit in {tmp_path} is None" in built.stdout


def test_the_command_finds_the_sources():
    assert [source.name for source in sorted(CUDA_SOURCES.glob("*.cu"))] == ["stream_order.cu"]
