"""The link between namespaces: as fast as asked for, no faster, and gone afterwards whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from paracore.bench import shaped_link as module
from paracore.bench.linear_overlap import FIELDS, PROBE, take_turns
from paracore.bench.ranks import Ranks
from paracore.bench.shaped_link import ShapedLink, main, remove, run_in, set_up, shaped_link
from paracore.errors import UsageError

_TIMEOUT = 60.0  # seconds that any wait may last


@cache
def _reason_against() -> str | None:
    """Return why no link can be made here."""
    try:
        with shaped_link(2, 1e8, f"paracore-try-{os.getpid()}"):
            return None
    except UsageError as error:
        return str(error)


@pytest.fixture
def name() -> str:
    """Return the name of a link of this test alone, where one can be made."""
    if reason := _reason_against():
        pytest.skip(reason)
    return f"paracore-test-{os.getpid()}"


def namespaces(name: str) -> list[str]:
    return sorted(path.name for path in Path("/var/run/netns").glob(f"{name}-*"))


def wait_until(condition: Callable[[], object]) -> None:
    latest = time.monotonic() + _TIMEOUT
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.02)


def test_ranks_get_the_bandwidth_that_is_asked_for(name: str, quick_ranks: None) -> None:
    report = torch.zeros(2, len(FIELDS), dtype=torch.float64).share_memory_()
    with shaped_link(2, 20e6, name) as link:
        ranks = Ranks(2, 2, take_turns, "cpu", report, link=link)

        def best() -> float:
            """Of several: what else the machine does can only slow one down."""
            found: list[float] = []
            for _ in range(7):
                ranks.turn("probe")
                seconds, _, sent = report.amax(0).tolist()
                assert PROBE <= sent <= 1.1 * PROBE  # it went by the link, and hardly anything else did
                found.append(PROBE / seconds)
            return max(found)

        assert best() == pytest.approx(20e6, rel=0.1)
        link.limit(40e6)
        assert best() == pytest.approx(40e6, rel=0.1)
        ranks.end()


MEET = """
import os, socket, sys, time
rank, size, place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), (os.environ["MASTER_ADDR"], 29500)
if rank == 0:
    server = socket.create_server(place)
    callers = [server.accept()[0] for _ in range(1, size)]
    open(sys.argv[1], "w").write(str(sorted(int(caller.recv(9)) for caller in callers)))
else:
    for _ in range(600):
        try:
            socket.create_connection(place).sendall(str(rank).encode())
            break
        except OSError:
            time.sleep(0.1)
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_meet_over_the_link_and_nothing_is_left(name: str, ranks: int, tmp_path: Path) -> None:
    with shaped_link(ranks, 1e8, name) as link:
        assert len(namespaces(name)) == (2 if ranks == 2 else 4)  # more than two need a hub
        assert run_in(link, [sys.executable, "-I", "-c", MEET, str(tmp_path / "met")]) == 0
    assert (tmp_path / "met").read_text() == str(list(range(1, ranks)))
    assert namespaces(name) == []


def test_the_others_end_when_a_rank_fails(name: str) -> None:
    with shaped_link(2, 1e8, name) as link:
        started = time.monotonic()
        assert run_in(link, ["sh", "-c", "test $RANK = 0 && exit 3; exec sleep 600"]) == 3
        assert time.monotonic() - started < _TIMEOUT


def test_an_exception_leaves_nothing_behind(name: str) -> None:
    def fail() -> None:
        assert len(namespaces(name)) == 4
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), shaped_link(3, 1e8, name):
        fail()
    assert namespaces(name) == []


def test_a_link_that_cannot_be_finished_leaves_nothing_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    existed = []

    def fail(namespace: str, bandwidth: float) -> None:
        existed.extend(namespaces(name))
        raise UsageError("no tc")

    monkeypatch.setattr(module, "_shape", fail)
    with pytest.raises(UsageError, match="no tc"), shaped_link(2, 1e8, name):
        pytest.fail("made")
    assert len(existed) == 2
    assert namespaces(name) == []


def test_sigterm_leaves_nothing_behind() -> None:
    if reason := _reason_against():
        pytest.skip(reason)
    arguments = ("run", "--ranks", "2", "--bandwidth", "100", "--", "sh", "-c", "echo up; exec sleep 600")
    command = [sys.executable, "-m", "paracore.bench.shaped_link", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        name = f"paracore-{process.pid}"
        assert len(namespaces(name)) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(_TIMEOUT) == 128 + signal.SIGTERM
    assert namespaces(name) == []


def test_a_link_can_be_kept_and_is_not_made_twice(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--ranks", "2", "--bandwidth", "50"]) == 0
    made = f"paracore-{os.getpid()}"
    try:
        out = capsys.readouterr().out
        assert f"ip netns exec {made}-1 env GLOO_SOCKET_IFNAME=wire COMMAND" in out
        assert f"down {made}" in out
        with pytest.raises(UsageError, match=f"the link {made} exists, as namespaces {made}-0, {made}-1"):
            set_up(ShapedLink(made, 2), 1e8)
        assert main(["down", made]) == 0
        assert namespaces(made) == []
        assert main(["down", made]) == 2
        assert f"there is no link '{made}'" in capsys.readouterr().err
    finally:
        remove(made)


@pytest.mark.parametrize(
    ("ranks", "bandwidth", "message"),
    [
        (1, 1e8, "a shaped link between 1 ranks: must be 2 to 250"),
        (251, 1e8, "a shaped link between 251 ranks"),
        (2, 0.0, r"a shaped link of 0 MB/s: must be 0.1 to 100000"),
        (2, -1e6, "of -1 MB/s"),
        (2, float("nan"), "of nan MB/s"),
        (2, float("inf"), "of inf MB/s"),
    ],
)
def test_bad_numbers_are_refused(ranks: int, bandwidth: float, message: str) -> None:
    with pytest.raises(UsageError, match=message), shaped_link(ranks, bandwidth, "paracore-refused"):
        pytest.fail("made")


def test_without_root_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="only root may make; this is user 1000: run the command with sudo"):
        module.check(2, 1e8)


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_without_iproute2_it_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/sbin/{tool}")
    with pytest.raises(UsageError, match=f"no '{missing}' on the PATH: install iproute2"):
        module.check(2, 1e8)


def test_what_the_kernel_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Operation not permitted\n")

    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(subprocess, "run", refuse)
    with (
        pytest.raises(UsageError, match="ip netns add refused-0 failed: Operation not permitted"),
        shaped_link(2, 1e8, "refused"),
    ):
        pytest.fail("made")
