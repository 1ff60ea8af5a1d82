"""The command line on every rank of a launcher, in processes that have imported it before.

A rank knows its place by its environment, as torchrun and our own launcher set it. How these start ranks and
tell of their end is in test_cli.py: that takes an interpreter for each, which imports torch for seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import IO, NamedTuple
from unittest import mock

import torch.distributed as dist

from paracore.cli.main import main
from tests.conftest import run_ranks


class Ended(NamedTuple):
    """The exit status of a command on one rank, and what it wrote."""

    status: int
    out: str
    err: str


def run_on_ranks(world_size: int, *argv: object, prepare: Callable[[], object] = dict) -> list[Ended]:
    """Run `paracore argv` on every rank of a launcher; return what came of it, by rank.

    `prepare` is called on each before; like the functions of `launch` it must be importable.
    """
    return run_ranks(world_size, _command, [*map(str, argv)], prepare)


def run_launcher(*argv: object, **environment: str) -> Ended:
    """Run `paracore argv`, which starts an interpreter for each rank, with this beside the environment.

    In a process of its own, which takes along what the launcher leaves behind: threads and a store.
    """
    [ended] = run_ranks(1, _launch, [*map(str, argv)], environment)
    assert isinstance(ended, Ended)
    return ended


def _launch(argv: list[str], environment: dict[str, str]) -> Ended:
    os.environ.update(environment)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        for file, number in ((out, 1), (err, 2)):  # where the ranks write as well
            os.dup2(file.fileno(), number)
        status = main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
        return Ended(status, _written(out), _written(err))


def _command(argv: list[str], prepare: Callable[[], object]) -> Ended:
    numbers = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    numbers |= {f"LOCAL_{name}": number for name, number in numbers.items()}
    numbers |= {"MASTER_PORT": _free_port()}
    place = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    dist.destroy_process_group()  # the command makes its own
    with (
        tempfile.TemporaryFile("w+") as out,  # with the file number that the fault handler asks for
        tempfile.TemporaryFile("w+") as err,
        mock.patch.dict(os.environ, place),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        prepare()
        status = main(argv)
        return Ended(status, _written(out), _written(err))


def _written(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _free_port() -> int:
    """Return the same one on every rank."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        ports = [found.getsockname()[1]]
    dist.broadcast_object_list(ports)
    return int(ports[0])
