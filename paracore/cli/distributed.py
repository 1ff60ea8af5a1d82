"""Runs a command on every rank of a mesh: starts local processes, or joins those that torchrun started."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paracore.cli import exit_codes
from paracore.errors import UsageError
from paracore.parallel.ledger import Ledger
from paracore.parallel.mesh import MeshShape, TrainingAxes
from paracore.threads import available_cores


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a command knows about the rank it runs on."""

    axes: TrainingAxes
    device: torch.device
    is_first: bool


# The launcher ends all ranks when the first one ends: a rank that lost another lets that one come first.
_GRACE_SECONDS = 2.0

Worker = Callable[[Rank], int]


def run_on_mesh(
    worker: Worker, shape: MeshShape, argv: Sequence[str], *, device: str, timeout: float, traceback: bool
) -> int:
    """Run `worker` on every rank of a mesh of `shape` and return the exit status.

    Under torchrun (RANK and WORLD_SIZE are set) this process becomes one of the ranks. Otherwise
    it starts one local process per rank, each with the command line `argv`; a mesh of one rank
    runs in this process. `device` is "cpu" (gloo) or "cuda" (NCCL); no wait lasts longer than
    `timeout` seconds. When a rank dies the others are ended, and one message names the root cause.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        shape.require_world_size(int(os.environ["WORLD_SIZE"]))
        return _guarded(lambda: _run_rank(worker, shape, device, timeout, store=None))
    if shape.world_size == 1:
        return _run_rank(worker, shape, device, timeout, store=HashStore())
    return _start_ranks(argv, shape.world_size, traceback)


# ---------------------------------------------------------------- one rank


def _run_rank(worker: Worker, shape: MeshShape, device: str, timeout: float, store: Store | None) -> int:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, available_cores() // local_ranks))
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    wait = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        timeout=wait,
        store=store,
        rank=-1 if store is None else 0,  # -1: torchrun's environment tells
        world_size=-1 if store is None else 1,
    )
    try:
        mesh = shape.build(device)
        axes = TrainingAxes.of(mesh, Ledger(), wait)
        return worker(Rank(axes, torch.device(device), is_first=dist.get_rank() == 0))
    finally:
        dist.destroy_process_group()


def _guarded(run: Callable[[], int]) -> int:
    """Report a failure to the launcher, which prints one message for all ranks, not to the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a traceback
    handler = get_error_handler()
    handler.initialize()
    try:
        return run()
    except UsageError:
        raise  # whoever runs the command prints it
    except Exception as error:  # noqa: BLE001 (the launcher must learn of whatever it is)
        handler.record_exception(error)
        if _means_lost_peer(error):
            time.sleep(_GRACE_SECONDS)
            return exit_codes.LOST_PEER
        return exit_codes.CRASHED


def _means_lost_peer(error: Exception) -> bool:
    # gloo raises a plain RuntimeError that names its own source file.
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


# ---------------------------------------------------------------- all local ranks


def _start_ranks(argv: Sequence[str], count: int, traceback: bool) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="paracore-") as logs,
        _environment_of_local_ranks(),
        _no_logging(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="paracore",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "paracore", *argv)
        except ChildFailedError as error:
            return _report(_root_cause(list(error.failures.values())), traceback)
        except SignalException as error:
            return _interrupted(error.sigval)
    return exit_codes.PASSED


@contextlib.contextmanager
def _environment_of_local_ranks() -> Iterator[None]:
    """Set what local ranks need to run fast and on any laptop, unless the user has set it already."""
    # A thread that spins while it waits takes the core that another rank needs: 10 times slower.
    defaults = {"OMP_WAIT_POLICY": "PASSIVE"}
    # gloo would look up the host's name, wherever that may point.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        defaults["GLOO_SOCKET_IFNAME"] = loopback[0]
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _no_logging() -> Iterator[None]:
    """Silence the launcher, which logs failures at length: our one message replaces that."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _root_cause(failures: list[ProcessFailure]) -> ProcessFailure:
    """Of all ranks that failed, the one that the others' failures follow from."""

    def consequence(failure: ProcessFailure) -> int:
        if failure.exitcode == -signal.SIGTERM:
            return 4  # ended by the launcher
        if failure.exitcode == exit_codes.LOST_PEER:
            return 3
        if failure.exitcode > 0:
            return 1 if _has_spoken(failure) else 2
        return 0

    return min(failures, key=lambda failure: (consequence(failure), failure.timestamp))


def _has_spoken(failure: ProcessFailure) -> bool:
    """Whether the rank has printed why it ended: the first one does, for a verdict or a refusal."""
    return failure.exitcode in (exit_codes.FAILED, exit_codes.USAGE) and failure.local_rank == 0


def _report(failure: ProcessFailure, traceback: bool) -> int:
    if _has_spoken(failure):
        return failure.exitcode
    if failure.exitcode == -signal.SIGINT:
        return _interrupted(signal.SIGINT)
    recorded: object = failure.message  # a dict where the rank recorded an exception
    if failure.exitcode < 0:
        text = f"was killed by {failure.signal_name()}"
    elif isinstance(recorded, dict):
        text = f"failed: {recorded['message']}"
    else:
        text = f"ended with status {failure.exitcode}"
    print(f"paracore: error: rank {failure.local_rank} {text}", file=sys.stderr)
    if isinstance(recorded, dict):
        where = recorded["extraInfo"]["py_callstack"] if traceback else "(--traceback shows where)"
        print(where, file=sys.stderr)
    return exit_codes.USAGE if failure.exitcode == exit_codes.USAGE else exit_codes.CRASHED


def _interrupted(by: signal.Signals) -> int:
    print(f"paracore: interrupted by {by.name}", file=sys.stderr)
    return exit_codes.INTERRUPTED
