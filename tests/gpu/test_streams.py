from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

import pytest
import torch

from slipstream.streams.cuda_lane import CudaLane
from slipstream.streams.errors import MisuseError
from slipstream.streams.hold import Hold
from slipstream.streams.host_lane import HostLane
from slipstream.streams.relay import Relay
from slipstream.streams.staging import StagingRing
from slipstream.streams.stream_ring import distinct_streams
from slipstream.streams.wake import EventWaiter, LoopWaiter, ThreadWaiter

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
CYCLES_10_MS = 20_000_000  # at about 2 GHz; tests need "long", not "exactly"

WAITERS: dict[str, Callable[[], EventWaiter]] = {
    "loop": lambda: LoopWaiter("test"),
    "thread": lambda: ThreadWaiter("test"),
}


def make_lanes(*names: str) -> list[CudaLane]:
    streams = distinct_streams(len(names), CUDA)
    return [CudaLane(name, CUDA, stream=stream) for name, stream in zip(names, streams, strict=True)]


def sleep_10_ms() -> None:
    torch.cuda._sleep(CYCLES_10_MS)


# --- streams, events, fences ---------------------------------------------------------------------


def test_lanes_never_share_a_raw_stream_although_torch_hands_streams_out_in_a_ring() -> None:
    first = distinct_streams(20, CUDA)
    second = distinct_streams(12, CUDA, taken=first)
    handles = {stream.cuda_stream for stream in [*first, *second, torch.cuda.default_stream(CUDA)]}
    assert len(handles) == 33
    with pytest.raises(MisuseError):
        distinct_streams(1, CUDA, taken=[*first, *second])


def test_streams_that_nobody_has_any_more_are_lent_again() -> None:
    first = distinct_streams(2, CUDA)
    handles = {stream.cuda_stream for stream in first}
    assert handles.isdisjoint(stream.cuda_stream for stream in distinct_streams(2, CUDA))
    del first
    gc.collect()
    free = distinct_streams(20, CUDA)
    assert handles <= {stream.cuda_stream for stream in free}


def test_a_fence_passes_with_its_work_and_its_event_is_used_again() -> None:
    (lane,) = make_lanes("compute")
    lane.submit(sleep_10_ms)
    fence = lane.fence()
    assert not fence.done()
    fence.wait_blocking()
    assert fence.done()
    assert len(lane._fence_events) == 1
    again = lane.fence()
    assert len(lane._fence_events) == 0
    again.wait_blocking()
    assert len(lane._fence_events) == 1
    lane.close()


async def test_a_copy_behind_a_fence_reads_what_was_computed_and_the_next_writer_waits_for_it() -> None:
    compute, copy = make_lanes("compute", "copy")
    values = torch.zeros(1024, dtype=torch.int64, device=CUDA)
    ring = StagingRing(1 << 16, pinned=True)
    torch.cuda.synchronize()
    outcomes = []
    for step in range(1, 4):
        host = ring.acquire(step).take((1024,), torch.int64)
        assert host.is_pinned()

        def forward(step: int = step) -> None:
            sleep_10_ms()
            values.fill_(step)

        def copy_out(host: torch.Tensor = host) -> None:
            sleep_10_ms()  # without the second fence the next forward would overwrite the source
            host.copy_(values, non_blocking=True)

        compute.submit(forward)
        copy.wait(compute.fence())
        copy.submit(copy_out)
        compute.wait(copy.fence())
        outcomes.append(copy.ticket(lambda host=host: set(host.tolist())))  # type: ignore[misc]
    assert [await outcome for outcome in outcomes] == [{1}, {2}, {3}]
    compute.close()
    copy.close()


def test_a_cuda_lane_refuses_the_fence_of_a_host_lane() -> None:
    (lane,) = make_lanes("compute")
    host = HostLane("host")
    with pytest.raises(MisuseError):
        lane.wait(host.fence())
    host.close()
    lane.close()


