from __future__ import annotations

import time
import types

import pytest

from slipstream.streams import marks
from slipstream.streams.marks import NoMarks, RingMarks


def test_ranges_may_overlap_and_come_back_by_start() -> None:
    ring = RingMarks(16)
    waiting = ring.start(marks.AWAIT, 1)
    planning = ring.start(marks.SCHEDULE, 2)
    time.sleep(0.001)
    ring.end(waiting)
    ring.end(planning)
    first, second = ring.records()
    assert (first.name, first.step) == ("await", 1)
    assert (second.name, second.step) == ("schedule", 2)
    assert first.start_ns <= second.start_ns < first.end_ns <= second.end_ns
    assert first.end_ns - first.start_ns >= 1_000_000


def test_an_open_range_is_not_a_record() -> None:
    ring = RingMarks(16)
    ring.start(marks.LAUNCH, 1)
    assert ring.records() == []


def test_the_ring_keeps_the_last_ranges_and_a_late_end_does_not_touch_a_newer_one() -> None:
    ring = RingMarks(4)
    late = ring.start(marks.SEND, 0)
    for step in range(1, 7):
        ring.end(ring.start(marks.COMMIT, step))
    before = ring.records()
    ring.end(late)
    assert ring.records() == before
    assert [mark.step for mark in before] == [3, 4, 5, 6]


def test_marks_that_are_off_record_nothing() -> None:
    off = NoMarks()
    off.end(off.start(marks.COMMIT, 1))
    assert off.records() == []


def test_marks_that_are_off_cost_next_to_nothing() -> None:
    off = NoMarks()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for step in range(2000):
            off.end(off.start(marks.COMMIT, step))
        best = min(best, (time.perf_counter() - started) / 2000)
    assert best < 3e-6


def test_ranges_go_to_nvtx_if_it_is_there_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []
    fake = types.ModuleType("nvtx")
    fake.start_range = lambda message: calls.append(("start", message)) or f"id-{message}"  # type: ignore[attr-defined, func-returns-value]
    fake.end_range = lambda range_id: calls.append(("end", range_id))  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "nvtx", fake)
    assert not RingMarks(4).emits_nvtx
    ring = RingMarks(4, nvtx=True)
    assert ring.emits_nvtx
    ring.end(ring.start(marks.STAGE, 3))
    assert calls == [("start", "stage"), ("end", "id-stage")]


def test_without_the_nvtx_package_asking_for_it_still_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvtx", None)
    ring = RingMarks(4, nvtx=True)
    assert not ring.emits_nvtx
    ring.end(ring.start(marks.STAGE, 3))
    assert len(ring.records()) == 1
