"""What `paracore bench memory` and `throughput` compare: ways to train one model on the same ranks."""

from __future__ import annotations

import dataclasses

import torch

from paracore.errors import UsageError
from paracore.nn.config import DecoderConfig
from paracore.nn.decoder import Decoder
from paracore.parallel.mesh import MeshShape, TrainingAxes

BASELINE = "ddp"


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to use the ranks: for as many copies of the model, or for one that is cut over all of them."""

    description: str
    tensor_parallel: bool = True
    sequence_parallel: bool = False
    vocab_parallel: bool = False

    def mesh(self, ranks: int) -> MeshShape:
        """Return the mesh of all ranks."""
        return MeshShape(tp=ranks) if self.tensor_parallel else MeshShape(dp=ranks)


MODES = {
    BASELINE: Mode(
        "data parallelism: every rank holds the whole model; gradients are summed after backward, where "
        "torch's DistributedDataParallel sums during it",
        tensor_parallel=False,
    ),
    "tp": Mode("tensor parallelism"),
    "tp_sp": Mode("and sequence parallelism", sequence_parallel=True),
    "tp_vp": Mode("tensor parallelism and vocabulary parallelism", vocab_parallel=True),
    "all": Mode("tensor, sequence and vocabulary parallelism", sequence_parallel=True, vocab_parallel=True),
}

POLICIES = {
    "fixed_per_rank": "each copy of the model has --batch-size sequences, on however many ranks it lies",
    "fixed_global": "all ranks together have --batch-size sequences",
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the batch that it is trained on.

    batch_size: sequences, of what `policy` says. ranks: of the world.
    Raises UsageError for what no model or batch can have.
    """

    config: DecoderConfig
    seq_len: int
    batch_size: int
    policy: str
    dtype: torch.dtype
    ranks: int

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "ranks"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.policy not in POLICIES:
            raise UsageError(f"--batch-policy {self.policy}: unknown; choose from {', '.join(POLICIES)}")

    def require(self, name: str) -> None:
        """Raise UsageError unless the mode called `name` can train this model on this batch."""
        self.sequences(name)
        if MODES[name].tensor_parallel:
            self.config.require_tp(self.ranks)

    def sequences(self, name: str) -> int:
        """Return how many sequences a copy of the model has in the mode called `name`."""
        copies = 1 if MODES[name].tensor_parallel else self.ranks
        if self.policy == "fixed_per_rank" or copies == 1:
            return self.batch_size
        if self.batch_size % copies:
            raise UsageError(
                f"--batch-size {self.batch_size} cannot be divided among the {copies} ranks of {name}; "
                "it must be a multiple, or --batch-policy fixed_per_rank"
            )
        return self.batch_size // copies

    def tokens(self, name: str) -> int:
        """Return how many tokens all ranks together train on in one step."""
        copies = 1 if MODES[name].tensor_parallel else self.ranks
        return copies * self.sequences(name) * self.seq_len

    def build(self, name: str, axes: TrainingAxes, *, seed: int = 0, device: torch.device | str) -> Decoder:
        """Return this rank's part of the model in the mode called `name`, whose mesh has `axes`."""
        mode = MODES[name]
        return Decoder(
            self.config,
            axes.tp,
            seed=seed,
            device=device,
            dtype=self.dtype,
            sequence_parallel=mode.sequence_parallel,
            vocab_parallel=mode.vocab_parallel,
        )
