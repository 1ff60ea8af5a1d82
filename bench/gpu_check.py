"""`make gpu-check`: the tests marked `gpu`, then the benchmarks, on a machine with a GPU.

Needs nothing but what the machine has: torch, triton, pytest and this checkout, built in place. Without
a GPU the same tests run under Triton's interpreter, and nothing is measured.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

# Together under six minutes, the build included.
TEST_SECONDS = 150
BENCHMARK_SECONDS = 14  # for the samples of one benchmark
LONGEST_BENCHMARK_SECONDS = 37  # with its warm-up
BENCHMARKS = {
    "adamw": ["--shapes", "1000000000", "--dtype", "float32"],
    "attention": ["--shapes", "1x32x8x8192x128", "4x16x16x4096x64", "--dtype", "bfloat16"],
    "matmul": ["--dtype", "bfloat16"],
    "rms_norm": ["--shapes", "8192x4096", "32768x8192", "1023x4097"],
}
RESULTS = Path("bench/results")


def main() -> int:
    """Run the check from the root of a checkout; return 0 if all tests passed and all benchmarks ran."""
    if not torch.cuda.is_available():
        print(
            "gpu-check: no GPU here. The gpu tests run under Triton's interpreter; nothing is measured.",
            flush=True,
        )
        return _run_tests()
    start = time.perf_counter()
    status = _run_tests()
    tests_seconds = time.perf_counter() - start
    RESULTS.mkdir(exist_ok=True)
    stem = f"{datetime.date.today().isoformat()}-{torch.cuda.get_device_name().replace(' ', '-').lower()}"
    failed = [name for name in BENCHMARKS if _run_benchmark(name, RESULTS / f"{stem}-{name}.json") != 0]
    summary = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tests": {"status": status, "seconds": tests_seconds},
        "failed_benchmarks": failed,
        "seconds": time.perf_counter() - start,
    }
    (RESULTS / f"{stem}-check.json").write_text(json.dumps(summary, indent=1) + "\n")
    return status or int(bool(failed))


def _run_tests() -> int:
    """Return pytest's exit status, which is not 0 either when it finds no test marked gpu."""
    return _run([sys.executable, "-m", "pytest", "-m", "gpu", "tests"], TEST_SECONDS)


def _run_benchmark(name: str, out: Path) -> int:
    options = ["--device", "cuda", "--seconds", str(BENCHMARK_SECONDS), *BENCHMARKS[name], "--json", str(out)]
    return _run([sys.executable, "-m", "paracore", "bench", name, *options], LONGEST_BENCHMARK_SECONDS)


def _run(command: list[str], seconds: float) -> int:
    try:
        return subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"gpu-check: {' '.join(command)} took longer than {seconds} s", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
