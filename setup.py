"""Maps the repository's folders to packages and builds the native extensions; the rest is in pyproject.toml.

The map is written out because a popular package already owns the top-level name `kernels`:
ours must install as `paracore.kernels`, and the benchmarks as `paracore.bench`. In a checkout, links
in paracore/ lead to the same folders.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        f"paracore's extension is compiled against torch, which cannot be imported here ({error}). "
        "Install torch 2.11 to 2.13 first, or build without --no-build-isolation."
    )

PACKAGE_DIRS = {
    "paracore": "paracore",
    "paracore.bench": "bench",
    "paracore.cli": "paracore/cli",
    "paracore.dropin": "paracore/dropin",
    "paracore.hf": "paracore/hf",
    "paracore.inspection": "paracore/inspection",
    "paracore.kernels": "kernels",
    "paracore.nn": "paracore/nn",
    "paracore.ops": "paracore/ops",
    "paracore.optim": "paracore/optim",
    "paracore.parallel": "paracore/parallel",
    "paracore.profiling": "paracore/profiling",
}

CUDA = "csrc/cuda"
X86 = platform.machine() in ("x86_64", "AMD64")
# Every file of csrc/cpu/kernels is compiled once per capability, with ATen's flags for it. The order counts:
# an inline function of a header that several variants emit is linked from the first, which must be the one
# that every processor can run.
CPU_VARIANTS = {"DEFAULT": []}
if X86:
    CPU_VARIANTS["AVX2"] = ["-mavx2", "-mfma", "-mf16c"]
    CPU_VARIANTS["AVX512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
# What single files may use beyond that: who calls them asks the processor first.
EXTRA_FLAGS = {("attention_pair_instruction.cpp", "AVX512"): ["-mavx512bf16"]}


def find_ninja() -> None:
    """Put the package `ninja` on the PATH, where it is not unless its environment is activated."""
    with contextlib.suppress(ImportError):
        import ninja

        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ["PATH"]])


def require_compiler() -> None:
    """Exit with what to install when there is no C++ compiler, or no Python to compile against."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        sys.exit(
            f"paracore builds a C++ extension, and there is no C++ compiler {compiler!r} on the PATH. "
            "Install one (Debian, Ubuntu: apt install g++; Fedora, RHEL: dnf install gcc-c++) or name "
            "yours in CXX."
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        sys.exit(
            f"paracore builds a C++ extension, and {header} is missing. Install Python's headers "
            "(Debian, Ubuntu: apt install python3-dev; Fedora, RHEL: dnf install python3-devel)."
        )


class BuildExtension(cpp_extension.BuildExtension):
    """torch's own, which knows ninja and nvcc, with the CPU kernels compiled once per capability."""

    def finalize_options(self) -> None:
        """Name the folder of the object files, and keep the environment's own paths out of the commands."""
        super().finalize_options()
        # Nothing of ours is there, and each environment's other path would compile everything again.
        environment_include = os.path.join(sys.exec_prefix, "include")
        self.include_dirs = [folder for folder in self.include_dirs if folder != environment_include]
        # An editable install would build in a fresh folder each time, and so compile everything again.
        tag = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{platform.machine()}"
        self.build_temp = os.path.join("build", tag)

    def build_extensions(self) -> None:
        """Build all extensions."""
        require_compiler()
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        """Compile the CPU kernels of the extension that has them, then the rest, and link."""
        if extension.name == "paracore._C":
            self.compile_every_variant(extension)
        super().build_extension(extension)

    def compile_every_variant(self, extension: Extension) -> None:
        """Compile csrc/cpu/kernels once per capability."""
        kernels = sorted(glob("csrc/cpu/kernels/*.cpp"))
        for name, flags in CPU_VARIANTS.items():
            extra = {file: EXTRA_FLAGS.get((os.path.basename(file), name), []) for file in kernels}
            common = [file for file in kernels if not extra[file]]
            for files in [common, *([file] for file in kernels if extra[file])]:
                self.compile_kernels(extension, name, files, [*flags, *extra[files[0]]])

    def compile_kernels(self, extension: Extension, variant: str, files: list[str], flags: list[str]) -> None:
        """Compile files of csrc/cpu/kernels for one capability."""
        extension.extra_objects += self.compiler.compile(
            files,
            output_dir=os.path.join(self.build_temp, variant),
            include_dirs=extension.include_dirs,
            macros=[
                *extension.define_macros,
                ("CPU_CAPABILITY", variant),
                (f"CPU_CAPABILITY_{variant}", None),
            ],
            # Contracted or not, two copies of one formula could differ: only what is spelled out is fused.
            extra_postargs=[*extension.extra_compile_args["cxx"], *flags, "-ffp-contract=off"],
            depends=extension.depends,
        )


def native_extension() -> Extension:
    """paracore._C: the CPU kernels."""
    # Without -fopenmp, at::parallel_for compiles and silently runs on one thread.
    openmp = ["-fopenmp"]
    return cpp_extension.CppExtension(
        "paracore._C",
        [*sorted(glob("csrc/*.cpp")), *sorted(glob("csrc/cpu/*.cpp"))],
        depends=[file for file in sorted(glob("csrc/**/*", recursive=True)) if not file.startswith(CUDA)],
        define_macros=[("PARACORE_X86_VARIANTS", None)] if X86 else [],
        extra_compile_args={"cxx": ["-O3", "-fvisibility=hidden", *openmp]},
        extra_link_args=openmp,
    )


def cuda_extensions() -> list[Extension]:
    """paracore._CUDA, the CUDA sources: where torch is built for CUDA and its nvcc is there, else nothing."""
    if torch.version.cuda is None:
        return []
    wanted, found = torch.version.cuda.split(".")[0], nvcc_version()
    if found != wanted:
        home = cpp_extension.CUDA_HOME
        print(f"paracore._CUDA is left out: torch is for CUDA {wanted}, the toolkit in {home} is {found}")
        return []
    return [
        # No torch.utils.cpp_extension.CUDAExtension: the sources use pybind11 and the CUDA runtime alone.
        Extension(
            "paracore._CUDA",
            [*sorted(glob(f"{CUDA}/*.cpp")), *sorted(glob(f"{CUDA}/*.cu"))],
            language="c++",
            include_dirs=cpp_extension.include_paths("cuda"),
            library_dirs=[os.path.join(cpp_extension.CUDA_HOME, folder) for folder in ("lib64", "lib")],
            libraries=["cudart"],
            depends=sorted(glob(f"{CUDA}/*")),
            extra_compile_args={"cxx": ["-O3", "-fvisibility=hidden"], "nvcc": ["-O3"]},
        )
    ]


def nvcc_version() -> str | None:
    """Return the major version of the CUDA toolkit that torch finds, or None where it is incomplete."""
    home = Path(cpp_extension.CUDA_HOME or "")
    nvcc = home / "bin" / "nvcc"
    if not (nvcc.exists() and (home / "include" / "cuda_runtime.h").exists()):
        return None
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.", printed)
    return None if release is None else release[1]


find_ninja()
setup(
    packages=list(PACKAGE_DIRS),
    package_dir=PACKAGE_DIRS,
    package_data={"paracore": ["py.typed", "_C.pyi", "_CUDA.pyi"]},
    ext_modules=[native_extension(), *cuda_extensions()],
    cmdclass={"build_ext": BuildExtension},
)
