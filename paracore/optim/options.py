"""How AdamW keeps and moves what it keeps: its arguments of the same names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paracore.errors import UsageError

MASTERS = ("float32", "remainder", "none")
REDUCTIONS = ("ordered", "backend")
_BUCKET_MIB = 25.0
_ANY = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES = {
    "moment_dtype": (torch.float32, torch.bfloat16, torch.float64),
    "gradient_dtype": _ANY,
    "wire_dtype": _ANY,
}


@dataclass(frozen=True)
class Options:
    """See `AdamW`. stochastic: stochastic_rounding. Raises UsageError for what has no meaning."""

    stage: int
    master: str
    moment_dtype: torch.dtype | None
    gradient_dtype: torch.dtype | None
    wire_dtype: torch.dtype | None
    reduction: str | None
    bucket_mib: float | None
    stochastic: bool
    impl: str | None

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            raise UsageError(f"stage={self.stage}: must be 0, 1, 2 or 3")
        if self.master not in MASTERS:
            raise UsageError(f"master={self.master!r}: must be one of {', '.join(MASTERS)}")
        if self.reduction not in (None, *REDUCTIONS):
            raise UsageError(f"reduction={self.reduction!r}: must be one of {', '.join(REDUCTIONS)}")
        if self.bucket_mib is not None and not self.bucket_mib > 0:
            raise UsageError(f"bucket_mib={self.bucket_mib}: must be positive")
        if self.stochastic and self.master == "remainder":
            raise UsageError(
                'stochastic_rounding=True with master="remainder": the rounding is part of the master'
            )
        for name, dtypes in _DTYPES.items():
            value = getattr(self, name)
            if value is not None and value not in dtypes:
                raise UsageError(f"{name}={value}: must be one of {', '.join(map(str, dtypes))}, or None")
        for name in ("reduction", "bucket_mib", "gradient_dtype", "wire_dtype"):
            if self.stage == 3 and getattr(self, name) is not None:
                value = getattr(self, name)
                raise UsageError(f"{name}={value} with stage=3: FSDP2 decides that, see MixedPrecisionPolicy")

    @property
    def ordered(self) -> bool:
        """Whether sums over the ranks are taken in the order of ranks."""
        return self.reduction != "backend"

    @property
    def bucket_bytes(self) -> int:
        """About how many bytes of parameters are sent at a time."""
        return int((self.bucket_mib or _BUCKET_MIB) * 2**20)
