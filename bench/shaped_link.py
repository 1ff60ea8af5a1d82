"""A link of given bandwidth between processes of one machine, made by the kernel and for real messages.

Every rank gets a network namespace of its own. Two are joined directly by a veth pair, more by a bridge in
a namespace of the link's own. A token-bucket filter on each rank's end limits what the rank sends, and so
what travels in both directions. No interface of the host takes part. Unlike `paracore.bench.link` this
delays real sockets, whatever program uses them; it needs root, and `ip` and `tc` of iproute2.

    python -m paracore.bench.shaped_link run --ranks 2 --bandwidth 100 -- paracore train --tp 2
    python -m paracore.bench.shaped_link up --ranks 2 --bandwidth 100     # says how to use and remove it
    python -m paracore.bench.shaped_link down NAME

`run` starts the command once in each namespace, with the variables that torchrun sets, and removes
everything when they have ended or one has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paracore.errors import UsageError

INTERFACE = "wire"  # of each rank, in its namespace
SLOWEST, FASTEST = 1e5, 1e11  # bytes per second
QUEUE = 2**17  # bytes of a socket on their way to the link
BURST = 2**17  # bytes that may pass at once after a pause; packets between namespaces have up to 64 KiB
TICKS = 1000  # per second, of the kernel's timer
MTU = 9000  # bytes; the bucket counts headers as well, here below 1 %
MOST_RANKS = 250  # the addresses of a /24

_NAMESPACES = Path("/var/run/netns")  # where iproute2 keeps them by name
_CLONE_NEWNET = 0x40000000  # of <linux/sched.h>
_PORT = 29500  # nobody else is in the namespace


@dataclass(frozen=True)
class ShapedLink:
    """A link between namespaces, one per rank. name: they begin with it. It is made by `shaped_link`."""

    name: str
    ranks: int

    def namespace(self, rank: int) -> str:
        """Return the namespace of `rank`."""
        return f"{self.name}-{rank}"

    def address(self, rank: int) -> str:
        """Return the address of `rank` on the link."""
        return f"10.0.0.{rank + 1}"

    def enter(self, rank: int) -> None:
        """Move this thread, and those that it starts, to the namespace of `rank`; tell gloo its interface.

        For a process of its own, before it makes process groups. They cannot meet by TCP outside of the
        link: use a file as rendezvous, or the address of a rank.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NAMESPACES / self.namespace(rank)).open() as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot enter namespace {self.namespace(rank)}: {os.strerror(code)}")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables by which a program in the namespace of `rank` finds the others."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def limit(self, bandwidth: float) -> None:
        """Let each rank send `bandwidth` bytes per second from now on."""
        for rank in range(self.ranks):
            _shape(self.namespace(rank), bandwidth)


@contextlib.contextmanager
def shaped_link(ranks: int, bandwidth: float, name: str | None = None) -> Iterator[ShapedLink]:
    """Make a link on which each of `ranks` ranks sends `bandwidth` bytes per second; remove it at the end.

    Also after an exception, and, in the main thread, after SIGTERM, which raises SystemExit here.
    name: of the namespaces; by default one that this process alone uses.

    Raises UsageError, before anything is made, where the numbers are wrong, without root, ip or tc, and
    where the kernel refuses.
    """
    link = ShapedLink(name or f"paracore-{os.getpid()}", ranks)
    with _exit_on_termination():
        try:
            set_up(link, bandwidth)
            yield link
        finally:
            remove(link.name)


def set_up(link: ShapedLink, bandwidth: float) -> None:
    """Make the namespaces of `link` and join them; see `shaped_link`. A failure leaves parts to `remove`."""
    check(link.ranks, bandwidth)
    if existing := _namespaces_of(link.name):
        raise UsageError(f"the link {link.name} exists, as namespaces {', '.join(existing)}: remove it first")
    namespaces = [link.namespace(rank) for rank in range(link.ranks)]
    for namespace in namespaces:
        _add_namespace(namespace)
    if link.ranks == 2:
        _ip(
            namespaces[0],
            "link",
            "add",
            INTERFACE,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            namespaces[1],
        )
    else:
        _join_by_bridge(f"{link.name}-hub", namespaces)
    for rank, namespace in enumerate(namespaces):
        _ip(namespace, "address", "add", f"{link.address(rank)}/24", "dev", INTERFACE)
        _ip(namespace, "link", "set", INTERFACE, "mtu", str(MTU), "up")
        _shape(namespace, bandwidth)


def remove(name: str) -> None:
    """Remove all namespaces of the link `name`, as many as there are, and their interfaces at once."""
    for namespace in _namespaces_of(name):
        # Processes may still live in the namespace: it would keep its interfaces until they end.
        _run("ip", "-n", namespace, "link", "delete", INTERFACE, check=False)
        _run("ip", "netns", "delete", namespace, check=False)


def check(ranks: int, bandwidth: float) -> None:
    """Raise UsageError unless a link of these numbers can be made, by this user and on this machine."""
    if not 2 <= ranks <= MOST_RANKS:
        raise UsageError(f"a shaped link between {ranks} ranks: must be 2 to {MOST_RANKS}")
    check_bandwidth(bandwidth)
    require_means()


