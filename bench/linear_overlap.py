"""How much of tensor parallelism's communication linear layers hide behind their own products.

Ranks run each layer (`paracore.bench.parallel_layers`) in five ways, in turn, in an order that changes from
round to round:

    compute      the layer with plain collectives left out: its products alone
    messages     what the overlapped layer sends, in its order, with nothing computed in between
    collectives  the same of the plain layer
    plain        collectives, then products; backward has a collective under way beside a product
    overlapped   products of parts of the sequence while other parts travel

In each the seconds are counted for which messages hold a rank up: it starts them or waits for them. Hidden
is 1 - held up when overlapped / the messages alone. Over peer memory (NVLink) there are no messages to
watch: there what overlapped takes longer than compute is held up, and collectives stand for messages. On CPUs
the messages travel over loopback or, for a given bandwidth, over `paracore.bench.shaped_link`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paracore.bench.parallel_layers import BOTH, Layer
from paracore.bench.ranks import Ranks
from paracore.bench.shaped_link import FASTEST, INTERFACE, SLOWEST, ShapedLink, shaped_link
from paracore.bench.watch import Step, Watch, clock_for
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.overlap import Overlap

NAME = "linear_overlap"
MODES = ("compute", "messages", "collectives", "plain", "overlapped")
FIELDS = ("seconds", "held_up", "sent")
"""What a turn reports of a rank: seconds, and bytes that left by the shaped link (0 over another)."""

MIN_ROUNDS = 5
CALIBRATION = 5  # turns of a kind, of which the median counts
PROBE = 2**22  # bytes sent to measure the bandwidth
_UNSHAPED = 1e10  # bytes per second, more than sockets carry here

UNITS = {
    "bandwidth, measured_bandwidth": "bytes per s that a rank sends; null: not limited, not measured",
    "figures, samples": "s, but for shares and ratios, and bytes for sent",
}

Turn = dict[str, float]
Measured = dict[str, list[float]]

# ---------------------------------------------------------------- in a rank


def take_turns(axis: MeshAxis, device_type: str, report: Tensor) -> Callable[..., None]:
    """Return a rank's turns: "load" a layer, "prepare" a direction, "probe" the link, and all MODES.

    report: [ranks, FIELDS].
    """
    rank = _Rank(dataclasses.replace(axis, name="tp"), device_type, report)
    return lambda name, *arguments: getattr(rank, name)(*arguments)


class _Rank:
    """Runs one layer at a time. Its methods are the turns."""

    def __init__(self, tp: MeshAxis, device_type: str, report: Tensor) -> None:
        self._tp, self._report = tp, report
        self._device = torch.device(device_type, tp.rank) if device_type == "cuda" else torch.device("cpu")
        self._clock = clock_for(self._device)
        self._watch = Watch(self._clock)

    def load(self, layer: Layer, overlap: Overlap) -> None:
        self._messages: list[Step] = []
        self._collectives: list[Step] = []
        self._run, self._overlap = layer.build(self._tp, self._device), overlap.on(self._device, self._tp)

    def prepare(self, direction: str) -> None:
        """Warm up, and record the messages of a forward, or of both directions."""
        self._backward = direction == BOTH
        for overlap in (None, self._overlap):
            self._run(overlap, self._backward)
        with self._watch.recording() as self._collectives:
            self._run(None, self._backward)
        with self._watch.recording() as self._messages:
            self._run(self._overlap, self._backward)
        if self._overlap.peers:  # what it sends besides, in a step, would pass for all that it sends
            self._messages = []

    def compute(self) -> None:
        with self._reported(), self._watch.leaving_out():
            self._run(None, self._backward)

    def plain(self) -> None:
        with self._reported(), self._watch.watching():
            self._run(None, self._backward)

    def overlapped(self) -> None:
        with self._reported(), self._watch.watching():
            self._run(self._overlap, self._backward)

    def messages(self) -> None:
        with self._reported():
            for step in self._messages:
                step()

    def collectives(self) -> None:
        with self._reported():
            for step in self._collectives:
                step()

    def probe(self) -> None:
        """Send to the next rank, and receive from the one before."""
        group, x = self._tp.connection(), torch.ones(PROBE // 4, device=self._device)
        peers = [(self._tp.rank + step) % self._tp.size for step in (-1, 1)]
        buffers = zip((dist.irecv, dist.isend), (torch.empty_like(x), x), peers, strict=True)
        operations = [
            dist.P2POp(operation, buffer, dist.get_global_rank(group, peer), group)
            for operation, buffer, peer in buffers
        ]
        with self._reported():
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Report what happens within, from when all ranks are there to when this one has done its part."""
        self._watch.take()
        dist.barrier(self._tp.connection())
        sent, start = _sent(), self._clock.mark()
        yield
        seconds = self._clock.seconds(start, self._clock.mark())
        row = [seconds, self._watch.take(), _sent() - sent]
        self._report[self._tp.rank] = torch.tensor(row, dtype=torch.float64)