# --- tickets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAITERS)
async def test_the_loop_turns_while_the_gpu_works_and_the_ticket_comes_when_it_is_done(name: str) -> None:
    lane = CudaLane("copy", CUDA, waiter=WAITERS[name]())
    lane.synchronize_blocking()
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    counter = asyncio.ensure_future(count_turns())
    for step in range(5):
        lane.submit(sleep_10_ms)
        fence = lane.fence()
        ticket = lane.ticket(lambda step=step: step)  # type: ignore[misc]
        assert not ticket.done()
        assert await asyncio.wait_for(ticket, 10) == step
        assert fence.done(), "the ticket came before its work was done"
    counter.cancel()
    assert turns >= 10
    lane.close()


@pytest.mark.parametrize("name", WAITERS)
async def test_an_await_after_the_gpu_has_finished_gives_up_no_turn(name: str) -> None:
    lane = CudaLane("copy", CUDA, waiter=WAITERS[name]())
    ticket = lane.ticket(lambda: "read")
    lane.synchronize_blocking()
    waiting = ticket.__await__()
    with pytest.raises(StopIteration) as stop:
        next(waiting)
    assert stop.value.value == "read"
    assert await asyncio.wait_for(lane.ticket(lambda: "next"), 10) == "next"
    lane.close()


@pytest.mark.parametrize("name", WAITERS)
async def test_many_tickets_in_flight_each_get_their_own_result_once(name: str) -> None:
    lane = CudaLane("copy", CUDA, waiter=WAITERS[name]())
    reads: list[int] = []
    tickets = []
    for step in range(50):
        lane.submit(lambda: torch.cuda._sleep(200_000))
        tickets.append(lane.ticket(lambda step=step: (reads.append(step), step)[1]))  # type: ignore[func-returns-value, misc]
    results = await asyncio.wait_for(asyncio.gather(*tickets), 20)
    assert results == list(range(50))
    assert sorted(reads) == results
    lane.close()


async def test_a_hold_is_dropped_only_when_the_gpu_is_past_it() -> None:
    compute, copy = make_lanes("compute", "copy")
    values = torch.ones(4, device=CUDA)
    torch.cuda.synchronize()
    compute.submit(sleep_10_ms)
    copy.wait(compute.fence())
    hold = Hold(values)
    hold.until(compute.fence())
    assert not hold.drop()
    await asyncio.wait_for(copy.ticket(lambda: None, hold=hold), 10)
    assert hold.drop()
    compute.close()
    copy.close()


async def test_closing_does_not_wait_for_a_step_that_is_stuck() -> None:
    (lane,) = make_lanes("compute")
    lane.submit(lambda: torch.cuda._sleep(50 * CYCLES_10_MS))
    ticket = lane.ticket(lambda: "late")
    started = time.perf_counter()
    lane.close()
    assert time.perf_counter() - started < 0.1
    assert not ticket.done()
    assert await asyncio.wait_for(ticket, 20) == "late"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
async def test_a_steady_step_of_lanes_staging_relay_and_ticket_never_synchronises() -> None:
    staging, compute, copy = make_lanes("staging", "compute", "copy")
    ring = StagingRing(1 << 12, pinned=True, poison=True)
    relay = Relay(8, CUDA)
    rows_gpu = torch.zeros(4, dtype=torch.int64, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids: list[list[int]] = []
        read_fence = compute.fence()
        for step in range(20):
            slot = ring.acquire(step)
            rows_cpu, ids_cpu = slot.take((4,), torch.int64), slot.take((4,), torch.int64)
            for index, row in enumerate((1, 2, 3, 0)):
                rows_cpu[index] = row
            staging.wait(read_fence)
            staging.submit(lambda host=rows_cpu: rows_gpu.copy_(host, non_blocking=True))  # type: ignore[misc]
            compute.wait(staging.fence())
            compute.submit(lambda: relay.scatter(rows_gpu, relay.gather(rows_gpu) + rows_gpu))
            read_fence = compute.fence()
            copy.wait(read_fence)
            copy.submit(lambda host=ids_cpu: host.copy_(relay.table[:4], non_blocking=True))  # type: ignore[misc]
            compute.wait(copy.fence())
            ids.append(await copy.ticket(lambda host=ids_cpu: host.tolist()))  # type: ignore[misc]
            ring.release(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ids == [[0, step, 2 * step, 3 * step] for step in range(1, 21)]
    for lane in (staging, compute, copy):
        lane.close()
