"""`paracore env`: what is installed and built, and which implementations each operation has here."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import paracore
from paracore.cli import flags, support
from paracore.ops import implementations
from paracore.ops.catalog import OPERATIONS
from paracore.ops.implementations import Operation

RULE = (
    f"argument impl, then {implementations.ENVIRONMENT_VARIABLE}, then the device: cuda triton, cpu native, "
    "others reference; dtypes that the device's kernel does not list take reference; any other refusal is "
    "an error"
)

# What paracore reads itself, and what of others decides how its kernels run.
ENVIRONMENT = {
    implementations.ENVIRONMENT_VARIABLE: f"{', '.join(implementations.NAMES)}: for every operation",
    "TRITON_INTERPRET": "1: Triton kernels run on the CPU, in Triton's interpreter",
    "ATEN_CPU_CAPABILITY": "default, avx2 or avx512: the most that native kernels may use",
    "OMP_NUM_THREADS": "threads of the native kernels",
    "THP_MEM_ALLOC_ENABLE": "1: torch asks for huge pages, which makes fresh CPU tensors cheaper",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON to FILE")
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="print instead which implementation serves each operation, device and dtype, in Markdown",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report, and write it to `args.json` if given. Returns the exit code."""
    if args.json is not None:
        flags.writable(args.json, flag="--json")
    report = collect()
    print("\n".join(support.markdown() if args.matrix else _lines(report)))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def collect() -> dict[str, Any]:
    """Return the report: versions, devices, cpu, native, rule, operations, environment."""
    return {
        "versions": {
            "paracore": paracore.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        },
        "devices": ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))],
        "cpu": {"capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()},
        "native": _native(),
        "rule": RULE,
        "operations": {operation.name: _operation(operation) for operation in OPERATIONS},
        "environment": {
            name: {"value": os.environ.get(name), "meaning": meaning} for name, meaning in ENVIRONMENT.items()
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native() -> dict[str, Any]:
    """Describe the extension; `missing` is why it cannot be used, or None."""
    missing = implementations.missing("native", "cpu")
    if missing is not None:
        return {"missing": missing}
    from paracore import _C

    return {
        "missing": None,
        **_C.build_info(),
        "cuda_sources": importlib.util.find_spec("paracore._CUDA") is not None,
        "capabilities": _C.capabilities(),
        "threads": _C.count_threads(),
    }


def _operation(operation: Operation[Any]) -> dict[str, dict[str, Any]]:
    """Per implementation: where it can run, why not elsewhere, for which dtypes, where it is the default."""
    device_types = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    described = {}
    for name, implementation in operation.implementations.items():
        refusals = {device: implementations.missing(name, device) for device in device_types}
        described[name] = {
            "available_on": [device for device, reason in refusals.items() if reason is None],
            "refusals": {device: reason for device, reason in refusals.items() if reason is not None},
            "dtypes": implementation.dtype_names(),
            "default_on": [device for device in device_types if implementations.default_name(device) == name],
        }
    return described


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{name:10} {version or 'none'}" for name, version in report["versions"].items()]
    lines.append(f"{'devices':10} {', '.join(report['devices'])}")
    lines.append("{:10} capability {capability}, {threads} threads".format("cpu", **report["cpu"]))
    lines.append(f"{'native':10} {_native_line(report['native'])}")
    lines += ["", f"implementations, by {report['rule']}"]
    for operation, described in report["operations"].items():
        for name, entry in described.items():
            lines += _implementation_lines(operation, name, entry)
    lines += ["", "environment"]
    for name, entry in report["environment"].items():
        value = "not set" if entry["value"] is None else entry["value"]
        lines.append(f"  {name}={value}  ({entry['meaning']})")
    return lines


def _native_line(native: dict[str, Any]) -> str:
    if native["missing"] is not None:
        return f"not available: {native['missing']}"
    cuda = "with" if native["cuda_sources"] else "without"
    return (
        f"built for torch {native['torch']} by compiler {native['compiler']}, {cuda} CUDA sources; "
        f"runs {', '.join(native['capabilities'])} on {native['threads']} threads"
    )


def _implementation_lines(operation: str, name: str, entry: dict[str, Any]) -> list[str]:
    available = f"on {', '.join(entry['available_on'])}" if entry["available_on"] else "not available"
    default = f", the default on {', '.join(entry['default_on'])}" if entry["default_on"] else ""
    lines = [f"  {operation}  {name:10} {available}{default}: {entry['dtypes']}"]
    return lines + [f"      not on {device}: {reason}" for device, reason in entry["refusals"].items()]
