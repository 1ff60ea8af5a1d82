"""Traces of both tools are read alike, and summed up rightly; what is missing or broken is said."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from paracore.cli.profile_report import memory_lines, report_lines
from paracore.errors import UsageError
from paracore.profiling.events import Collective, RankTrace
from paracore.profiling.memory import KINDS
from paracore.profiling.nsys_export import read_nsys_export
from paracore.profiling.summary import RangeTime, RankSummary, as_json, range_spread, spread, summarize
from paracore.profiling.timeline import draw_timeline
from paracore.profiling.torch_trace import read_torch_trace
from paracore.profiling.traces import find_traces, read_traces, remove_old, require_ranks, require_world
from tests.nsys_export import MS, NsysExport
from tests.profile_cases import (
    collective,
    counted,
    device_span,
    event,
    host_trace,
    span,
    step,
    write_torch_trace,
)

# ---------------------------------------------------------------- readers


def host_events() -> list[dict[str, object]]:
    return [
        event("paracore.training.step", "cpu_op", 0, 10),
        event("paracore.collectives.all_reduce.tp.post", "cpu_op", 0, 1, bytes=64),
        event("c10d::allreduce_", "cpu_op", 0.2, 0.8),
        event("gloo:all_reduce", "user_annotation", 0.5, 4, tid=8),
        event("aten::mm", "cpu_op", 1, 3),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 1, 9),
        event("MmBackward0", "cpu_op", 1, 9),
        event("Optimizer.step#AdamW.step", "user_annotation", 1, 9),
        event("paracore.collectives.all_reduce.tp.wait", "cpu_op", 3.5, 5),
        event("PyTorch Profiler (0)", "Trace", 0, 20, tid="PyTorch Profiler"),
    ]


def test_a_torch_trace_of_the_host_is_read(tmp_path: Path) -> None:
    trace = read_torch_trace(write_torch_trace(tmp_path / "a.json", host_events(), rank=3))
    assert trace.rank == 3
    assert [(each.name, each.bytes) for each in trace.ranges] == [
        ("paracore.training.step", None),
        ("paracore.collectives.all_reduce.tp.post", 64),
        ("paracore.collectives.all_reduce.tp.wait", None),
    ]
    assert [each.name for each in trace.operations] == ["aten::mm"]
    assert [(each.name, each.interval) for each in trace.messages] == [("gloo:all_reduce", (MS // 2, 4 * MS))]
    total = summarize(trace).overlap.total
    assert (total.exposed, total.hidden, total.bytes) == (1.5 * MS, 2 * MS, 64)


def test_a_torch_trace_may_be_compressed(tmp_path: Path) -> None:
    plain = write_torch_trace(tmp_path / "rank0.json", host_events())
    packed = tmp_path / "rank0.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_torch_trace(packed) == read_torch_trace(plain)


def device_events() -> list[dict[str, object]]:
    place = {"device": 0}
    return [
        event("paracore.training.step", "cpu_op", 0, 4),
        event("paracore.rms_norm.forward", "cpu_op", 0, 0.5),
        event("cudaLaunchKernel", "cuda_runtime", 0.2, 0.3, correlation=1),
        event("gemm", "kernel", 1, 5, tid=7, correlation=1, stream=7, **place),
        event("paracore.collectives.all_reduce.tp.post", "cpu_op", 1, 2, bytes=64),
        event("cudaLaunchKernelExC", "cuda_runtime", 1.2, 1.3, correlation=2),
        event("ncclDevKernel_AllReduce_Sum_f32_RING", "kernel", 2, 8, correlation=2, stream=20, **place),
        event("paracore.collectives.all_reduce.tp.wait", "cpu_op", 2, 2.1),
        event("cudaLaunchKernel", "cuda_runtime", 0.3, 0.4, correlation=3),
        event("wait_for_counter_kernel", "kernel", 5, 9, correlation=3, stream=21, **place),
    ]


def nsys_events(path: Path) -> Path:
    """Write the same as `device_events` as nsys would."""
    export = NsysExport(path)
    export.range("paracore.training.step", 0, 4)
    export.range("paracore.rms_norm.forward", 0, 0.5)
    export.kernel("gemm", 0.2, 1, 5)
    export.range("paracore.collectives.all_reduce.tp.post", 1, 2, bytes_=64)
    export.kernel("ncclDevKernel_AllReduce_Sum_f32_RING", 1.2, 2, 8, stream=20)
    export.range("paracore.collectives.all_reduce.tp.wait", 2, 2.1)
    export.foreign_range("ncclAllReduce", 1.1, 1.4)
    export.kernel("wait_for_counter_kernel", 0.3, 5, 9, stream=21)
    export.range("paracore.swiglu.forward", 3.9, None)  # open when recording ended
    return path


def test_both_tools_give_the_same_summary_of_a_device(tmp_path: Path) -> None:
    by_torch = summarize(read_torch_trace(write_torch_trace(tmp_path / "a.json", device_events())))
    by_nsys = summarize(read_nsys_export(nsys_events(tmp_path / "a.sqlite")))
    assert by_torch == by_nsys
    found = by_nsys.overlap.collectives[Collective("all_reduce", "tp")]
    assert (found.exposed, found.hidden, found.bytes) == (3 * MS, 3 * MS, 64)
    assert by_nsys.time == 8 * MS  # until the device has done what the step launched
    assert by_nsys.ranges["paracore.rms_norm.forward"].device == 4 * MS
    assert by_nsys.ranges["paracore.training.step"].device == 7 * MS


def test_copies_from_peer_to_peer_communicate_and_others_do_not(tmp_path: Path) -> None:
    export = NsysExport(tmp_path / "rank0.sqlite")
    export.range("paracore.training.step", 0, 4)
    export.copy(10, 0, 1, 3, 128, stream=9)
    export.copy(8, 0, 2, 5, 128, stream=7)
    total = summarize(read_nsys_export(export.path)).overlap.total
    assert (total.exposed, total.hidden, total.bytes) == (MS, MS, 128)


def test_an_export_without_a_device_is_read(tmp_path: Path) -> None:
    export = NsysExport(tmp_path / "rank0.sqlite", cuda=False)
    export.range("paracore.training.step", 0, 10)
    export.range("paracore.collectives.exchange.cp.post", 0, 1)
    export.range("paracore.attention.forward", 1, 4)
    export.range("paracore.collectives.exchange.cp.wait", 5, 7)
    total = summarize(read_nsys_export(export.path, 2)).overlap.total
    assert (total.exposed, total.hidden) == (2 * MS, 3 * MS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rank0.json", "{", r"rank0.json: cannot be read as a trace of torch.profiler \(JSONDecodeError"),
        ("rank0.json", "[]", "cannot be read as a trace of torch.profiler"),
        ("rank0.json.gz", "no gzip", "cannot be read as a trace of torch.profiler"),
        ("rank0.json.gz", gzip.compress(b"[1, 2, 3]" * 99, mtime=0)[:-9], r"rank0.json.gz: .* \(EOFError"),
        (
            "rank0.json.gz",
            gzip.compress(b"[]", mtime=0)[:10] + b"\xff" * 9,
            r"json.gz: .* \(error: Error -3",
        ),
        ("rank0.json", '{"traceEvents": []}', "has no range of paracore's: record it with"),
        ("rank0.sqlite", "no database at all, but long enough", "cannot be read as an export of Nsight"),
        ("rank0.sqlite", "", "no table NVTX_EVENTS: nothing was recorded with --trace nvtx"),
    ],
)
def test_unreadable_traces_are_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        read_traces(find_traces(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ALTER TABLE NVTX_EVENTS DROP COLUMN int64Value", "No item with that key"),
        ("UPDATE NVTX_EVENTS SET globalTid = NULL", "NoneType"),
    ],
)
def test_an_export_that_is_not_as_documented_is_refused(tmp_path: Path, change: str, message: str) -> None:
    path = nsys_events(tmp_path / "rank0.sqlite")
    alter(path, change)
    with pytest.raises(UsageError, match=rf"rank0.sqlite: cannot be read as an export .*{message}"):
        read_nsys_export(path)


def alter(path: Path, change: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(change)


def test_ranges_are_told_by_their_names_where_nothing_says_what_made_the_domain(
    tmp_path: Path,
) -> None:
    path = nsys_events(tmp_path / "rank0.sqlite")
    whole = read_nsys_export(path)
    alter(path, "DELETE FROM NVTX_EVENTS WHERE eventType = 75")
    assert whole.ranges
    assert read_nsys_export(path) == whole  # without the other library's ranges


def test_missing_traces_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no trace, which would be called rank0.json"):
        find_traces(tmp_path)
    for rank in (0, 2):
        write_torch_trace(tmp_path / f"rank{rank}.json", host_events())
    with pytest.raises(UsageError, match=r"2 of 4 ranks wrote no trace \(rank1.json, rank3.json\)"):
        require_ranks(tmp_path, 4, ".json")


def test_ranks_are_those_of_the_files_names_and_each_is_there_once(tmp_path: Path) -> None:
    for rank in (10, 2):
        write_torch_trace(tmp_path / f"rank{rank}.json", host_events())
    assert [trace.rank for trace in read_traces(find_traces(tmp_path))] == [2, 10]
    nsys_events(tmp_path / "rank2.sqlite")
    with pytest.raises(UsageError, match=r"rank2.json and rank2.sqlite are both of rank 2: keep the traces"):
        read_traces(find_traces(tmp_path))


def test_only_traces_of_time_are_found(tmp_path: Path) -> None:
    trace = write_torch_trace(tmp_path / "rank0.json", host_events())
    for name in ("rank0.memory.json", "rank0.nsys-rep", "rank0x.json", "summary.json", "ranks.json"):
        (tmp_path / name).write_text("{}")
    assert find_traces(tmp_path) == [trace]


@pytest.mark.parametrize(
    ("ranks", "world_size", "message"),
    [
        ([0], 2, "of 2 ranks the traces of rank 1 are missing"),
        ([0, 2], None, "of 3 ranks the traces of rank 1 are missing"),
        ([0, 1, 2], 2, "a trace of rank 2, but the run had 2 ranks: remove those of earlier runs"),
    ],
)
def test_the_ranks_of_a_folder_must_be_those_of_one_run(
    tmp_path: Path, ranks: list[int], world_size: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        require_world(tmp_path, [RankTrace(rank, world_size=world_size) for rank in ranks])


def test_traces_of_runs_of_different_sizes_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        write_torch_trace(tmp_path / f"rank{rank}.json", host_events(), rank)
    found = read_traces(find_traces(tmp_path))
    require_world(tmp_path, found)
    with pytest.raises(UsageError, match="holds traces of runs of 2 and 4 ranks"):
        require_world(tmp_path, [found[0], replace(found[1], world_size=4)])


@pytest.mark.parametrize(
    ("way", "removed"),
    [
        ("torch", {"rank0.json", "rank12.json.gz"}),
        ("nsys", {"rank0.nsys-rep", "rank0.sqlite"}),
        ("ncu", {"rank0.ncu-rep"}),
        ("memory", {"rank0.memory.json", "rank0.memory.pickle"}),
    ],
)
def test_what_an_earlier_run_left_is_removed_and_nothing_else(
    tmp_path: Path, way: str, removed: set[str]
) -> None:
    left = {"rank0.json", "rank12.json.gz", "rank0.nsys-rep", "rank0.sqlite", "rank0.ncu-rep"}
    left |= {"rank0.memory.json", "rank0.memory.pickle", "rank0.notes.json", "rank.json", "summary.json"}
    for name in left:
        (tmp_path / name).touch()
    remove_old(tmp_path, way)
    assert {path.name for path in tmp_path.iterdir()} == left - removed


# ---------------------------------------------------------------- sums


def two_steps(slow: float, rank: int) -> RankTrace:
    """Return two steps of 10 ms: `slow` ms are computed, the rest waited for, but for a gap."""
    ranges = []
    for begin in (0, 10):
        ranges += [
            step(begin + 10, begin),
            span("paracore.training.forward", begin, begin + 9),
            span("paracore.swiglu.forward", begin, begin + slow),
            *collective("all_reduce", "tp", (begin + slow, begin + slow), (begin + slow, begin + 8.5), 32),
        ]
    return RankTrace(rank, ranges)


def two_ranks() -> list[RankSummary]:
    return [summarize(two_steps(2, 0)), summarize(two_steps(6, 1))]


def test_time_is_counted_with_and_without_the_ranges_within() -> None:
    ranges = two_ranks()[0].ranges
    assert ranges["paracore.training.step"] == RangeTime(2, 20 * MS, 2 * MS, 0)
    assert ranges["paracore.training.forward"] == RangeTime(2, 18 * MS, 1 * MS, 0)
    assert ranges["paracore.swiglu.forward"] == RangeTime(2, 4 * MS, 4 * MS, 0)


def test_gaps_are_what_is_neither_computed_nor_waited_for() -> None:
    gaps = two_ranks()[0].gaps
    assert [(gap.begin, gap.length) for gap in gaps] == [(8.5 * MS, 1.5 * MS), (18.5 * MS, 1.5 * MS)]
    assert gaps[0].inside == "paracore.training.step"  # the middle lies behind forward


def test_imbalance_is_by_how_much_the_slowest_rank_is_above_the_mean() -> None:
    ranks = two_ranks()
    compute = spread(ranks, lambda rank: rank.compute)
    assert (compute.mean, compute.least, compute.most) == (4 * MS, 2 * MS, 6 * MS)
    assert compute.imbalance == 0.5
    assert range_spread(ranks, "paracore.swiglu.forward", "total").imbalance == 0.5
    assert range_spread(ranks, "paracore.training.step", "total").imbalance == 0.0
    assert range_spread(ranks, "paracore.nowhere", "total").imbalance == 0.0


def test_the_report_and_the_json_say_so() -> None:
    text = "\n".join(report_lines(two_ranks()))
    assert "2 ranks, 2 steps; ms per step" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["paracore.swiglu.forward"][1:5] == ["1", "4.000", "2.000", "6.000"]
    assert rows["all_reduce"] == ["all_reduce", "tp", "1", "0.000", "4.500", "0.000", "0.0", "%"]
    assert "share of communication hidden behind compute: 0.0 %" in text
    document = json.loads(json.dumps(as_json(two_ranks()), allow_nan=False))
    assert document["hidden"] == 0.0
    assert document["ranks"][1]["compute"] == 12 * MS
    assert document["ranks"][0]["collectives"][0]["exposed"] == 13 * MS
    assert document["imbalance"]["compute"] == 0.5


def test_only_ranges_of_measured_steps_are_in_the_table() -> None:
    ranges = [step(10), *counted(20, 10)]
    ranges += [span("paracore.swiglu.forward", begin, begin + length) for begin, length in ((1, 5), (11, 2))]
    found = summarize(RankTrace(0, ranges))
    assert found.steps == 1
    assert set(found.ranges) == {"paracore.training.step", "paracore.swiglu.forward"}
    assert found.ranges["paracore.swiglu.forward"] == RangeTime(1, 2 * MS, 2 * MS, 0)


@pytest.mark.parametrize(
    ("steps", "head"),
    [
        ((0, 0), "2 ranks, no training step among what is recorded; ms of all of it"),
        ((2, 2), "2 ranks, 2 steps; ms per step"),
        ((1, 2), "2 ranks, not as many steps on each (rank 0 1, rank 1 2); ms per step"),
        (
            (2, 0),
            "2 ranks, not as many steps on each (rank 0 2, rank 1 0); ms per step, or of all that is "
            "recorded where there is none",
        ),
    ],
)
def test_the_report_says_of_how_many_steps_it_is(steps: tuple[int, ...], head: str) -> None:
    ranks = []
    for rank, count in enumerate(steps):
        ranges = [step(10 * number + 10, 10 * number) for number in range(count)]
        ranks.append(summarize(RankTrace(rank, [*ranges, span("paracore.swiglu.forward", 0, 2)])))
    assert next(report_lines(ranks)) == head


def test_a_report_says_what_is_unpaired() -> None:
    post, _ = collective("all_gather", "dp", (8, 9), (30, 31))
    text = "\n".join(report_lines([summarize(host_trace(step(10), post))]))
    assert "1 unpaired: posted before recording, or in the last step and not waited for in it" in text


def test_a_device_has_a_column_of_its_own(tmp_path: Path) -> None:
    ranks = [summarize(read_nsys_export(nsys_events(tmp_path / "a.sqlite")))]
    text = "\n".join(report_lines(ranks))
    assert "device" in text.splitlines()[2]
    assert "share of communication hidden behind compute: 50.0 %" in text


def test_a_report_of_memory_has_each_range_on_its_highest_rank() -> None:
    low, high = (dict.fromkeys(KINDS, count << 20) for count in (1, 2))
    ranks = [{"a": low}, {"a": high, "b": low}]
    lines = list(memory_lines(ranks))
    assert lines[1].split() == ["range", "peak", "rank", *reversed(KINDS)]
    assert lines[2].split() == ["a", "10.000", "1", *["2.000"] * len(KINDS)]


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize(
    "trace",
    [
        two_steps(2, 0),
        RankTrace(
            0,
            [step(8), *collective("all_reduce", "tp", (1, 2), (2, 3))],
            device=[device_span(2, 7, moves=True, stream=20, launched=1.5), device_span(0, 5, launched=0.1)],
        ),
        host_trace(span("paracore.swiglu.forward", 0, 1)),
    ],
    ids=["host", "device", "without a step"],
)
def test_a_timeline_has_both_colours_where_there_is_both(tmp_path: Path, trace: RankTrace) -> None:
    draw_timeline([trace], tmp_path / "timeline.png")
    picture = imread(tmp_path / "timeline.png")[..., :3]
    communicates = bool(summarize(trace).overlap.collectives)
    # Below the legend and the title, which have the colours in any case.
    panel = picture[picture.shape[0] // 3 :]
    for color, expected in (((0x44, 0x77, 0xAA), True), ((0xEE, 0x66, 0x77), communicates)):
        wanted = [channel / 255 for channel in color]
        assert bool((abs(panel - wanted) < 0.01).all(-1).any()) == expected
