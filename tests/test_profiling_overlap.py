"""How much communication is hidden, on traces with known overlap: exactly the known number."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paracore.errors import UsageError
from paracore.profiling.events import Collective, RankTrace, collective_of, parents, waits
from paracore.profiling.intervals import difference, intersection, length, union
from paracore.profiling.overlap import Overlap, overlap_of
from paracore.profiling.window import measured
from tests.nsys_export import MS
from tests.profile_cases import collective, counted, device_span, host_trace, span, step

ALL_REDUCE = Collective("all_reduce", "tp")
INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_moments(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = union(first), union(second)
    assert moments(a) == moments(first)
    assert length(a) == len(moments(first))
    assert moments(union(first, second)) == moments(first) | moments(second)
    assert moments(intersection(a, b)) == moments(a) & moments(b)
    assert moments(difference(a, b)) == moments(a) - moments(b)
    for found in (a, union(first, second), intersection(a, b), difference(a, b)):
        assert all(begin < end for begin, end in found)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(found))


def overlap(trace: RankTrace) -> Overlap:
    return overlap_of(trace, measured(trace))


def times(found: Overlap, which: Collective | None = None) -> tuple[float, float]:
    """Return exposed and hidden, in ms."""
    total = found.total if which is None else found.collectives[which]
    return total.exposed / MS, total.hidden / MS


def test_what_is_computed_in_flight_is_hidden_and_what_is_waited_is_exposed() -> None:
    trace = host_trace(
        step(10),
        *collective("all_reduce", "tp", (0, 1), (5, 8), bytes_=12),
        operations=[span("aten::mm", 1, 5)],
    )
    found = overlap(trace)
    assert times(found) == times(found, ALL_REDUCE) == (3.0, 4.0)
    assert found.total.share_hidden == 4 / 7
    assert (found.total.count, found.total.bytes) == (1, 12)


def test_a_sleep_before_the_wait_is_no_communication() -> None:
    # The backend's record of a message lasts from post to wait, whatever the rank does meanwhile.
    trace = host_trace(
        step(10),
        *collective("exchange", "cp", (0, 1), (8, 9)),
        messages=[span("gloo:send", 0.5, 9), span("gloo:recv", 0.6, 9)],
    )
    assert times(overlap(trace)) == (1.0, 0.0)


def test_a_message_that_has_arrived_is_no_longer_hidden_by_what_is_computed() -> None:
    trace = host_trace(
        step(10),
        *collective("exchange", "cp", (0, 1), (9, 9.5)),
        operations=[span("aten::mm", 1, 9)],
        messages=[span("gloo:send", 0.5, 2), span("gloo:recv", 0.6, 3)],
    )
    assert times(overlap(trace)) == (0.5, 2.0)


def test_a_collective_is_in_flight_as_the_backends_thread_has_it() -> None:
    # Two at once over different axes: each is given the record of its own kind, in the order of posts.
    trace = host_trace(
        step(20),
        *collective("reduce_scatter", "tp", (0, 1), (9, 9.5)),
        *collective("all_gather", "dp", (1, 2), (12, 12)),
        operations=[span("aten::mm", 2, 9)],
        messages=[
            span("gloo:all_reduce", 1.5, 3, "thread 8"),  # gloo reduces and scatters so
            span("gloo:all_gather", 3, 8, "thread 9"),
            span("gloo:barrier", 0, 20, "thread 9"),
        ],
    )
    found = overlap(trace)
    assert times(found, Collective("reduce_scatter", "tp")) == (0.5, 1.0)
    assert times(found, Collective("all_gather", "dp")) == (0.0, 5.0)
    assert times(found) == (0.5, 6.0)


def test_moments_with_two_transfers_in_flight_count_once_in_all() -> None:
    trace = host_trace(
        step(10),
        *collective("all_reduce", "tp", (0, 1), (6, 7)),
        *collective("all_gather", "tp", (1, 2), (7, 8)),
        operations=[span("aten::mm", 2, 6)],
    )
    found = overlap(trace)
    assert times(found, ALL_REDUCE) == (1.0, 4.0)
    assert times(found, Collective("all_gather", "tp")) == (1.0, 4.0)
    assert times(found) == (2.0, 4.0)


def test_without_operations_the_innermost_ranges_are_compute_but_not_those_around_them() -> None:
    trace = host_trace(
        step(20),
        span("paracore.ring_attention.forward", 0, 20),
        span("paracore.attention.continue", 2, 5),
        *collective("exchange", "cp", (1, 2), (10, 12)),
    )
    assert times(overlap(trace)) == (2.0, 3.0)


def test_copies_by_the_backends_threads_are_no_compute() -> None:
    trace = host_trace(
        step(10),
        *collective("all_reduce", "tp", (0, 1), (5, 6)),
        operations=[span("aten::clone", 1, 5, "thread 9")],
    )
    assert times(overlap(trace)) == (1.0, 0.0)


def test_what_was_posted_before_recording_or_is_waited_for_after_it_is_unpaired() -> None:
    _, wait = collective("all_reduce", "tp", (-5, -4), (2, 3))
    post, _ = collective("all_gather", "tp", (8, 9), (30, 31), bytes_=12)
    found = overlap(host_trace(step(10), wait, post, operations=[span("aten::mm", 1, 10)]))
    reduced, gathered = found.collectives[ALL_REDUCE], found.collectives[Collective("all_gather", "tp")]
    assert (reduced.exposed, reduced.hidden, reduced.count, reduced.unpaired) == (MS, MS, 1, 1)
    assert (gathered.exposed, gathered.hidden, gathered.unpaired) == (0, 2 * MS, 1)
    assert (gathered.count, gathered.bytes) == (0, 0)  # they are those of the step that waits


def test_records_of_what_is_not_paired_are_not_counted_again() -> None:
    _, wait = collective("all_gather", "dp", (-5, -4), (2, 3))
    post, _ = collective("all_gather", "dp", (8, 9), (30, 31))
    records = [span("gloo:all_gather", begin, begin + 1, "thread 8") for begin in (1, 9)]
    found = overlap(host_trace(step(10), wait, post, messages=records))
    assert set(found.collectives) == {Collective("all_gather", "dp")}
    assert (found.total.count, found.total.unpaired) == (1, 2)


def test_what_one_step_posts_and_the_next_waits_for_is_of_the_step_that_waits() -> None:
    # Recorded from one step before the measured one on; the last wait lies behind what is recorded.
    first, last = (collective("all_gather", "dp", (at, at), (at + 5, at + 6), 100) for at in (9, 19))
    ranges = [step(10), *counted(20, 10), *first, last[0]]
    trace = host_trace(*ranges, operations=[span("aten::mm", 10, 14)])
    found = overlap(trace)
    assert times(found, Collective("all_gather", "dp")) == times(found) == (1.0, 4.0)
    assert (found.total.count, found.total.bytes, found.total.unpaired) == (1, 100, 1)


def test_on_a_device_the_last_steps_gather_does_not_prolong_the_measured_steps() -> None:
    first, last = (collective("all_gather", "dp", (at, at + 0.5), (at + 2, at + 2), 100) for at in (3, 13))
    trace = RankTrace(
        0,
        [step(4), *counted(14, 4), *first, last[0]],
        device=[
            device_span(0, 8, launched=0.1),  # the device is behind the host
            device_span(8, 12, moves=True, stream=20, launched=3.2),
            device_span(9, 18, launched=6),
            device_span(18, 40, moves=True, stream=20, launched=13.2),
        ],
    )
    assert measured(trace).time == [(8 * MS, 18 * MS)]
    found = overlap(trace)
    assert times(found) == (1.0, 3.0)
    assert (found.total.count, found.total.bytes, found.total.unpaired) == (1, 100, 1)


def test_waits_in_another_order_than_posts_do_not_cut_the_records_short() -> None:
    late, early = (collective("exchange", "cp", *ends) for ends in (((0, 1), (12, 13)), ((1, 2), (3, 3.1))))
    trace = host_trace(
        step(20),
        *late,
        *early,
        operations=[span("aten::mm", 4, 12)],
        messages=[span("gloo:recv", 0.5, 11), span("gloo:recv", 1.5, 3)],
    )
    assert times(overlap(trace)) == (1.1, 7.0)


def test_each_axis_has_the_records_of_its_groups_threads() -> None:
    # The later one's thread is free, the earlier one's busy with what is not seen.
    trace = host_trace(
        step(20),
        *collective("all_reduce", "tp", (0, 0.1), (12, 12.1)),
        *collective("all_reduce", "cp", (0.2, 0.3), (2, 2.1)),
        operations=[span("aten::mm", 0.5, 2), span("aten::mm", 2.1, 12)],
        messages=[span("gloo:all_reduce", 0.5, 1, "thread 9"), span("gloo:all_reduce", 3, 11, "thread 8")],
    )
    found = overlap(trace)
    assert times(found, Collective("all_reduce", "cp")) == (0.1, 0.5)
    assert times(found, ALL_REDUCE) == (0.1, 8.0)


def test_what_another_thread_computes_while_one_waits_hides_communication() -> None:
    trace = host_trace(
        step(10),
        *collective("all_reduce", "tp", (0, 1), (2, 8)),
        span("paracore.swiglu.backward", 3, 7, "thread 8"),
    )
    found = overlap(trace)
    assert times(found) == (2.0, 4.0)
    assert found.compute == [(3 * MS, 7 * MS)]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("wait_for_counter_kernel", True),
        (
            "c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**)",
            True,
        ),
        ("void c10d::symmetric_memory::wait_signal_kernel(unsigned int**)", True),
        ("matmul_kernel", False),
        ("barrier_kernels_of_somebody", False),
    ],
)
def test_kernels_that_only_wait_are_known_by_name(name: str, found: bool) -> None:
    assert waits(name) == found


def test_only_the_measured_steps_count() -> None:
    outside = collective("all_reduce", "tp", (12, 13), (14, 15))
    inside = collective("all_reduce", "tp", (0, 1), (2, 3))
    again = collective("all_reduce", "tp", (20, 21), (22, 24))
    found = overlap(host_trace(step(10), step(30, 20), *inside, *outside, *again))
    assert times(found) == (3.0, 0.0)
    assert found.total.count == 2


def test_on_a_device_what_runs_alone_is_exposed_whatever_the_host_waits_for() -> None:
    trace = RankTrace(
        0,
        [step(4), *collective("all_reduce", "tp", (1, 2), (2, 3), bytes_=8)],
        device=[
            device_span(2, 12, moves=True, stream=20, launched=1.5),
            device_span(0, 5, launched=0.1),
            device_span(9, 10, launched=3.5),
        ],
    )
    found = overlap(trace)
    assert times(found, ALL_REDUCE) == times(found) == (6.0, 4.0)
    assert found.total.bytes == 8


def test_copies_launched_in_a_post_communicate_though_they_are_no_collective() -> None:
    trace = RankTrace(
        0,
        [step(4), *collective("all_gather", "tp", (1, 2), (2, 3))],
        device=[device_span(2, 8, stream=20, launched=1.5), device_span(0, 6, launched=0.1)],
    )
    assert times(overlap(trace), Collective("all_gather", "tp")) == (2.0, 4.0)


def test_what_no_range_posted_is_found_all_the_same_over_an_unknown_axis() -> None:
    on_device = RankTrace(
        0, [step(4)], device=[device_span(0, 6, moves=True, launched=0), device_span(1, 2, launched=0)]
    )
    assert times(overlap(on_device), Collective("ncclDevKernel_AllReduce", "-")) == (5.0, 1.0)
    on_host = host_trace(
        step(10), operations=[span("aten::mm", 1, 4)], messages=[span("gloo:all_gather", 2, 8, "thread 9")]
    )
    assert times(overlap(on_host), Collective("gloo:all_gather", "-")) == (4.0, 2.0)


def test_a_trace_without_communication_has_no_share() -> None:
    assert overlap(host_trace(step(10), operations=[span("aten::mm", 1, 4)])).total.share_hidden is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("paracore.collectives.all_gather.tp.post", (Collective("all_gather", "tp"), "post")),
        ("paracore.collectives.all_to_all.dp_cp.wait", (Collective("all_to_all", "dp_cp"), "wait")),
        ("paracore.collectives.all_reduce.tp[2].wait", (Collective("all_reduce", "tp[2]"), "wait")),
        ("paracore.adamw.step", None),
        ("paracore.collectives.all_reduce.tp", None),
    ],
)
def test_names_of_collectives_are_read(name: str, found: object) -> None:
    assert collective_of(name) == found


def test_parents_are_the_innermost_ranges_around_on_the_same_thread() -> None:
    spans = [span("a", 0, 10), span("b", 2, 6), span("c", 2, 4), span("d", 6, 7), span("e", 3, 5, "thread 8")]
    assert parents(spans) == [None, 0, 1, 0, None]


def test_ranges_that_do_not_nest_are_refused() -> None:
    with pytest.raises(UsageError, match=r"do not nest on thread 7: b from 5000000 .* and a from 0"):
        parents([span("a", 0, 10), span("b", 5, 15)])
