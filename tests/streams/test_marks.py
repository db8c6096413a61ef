from __future__ import annotations

import time
import types
from typing import Any

import pytest

from slipstream.streams import marks
from slipstream.streams.marks import MarkSwitch, NoMarks, RingMarks


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


def test_a_range_carries_the_rows_and_tokens_of_its_step() -> None:
    ring = RingMarks(16)
    ring.end(ring.start(marks.LAUNCH, 4, 8, 130))
    ring.lane_end(ring.lane_start(marks.FORWARD, 4))
    launch, forward = ring.records()
    assert (launch.step, launch.rows, launch.tokens, launch.is_on_lane) == (4, 8, 130, False)
    assert (forward.name, forward.step, forward.is_on_lane) == ("forward", 4, True)


def test_an_open_range_is_not_a_record() -> None:
    ring = RingMarks(16)
    ring.start(marks.LAUNCH, 1)
    assert ring.records() == []


def test_the_ring_keeps_the_last_ranges() -> None:
    ring = RingMarks(4)
    for step in range(1, 7):
        ring.end(ring.start(marks.COMMIT, step))
    assert [mark.step for mark in ring.records()] == [3, 4, 5, 6]


def test_a_switch_is_off_until_marks_are_put_in_and_whoever_holds_the_old_ones_may_end_with_them() -> None:
    switch = MarkSwitch()
    before = switch.marks
    open_while_off = before.start(marks.AWAIT, 1)
    ring = RingMarks(4)
    switch.marks = ring
    assert switch.marks.is_on
    before.end(open_while_off)
    switch.marks.end(switch.marks.start(marks.COMMIT, 1))
    switch.off()
    assert not switch.marks.is_on
    assert [mark.name for mark in ring.records()] == ["commit"]


def test_marks_that_are_off_record_nothing() -> None:
    off = NoMarks()
    off.end(off.start(marks.COMMIT, 1))
    off.lane_end(off.lane_start(marks.FORWARD, 1))
    assert off.records() == []


def _seconds_a_mark(each: Any) -> float:
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for step in range(2000):
            each.end(each.start(marks.COMMIT, step, 8, 8))
        best = min(best, (time.perf_counter() - started) / 2000)
    return best


def test_marks_that_are_off_cost_next_to_nothing() -> None:
    assert _seconds_a_mark(NoMarks()) < 2e-6


def test_marks_that_are_on_cost_a_hundredth_of_a_millisecond_step() -> None:
    num_marks = 9  # of a step: seven on the loop, stage twice, and the lane's are not on the loop
    assert num_marks * _seconds_a_mark(RingMarks()) < 1e-5


class _FakeNvtx(types.ModuleType):
    """What the package looks like while a tool listens."""

    def __init__(self, *, listened_to: bool = True) -> None:
        super().__init__("nvtx")
        self.listened_to = listened_to
        self.calls: list[tuple[Any, ...]] = []

    def get_domain(self, name: str) -> _FakeNvtx:
        self.calls.append(("domain", name))
        return self

    def get_event_attributes(self, message: str) -> Any:
        return types.SimpleNamespace(message=message, payload=None) if self.listened_to else None

    def start_range(self, attributes: Any) -> str:
        self.calls.append(("start", attributes.message, attributes.payload))
        return f"id-{attributes.message}"

    def end_range(self, range_id: object) -> None:
        self.calls.append(("end", range_id))


def test_ranges_go_to_an_nvtx_domain_with_the_step_as_payload_if_a_tool_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = _FakeNvtx()
    monkeypatch.setitem(__import__("sys").modules, "nvtx", fake)
    assert not RingMarks(4).emits_nvtx
    ring = RingMarks(4, nvtx=True)
    assert ring.emits_nvtx
    ring.end(ring.start(marks.STAGE, 3))
    assert fake.calls == [("domain", "slipstream"), ("start", "stage", 3), ("end", "id-stage")]


@pytest.mark.parametrize("module", [None, _FakeNvtx(listened_to=False)], ids=["no package", "no tool"])
def test_without_a_listener_asking_for_nvtx_still_records(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvtx", module)
    ring = RingMarks(4, nvtx=True)
    assert not ring.emits_nvtx
    ring.end(ring.start(marks.STAGE, 3))
    assert len(ring.records()) == 1
