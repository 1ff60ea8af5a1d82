"""paracore installs from a wheel, as an editable install, and runs from a bare checkout; each in an
environment of its own, which borrows torch from this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import build_backend

REPOSITORY = Path(__file__).parents[1]

# What an environment makes of the package, printed as JSON. torch first: the extension needs its libraries.
PROBE = """
import importlib.util, json, torch
import paracore.kernels, paracore.bench
origin = lambda name: getattr(importlib.util.find_spec(name), "origin", None) if name else None
report = {name: origin(name) for name in ("paracore", "paracore.kernels", "paracore.bench", "paracore._C")}
if importlib.util.find_spec("kernels"):
    import kernels
    report["kernels"] = getattr(kernels, "OWNER", None)
if report["paracore._C"]:
    from paracore.nn import RMSNorm
    report["y"] = RMSNorm(4)(torch.full((1, 4), 2.0)).tolist()
print(json.dumps(report))
"""


class Environment:
    """A virtual environment without paracore, in which a foreign package named `kernels` is installed."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder = folder
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site_packages = folder / "lib" / version / "site-packages"
        # A .pth file found through another .pth file is not run, so our own editable install stays out.
        (self.site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (self.site_packages / "kernels").mkdir()
        (self.site_packages / "kernels" / "__init__.py").write_text("OWNER = 'somebody else'\n")

    def install(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        # The ninja of this environment: another version's log would make it compile everything again.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        command = [*pip, "--no-deps", "--no-index", *arguments]
        subprocess.run(command, env=os.environ | {"PATH": path}, check=True, timeout=250)

    def probe(self, cwd: Path, **environment: str) -> dict[str, Any]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [str(self.python), "-c", PROBE]
        printed = subprocess.run(
            command, cwd=cwd, env=inherited | environment, capture_output=True, text=True
        )
        assert printed.returncode == 0, printed.stderr
        report: dict[str, Any] = json.loads(printed.stdout)
        return report


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(REPOSITORY)], check=True, timeout=250)
    (built,) = folder.glob("paracore-*.whl")
    return built


def test_a_wheel_has_every_package_the_extension_and_its_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"paracore/kernels/__init__.py", "paracore/bench/__init__.py"} <= set(names)
    assert {"paracore/_C.pyi", "paracore/py.typed"} <= set(names)
    assert f"paracore/_C{sysconfig.get_config_var('EXT_SUFFIX')}" in names
    packages = {path.parent for path in (REPOSITORY / "paracore").rglob("__init__.py")}
    expected = {str(package.relative_to(REPOSITORY)) for package in packages}
    assert expected <= {name.rpartition("/")[0] for name in names}
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"paracore"}


def test_installed_from_a_wheel(wheel: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install(str(wheel))
    report = environment.probe(tmp_path)
    for name in ("paracore", "paracore.kernels", "paracore.bench", "paracore._C"):
        assert Path(report[name]).is_relative_to(environment.site_packages), name
    assert report["kernels"] == "somebody else"
    assert report["y"] == [pytest.approx([1.0] * 4)]


def test_installed_editable(environment: Environment, tmp_path: Path) -> None:
    environment.install("--no-build-isolation", "--editable", str(REPOSITORY))
    report = environment.probe(tmp_path)
    assert Path(report["paracore.kernels"]).samefile(REPOSITORY / "kernels" / "__init__.py")
    assert Path(report["paracore.bench"]).samefile(REPOSITORY / "bench" / "__init__.py")
    assert report["kernels"] == "somebody else"
    assert report["y"] == [pytest.approx([1.0] * 4)]


@pytest.mark.parametrize("found_by", ["working directory", "PYTHONPATH"])
def test_from_a_bare_checkout(found_by: str, environment: Environment, tmp_path: Path) -> None:
    """Nothing built, nothing installed: the packages are there, and the extension's absence is an error."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("paracore", "kernels", "bench"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(REPOSITORY / name, checkout / name, symlinks=True, ignore=ignored)
    if found_by == "working directory":
        report = environment.probe(checkout)
    else:
        report = environment.probe(tmp_path, PYTHONPATH=str(checkout))
    assert Path(report["paracore.kernels"]).samefile(checkout / "kernels" / "__init__.py")
    assert Path(report["paracore.bench"]).samefile(checkout / "bench" / "__init__.py")
    assert report["paracore._C"] is None


def test_importing_paracore_imports_no_kernels_and_a_command_no_matplotlib() -> None:
    """Every rank of every command would wait for it."""
    program = """if True:
        import sys, paracore.nn
        assert not {"paracore.kernels", "triton"} & set(sys.modules)
        import paracore.cli.main
        assert "matplotlib" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


# ---------------------------------------------------------------- what a build needs


def build(tmp_path: Path, **environment: str) -> str:
    """Run setup.py's build in a folder of its own; return what it printed, having failed."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path)]
    printed = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )
    assert printed.returncode != 0
    return printed.stderr


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path) -> None:
    printed = build(tmp_path, CXX="no-such-compiler")
    assert "no C++ compiler 'no-such-compiler'" in printed
    assert "apt install g++" in printed
    assert "dnf install gcc-c++" in printed


def test_without_torch_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    printed = build(tmp_path, PYTHONPATH=str(tmp_path))
    assert "compiled against torch, which cannot be imported here (not here)" in printed


def test_an_isolated_build_asks_for_the_torch_that_is_installed(tmp_path: Path) -> None:
    installed = torch.__version__.split("+")[0]
    assert build_backend.get_requires_for_build_wheel() == ["ninja", f"torch=={installed}"]
    assert build_backend.torch_requirement([str(tmp_path)]) == "torch>=2.11,<2.14"
