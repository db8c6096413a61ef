"""The report recovers what was planted: idle, exposed and hidden time, steps, distances, stalls, tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.profiling.overlap_report import OUTSIDE, OverlapReport, overlap_report
from slipstream.profiling.report_text import report_text
from slipstream.profiling.timeline import LaneKind, StepFacts, Timeline, TraceError
from slipstream.streams import marks

SPANS = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 40)), max_size=12)
NAMED = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 120), st.integers(0, 60)), max_size=14)


def phase_times(report: OverlapReport) -> dict[str, tuple[int, int]]:
    return {phase.name: (phase.exposed_ns, phase.hidden_ns) for phase in report.phases}


def painted(
    streams: list[list[tuple[int, int]]], host: list[tuple[str, int, int]]
) -> tuple[int, dict[str, tuple[int, int]]]:
    """Busy time, and exposed and hidden by name, counted tick by tick: slow, and too simple to be wrong."""
    busy = {tick for spans in streams for start, length in spans for tick in range(start, start + length)}
    start, end = min(busy), max(busy) + 1
    doing: dict[int, str] = {}
    for name, begin, length in sorted(host, key=lambda span: (span[1], -span[2])):
        # The one that began last has the tick, so painting in order of begin leaves the innermost on top.
        doing |= dict.fromkeys(range(begin, begin + length), name)
    exposed: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    for tick in range(start, end):
        (hidden if tick in busy else exposed)[doing.get(tick, OUTSIDE)] += 1
    return len(busy), {name: (exposed[name], hidden[name]) for name in exposed | hidden}


@given(streams=st.lists(SPANS, min_size=1, max_size=4), host=NAMED, origin=st.integers(0, 2**60))
def test_busy_exposed_and_hidden_are_exact_for_nesting_overlap_many_streams_and_any_origin(
    streams: list[list[tuple[int, int]]], host: list[tuple[str, int, int]], origin: int
) -> None:
    timeline = Timeline("planted")
    for number, spans in enumerate(streams):
        lane = timeline.lane(f"stream {number}", LaneKind.DEVICE)
        for start, length in spans:
            lane.add("kernel", origin + start, origin + start + length)
    loop = timeline.lane("loop", LaneKind.LOOP)
    for name, start, length in host:
        loop.add(name, origin + start, origin + start + length)
    if not any(length for spans in streams for _, length in spans):
        with pytest.raises(TraceError, match="nothing ran"):
            overlap_report(timeline)
        return
    report = overlap_report(timeline, burst_gap_ns=10**9)
    busy, expected = painted(streams, host)
    assert report.busy_ns == busy
    assert report.idle_ns == report.window_ns - busy
    assert phase_times(report) == expected
    assert sum(phase.exposed_ns for phase in report.phases) == report.idle_ns
    assert sum(phase.total_ns for phase in report.phases) == report.window_ns
    for gap in report.gaps:
        assert sum(length for _, length in gap.causes) == gap.end_ns - gap.start_ns


PLANTED = st.lists(
    st.tuples(
        st.integers(1, 500),  # forward
        st.integers(0, 300),  # schedule, exposed
        st.integers(0, 300),  # launch, exposed
        st.integers(0, 400),  # commit, hidden behind the forward as far as it fits
    ),
    min_size=2,
    max_size=8,
)


@given(steps=PLANTED, offset=st.integers(-(2**40), 2**40), first=st.integers(0, 1000))
def test_planted_gaps_are_recovered_over_a_clock_offset(
    steps: list[tuple[int, int, int, int]], offset: int, first: int
) -> None:
    marked, device = Timeline("marks"), Timeline("device")
    loop, compute = marked.lane("loop", LaneKind.LOOP), device.lane("compute", LaneKind.DEVICE)
    now = 10**6
    expected: Counter[str] = Counter()
    idle = 0
    for number, (forward, schedule, launch, commit) in enumerate(steps, first):
        loop.add(marks.SCHEDULE, now, now + schedule, number)
        loop.add(marks.LAUNCH, now + schedule, now + schedule + launch, number)
        if number > first:  # what is before the first step is outside the window
            expected += Counter(schedule=schedule, launch=launch)
            idle += schedule + launch
        now += schedule + launch
        compute.add("forward", now + offset, now + forward + offset, number)
        loop.add(marks.COMMIT, now, now + min(commit, forward), number - 1)
        now += forward
    marked.absorb(device, offset_ns=-offset)
    report = overlap_report(marked)
    assert report.steps_are == "steps"
    assert report.num_steps == len(steps) - 1
    assert report.idle_ns == report.idle_between_ns == idle
    exposed = {phase.name: phase.exposed_ns for phase in report.phases if phase.exposed_ns}
    assert exposed == {name: length for name, length in expected.items() if length}
    hidden = sum(min(commit, forward) for forward, _, _, commit in steps[:-1])
    assert sum(phase.hidden_ns for phase in report.phases if phase.name == marks.COMMIT) == hidden
    assert report.step is not None
    assert report.step.count == len(steps) - 1


def two_steps_on_two_streams() -> Timeline:
    """Marks, runtime calls and kernels without steps of their own: the calls say whose they are."""
    timeline = Timeline("planted")
    loop = timeline.lane("loop", LaneKind.LOOP, thread="main")
    calls = timeline.lane("main calls", LaneKind.RUNTIME, thread="main")
    compute, copy = timeline.lane("stream 7", LaneKind.DEVICE), timeline.lane("stream 9", LaneKind.DEVICE)
    for number, at in enumerate((0, 1000, 2000)):
        loop.add(marks.LAUNCH, at, at + 300, number)
        calls.add("cudaGraphLaunch", at + 100, at + 150, correlation=10 + number)
        calls.add("cudaMemcpyAsync", at + 200, at + 220, correlation=20 + number)
        compute.add("gemm", at + 400, at + 600, correlation=10 + number)
        compute.add("norm", at + 610, at + 900, correlation=10 + number)
        copy.add("DtoH", at + 950, at + 960, correlation=20 + number)
        timeline.facts[number] = StepFacts(rows=8, tokens=8, sampled=8)
    return timeline


def test_kernels_belong_to_the_step_whose_mark_holds_their_launch_call() -> None:
    report = overlap_report(two_steps_on_two_streams())
    assert (report.steps_are, report.num_steps, report.window_ns) == ("steps", 2, 2000)
    assert report.idle_within_ns == 2 * (10 + 50)
    assert report.idle_between_ns == 2 * 440
    assert report.gaps[0].before + 1 == report.gaps[0].after
    assert dict(report.gaps[0].causes) == {marks.LAUNCH: 300, OUTSIDE: 140}
    assert report.streams == (("stream 7", 2 * 490), ("stream 9", 2 * 10))


def test_distances_graph_launches_and_tokens_are_those_of_the_window() -> None:
    report = overlap_report(two_steps_on_two_streams())
    assert report.launch_to_start is not None
    # A graph's launch is one start, not one for each of its kernels.
    assert (report.launch_to_start.count, report.launch_to_start.least, report.launch_to_start.most) == (4, 300, 750)
    assert report.num_graph_launches == report.num_graph_steps == 2
    assert report.num_tokens == 16
    assert report.tokens_per_s == 16 / 2000e-9


def test_work_that_starts_before_its_launch_shows_that_the_clocks_disagree() -> None:
    timeline = two_steps_on_two_streams()
    skewed = Timeline("skewed")
    skewed.absorb(timeline, without=(LaneKind.DEVICE,))
    skewed.absorb(timeline, offset_ns=-500, without=(LaneKind.LOOP, LaneKind.RUNTIME))
    assert overlap_report(timeline).starts_before_launch == 0
    assert overlap_report(skewed).starts_before_launch == 2


def test_without_calls_the_distance_is_from_the_launch_mark_to_the_steps_start() -> None:
    timeline = Timeline("cpu")
    loop, lane = timeline.lane("loop", LaneKind.LOOP), timeline.lane("compute", LaneKind.DEVICE)
    for number, at in enumerate((0, 1000, 2000)):
        loop.add(marks.LAUNCH, at, at + 10, number)
        lane.add("forward", at + 100 * (number + 1), at + 600, number)
        lane.add("draw", at + 600, at + 700, number)
    report = overlap_report(timeline)
    assert report.launch_to_start is not None
    assert (report.launch_to_start.least, report.launch_to_start.most, report.launch_to_start.count) == (100, 200, 2)


def foreign(gaps: tuple[int, ...]) -> Timeline:
    """Another engine's trace: kernels in bursts, calls of two threads, no marks."""
    timeline = Timeline("foreign")
    stream = timeline.lane("stream 7", LaneKind.DEVICE)
    scheduler = timeline.lane("calls", LaneKind.RUNTIME, thread="scheduler")
    other = timeline.lane("calls", LaneKind.RUNTIME, thread="other")
    operators = timeline.lane("operators", LaneKind.HOST, thread="scheduler")
    now = 10_000
    for number, gap in enumerate(gaps):
        operators.add("prepare", now, now + gap, correlation=0)
        scheduler.add("cudaLaunchKernel", now + gap - 100, now + gap - 50, correlation=2 * number + 1)
        scheduler.add("cudaLaunchKernel", now + gap - 40, now + gap - 10, correlation=2 * number + 2)
        stream.add("k1", now + gap, now + gap + 1000, correlation=2 * number + 1)
        stream.add("k2", now + gap + 1002, now + gap + 2000, correlation=2 * number + 2)
        now += gap + 2000
    other.add("cudaStreamSynchronize", 0, now, correlation=0)
    # A thread that waits for the device, call by call: recorders number these like launches.
    waker = timeline.lane("calls", LaneKind.RUNTIME, thread="waker")
    for number in range(50):
        waker.add("cudaEventQuery", 100 * number, 100 * number + 50, correlation=1000 + number)
    waker.add("cudaEventSynchronize", 10_000, now, correlation=2000)
    return timeline


