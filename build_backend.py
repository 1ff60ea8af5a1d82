"""setuptools' build backend, but building against the torch that will load the extension.

An isolated build gets a fresh torch, and torch promises no binary compatibility between minor versions.
So it asks for the very version that is installed where pip runs; where none is, for the newest supported.
Without isolation pip asks this file nothing, and the build uses the torch that is there.
"""

from __future__ import annotations

import site
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions

from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

SUPPORTED_TORCH = "torch>=2.11,<2.14"


def torch_requirement(site_packages: Iterable[str]) -> str:
    """Return the requirement for the torch installed in these folders, or for any that is supported."""
    for distribution in distributions(name="torch", path=list(site_packages)):
        return f"torch=={distribution.version.split('+')[0]}"
    return SUPPORTED_TORCH


def get_requires_for_build_wheel(config_settings: Mapping[str, object] | None = None) -> list[str]:
    """Return what an isolated build installs beside setuptools."""
    # pip takes these folders off sys.path for an isolated build, but the interpreter still knows them.
    outer = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return ["ninja", torch_requirement(outer)]


get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel
