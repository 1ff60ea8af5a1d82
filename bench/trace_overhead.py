"""What the ranges of paracore.trace cost a small training step: off, and on for each tool.

    python -m paracore.bench.trace_overhead

Two ranks of cp take steps of a small decoder. The ranges of a step are counted and what one costs is measured
by itself, off and on: its share of a step is far below what steps differ by. Steps are also timed, with and
without, in turn; "torch.profiler records" is then with the cost of that profiler, which records every
operator. Seconds are those of the slowest rank, and the shortest of all steps of a kind.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paracore import trace
from paracore.bench.ranks import Ranks
from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.nn.decoder import Decoder
from paracore.nn.sequence import SequenceContext
from paracore.parallel.layout import parse_layout
from paracore.parallel.masks import causal
from paracore.parallel.mesh import MeshAxis, ShardingAxes
from paracore.training import Trainer

RANKS, CALLS = 2, 20_000
CONFIG = DecoderConfig(256, 128, 4, 8, 4)
SEQ_LEN, BATCH = 128, 8
MODES = ("off", "NVTX", "torch ranges", "torch.profiler records")


class _Count(trace.Sink):
    """Counts ranges."""

    def __init__(self) -> None:
        self.ranges = 0

    def open(self, name: str, facts: trace.Facts) -> trace.Context:
        self.ranges += 1
        return super().open(name, facts)


@contextlib.contextmanager
def _watched(mode: str, ranges: dict[str, trace.Sink]) -> Iterator[None]:
    if mode == "off":
        yield
        return
    recording: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if mode == "torch.profiler records":
        recording = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with recording, trace.enabled(ranges["NVTX" if mode == "NVTX" else "torch"]):
        yield


def train(axis: MeshAxis, modes: tuple[str, ...], report: Tensor) -> Callable[..., None]:
    """Return a rank's turns: a mode, or "count". report: [RANKS, 1], seconds of a step, or its ranges."""
    model = Decoder(CONFIG, MeshAxis.alone("tp"), axis)
    trainer = Trainer(model, lr=1e-3, max_norm=1.0, axes=ShardingAxes(axis, MeshAxis.alone("tp")))
    sequence = SequenceContext(parse_layout("zigzag")(causal(), SEQ_LEN, axis.size), causal())
    tokens = torch.arange(BATCH * (SEQ_LEN // axis.size)).view(BATCH, -1) % CONFIG.vocab_size
    ranges: dict[str, trace.Sink] = {"torch": trace.TorchRanges()}
    if "NVTX" in modes:
        ranges["NVTX"] = trace.NvtxRanges()

    def turn(name: str) -> None:
        if name == "count":
            count = _Count()
            with trace.enabled(count):
                trainer.step(tokens, tokens, sequence)
            report[axis.rank] = count.ranges
            return
        with _watched(name, ranges):
            dist.barrier(axis.connection())
            start = time.perf_counter()
            trainer.step(tokens, tokens, sequence)
            report[axis.rank] = time.perf_counter() - start

    return turn


def range_seconds() -> float:
    """Return what a range costs, as it is now: off, or on for some tool."""

    def of_range() -> None:
        with trace.range("paracore.overhead.step", 1, bytes=1):
            pass

    return _seconds(of_range) - _seconds(lambda: None)


def _seconds(call: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()  # others may be running, too
        for _ in range(CALLS):
            call()
        best = min(best, (time.thread_time() - start) / CALLS)
    return best


def available_modes() -> tuple[str, ...]:
    """Return the modes that can be measured: NVTX needs its package."""
    try:
        trace.NvtxRanges()
    except UsageError:
        return tuple(mode for mode in MODES if mode != "NVTX")
    return MODES


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="steps of each kind (default 20)")
    rounds, modes = parser.parse_args().rounds, available_modes()
    report = torch.zeros(RANKS, 1, dtype=torch.float64).share_memory_()
    ranks = Ranks(RANKS, RANKS, train, modes, report)

    def turn(name: str) -> float:
        ranks.turn(name)
        return float(report.max())

    count = turn("count")
    for mode in modes * 2:
        turn(mode)
    samples = [{mode: turn(mode) for mode in modes} for _ in range(rounds)]
    best = {mode: min(sample[mode] for sample in samples) for mode in modes}
    print(f"{RANKS} ranks; a step has {count:.0f} ranges on a rank and takes {1e3 * best['off']:.1f} ms")
    tools: dict[str, trace.Sink] = {"torch": trace.TorchRanges(arrivals=False)}
    if "NVTX" in modes:
        tools["NVTX"] = trace.NvtxRanges()
    for mode in modes:
        with _watched(mode, tools):
            cost = range_seconds()
        share, timed = count * cost / best["off"], best[mode] / best["off"] - 1
        print(
            f"  {mode}: {1e9 * cost:.0f} ns a range, {100 * share:.2f} % of a step; whole steps, best of "
            f"{rounds}: {100 * timed:+.1f} %"
        )


if __name__ == "__main__":
    main()
