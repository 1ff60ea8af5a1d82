"""Compiles one configuration of a Triton kernel without a GPU, and measures the machine code."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paracore.inspection.machine_code import Measurement, measure_amdgcn, measure_cubin
from paracore.kernels.configuration import Configuration, Target


def measure(configuration: Configuration, target: Target) -> Measurement:
    """Compile and measure. A compiler crash ends the process: call it in a child (see `worker`).

    The kernel must not have been decorated under TRITON_INTERPRET=1.
    """
    compiled = triton.compile(
        _source(configuration),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options=configuration.options,
    )
    shared_bytes = compiled.metadata.shared
    if target.backend == "hip":
        return measure_amdgcn(compiled.asm["amdgcn"], shared_bytes=shared_bytes)
    functions = measure_cubin(
        compiled.asm["cubin"], knobs.nvidia.cuobjdump.path, dynamic_shared_bytes=shared_bytes
    )
    return functions[configuration.kernel_name]


def cache_key(configuration: Configuration, target: Target) -> str:
    """Digest everything the measurement depends on.

    That is: the kernel's source and that of the functions it calls (Triton's own key), the configuration
    except its requirements, the target, the compiler's version, and the source of this package.
    """
    parts = [
        configuration.kernel.cache_key,
        repr(sorted(configuration.signature.items())),
        repr(sorted(configuration.constants.items())),
        repr(configuration.options),
        repr(target),
        triton.__version__,
        *(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _source(configuration: Configuration) -> ASTSource:
    names: list[str] = configuration.kernel.arg_names
    declared = {*configuration.signature, *configuration.constants}
    if declared != set(names):
        raise ValueError(f"{configuration.kernel_name}: declares {sorted(declared)}, takes {sorted(names)}")
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(names):
        if name in configuration.constants:
            signature[name] = "constexpr"
            constants[index,] = configuration.constants[name]
            continue
        signature[name], _, divisor = configuration.signature[name].partition(":")
        if divisor:
            attributes[index,] = [["tt.divisibility", int(divisor)]]
    return ASTSource(configuration.kernel, signature, constants, attributes)