def check_bandwidth(bandwidth: float) -> None:
    """Raise UsageError unless a link can have `bandwidth`, in bytes per second."""
    if not SLOWEST <= bandwidth <= FASTEST:  # also refuses nan
        raise UsageError(
            f"a shaped link of {bandwidth / 1e6:g} MB/s: must be {SLOWEST / 1e6:g} to {FASTEST / 1e6:g}"
        )


def require_means() -> None:
    """Raise UsageError unless this process may make namespaces, and has the tools for it."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UsageError(
                f"a shaped link needs ip and tc, and there is no {tool!r} on the PATH: install iproute2 "
                "(Debian, Ubuntu: apt install iproute2; Fedora, RHEL: dnf install iproute iproute-tc)"
            )
    if os.geteuid() != 0:
        raise UsageError(
            f"a shaped link needs network namespaces of its own, which only root may make; this is user "
            f"{os.geteuid()}: run the command with sudo, or without a bandwidth to measure over loopback"
        )


def _add_namespace(namespace: str) -> None:
    _run("ip", "netns", "add", namespace)
    _ip(namespace, "link", "set", "lo", "up")
    # What a socket has queued, by default a megabyte, delays all acknowledgements of what arrives meanwhile.
    short_queue = f"echo {QUEUE} > /proc/sys/net/ipv4/tcp_limit_output_bytes"
    _run("ip", "netns", "exec", namespace, "sh", "-c", short_queue)


def _join_by_bridge(hub: str, namespaces: Sequence[str]) -> None:
    _add_namespace(hub)
    _ip(hub, "link", "add", "bridge", "type", "bridge")
    _ip(hub, "link", "set", "bridge", "up")
    for rank, namespace in enumerate(namespaces):
        port = f"port{rank}"
        _ip(hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _ip(hub, "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")


def _shape(namespace: str, bandwidth: float) -> None:
    check_bandwidth(bandwidth)
    # A bucket holds what may pass at once after a pause: little, or short messages would beat the bandwidth,
    # but no less than the largest packet and than what flows between two looks of the kernel's timer.
    burst = max(BURST, int(bandwidth / TICKS))
    bucket = ("tbf", "rate", f"{round(8 * bandwidth)}bit", "burst", str(burst), "latency", "200ms")
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", INTERFACE, "root", *bucket)


def _namespaces_of(name: str) -> list[str]:
    """Return those that exist."""
    names = sorted(path.name for path in _NAMESPACES.iterdir()) if _NAMESPACES.exists() else []
    return [found for found in names if re.fullmatch(rf"{re.escape(name)}-(\d+|hub)", found)]


def _ip(namespace: str, *arguments: str) -> None:
    _run("ip", "-n", namespace, *arguments)


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if check and done.returncode:
        reason = (done.stderr or done.stdout).strip()
        raise UsageError(f"no shaped link can be made here: {' '.join(command)} failed: {reason}")


@contextlib.contextmanager
def _exit_on_termination() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that what is open is closed; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------- the command


def run_in(link: ShapedLink, command: Sequence[str]) -> int:
    """Run `command` in the namespace of each rank; return 0, or the first other exit status there is.

    Where one fails the others are ended.
    """
    processes = []
    try:
        for rank in range(link.ranks):
            environment = {**os.environ, **link.environment(rank)}
            inside = ["ip", "netns", "exec", link.namespace(rank), *command]
            processes.append(subprocess.Popen(inside, env=environment))
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.05)
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paracore.bench.shaped_link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("run", "up"):
        action = actions.add_parser(name)
        action.add_argument("--ranks", type=int, default=2, help="namespaces (default: %(default)s)")
        action.add_argument("--bandwidth", type=float, required=True, metavar="MB/s", help="1e6 bytes per s")
        if name == "run":
            action.add_argument("program", nargs="+", metavar="COMMAND", help="behind --")
    actions.add_parser("down").add_argument("name")
    return parser


def _act(args: argparse.Namespace) -> int:
    if args.action == "down":
        require_means()
        if not _namespaces_of(args.name):
            raise UsageError(f"there is no link {args.name!r}: `ip netns` lists the namespaces of all")
        remove(args.name)
        return 0
    if args.action == "run":
        with shaped_link(args.ranks, 1e6 * args.bandwidth) as link:
            return run_in(link, args.program)
    link = ShapedLink(f"paracore-{os.getpid()}", args.ranks)
    with contextlib.ExitStack() as undo:
        undo.callback(remove, link.name)
        set_up(link, 1e6 * args.bandwidth)
        undo.pop_all()
    for rank in range(link.ranks):
        inside = f"ip netns exec {link.namespace(rank)} env GLOO_SOCKET_IFNAME={INTERFACE}"
        print(f"{link.address(rank)}: {inside} COMMAND")
    print(f"to remove it: python -m paracore.bench.shaped_link down {link.name}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        return _act(_parser().parse_args(argv))
    except UsageError as error:
        print(f"shaped_link: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
