"""Maps the repository's folders to packages and builds the native extension; the rest is in pyproject.toml.

The map is written out because a popular package already owns the top-level name `kernels`:
ours must install as `paracore.kernels`, and the benchmarks as `paracore.bench`. In a checkout, links
in paracore/ lead to the same folders.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
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
    "paracore.inspection": "paracore/inspection",
    "paracore.kernels": "kernels",
    "paracore.nn": "paracore/nn",
    "paracore.ops": "paracore/ops",
    "paracore.optim": "paracore/optim",
    "paracore.parallel": "paracore/parallel",
    "paracore.profiling": "paracore/profiling",
}

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
        """Build all extensions; there is one."""
        require_compiler()
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        """Compile the kernels of every capability, then the rest, and link."""
        kernels = sorted(glob("csrc/cpu/kernels/*.cpp"))
        for name, flags in CPU_VARIANTS.items():
            extra = {file: EXTRA_FLAGS.get((os.path.basename(file), name), []) for file in kernels}
            common = [file for file in kernels if not extra[file]]
            for files in [common, *([file] for file in kernels if extra[file])]:
                self.compile_kernels(extension, name, files, [*flags, *extra[files[0]]])
        super().build_extension(extension)

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
    """paracore._C: the CPU kernels, and the CUDA sources where torch has CUDA and nvcc is there."""
    cuda_sources = sorted(glob("csrc/cuda/*.cu"))
    cuda = bool(cuda_sources) and torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    macros = [("PARACORE_X86_VARIANTS", None)] if X86 else []
    if cuda:
        macros.append(("PARACORE_CUDA", None))
    # Without -fopenmp, at::parallel_for compiles and silently runs on one thread.
    openmp = ["-fopenmp"]
    extension = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    return extension(
        "paracore._C",
        [*sorted(glob("csrc/*.cpp")), *sorted(glob("csrc/cpu/*.cpp")), *(cuda_sources if cuda else [])],
        depends=sorted(glob("csrc/**/*", recursive=True)),
        define_macros=macros,
        extra_compile_args={"cxx": ["-O3", "-fvisibility=hidden", *openmp], "nvcc": ["-O3"]},
        extra_link_args=openmp,
    )


find_ninja()
setup(
    packages=list(PACKAGE_DIRS),
    package_dir=PACKAGE_DIRS,
    package_data={"paracore": ["py.typed", "_C.pyi"]},
    ext_modules=[native_extension()],
    cmdclass={"build_ext": BuildExtension},
)
