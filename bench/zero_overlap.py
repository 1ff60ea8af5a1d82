"""How much of ZeRO stage 2's communication is hidden: gradients behind backward, parameters behind forward.

Ranks train a decoder over an emulated link (`paracore.bench.link`), two kinds of steps in turn:

    serial       backward alone (no_sync); then all gradients travel; the step; then all parameters travel
    overlapped   gradients travel during backward; the step; parameters travel during the next forward

In both, the seconds that a rank is blocked in waiting for the link are counted. In a serial step these are
the messages alone; in an overlapped one, what sticks out: hidden = 1 - sticking out / messages alone.

The link is given the bandwidth at which backward takes RATIO times as long as the gradients' messages: a
slower one could hide little, whatever the program, and over a much faster one there is little to hide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paracore.bench.link import Link, optimizer_over
from paracore.bench.ranks import Ranks
from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.nn.decoder import Decoder
from paracore.optim import AdamW
from paracore.parallel.mesh import MeshAxis, ShardingAxes

NAME = "zero_overlap"
RATIO = 1.8
BUCKETS = 24  # about; the last one to be full is sent when backward is over, and cannot be hidden
MIN_ROUNDS = 5
CALIBRATION = 4  # serial steps, the first of them to warm up

FIELDS = (
    "forward",
    "forward_blocked",
    "backward",
    "backward_blocked",
    "gradients_blocked",
    "parameters_blocked",
    "step",
    "bytes",
)
"""What a turn reports of a rank: seconds, and bytes of gradients that crossed the link.

gradients_blocked is the whole of what a rank waits for gradients, backward_blocked the part within backward.
"""

UNITS = {"bandwidth": "bytes per s", "figures, samples": "s, but for shares and ratios"}

Turn = dict[str, float]
Measured = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Model:
    """Who trains what. tokens: of each rank in a step."""

    ranks: int = 2
    layers: int = 12
    hidden: int = 256
    vocabulary: int = 1024
    tokens: int = 512

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UsageError(f"{self.ranks} rank has nobody to send to: at least 2 ranks")
        if self.hidden % 2:
            raise UsageError(f"hidden={self.hidden}: must be even")

    def build(self, seed: int) -> Decoder:
        """Return the decoder, the same on every rank."""
        heads = max(1, self.hidden // 64)
        heads = heads if self.hidden % (2 * heads) == 0 else 1
        config = DecoderConfig(self.vocabulary, self.hidden, self.layers, heads, heads)
        return Decoder(config, MeshAxis.alone("tp"), seed=seed)


def train(axis: MeshAxis, model: Model, seed: int, report: Tensor) -> Callable[..., None]:
    """Return a rank's turns: "serial", "overlapped", and "limit" to a bandwidth. report: [ranks, FIELDS]."""
    decoder, link = model.build(seed), Link()
    mib = sum(parameter.nbytes for parameter in decoder.parameters()) / BUCKETS / 2**20
    axes = ShardingAxes(axis, MeshAxis.alone("tp"))
    optimizer = AdamW(decoder, mesh=axes, stage=2, max_norm=1.0, bucket_mib=mib)
    generator = torch.Generator().manual_seed(seed + axis.rank)
    tokens = torch.randint(model.vocabulary, (1, model.tokens), generator=generator)

    def limit(bandwidth: float) -> None:
        link.bandwidth = bandwidth

    def step(*, overlapped: bool) -> None:
        values: Turn = {}
        start = _lap(values, "forward", link.clock)
        loss = decoder.loss(tokens, tokens, over=axis)
        values["forward_blocked"] = link.reset()
        start = start("backward")
        with contextlib.nullcontext() if overlapped else optimizer.no_sync():
            loss.backward()
        if not overlapped:  # messages alone do not wait for a rank that is not done yet
            dist.barrier(axis.connection())
        values["backward_blocked"] = link.blocked
        start = start("step")
        optimizer.step()
        values["bytes"] = link.carried / 2  # as many of gradients as of parameters, which are on their way
        values["gradients_blocked"] = link.reset()
        if not overlapped:
            optimizer.synchronize()
        start(None)
        values["parameters_blocked"] = link.reset()
        report[axis.rank] = torch.tensor([values[field] for field in FIELDS], dtype=torch.float64)

    turns: dict[str, Callable[..., None]] = {
        "limit": limit,
        "serial": functools.partial(step, overlapped=False),
        "overlapped": functools.partial(step, overlapped=True),
        "finish": optimizer.synchronize,
    }

    def turn(name: str, *arguments: float) -> None:
        with optimizer_over(link):
            turns[name](*arguments)

    return turn


