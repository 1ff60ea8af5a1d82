"""What the decoder must know of the sequence of which a rank holds some tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paracore.errors import UsageError
from paracore.ops.ring_attention import STRATEGIES
from paracore.parallel.layout import Layout
from paracore.parallel.masks import Mask, causal
from paracore.parallel.mesh import MeshAxis

_CAUSAL = causal()


@dataclass(frozen=True)
class SequenceContext:
    """The whole sequence, described alike on every rank of the cp axis.

    layout: which positions each rank holds. Tokens, labels and RoPE positions of a rank follow from it.
    mask: which tokens see which, over global positions.
    strategy, check: how keys come to queries that lie elsewhere; see `paracore.ops.ring_attention`.

    Make one and keep it: who sends which keys to whom is planned once per mask and layout.
    Raises UsageError for an unknown strategy, or a mask that does not cover the layout.
    """

    layout: Layout
    mask: Mask = _CAUSAL
    strategy: str = "ring"
    check: bool = True

    def __post_init__(self) -> None:
        require_strategy(self.strategy)
        self.mask.require_covers(self.layout.length)

    def part(self, x: Tensor, dp: MeshAxis, cp: MeshAxis) -> Tensor:
        """Return what a rank holds of whole sequences x [dp * B, S]: of B of them, its positions."""
        return self.layout.shard(x.chunk(dp.size)[dp.rank], cp.rank, 1)


def require_strategy(strategy: str) -> None:
    """Raise UsageError for a strategy that is not known."""
    if strategy not in STRATEGIES:
        raise UsageError(f"strategy={strategy!r}: must be one of {', '.join(STRATEGIES)}")


def require_fitting(sequence: SequenceContext | None, length: int, cp: MeshAxis) -> None:
    """Raise UsageError where a rank's `length` tokens, or the size of cp, are not those of the layout.

    None is a whole sequence on a single rank of cp.
    """
    if sequence is None:
        if cp.size > 1:
            raise UsageError(
                f"sequence=None over cp={cp.size} ranks: {length} tokens on this one do not tell what others "
                f"hold; pass for example SequenceContext(zigzag(total_length, {cp.size}))"
            )
        return
    layout = sequence.layout
    if layout.size != cp.size:
        raise UsageError(f"the layout is for {layout.size} ranks, but axis {cp.name} has {cp.size}")
    if layout.lengths[cp.rank] != length:
        raise UsageError(
            f"rank {cp.rank} of axis {cp.name} was given {length} tokens of each sequence, must be "
            f"{layout.lengths[cp.rank]}: those of its own positions, as layout.shard cuts them"
        )
