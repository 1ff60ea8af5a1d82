"""What has the vocabulary as a dim: the token embedding and the LM head, whole on every rank or cut over tp.

T is the size of the tp axis. Hidden states are the same on every rank, [S, B, H], or, with sequence_parallel,
this rank's part of the sequence, [S/T, B, H]:

| vocab_parallel | sequence_parallel | weight, its gradient    | embedding             | logits              |
|----------------|-------------------|-------------------------|-----------------------|---------------------|
| no             | no                | [V, H], the same        | all tokens            | [S, B, V], the same |
| no             | yes               | [V, H], partial over tp | own tokens            | [S/T, B, V]         |
| yes            | no                | [V/T, H]                | sum over own rows (1) | [S, B, V/T] (2)     |
| yes            | yes               | [V/T, H]                | sum over own rows (3) | [S, B, V/T] (4)     |

Communication: (1) forward all-reduce; (2) backward all-reduce of dX; (3) forward reduce-scatter, backward
all-gather; (4) forward all-gather of X, backward that again and reduce-scatter of dX.

Shards of the vocabulary follow `shard_range`: uneven or empty where T does not divide V. Source: Shoeybi et
al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paracore.counter_random import fill_region_, normal_at
from paracore.errors import UsageError
from paracore.nn.initialization import linear_uniform_
from paracore.ops.cross_entropy import Objective
from paracore.ops.embedding import embedding
from paracore.ops.linear import column_linear, linear
from paracore.ops.linear_cross_entropy import sum_of_losses
from paracore.parallel.collectives import gather_from, reduce_from, reduce_scatter, take_shard
from paracore.parallel.mesh import MeshAxis
from paracore.parallel.placement import ParameterPlacement


class _Vocabulary(nn.Module):
    """What embedding and head share: a weight of V rows, and how it lies over tp."""

    weight: nn.Parameter

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: MeshAxis,
        *,
        vocab_parallel: bool = True,
        sequence_parallel: bool = False,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, tp
        self.vocab_parallel, self.sequence_parallel = vocab_parallel, sequence_parallel
        shape = (vocab_size, hidden_size)
        self.placement = (
            ParameterPlacement.shard(shape, tp.size, 0)
            if vocab_parallel
            else ParameterPlacement.replicate(shape, tp.size, partial_gradient=sequence_parallel)
        )
        self.placements = {"weight": self.placement}
        held = torch.empty(self.placement.local_shape(tp.rank), device=device, dtype=dtype)
        self.weight = nn.Parameter(held)
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int) -> None:
        """Draw initial weights, the same for every tp size."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Say what the module's repr shows."""
        return (
            f"{self.vocab_size}, {self.hidden_size}, tp={self.tp.rank} of {self.tp.size}, "
            f"vocab_parallel={self.vocab_parallel}, sequence_parallel={self.sequence_parallel}"
        )


class Embedding(_Vocabulary):
    """A token embedding, initialised as torch.nn.Embedding: see the table above.

    vocab_parallel: each rank holds its part of the rows. sequence_parallel: return this rank's tokens only.
    padding_idx: a token whose row is read as any other, but gets no gradient through this module, as
        torch.nn.Embedding's; initially zero. Raises UsageError where the vocabulary has no such token.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: MeshAxis,
        *,
        padding_idx: int | None = None,
        **options: Any,
    ) -> None:
        if padding_idx is not None and not -vocab_size <= padding_idx < vocab_size:
            raise UsageError(f"padding_idx={padding_idx}: must be one of the {vocab_size} tokens, or None")
        self._padding_idx = None if padding_idx is None else padding_idx % vocab_size
        super().__init__(vocab_size, hidden_size, tp, **options)

    @property
    def padding_idx(self) -> int | None:
        """The token whose row gets no gradient, counted from 0."""
        return self._padding_idx

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw from the standard normal distribution; zero the row of `padding_idx`."""
        rows, *_ = region = self.placement.region(self.tp.rank)
        fill_region_(
            self.weight, region, self.placement.full_shape, lambda index: normal_at(index, seed, "embedding")
        )
        if self.padding_idx is not None and self.padding_idx in rows:
            self.weight[self.padding_idx - rows.start].zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [S, ...] int64, the same on every rank. Returns [S, ..., H], or this rank's [S/T, ..., H].

        Raises RuntimeError, asynchronously on a GPU, for tokens that are not in the vocabulary.
        """
        in_vocabulary = ((tokens >= 0) & (tokens < self.vocab_size)).all()
        torch._assert_async(in_vocabulary, f"tokens must be from 0 to {self.vocab_size - 1}")
        if self.vocab_parallel:
            rows = self._own_rows(tokens)
            return reduce_scatter(rows, self.tp, 0) if self.sequence_parallel else reduce_from(rows, self.tp)
        return self._own_rows(take_shard(tokens, self.tp, 0) if self.sequence_parallel else tokens)

    def _own_rows(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens in this rank's vocabulary, zeros for others: every token is in one."""
        rows = embedding(tokens - self.placement.region(self.tp.rank)[0].start, self.weight)
        if self.padding_idx is None:
            return rows
        return torch.where((tokens == self.padding_idx).unsqueeze(-1), rows.detach(), rows)


class LMHead(_Vocabulary):
    """Hidden states to logits, and to losses, initialised as torch.nn.Linear: see the table above.

    vocab_parallel: each rank holds its part of the rows. sequence_parallel: it is given its tokens only.
    """

    def reset_parameters(self, seed: int) -> None:
        """Draw as torch.nn.Linear does."""
        linear_uniform_(self.weight, self.placement, self.tp.rank, self.hidden_size, seed, "head")

    @property
    def cuts_tokens(self) -> bool:
        """Whether the logits are those of this rank's tokens, of the whole vocabulary."""
        return self.sequence_parallel and not self.vocab_parallel and self.tp.size > 1

    def forward(self, hidden: Tensor, length: int | None = None) -> Tensor:
        """hidden: [S, ..., H], or this rank's [S/T, ..., H] with sequence_parallel.

        length: S, to be given then: no rank can tell it from its own part. Returns the logits [S, ..., V],
        the same on every rank.
        """
        if self.sequence_parallel and self.tp.size > 1 and length is None:
            raise UsageError(
                f"length=None with sequence_parallel: give the length of the whole sequence, of which hidden "
                f"holds {hidden.size(0)} on this rank of {self.tp.size}"
            )
        logits = self._logits(hidden, length)
        if self.vocab_parallel:
            return gather_from(logits, self.tp, -1, self.vocab_size)
        return gather_from(logits, self.tp, 0, length) if self.cuts_tokens else logits

    def sum_of_losses(self, hidden: Tensor, labels: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of this rank's tokens, float64, and their labels; never whole logits.

        hidden: as for `forward`; labels: [S, B] int64, the same on every rank. Where `cuts_tokens` this
        rank's tokens are its part of the sequence, else all, and the sum is the same on every rank.
        """
        length = labels.size(0) if self.vocab_parallel and self.sequence_parallel else None
        labels = take_shard(labels, self.tp, 0) if self.cuts_tokens else labels
        vocabulary = self.tp if self.vocab_parallel else MeshAxis.alone(self.tp.name)
        return sum_of_losses(hidden, self.weight, labels, objective, vocabulary, length=length), labels

    def _logits(self, hidden: Tensor, length: int | None) -> Tensor:
        if not self.vocab_parallel:
            return linear(hidden, self.weight)
        whole = length if self.sequence_parallel else None
        return column_linear(hidden, [self.weight], [None], self.tp, length=whole)[0]
