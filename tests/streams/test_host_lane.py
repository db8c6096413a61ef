from __future__ import annotations

import asyncio
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from slipstream.streams.errors import MisuseError
from slipstream.streams.hold import Hold
from slipstream.streams.host_lane import HostLane

MakeLane = Callable[..., HostLane]


@pytest.fixture
def make_lane() -> Iterator[MakeLane]:
    lanes: list[HostLane] = []

    def make(name: str, delay: Callable[[], None] | None = None) -> HostLane:
        lanes.append(HostLane(name, delay=delay))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.close()


def fail() -> None:
    raise ValueError("the step failed")


async def test_jobs_run_in_order_on_one_other_thread(make_lane: MakeLane) -> None:
    lane = make_lane("compute")
    seen: list[int] = []
    threads: set[int] = set()
    for value in range(100):
        lane.submit(lambda value=value: (seen.append(value), threads.add(threading.get_ident())))  # type: ignore[misc]
    assert await lane.ticket(lambda: len(seen)) == 100
    assert seen == list(range(100))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_a_fence_is_done_when_what_was_before_it_has_run_and_not_earlier(make_lane: MakeLane) -> None:
    lane = make_lane("compute")
    gate = threading.Event()
    assert lane.fence().done()
    lane.submit(lambda: gate.wait(5) and None)  # type: ignore[func-returns-value]
    fence = lane.fence()
    lane.submit(lambda: None)
    assert not fence.done()
    gate.set()
    fence.wait_blocking()
    assert fence.done()


async def test_a_lane_waits_for_the_fence_of_another_and_its_submitter_does_not(make_lane: MakeLane) -> None:
    compute, copy = make_lane("compute"), make_lane("copy")
    gate = threading.Event()
    values: list[str] = []
    compute.submit(lambda: gate.wait(5) and values.append("forward"))  # type: ignore[func-returns-value]
    copy.wait(compute.fence())
    copy.submit(lambda: values.append("copy"))
    outcome = copy.ticket(lambda: list(values))
    assert not outcome.done()
    gate.set()
    assert await outcome == ["forward", "copy"]


@pytest.mark.parametrize("seed", range(4))
async def test_two_lanes_that_fence_each_other_never_break_a_buffer_under_random_delays(
    make_lane: MakeLane, seed: int
) -> None:
    rng = random.Random(seed)

    def delay() -> None:
        time.sleep(rng.choice([0, 0, 0, 0.0005]))

    staging, compute = make_lane("staging", delay), make_lane("compute", delay)
    buffers = [-1, -1]  # double buffer: staging writes, compute reads
    readers = [compute.fence(), compute.fence()]
    seen: list[int] = []
    for step in range(40):
        side = step % 2
        staging.wait(readers[side])  # a writer waits for the last reader
        staging.submit(lambda side=side, step=step: buffers.__setitem__(side, step))  # type: ignore[misc]
        compute.wait(staging.fence())
        compute.submit(lambda side=side: seen.append(buffers[side]))  # type: ignore[misc]
        readers[side] = compute.fence()
    assert await compute.ticket(lambda: list(seen)) == list(range(40))


async def test_waiting_for_a_fence_of_its_own_does_not_stop_a_lane(make_lane: MakeLane) -> None:
    lane = make_lane("compute")
    lane.submit(lambda: None)
    lane.wait(lane.fence())
    assert await lane.ticket(lambda: 1) == 1


async def test_a_failed_job_fails_the_next_ticket_and_only_that(make_lane: MakeLane) -> None:
    lane = make_lane("compute")
    before = lane.ticket(lambda: "before")
    lane.submit(fail)
    lane.submit(fail)
    failed = lane.ticket(lambda: "never")
    after = lane.ticket(lambda: "after")
    assert await before == "before"
    with pytest.raises(ValueError, match="the step failed"):
        await failed
    assert await after == "after"


async def test_a_failure_travels_over_fences_to_the_ticket_of_its_own_step(make_lane: MakeLane) -> None:
    compute, copy = make_lane("compute"), make_lane("copy")
    outcomes = []
    for step in range(4):
        compute.submit(fail if step == 1 else lambda: None)
        copy.wait(compute.fence())
        outcomes.append(copy.ticket(lambda step=step: step))  # type: ignore[misc]
    assert await outcomes[0] == 0
    with pytest.raises(ValueError, match="the step failed"):
        await outcomes[1]
    assert [await outcomes[2], await outcomes[3]] == [2, 3]


