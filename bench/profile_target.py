"""One operation or one layer to look at under a profiler: forward and backward, after a warm-up.

    python -m paracore.bench.profile_target rms_norm --device cuda --tool nvtx   # under nsys or ncu
    python -m paracore.bench.profile_target layer --out DIR                      # torch.profiler

bench/profiling.md has the command lines. Whole training steps, over several ranks, are `paracore profile`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from paracore import attention, trace
from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.nn.decoder import DecoderBlock
from paracore.ops.rms_norm import rms_norm
from paracore.ops.swiglu import swiglu
from paracore.parallel.mesh import MeshAxis
from paracore.profiling.session import NvtxRecorder, Recorder, StepWindow, TorchRecorder
from paracore.profiling.traces import trace_path

WARM_UP, STEPS = 5, 3
OUT = Path("profile_target_out")  # not that of `paracore profile`, whose rank 0 this would replace
HEADS, HEAD_DIM = 16, 128
HIDDEN = HEADS * HEAD_DIM


class _Operation(nn.Module):
    """An operation of tensors that are its parameters."""

    def __init__(self, call: Callable[..., Tensor], *shapes: Sequence[int]) -> None:
        super().__init__()
        self._call = call
        self.inputs = nn.ParameterList(torch.randn(*shape) for shape in shapes)

    def forward(self) -> Tensor:
        """Return what the operation does."""
        return self._call(*self.inputs)


class _Layer(nn.Module):
    """A decoder block, its input a parameter."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        config = DecoderConfig(1, HIDDEN, 1, HEADS, HEADS // 4)
        with torch.device("meta"):  # weights are drawn once, below
            self.block = DecoderBlock(config, MeshAxis.alone("tp"))
        self.block.to_empty(device="cpu")
        for weight in self.block.parameters():
            nn.init.normal_(weight, std=0.02)
        self.x = nn.Parameter(torch.randn(tokens, 1, HIDDEN))
        angles = torch.randn(tokens, HEAD_DIM // 2)
        self.cos, self.sin = (
            nn.Parameter(table, requires_grad=False) for table in (angles.cos(), angles.sin())
        )

    def forward(self) -> Tensor:
        """Return what the block does."""
        y: Tensor = self.block(self.x, self.cos.float(), self.sin.float())
        return y


TARGETS: dict[str, Callable[[int], nn.Module]] = {
    "rms_norm": lambda tokens: _Operation(rms_norm, (tokens, HIDDEN), (HIDDEN,)),
    "swiglu": lambda tokens: _Operation(swiglu, (tokens, 4 * HIDDEN), (tokens, 4 * HIDDEN)),
    "attention": lambda tokens: _Operation(attention, *[(1, HEADS, tokens, HEAD_DIM)] * 3),
    "layer": _Layer,
}


def run(target: nn.Module, sinks: Sequence[trace.Sink], recorder: Recorder) -> None:
    """Run forward and backward of `target` some times, the last of them recorded."""
    optimizer = torch.optim.SGD(target.parameters())
    window = StepWindow(recorder, WARM_UP, STEPS)
    with trace.enabled(*sinks, window):
        for _ in range(WARM_UP + STEPS):
            with trace.step(target, optimizer):
                y = target()
                y.backward(torch.ones_like(y))
                optimizer.zero_grad()


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="default 2048")
    parser.add_argument("--tool", choices=("torch", "nvtx"), default="torch", help="default torch.profiler")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help=f"of --tool torch; default {OUT}"
    )
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: must be at least 1")
    target = TARGETS[args.target](args.tokens).to(args.device, getattr(torch, args.dtype))
    if args.tool == "nvtx":
        try:
            ranges = trace.NvtxRanges()
        except UsageError as error:
            parser.error(str(error))
        run(target, [ranges], NvtxRecorder(ranges))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    run(target, [trace.TorchRanges(arrivals=False)], TorchRecorder(trace_path(args.out, 0)))
    print(
        f"open {trace_path(args.out, 0)} at https://ui.perfetto.dev, or: paracore profile --read {args.out}"
    )


if __name__ == "__main__":
    main()
