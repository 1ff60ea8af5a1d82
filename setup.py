"""Maps the repository's folders to packages; everything else is declared in pyproject.toml.

The map is written out because a popular package already owns the top-level name `kernels`:
ours must install as `paracore.kernels`, and the benchmarks as `paracore.bench`.
"""

from setuptools import setup

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
}

setup(
    packages=list(PACKAGE_DIRS),
    package_dir=PACKAGE_DIRS,
    package_data={"paracore": ["py.typed"]},
)