async def test_a_failure_is_reported_once_although_lanes_fence_each_other_in_a_circle(make_lane: MakeLane) -> None:
    staging, compute, copy = make_lane("staging"), make_lane("compute"), make_lane("copy")
    outcomes = []
    for step in range(6):
        staging.wait(compute.fence())
        staging.submit(lambda: None)
        compute.wait(staging.fence())
        compute.submit(fail if step == 2 else lambda: None)
        copy.wait(compute.fence())
        outcomes.append(copy.ticket(lambda: None))
    results = await asyncio.gather(*outcomes, return_exceptions=True)
    assert [isinstance(result, ValueError) for result in results] == [False, False, True, False, False, False]


async def test_a_failure_behind_the_fence_is_not_taken_early(make_lane: MakeLane) -> None:
    compute, copy = make_lane("compute"), make_lane("copy")
    fence = compute.fence()
    compute.submit(fail)
    compute.synchronize_blocking()
    copy.wait(fence)
    assert await copy.ticket(lambda: "clean") == "clean"


async def test_a_read_that_raises_fails_its_ticket(make_lane: MakeLane) -> None:
    lane = make_lane("copy")
    with pytest.raises(ZeroDivisionError):
        await lane.ticket(lambda: 1 // 0)
    assert await lane.ticket(lambda: 1) == 1


async def test_a_job_and_all_it_closes_over_is_forgotten_as_soon_as_it_has_run(make_lane: MakeLane) -> None:
    class Logits:
        pass

    lane = make_lane("compute")
    logits = Logits()
    alive = weakref.ref(logits)
    lane.submit(lambda logits=logits: None)  # type: ignore[misc]
    del logits
    lane.synchronize_blocking()
    assert alive() is None


async def test_the_hold_of_a_ticket_is_dropped_before_the_ticket_completes(make_lane: MakeLane) -> None:
    class Batch:
        pass

    lane = make_lane("copy")
    batch = Batch()
    alive = weakref.ref(batch)
    hold = Hold(batch)
    del batch
    gate = threading.Event()
    lane.submit(lambda: gate.wait(5) and None)  # type: ignore[func-returns-value]
    hold.until(lane.fence())
    outcome = lane.ticket(lambda: alive() is not None, hold=hold)
    del hold
    gate.set()
    assert await outcome, "the hold must last until the result has been read"
    assert alive() is None


async def test_a_hold_that_another_lane_still_needs_outlives_its_ticket(make_lane: MakeLane) -> None:
    class Batch:
        pass

    copy, compute = make_lane("copy"), make_lane("compute")
    batch, gate = Batch(), threading.Event()
    alive = weakref.ref(batch)
    compute.submit(lambda: gate.wait(5) and None)  # type: ignore[func-returns-value]
    hold = Hold(batch)
    hold.until(compute.fence())
    del batch
    await copy.ticket(lambda: None, hold=hold)
    del hold
    assert alive() is not None
    gate.set()
    compute.synchronize_blocking()
    await copy.ticket(lambda: None)
    assert alive() is None


async def test_closing_never_waits_and_lets_submitted_work_finish(make_lane: MakeLane) -> None:
    lane = make_lane("compute")
    gate = threading.Event()
    lane.submit(lambda: gate.wait(5) and None)  # type: ignore[func-returns-value]
    outcome = lane.ticket(lambda: "done")
    started = time.perf_counter()
    lane.close()
    lane.close()
    assert time.perf_counter() - started < 1
    assert not outcome.done()
    with pytest.raises(MisuseError, match="compute"):
        lane.submit(lambda: None)
    gate.set()
    assert await outcome == "done"


async def test_the_delay_hook_runs_before_every_job(make_lane: MakeLane) -> None:
    calls: list[str] = []
    lane = make_lane("compute", lambda: calls.append("delay"))
    lane.submit(lambda: calls.append("job"))
    await lane.ticket(lambda: None)
    assert calls == ["delay", "job", "delay"]