def _sent() -> int:
    """Return the bytes that have left by the shaped link, headers included; 0 where this process has none."""
    table = Path("/proc/self/net/dev")
    for line in table.read_text().splitlines() if table.exists() else ():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])  # behind eight of what was received
    return 0


# ---------------------------------------------------------------- in the measuring process


def calibrate(turn: Callable[[str], Turn], limit: Callable[[float], None], ratio: float) -> float:
    """Limit to the bandwidth at which compute takes `ratio` times as long as the messages, and return it."""
    limit(_UNSHAPED)
    computes = [turn("compute")["seconds"] for _ in range(CALIBRATION)]
    bandwidth = ratio * turn("messages")["sent"] / statistics.median(computes)
    for _ in range(2):  # what messages cost besides their bytes is known only at about that bandwidth
        limit(_possible(bandwidth))
        pairs = [[turn(name)["seconds"] for name in ("compute", "messages")] for _ in range(CALIBRATION)]
        compute, messages = map(statistics.median, zip(*pairs, strict=True))
        bandwidth = _possible(bandwidth) * ratio * messages / compute
    limit(_possible(bandwidth))
    return _possible(bandwidth)


def _possible(bandwidth: float) -> float:
    return min(max(bandwidth, SLOWEST), FASTEST)


def measure(
    turn: Callable[[str], Turn],
    *,
    seconds: float,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Let all MODES take turns until another round would pass `seconds`; return samples by mode and field."""
    order = random.Random(seed)
    for mode in MODES:
        turn(mode)
    samples: Measured = defaultdict(list)
    start, rounds = clock(), 0
    while rounds < MIN_ROUNDS or (clock() - start) * (rounds + 1) <= seconds * rounds:
        for mode in order.sample(MODES, len(MODES)):
            for field, value in turn(mode).items():
                samples[f"{mode}_{field}"].append(value)
        rounds += 1
    return dict(samples)


def summary(samples: Measured) -> dict[str, float]:
    """Return medians, and what is derived from them."""
    found = {name: statistics.median(values) for name, values in samples.items()}
    if found["messages_held_up"] == 0:
        found["messages_held_up"] = found["messages_seconds"] = found["collectives_held_up"]
        found["overlapped_held_up"] = max(0.0, found["overlapped_seconds"] - found["compute_seconds"])
    found["hidden"] = 1 - found["overlapped_held_up"] / found["messages_held_up"]
    found["plain_hidden"] = 1 - found["plain_held_up"] / found["collectives_held_up"]
    found["ratio"] = found["plain_seconds"] / found["overlapped_seconds"]
    found["compute_over_messages"] = found["compute_seconds"] / found["messages_seconds"]
    return found


@dataclasses.dataclass(frozen=True)
class Conditions:
    """How to measure. threads: of all ranks together. bandwidth: bytes per second.

    ratio: choose the bandwidth so that compute takes this many times as long as the messages, for each layer
    and direction. With neither the messages are not slowed down. seconds: of samples, for each of them.
    """

    tp: int
    threads: int
    seconds: float
    seed: int = 0
    device_type: str = "cpu"
    bandwidth: float | None = None
    ratio: float | None = None


def run(layers: Sequence[Layer], overlap: Overlap, conditions: Conditions) -> Iterator[dict[str, Any]]:
    """Measure layer by layer; yield the figures of each direction, with all samples."""
    with contextlib.ExitStack() as stack:
        link = None
        if conditions.bandwidth or conditions.ratio:
            link = stack.enter_context(shaped_link(conditions.tp, conditions.bandwidth or _UNSHAPED))
        report = torch.zeros(conditions.tp, len(FIELDS), dtype=torch.float64).share_memory_()
        arguments = (conditions.tp, conditions.threads, take_turns, conditions.device_type, report)
        ranks = Ranks(*arguments, link=link, device_type=conditions.device_type)
        stack.callback(ranks.end)

        def turn(name: str) -> Turn:
            ranks.turn(name)
            return dict(zip(FIELDS, report.amax(0).tolist(), strict=True))  # the slowest rank's

        for layer in layers:
            ranks.turn("load", layer, overlap)
            for direction in layer.directions:
                ranks.turn("prepare", direction)
                yield _measured(layer, direction, turn, link, conditions)


def _measured(
    layer: Layer,
    direction: str,
    turn: Callable[[str], Turn],
    link: ShapedLink | None,
    conditions: Conditions,
) -> dict[str, Any]:
    bandwidth, probed = conditions.bandwidth, None
    if link is not None and conditions.ratio is not None:
        bandwidth = calibrate(turn, link.limit, conditions.ratio)
    if link is not None:
        turn("probe")
        probed = PROBE / statistics.median(turn("probe")["seconds"] for _ in range(CALIBRATION))
    samples = measure(turn, seconds=conditions.seconds, seed=conditions.seed)
    return {
        "layer": layer.name,
        "model": dataclasses.asdict(layer.model),
        "dtype": str(layer.dtype).removeprefix("torch."),
        "direction": direction,
        "tp": conditions.tp,
        "threads_per_rank": conditions.threads // conditions.tp,
        "bandwidth": bandwidth,
        "measured_bandwidth": probed,
        "rounds": len(samples["plain_seconds"]),
        "figures": summary(samples),
        "samples": samples,
    }


# ---------------------------------------------------------------- the report

LEGEND = """\
Times in ms: medians, of the slowest rank. held up: the part of it for which messages held that rank up.
compute: the layer without messages. messages: those of the overlapped layer, alone; by: compute by messages.
hidden: 1 - held up when overlapped / messages alone. ratio: plain by overlapped, above 1 is faster. MB/s:
the link's bandwidth, and what was measured of it. MB: sent by a rank over the link. 1 MB is 1e6 bytes."""

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "layer": lambda row: row["layer"],
    "direction": lambda row: row["direction"],
    "MB/s": lambda row: _megabytes(row["bandwidth"]),
    "measured": lambda row: _megabytes(row["measured_bandwidth"]),
    "compute": lambda row: _ms(row, "compute_seconds"),
    "messages": lambda row: _ms(row, "messages_seconds"),
    "by": lambda row: f"{row['figures']['compute_over_messages']:.2f}",
    "plain": lambda row: _ms(row, "plain_seconds"),
    "held up ": lambda row: _ms(row, "plain_held_up"),
    "overlapped": lambda row: _ms(row, "overlapped_seconds"),
    "held up": lambda row: _ms(row, "overlapped_held_up"),
    "ratio": lambda row: f"{row['figures']['ratio']:.2f}",
    "hidden": lambda row: f"{100 * row['figures']['hidden']:.0f} %",
    "rounds": lambda row: str(row["rounds"]),
    "MB plain": lambda row: _megabytes(row["figures"]["plain_sent"] or None),
    "MB overlapped": lambda row: _megabytes(row["figures"]["overlapped_sent"] or None),
}


def _ms(row: dict[str, Any], name: str) -> str:
    return f"{1e3 * row['figures'][name]:.1f}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.1f}"
