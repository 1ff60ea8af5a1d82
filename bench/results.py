"""The outcome of a benchmark: one `Result` per contender and setting, or a `Refusal` with its reason.

Units: ms = 1e-3 s; GB = 1e9 bytes; TFLOP = 1e12 operations; MiB = 2**20 bytes. Rates are of the work
that the case counts, at the median time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from paracore.bench.case import Case, Contender, Setting, Work
from paracore.bench.limits import CLONE, COPY, MATMUL
from paracore.bench.measure import Samples
from paracore.ops.implementations import dtype_name


@dataclass(frozen=True)
class Measurement:
    """One contender's samples, its peak memory beyond the inputs, and the work that a call does."""

    contender: Contender
    work: Work
    samples: Samples
    peak_bytes: int

    @property
    def median(self) -> float:
        """Seconds per call."""
        return self.samples.percentile(50)

    @property
    def bytes_per_second(self) -> float:
        """Bytes of work per second, at the median."""
        return self.work.bytes / self.median

    @property
    def flops_per_second(self) -> float:
        """Operations of work per second, at the median."""
        return self.work.flops / self.median


@dataclass(frozen=True)
class Result:
    """One row of a report. None where a number has no meaning.

    kind: "contender", "baseline" or "limit". ratio: the baseline's median by this one's, above 1 is
    faster. fraction_of_copy, _clone, _matmul: this rate by that of the limit, measured in the same
    rounds. fraction_of_limit: the one that binds: the case's own if it has one; else the matmul's for a
    case bound by compute; for one bound by memory, `clone`'s if the outputs are fresh and `copy_`'s if
    they exist. That can pass 1 where a call writes less than it reads, as a copy does not.
    peak_mib: see `memory.peak_bytes`. host_bound: see `timers.CudaTimer`.
    """

    contender: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    variant: str
    output: str
    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    calls_per_sample: int
    bytes: int
    flops: int
    gb_per_s: float
    tflop_per_s: float
    peak_mib: float
    ratio: float | None
    fraction_of_copy: float | None
    fraction_of_clone: float | None
    fraction_of_matmul: float | None
    fraction_of_limit: float | None
    host_bound: bool


@dataclass(frozen=True)
class Refusal:
    """A contender that could not serve, and why."""

    contender: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    variant: str
    reason: str


RESULT_FIELDS = tuple(field.name for field in fields(Result))


def refusal(name: str, setting: Setting, reason: str) -> Refusal:
    """Return the refusal of the contender `name`."""
    return Refusal(name, setting.shape, dtype_name(setting.dtype), setting.direction, setting.variant, reason)


def results(
    setting: Setting,
    contenders: Mapping[str, Measurement],
    limits: Mapping[str, Measurement],
    case: Case,
) -> list[Result]:
    """Return the rows of one setting: limits first, then contenders in their order."""
    reference = contenders.get(case.baseline)
    rows = [_result(name, "limit", setting, limit, None, {}, case) for name, limit in limits.items()]
    for name, measurement in contenders.items():
        kind = "baseline" if name == case.baseline else "contender"
        rows.append(_result(name, kind, setting, measurement, reference, limits, case))
    return rows


def _result(
    name: str,
    kind: str,
    setting: Setting,
    own: Measurement,
    baseline: Measurement | None,
    limits: Mapping[str, Measurement],
    case: Case,
) -> Result:
    fractions = _fractions(own, limits)
    return Result(
        contender=name,
        kind=kind,
        shape=setting.shape,
        dtype=dtype_name(setting.dtype),
        direction=setting.direction,
        variant=setting.variant,
        output=own.contender.output,
        median_ms=own.median * 1e3,
        p20_ms=own.samples.percentile(20) * 1e3,
        p80_ms=own.samples.percentile(80) * 1e3,
        samples=len(own.samples.seconds),
        calls_per_sample=own.samples.calls_per_sample,
        bytes=own.work.bytes,
        flops=own.work.flops,
        gb_per_s=own.bytes_per_second / 1e9,
        tflop_per_s=own.flops_per_second / 1e12,
        peak_mib=own.peak_bytes / 2**20,
        ratio=baseline.median / own.median if baseline else None,
        fraction_of_copy=fractions.get(COPY),
        fraction_of_clone=fractions.get(CLONE),
        fraction_of_matmul=fractions.get(MATMUL),
        fraction_of_limit=fractions.get(_binding_limit(own.contender, case)),
        host_bound=own.samples.host_bound,
    )


def _fractions(own: Measurement, limits: Mapping[str, Measurement]) -> dict[str, float]:
    """Return, by limit, this measurement's rate over the limit's."""
    return {
        name: own.flops_per_second / limit.flops_per_second
        if name == MATMUL
        else own.bytes_per_second / limit.bytes_per_second
        for name, limit in limits.items()
    }


def _binding_limit(contender: Contender, case: Case) -> str:
    if case.limit is not None:
        return case.limit[0]
    if case.bound == "compute":
        return MATMUL
    return CLONE if contender.output == "fresh" else COPY
