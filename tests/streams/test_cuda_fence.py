from __future__ import annotations

import threading
from typing import Any

import pytest

from slipstream.streams import cuda_lane
from slipstream.streams.cuda_lane import CudaFence, EventPool, default_waiter
from slipstream.streams.wake import LoopWaiter, ThreadWaiter


class FakeEvent:
    def __init__(self) -> None:
        self.passed = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.num_waits += 1
        self.passed = True


def make_fence() -> tuple[CudaFence, Any, EventPool]:
    event: Any = FakeEvent()
    pool = EventPool()
    return CudaFence(event, pool), event, pool


def test_an_event_goes_back_to_the_pool_when_it_was_seen_passed_and_the_fence_stays_done() -> None:
    fence, event, pool = make_fence()
    assert not fence.done()
    assert fence.event() is event
    assert len(pool) == 0
    event.passed = True
    assert fence.done()
    assert len(pool) == 1
    event.passed = False  # recorded again, for somebody else
    assert fence.done()
    assert fence.event() is None
    fence.wait_blocking()
    assert event.num_waits == 0


def test_a_blocking_wait_gives_the_event_back_too() -> None:
    fence, event, pool = make_fence()
    fence.wait_blocking()
    assert event.num_waits == 1
    assert fence.done()
    assert len(pool) == 1


def test_an_event_goes_back_once_however_many_threads_see_it_passed() -> None:
    for _ in range(50):
        fence, event, pool = make_fence()
        event.passed = True
        barrier = threading.Barrier(4)

        def look(fence: CudaFence = fence, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            assert fence.done()

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(pool) == 1


@pytest.mark.parametrize(("cores", "sleeps"), [(1, True), (3, True), (4, False), (16, False)])
def test_the_loop_asks_for_its_tickets_only_where_that_takes_no_core_from_somebody(
    monkeypatch: pytest.MonkeyPatch, cores: int, sleeps: bool
) -> None:
    monkeypatch.setattr(cuda_lane, "usable_cores", lambda: cores)
    assert default_waiter("compute").blocking_events is sleeps
    assert isinstance(default_waiter("compute"), ThreadWaiter if sleeps else LoopWaiter)
