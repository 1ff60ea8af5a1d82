"""What one launch of the update works on: the parts of parameters that a rank updates, in flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paracore.errors import UsageError
from paracore.optim.flat import pieces_tensor
from paracore.reference import accumulation_dtype
from paracore.reference_adamw import join_remainder, split_master


@dataclass(frozen=True)
class Part:
    """Elements `first` to `first + length` of parameter `index`, from `begin` in the section."""

    index: int
    begin: int
    length: int
    first: int

    @property
    def place(self) -> slice:
        """Where the part lies in the section."""
        return slice(self.begin, self.begin + self.length)


@dataclass
class Section:
    """Flat tensors of equal length: see `paracore.reference_adamw`, which names them alike."""

    parameter: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor
    max_second_moment: Tensor | None
    master: Tensor | None
    pieces: Tensor
    parts: tuple[Part, ...]

    @classmethod
    def start(
        cls,
        parameter: Tensor,
        gradient: Tensor,
        pieces: Sequence[tuple[int, int, int]],
        parts: Sequence[Part],
        *,
        moment_dtype: torch.dtype | None,
        amsgrad: bool,
        master: str,
    ) -> Section:
        """Return the section with moments of zero and a master of the parameter's values.

        moment_dtype: float32 (float64 for float64 parameters) if None. master: see `AdamW`; parameters in
        float32 and better are their own.
        """
        device, dtype = parameter.device, moment_dtype or accumulation_dtype(parameter.dtype)
        moments = [torch.zeros(parameter.numel(), dtype=dtype, device=device) for _ in range(2 + amsgrad)]
        return cls(
            parameter,
            gradient,
            moments[0],
            moments[1],
            moments[2] if amsgrad else None,
            _start_master(parameter, master),
            pieces_tensor(pieces, device),
            tuple(parts),
        )

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """What `paracore.ops.adamw.adamw_` takes first."""
        moments = self.first_moment, self.second_moment, self.max_second_moment
        return self.parameter, self.gradient, *moments, self.master, self.pieces

    def states(self) -> dict[str, Tensor]:
        """Return the tensors of the state by the names that torch.optim.AdamW gives them."""
        states = {"exp_avg": self.first_moment, "exp_avg_sq": self.second_moment}
        if self.max_second_moment is not None:
            states["max_exp_avg_sq"] = self.max_second_moment
        return states

    @property
    def state_tensors(self) -> list[Tensor]:
        """Moments and master."""
        return [*self.states().values(), *([] if self.master is None else [self.master])]

    @property
    def state_bytes(self) -> int:
        """Bytes of moments and master."""
        return sum(tensor.nbytes for tensor in self.state_tensors)

    def read_master(self, place: slice) -> Tensor | None:
        """Return the float32 master there, or None where the parameter is its own."""
        if self.master is None:
            return None
        if self.master.dtype == torch.int16:
            return join_remainder(self.parameter[place], self.master[place])
        return self.master[place]

    def write_master(self, place: slice, value: Tensor) -> None:
        """Set the float32 master there; a parameter with a remainder is set too, as it is a part of it."""
        if self.master is None:
            raise UsageError("a master was given for a parameter that has none")
        if self.master.dtype == torch.int16:
            high, low = split_master(value)
            self.parameter[place] = high
            self.master[place] = low
        else:
            self.master[place] = value


def _start_master(parameter: Tensor, master: str) -> Tensor | None:
    if master == "none" or parameter.dtype == accumulation_dtype(parameter.dtype):
        return None
    if master == "float32":
        return parameter.float()
    if parameter.dtype != torch.bfloat16:
        raise UsageError(f'master="remainder" for {parameter.dtype} parameters: must be bfloat16')
    return torch.zeros(parameter.numel(), dtype=torch.int16, device=parameter.device)