def test_a_trace_without_marks_is_cut_into_bursts_and_its_launching_thread_is_charged() -> None:
    report = overlap_report(foreign((50_000, 30_000, 40_000)))
    assert (report.steps_are, report.host, report.num_steps) == ("bursts", "scheduler", 2)
    assert report.idle_between_ns == 70_000
    assert report.idle_within_ns == 4
    assert phase_times(report)["prepare"][0] == 70_000 - 2 * 80
    assert phase_times(report)["cudaLaunchKernel"] == (2 * 80, 0)


def test_named_ranges_are_steps_if_asked_for() -> None:
    report = overlap_report(foreign((50_000, 100, 40_000)), step_range="^prepare$")
    assert (report.steps_are, report.num_steps) == ("ranges", 2)
    assert report.idle_between_ns == 40_100


def test_a_blocking_call_of_a_thread_that_launches_is_a_stall_and_of_one_that_only_waits_it_is_none() -> None:
    timeline = foreign((50_000, 30_000))
    timeline.lane("calls", LaneKind.RUNTIME, thread="scheduler").add("cudaDeviceSynchronize", 60_200, 61_900)
    report = overlap_report(timeline, stall_ns=1500)
    assert [(stall.name, stall.seen) for stall in report.stalls] == [("cudaDeviceSynchronize", ("scheduler",))]
    assert "1 stall of the loop" in report_text(report)


