"""The measuring core as its specification, on a clock that passes only when told to."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paracore.bench.measure import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    WARM_UP_SAMPLES,
    Rotation,
    Samples,
    Task,
    copies_beyond_cache,
    measure,
)
from paracore.bench.memory import cpu_cache_bytes, peak_bytes
from paracore.bench.timers import CudaTimer, WallTimer
from paracore.errors import UsageError
from tests.bench_doubles import Clock, LaunchQueue

CPU = torch.device("cpu")
MIB = 2**20


def run(clock: Clock, tasks: list[Task], seconds: float = 1.0, seed: int = 0) -> dict[str, Samples]:
    return measure(tasks, WallTimer(clock.now), seconds=seconds, seed=seed, clock=clock.now)


def constant_tasks(clock: Clock, names: str, seconds: float = 0.01) -> list[Task]:
    inputs = Rotation([0, 1, 2])
    return [Task(name, clock.work(name, seconds), inputs) for name in names]


def rounds_of(clock: Clock, contenders: int) -> list[str]:
    """Who took turns in each round after warm-up, given one call per sample."""
    names = "".join(name for name, _ in clock.log)
    timed = names[contenders * (WARM_UP_SAMPLES + 1) :]
    return [timed[i : i + contenders] for i in range(0, len(timed), contenders)]


def test_every_contender_takes_one_turn_per_round_in_changing_order() -> None:
    clock = Clock()
    run(clock, constant_tasks(clock, "abc"))
    rounds = rounds_of(clock, 3)
    assert {"".join(sorted(turns)) for turns in rounds} == {"abc"}
    assert len(set(rounds)) == 6  # every order of three occurs


def test_the_order_of_turns_follows_from_the_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        clock = Clock()
        run(clock, constant_tasks(clock, "abc"), seed=seed)
        orders.append(rounds_of(clock, 3))
    assert orders[0] == orders[1] != orders[2]


def test_drift_of_the_machine_hits_equal_contenders_alike() -> None:
    clock = Clock()
    slowing = lambda time: 0.01 * (1 + time)  # noqa: E731 (ten times slower by the end of the run)
    tasks = [Task(name, clock.work(name, slowing), Rotation([0])) for name in "ab"]
    samples = run(clock, tasks, seconds=10.0)
    assert max(samples["a"].seconds) > 5 * min(samples["a"].seconds)
    assert samples["a"].percentile(50) == pytest.approx(samples["b"].percentile(50), rel=0.03)


def test_rounds_fill_the_time_budget() -> None:
    clock = Clock()
    samples = run(clock, constant_tasks(clock, "ab", 0.01), seconds=0.99)  # a round takes 0.02
    assert len(samples["a"].seconds) == len(samples["b"].seconds) == 49


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-6, MIN_ROUNDS), (1e9, MAX_ROUNDS)])
def test_rounds_stay_between_their_bounds(seconds: float, rounds: int) -> None:
    clock = Clock()
    assert len(run(clock, constant_tasks(clock, "a"), seconds=seconds)["a"].seconds) == rounds


def test_a_call_too_short_for_the_clock_is_repeated_and_reported_per_call() -> None:
    clock = Clock()
    [short] = run(clock, constant_tasks(clock, "a", 1e-6), seconds=0.1).values()
    assert short.calls_per_sample * 1e-6 >= WallTimer.shortest_sample
    assert short.percentile(50) == pytest.approx(1e-6)


def test_a_long_call_is_a_sample_of_its_own() -> None:
    clock = Clock()
    assert run(clock, constant_tasks(clock, "a", 0.5))["a"].calls_per_sample == 1


def test_one_disturbed_call_in_warm_up_does_not_pass_for_a_long_call() -> None:
    clock = Clock()
    tasks = [Task("a", clock.work("a", lambda time: 1.0 if time == 0 else 1e-6), Rotation([0]))]
    assert run(clock, tasks)["a"].calls_per_sample >= 1000


def test_warm_up_is_no_sample() -> None:
    clock = Clock()
    compiles_first = clock.work("a", lambda time: 100.0 if time == 0 else 0.01)
    samples = run(clock, [Task("a", compiles_first, Rotation([0]))])["a"]
    assert max(samples.seconds) == pytest.approx(0.01)
    assert len(samples.seconds) == pytest.approx(100, abs=1)  # nor does it eat into the one second


def test_the_garbage_collector_rests_during_samples_only() -> None:
    seen: list[bool] = []
    clock = Clock()

    def call(_: int) -> None:
        seen.append(gc.isenabled())
        clock.time += 0.01

    run(clock, [Task("a", call, Rotation([0]))])
    assert not any(seen[WARM_UP_SAMPLES:])
    assert gc.isenabled()


def test_percentiles_are_not_swapped() -> None:
    samples = Samples(1, seconds=[float(value) for value in reversed(range(101))])
    assert [samples.percentile(q) for q in (20, 50, 80)] == [20.0, 50.0, 80.0]


def test_contenders_that_share_a_rotation_never_meet_a_copy_before_all_others_were_used() -> None:
    clock = Clock()
    copies = list(range(7))
    inputs = Rotation(copies)
    run(clock, [Task(name, clock.work(name, 4e-4), inputs) for name in "abc"])  # several calls per sample
    used = [copy for _, copy in clock.log]
    assert len(used) > 100
    assert all(sorted(used[i : i + 7]) == copies for i in range(0, len(used) - 7))  # type: ignore[type-var]


@given(st.integers(1, 10 * MIB), st.integers(0, 100 * MIB))
def test_the_copies_exceed_twice_the_cache_and_are_no_more_than_needed(size: int, cache: int) -> None:
    copies = copies_beyond_cache(size, cache, limit_bytes=10**12)
    assert copies * size > 2 * cache
    assert copies == 2 or (copies - 1) * size <= 2 * cache


def test_too_little_memory_to_defeat_the_cache_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"limit 63\.0 MiB: 65 copies of inputs of 1\.000 MiB .* 32\.0 MiB"):
        copies_beyond_cache(MIB, 32 * MIB, 63 * MIB)


def test_what_a_call_returns_is_freed_before_the_next_call() -> None:
    class Output:
        pass

    living: weakref.WeakSet[Output] = weakref.WeakSet()
    counts = []

    def call(_: int) -> Output:
        counts.append(len(living))
        output = Output()
        living.add(output)
        return output

    WallTimer().sample(call, [0, 1, 2])
    assert counts == [0, 0, 0]


def cuda_sample(queue: LaunchQueue, launch: float, kernel: float) -> tuple[float, bool]:
    return CudaTimer(torch.device("cuda")).sample(lambda _: queue.launch(launch, kernel), range(10))


def test_cuda_events_time_the_kernels_and_not_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LaunchQueue()
    monkeypatch.setattr(torch, "cuda", queue.cuda)
    # Launching takes ten times as long as running, and together longer than the first sleep hides.
    taken, host_bound = cuda_sample(queue, launch=1e-3, kernel=1e-4)
    assert taken == pytest.approx(10 * 1e-4)
    assert not host_bound


def test_calls_that_cannot_be_queued_ahead_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LaunchQueue()
    monkeypatch.setattr(torch, "cuda", queue.cuda)
    taken, host_bound = CudaTimer(torch.device("cuda")).sample(lambda _: queue.synchronize(), [0])
    assert host_bound
    assert taken == 0.0


def test_peak_memory_counts_what_is_held_at_once_beyond_the_inputs() -> None:
    inputs = torch.ones(4 * MIB, dtype=torch.uint8)

    def call() -> torch.Tensor:
        for _ in range(3):
            intermediate = inputs[: 2 * MIB].clone()
            del intermediate
        output = inputs[:MIB].clone()
        return output.clone()  # held at once: `output` and its copy

    assert peak_bytes(call, CPU) == 2 * MIB
    assert peak_bytes(lambda: inputs.zero_(), CPU) == 0


def test_a_cache_shared_by_cores_counts_once_and_one_per_socket_adds_up(tmp_path: Path) -> None:
    for cpu, socket in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, (level, size, sharing) in enumerate([(1, "32K", str(cpu)), (3, "16384K", socket)]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", sharing)):
                (folder / name).write_text(f"{text}\n")
    assert cpu_cache_bytes(tmp_path) == 32 * MIB
