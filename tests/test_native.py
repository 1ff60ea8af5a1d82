"""The extension itself: which instruction sets it runs, on how many threads, what it refuses, its stub."""

from __future__ import annotations

import ast
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paracore
from paracore import _C
from paracore.reference_attention import Terms
from tests.numerics import randn
from tests.rms_norm_cases import native

X86 = platform.machine() == "x86_64"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_as_many_threads_take_part_as_torch_is_told(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert _C.count_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_capabilities_are_those_of_the_processor() -> None:
    best = torch.backends.cpu.get_cpu_capability()
    expected = ["default", "avx2", "avx512"]
    assert _C.capabilities() == (expected[: expected.index(best.lower()) + 1] if X86 else ["default"])


def test_a_capability_that_cannot_run_here_is_refused_with_those_that_can() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"capability=sse9 cannot run here.* have: default"):
        _C.rms_norm_forward(x, weight, None, 1e-6, capability="sse9")


def test_torch_can_cap_the_capability() -> None:
    program = "import torch; from paracore import _C; print(_C.capabilities())"
    environment = {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(Path(paracore.__file__).parents[1])}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "['default']"


@pytest.mark.skipif(not X86, reason="one variant only")
def test_variants_are_different_machine_code() -> None:
    """The order of a sum differs with the width of the vectors, so some bits of some sums must differ."""
    x, weight = randn(200, 4096, seed=0, dtype=torch.float32), torch.ones(4096)
    rstd = {name: native(name).rms_norm_forward(x, weight, None, 0.0)[2] for name in _C.capabilities()}
    assert len(rstd) == 1 or not torch.equal(rstd["default"], rstd["avx2"])
    assert "avx512" not in rstd or not torch.equal(rstd["avx2"], rstd["avx512"])


def test_outputs_may_be_given() -> None:
    x, weight, dy = (randn(*shape, seed=len(shape), dtype=torch.float32) for shape in ((4, 9), (9,), (4, 9)))
    out = torch.full_like(x, float("nan"))
    y, h, rstd = _C.rms_norm_forward(x, weight, None, 1e-6, out=out)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(y, _C.rms_norm_forward(x, weight, None, 1e-6)[0])
    dx, dweight = _C.rms_norm_backward(dy, None, h, weight, rstd, out=out)
    assert dx.data_ptr() == out.data_ptr()
    assert all(map(torch.equal, (dx, dweight), _C.rms_norm_backward(dy, None, h, weight, rstd)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(8)}, r"x is Float \[8\], must be \[rows, hidden\]"),
        ({"x": torch.ones(8, 2).t()}, "x of shape .* its last dim must be contiguous"),
        ({"x": torch.ones(2, 8).double()}, "x is Double and weight Float"),
        ({"x": torch.ones(2, 8, device="meta")}, "x is on meta, must be on the CPU"),
        ({"weight": torch.ones(7)}, r"weight has shape \[7\].*must be a contiguous \[8\]"),
        ({"weight": torch.ones(8, dtype=torch.bfloat16)}, "x is Float and weight BFloat16"),
        ({"residual": torch.ones(3, 8)}, r"residual is Float \[3, 8\], must be .* Float \[2, 8\]"),
        ({"out": torch.ones(2, 9)}, r"out is Float \[2, 9\], must be .* Float \[2, 8\]"),
        ({"out": torch.ones(2, 16)[:, :8]}, "out has strides .*, must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.ones(2, 8), "weight": torch.ones(8), "residual": None, "eps": 1e-6} | change
    with pytest.raises(ValueError, match=message):
        _C.rms_norm_forward(**arguments)


def test_the_stub_declares_exactly_what_the_extension_has() -> None:
    stub = ast.parse(Path(paracore.__file__).with_name("_C.pyi").read_text())
    declared = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert set(declared) == {name for name in dir(_C) if not name.startswith("_")}
    for name, node in declared.items():
        arguments = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        if node.args.kwarg is not None:  # **terms: keyword-only arguments by the names of Terms
            arguments[-len(node.args.kwonlyargs) : -len(node.args.kwonlyargs)] = list(Terms.__annotations__)
        signature = str(getattr(_C, name).__doc__).splitlines()[0]
        found = [re.search(rf"\b{argument}:", signature) for argument in arguments]
        assert all(found), (name, signature)
        positions = [match.start() for match in found if match]
        assert positions == sorted(positions), (name, signature)


@pytest.mark.parametrize(
    "source",
    [
        "rms_norm.cpp",
        "attention.cpp",
        "attention_arguments.cpp",
        "kernels/attention.cpp",
        "adamw.cpp",
        "kernels/adamw.cpp",
        *(f"kernels/{name}.cpp" for name in ("cross_entropy", "swiglu", "rotary", "embedding")),
    ],
)
@pytest.mark.parametrize("compiler", ["c++", "aarch64-linux-gnu-g++"])
def test_sources_compile_for_processors_with_one_variant_only(compiler: str, source: str) -> None:
    """As on 64-bit Arm, where at::vec uses NEON: without the macro that setup.py defines on x86."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    root, torch_root = Path(__file__).parent.parent, Path(torch.__file__).parent
    includes = [root / "csrc", torch_root / "include", torch_root / "include/torch/csrc/api/include"]
    flags = ["-std=c++20", "-fopenmp", "-fsyntax-only", *(f"-I{folder}" for folder in includes)]
    flags += ["-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]
    done = subprocess.run([compiler, *flags, root / "csrc/cpu" / source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