def _lap(values: Turn, name: str | None, clock: Callable[[], float]) -> Callable[[str | None], Any]:
    """Start a stop watch for `name`; calling the result ends it and starts the next."""
    started = clock()

    def end(following: str | None) -> Any:
        values[name or ""] = clock() - started
        return _lap(values, following, clock)

    return end


def measure(
    turn: Callable[[str], Turn],
    limit: Callable[[float], None],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Measured, float]:
    """Take turns until another round would pass `seconds`; return samples by name, and the bandwidth."""
    calibration = [turn("serial") for _ in range(CALIBRATION)][1:]
    backward = statistics.median(values["backward"] for values in calibration)
    bandwidth = calibration[0]["bytes"] * RATIO / backward
    limit(bandwidth)
    for name in ("serial", "overlapped"):
        turn(name)
    samples: Measured = defaultdict(list)
    start, rounds = clock(), 0
    while rounds < MIN_ROUNDS or (clock() - start) * (rounds + 1) <= seconds * rounds:
        _record(samples, turn("serial"), turn("overlapped"))
        rounds += 1
    return dict(samples), bandwidth


def _record(samples: Measured, serial: Turn, overlapped: Turn) -> None:
    """Enter a round. Parameters of an overlapped step travel during the forward of the next, a serial one."""
    values = {
        "forward_alone": overlapped["forward"],
        "backward_alone": serial["backward"],
        "gradients_alone": serial["gradients_blocked"],
        "gradients_sticking_out": overlapped["gradients_blocked"],
        "gradients_sticking_out_within_backward": overlapped["backward_blocked"],
        "parameters_alone": serial["parameters_blocked"],
        "parameters_sticking_out": serial["forward_blocked"],
        "serial_step": overlapped["forward"] + serial["backward"] + serial["step"],
        "overlapped_step": serial["forward"] + overlapped["backward"] + overlapped["step"],
    }
    for name, value in values.items():
        samples[name].append(value)


def summary(samples: Measured) -> dict[str, float]:
    """Return medians in seconds, and what is derived from them."""
    found = {name: statistics.median(values) for name, values in samples.items()}
    for name in ("gradients", "parameters"):
        found[f"{name}_hidden"] = 1 - found[f"{name}_sticking_out"] / found[f"{name}_alone"]
    found["backward_over_gradients"] = found["backward_alone"] / found["gradients_alone"]
    found["step_ratio"] = found["serial_step"] / found["overlapped_step"]
    return found


def run(model: Model, *, threads: int, seconds: float, seed: int) -> dict[str, Any]:
    """Measure; return the figures, the bandwidth in bytes per second, and all samples, in seconds."""
    report = torch.zeros(model.ranks, len(FIELDS), dtype=torch.float64).share_memory_()
    ranks = Ranks(model.ranks, threads, train, model, seed, report)

    def turn(name: str) -> Turn:
        ranks.turn(name)
        return dict(zip(FIELDS, report.amax(0).tolist(), strict=True))  # the slowest rank's

    samples, bandwidth = measure(turn, lambda bandwidth: ranks.turn("limit", bandwidth), seconds=seconds)
    ranks.turn("finish")  # a rank must not end while parameters are under way
    return {
        "model": dataclasses.asdict(model),
        "bandwidth": bandwidth,
        "rounds": len(samples["backward_alone"]),
        "figures": summary(samples),
        "samples": samples,
    }


def format_report(found: dict[str, Any]) -> str:
    """Return what to print of `run`."""
    figures, model = found["figures"], found["model"]

    def ms(name: str) -> str:
        return f"{1e3 * figures[name]:.1f} ms"

    def line(what: str, name: str, behind: str) -> str:
        return (
            f"  {what}: {ms(name + '_alone')} alone, of which {ms(name + '_sticking_out')} stick out of "
            f"{behind}: {100 * figures[name + '_hidden']:.1f} % hidden"
        )

    shape = " x ".join(f"{value} {name}" for name, value in model.items())
    return "\n".join(
        [
            f"{NAME}: {shape}; medians of {found['rounds']} steps of each kind, of the slowest rank",
            f"  link: {found['bandwidth'] / 1e6:.1f} MB/s, emulated; backward alone takes "
            f"{figures['backward_over_gradients']:.2f} times as long as the gradients alone",
            line("gradients", "gradients", f"backward ({ms('backward_alone')} alone)"),
            f"    {ms('gradients_sticking_out_within_backward')} of that within backward, the rest after it",
            line("parameters", "parameters", f"the next forward ({ms('forward_alone')} alone)"),
            f"  step: {ms('serial_step')} serial, {ms('overlapped_step')} overlapped, "
            f"{figures['step_ratio']:.2f} times as fast",
        ]
    )