def test_a_thread_that_is_stopped_for_the_device_does_no_work() -> None:
    timeline = foreign((50_000, 30_000, 40_000))
    calm = overlap_report(timeline)
    timeline.lane("calls", LaneKind.RUNTIME, thread="scheduler").add("cudaStreamSynchronize", 60_200, 61_900)
    report = overlap_report(timeline)
    assert (report.exposed_ns, report.hidden_ns) == (calm.exposed_ns, calm.hidden_ns)
    (wait,) = (phase for phase in report.phases if phase.name == "cudaStreamSynchronize")
    assert (wait.is_wait, wait.hidden_ns, wait.exposed_ns) == (True, 1698, 2)
    assert "(cudaStreamSynchronize)" in report_text(report)


def test_a_long_phase_is_a_stall_named_with_the_code_that_was_seen_and_an_await_is_none() -> None:
    timeline = two_steps_on_two_streams()
    loop = timeline.lane("loop", LaneKind.LOOP, thread="main")
    loop.add(marks.AWAIT, 500, 900, 0)
    loop.add(marks.COMMIT, 1400, 1900, 0)
    loop.add(marks.DETOKENIZE, 1450, 1890, 0)
    watch = timeline.lane("watch", LaneKind.STALLS)
    watch.add("detokenizer.py:40 push", 1500, 1880)
    watch.add("client.py:7 handle", 520, 880)
    stalls = overlap_report(timeline, stall_ns=350).stalls
    assert [(stall.name, stall.seen) for stall in stalls] == [
        ("commit", ("detokenizer.py:40 push",)),
        ("other tasks of the loop", ("client.py:7 handle",)),
    ]
