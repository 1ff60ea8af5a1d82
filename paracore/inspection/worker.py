"""Compiles many configurations, each in a child process of its own, with a cache on disk.

A compiler that crashes takes its process along, so nothing is compiled in the caller's. `inspect` starts
one worker process (this file run as a module). The worker imports Triton once and forks one child per
configuration, a few at a time. The child writes its result to the cache, or fails alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from paracore.inspection.machine_code import Measurement
from paracore.kernels.configuration import TARGETS, Configuration, Target

CATALOGUE = "paracore.kernels.catalogue:configurations"
COMPILE_SECONDS = 600  # a compiler that takes longer hangs


@dataclass(frozen=True)
class Job:
    """One configuration on one target, by name, so that it can be handed to another process."""

    target: str
    kernel: str
    config: str


@dataclass(frozen=True)
class Result:
    """What became of a job: a measurement, or the reason why there is none."""

    job: Job
    measurement: Measurement | None
    error: str = ""


def default_cache_folder() -> Path:
    """Return paracore/kernels in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paracore" / "kernels"


def load_catalogue(catalogue: str) -> Callable[[Target], list[Configuration]]:
    """Import "module:function"; the function lists a target's configurations."""
    module, _, name = catalogue.partition(":")
    function: Callable[[Target], list[Configuration]] = getattr(importlib.import_module(module), name)
    return function


def inspect(
    jobs: list[Job], *, workers: int, cache: Path | None, catalogue: str = CATALOGUE
) -> Iterator[Result]:
    """Yield one result per job, in the order in which they are ready.

    workers: how many are compiled at a time. cache: folder that keeps measurements; None compiles anew.
    catalogue: "module:function" that lists the configurations the jobs name.
    """
    # Under TRITON_INTERPRET the kernels would be Python functions; Triton's own cache would hide changes.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as errors:
        environment |= {"TRITON_ALWAYS_COMPILE": "1", "TRITON_CACHE_DIR": scratch}
        request = {
            "jobs": [asdict(job) for job in jobs],
            "workers": workers,
            "cache": str(cache or Path(scratch) / "measurements"),
            "catalogue": catalogue,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "paracore.inspection.worker", json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        unanswered = set(range(len(jobs)))
        with process:
            for line in process.stdout or ():
                answer = json.loads(line)
                unanswered.discard(answer["job"])
                measured = answer["measurement"]
                measurement = None if measured is None else Measurement(**measured)
                yield Result(jobs[answer["job"]], measurement, answer["error"])
        errors.seek(0)
        reason = f"the worker process ended with code {process.returncode}: {errors.read()[-2000:]}"
        for index in sorted(unanswered):
            yield Result(jobs[index], None, reason)


# ---------------------------------------------------------------- in the worker


@dataclass(frozen=True)
class _Child:
    process: BaseProcess
    job: int
    result: Path
    log: Path
    deadline: float


def _serve(jobs: list[dict[str, str]], workers: int, cache: str, catalogue: str) -> None:
    """Answer each job with one line of JSON on standard output."""
    # Only here: Triton must be imported without its interpreter.
    from triton.runtime.cache import triton_key

    from paracore.inspection.compile import cache_key

    triton_key()  # digests Triton's whole installation: once, for the children to inherit
    configurations = load_catalogue(catalogue)
    folder = Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    waiting = list(range(len(jobs)))[::-1]
    running: list[_Child] = []
    while waiting or running:
        while waiting and len(running) < workers:
            index = waiting.pop()
            job = Job(**jobs[index])
            target = TARGETS[job.target]
            configuration = next(
                entry
                for entry in configurations(target)
                if (entry.kernel_name, entry.name) == (job.kernel, job.config)
            )
            result = folder / f"{cache_key(configuration, target)}.json"
            if result.exists():
                _answer(index, result)
            else:
                running.append(_start(index, configuration, target, result))
        running = _reap(running)


def _start(index: int, configuration: Configuration, target: Target, result: Path) -> _Child:
    log = result.with_suffix(f".{os.getpid()}.log")
    # fork: the child finds Triton imported, and starts in milliseconds
    process = multiprocessing.get_context("fork").Process(
        target=_compile_in_child, args=(configuration, target, result, log)
    )
    process.start()
    return _Child(process, index, result, log, time.monotonic() + COMPILE_SECONDS)


def _compile_in_child(configuration: Configuration, target: Target, result: Path, log: Path) -> None:
    """Compile, and move the finished result into place, so that a crash leaves none."""
    from paracore.inspection.compile import measure

    with log.open("w") as file:  # what compilers print is kept for the failure's report
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    measurement = measure(configuration, target)
    unfinished = result.with_suffix(f".{os.getpid()}.json")
    unfinished.write_text(json.dumps(asdict(measurement)))
    unfinished.replace(result)


def _reap(running: list[_Child]) -> list[_Child]:
    """Wait until a child ends or is overdue, answer for those that have, and return the others."""
    if running:
        patience = min(child.deadline for child in running) - time.monotonic()
        wait([child.process.sentinel for child in running], timeout=max(0.0, patience))
    remaining = []
    for child in running:
        overdue = time.monotonic() > child.deadline
        if child.process.is_alive() and not overdue:
            remaining.append(child)
            continue
        if overdue:
            child.process.kill()
        child.process.join()
        _answer(child.job, child.result, _failure(child, overdue))
        child.log.unlink(missing_ok=True)
    return remaining


def _failure(child: _Child, overdue: bool) -> str:
    code = child.process.exitcode or 0
    if code == 0:
        return ""
    if overdue:
        return f"the compiler took longer than {COMPILE_SECONDS} s"
    log = child.log.read_text(errors="replace").strip() if child.log.exists() else ""
    if code < 0:
        return f"the compiler crashed with {signal.Signals(-code).name}\n{log[-2000:]}".strip()
    return log[-2000:] or f"the compiler ended with code {code}"


def _answer(job: int, result: Path, error: str = "") -> None:
    measurement = None if error else json.loads(result.read_text())
    print(json.dumps({"job": job, "measurement": measurement, "error": error}), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the caller wants no more results
        _serve(**json.loads(sys.argv[1]))
