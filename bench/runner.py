"""Runs a case: from what it states, through the measuring core, to results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from paracore.bench.case import Case, Contender, Function, Inputs, Prepared, Setting, Work, as_call
from paracore.bench.limits import limits
from paracore.bench.measure import Rotation, Samples, Task, copies_beyond_cache, measure
from paracore.bench.memory import free_bytes, last_level_cache_bytes, peak_bytes
from paracore.bench.results import Measurement, Refusal, Result, refusal, results
from paracore.bench.timers import REST, Timer, timer_for
from paracore.errors import UsageError


@dataclass(frozen=True)
class Options:
    """How to measure.

    seconds: time for the samples of one setting. memory_limit: bytes that the copies of the inputs
    may take, for the case and for each limit. cache_bytes: what the copies must exceed.
    """

    seconds: float
    seed: int
    memory_limit: int
    cache_bytes: int

    @classmethod
    def for_device(
        cls, device: torch.device, *, seconds: float, seed: int, memory_limit: int | None
    ) -> Options:
        """Ask the machine what is not given: a quarter of the free memory, so that four rotations fit."""
        limit = free_bytes(device) // 4 if memory_limit is None else memory_limit
        return cls(seconds, seed, limit, last_level_cache_bytes(device))


@dataclass(frozen=True)
class _Entry:
    """A contender or limit that serves: its task for the core, and what its result needs besides times."""

    contender: Contender
    work: Work
    task: Task
    peak_bytes: int

    def measurement(self, samples: Mapping[str, Samples]) -> Measurement:
        return Measurement(self.contender, self.work, samples[self.task.name], self.peak_bytes)


def run_setting(
    case: Case,
    setting: Setting,
    contenders: Mapping[str, Contender],
    options: Options,
    timer: Timer | None = None,
) -> tuple[list[Result], list[Refusal]]:
    """Measure `contenders` and the limits in one setting, all in the same rounds.

    All contenders are refused when the inputs do not fit the memory limit.
    """
    work, timer = case.work(setting), timer or timer_for(setting.device)
    try:
        inputs = _rotation(case.inputs, setting, options)
        limit_entries = _enter_limits(work.bytes, setting, options, timer)
    except UsageError as reason:
        return [], [refusal(name, setting, str(reason)) for name in contenders]
    entries: dict[str, _Entry] = {}
    refusals = []
    own_limit = dict([case.limit] if case.limit else [])
    for name, contender in (own_limit | dict(contenders)).items():
        try:
            entry = _enter(name, contender, work, setting, inputs)
            (limit_entries if name in own_limit else entries)[name] = entry
        except (UsageError, torch.OutOfMemoryError) as reason:
            refusals.append(refusal(name, setting, str(reason)))
    tasks = [entry.task for entry in (*limit_entries.values(), *entries.values())]
    samples = measure(tasks, timer, seconds=options.seconds, seed=options.seed)
    rows = results(
        setting,
        {name: entry.measurement(samples) for name, entry in entries.items()},
        {name: entry.measurement(samples) for name, entry in limit_entries.items()},
        case,
    )
    return rows, refusals


def _enter_limits(bytes_of_case: int, setting: Setting, options: Options, timer: Timer) -> dict[str, _Entry]:
    forward = dataclasses.replace(setting, direction="forward")  # a copy has no backward pass
    return {
        name: _enter(name, limit.contender, limit.work, forward, _rotation(limit.inputs, forward, options))
        for name, limit in limits(forward, bytes_of_case, options.cache_bytes, timer).items()
    }


def _rotation(
    make: Callable[[Setting, torch.Generator], Inputs], setting: Setting, options: Options
) -> Rotation[Inputs]:
    """Return random inputs in so many copies that together they exceed the cache."""
    first = make(setting, torch.Generator(setting.device).manual_seed(options.seed))
    count = copies_beyond_cache(first.bytes, options.cache_bytes, options.memory_limit)
    return Rotation([first, *(first.clone() for _ in range(count - 1))])


def _enter(name: str, contender: Contender, work: Work, setting: Setting, inputs: Rotation[Inputs]) -> _Entry:
    """Build a contender and try it once, so that it compiles, or refuses, before anything is timed.

    Contenders of one setting share `inputs`: were each to go round on its own, one could find in the
    cache what another has just read.
    """
    function = contender.build(setting)
    call = as_call(function, setting.direction, contender.output)
    prepare = _as_prepare(function)
    [trial] = inputs.take(1)
    _get_ready(trial, prepare)
    call(trial)
    _get_ready(trial, prepare)
    peak = peak_bytes(lambda: call(trial), setting.device)
    rest = REST if contender.elsewhere else 0.0
    return _Entry(contender, work, Task(name, call, inputs, rest, prepare), peak)


def _as_prepare(function: Function) -> Callable[[Inputs], None] | None:
    return (lambda inputs: function.prepare(**inputs.arguments)) if isinstance(function, Prepared) else None


def _get_ready(trial: Inputs, prepare: Callable[[Inputs], None] | None) -> None:
    if prepare is not None:
        prepare(trial)
