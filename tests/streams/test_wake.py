from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from slipstream.streams.errors import MisuseError
from slipstream.streams.ticket import Ticket
from slipstream.streams.wake import Completion, EventWaiter, LoopWaiter, ThreadWaiter


class FakeEvent:
    """A CUDA event that a test passes by hand."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: Exception | None = None
        self.num_waits = 0
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        if self.error is not None:
            raise self.error
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.num_waits += 1
        self.passed.wait(10)
        if self.error is not None:
            raise self.error


def watched(waiter: EventWaiter, event: FakeEvent, released: list[FakeEvent]) -> Ticket[str]:
    completion: Completion
    ticket: Ticket[str] = Ticket(poll=lambda: waiter.ask(completion))
    completion = Completion(
        event,
        finish=lambda: ticket.set_result("read"),
        fail=ticket.set_error,
        release=lambda: released.append(event),
    )
    waiter.watch(completion)
    return ticket


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.001)


async def test_a_waiting_thread_completes_tickets_and_then_gives_the_events_back() -> None:
    waiter, released = ThreadWaiter("copy"), list[FakeEvent]()
    events = [FakeEvent(), FakeEvent()]
    tickets = [watched(waiter, event, released) for event in events]
    threading.Timer(0.02, events[0].passed.set).start()
    threading.Timer(0.04, events[1].passed.set).start()
    assert [await ticket for ticket in tickets] == ["read", "read"]
    await until(lambda: released == events)
    waiter.close()


async def test_an_await_of_an_event_that_has_passed_asks_it_and_needs_no_wake() -> None:
    waiter, released = ThreadWaiter("copy"), list[FakeEvent]()
    blocker, passed = FakeEvent(), FakeEvent()
    first = watched(waiter, blocker, released)
    second = watched(waiter, passed, released)
    passed.passed.set()
    assert await asyncio.wait_for(second, 1) == "read", "the thread is still busy with the first"
    assert not first.done()
    blocker.passed.set()
    assert await first == "read"
    await until(lambda: released == [blocker, passed])
    assert passed.num_waits == 0, "an event seen passed is not waited for again: it may be in use elsewhere by then"
    waiter.close()


async def test_an_event_is_not_given_back_while_the_thread_still_waits_on_it() -> None:
    waiter, released = ThreadWaiter("copy"), list[FakeEvent]()
    event = FakeEvent()
    ticket = watched(waiter, event, released)
    await until(lambda: event.num_waits == 1)
    real_query, event.query = event.query, lambda: True  # type: ignore[method-assign]
    assert await ticket == "read"
    assert released == []
    event.query = real_query  # type: ignore[method-assign]
    event.passed.set()
    await until(lambda: released == [event])
    waiter.close()


@pytest.mark.parametrize("seen_by", ["thread", "query"])
async def test_a_device_error_fails_the_ticket(seen_by: str) -> None:
    waiter, released = ThreadWaiter("copy"), list[FakeEvent]()
    event = FakeEvent()
    ticket = watched(waiter, event, released)
    if seen_by == "thread":
        reader = asyncio.ensure_future(ticket)
        await asyncio.sleep(0)
        event.error = RuntimeError("an illegal memory access")
        event.passed.set()
        with pytest.raises(RuntimeError, match="illegal memory"):
            await reader
    else:
        event.error = RuntimeError("an illegal memory access")
        with pytest.raises(RuntimeError, match="illegal memory"):
            await ticket
        event.passed.set()
    await until(lambda: released == [event])
    waiter.close()


async def test_closing_does_not_wait_for_a_stuck_step() -> None:
    waiter = ThreadWaiter("copy")
    event = FakeEvent()
    ticket = watched(waiter, event, [])
    started = time.perf_counter()
    waiter.close()
    assert time.perf_counter() - started < 1
    with pytest.raises(MisuseError):
        watched(waiter, FakeEvent(), [])
    event.passed.set()
    assert await ticket == "read"


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_loop_asks_in_each_turn_and_stops_when_nothing_is_out() -> None:
    waiter, released, threads = LoopWaiter("copy"), list[FakeEvent](), threading.active_count()
    events = [FakeEvent() for _ in range(3)]
    for _ in range(2):
        released.clear()
        tickets = [watched(waiter, event, released) for event in events]
        readers = [asyncio.ensure_future(ticket) for ticket in tickets]
        await turns(3)
        assert not any(reader.done() for reader in readers)
        events[1].passed.set()
        await turns(3)
        assert not any(reader.done() for reader in readers), "those of a lane pass in order: who is first is asked"
        events[0].passed.set()
        await turns(3)
        assert [reader.done() for reader in readers] == [True, True, False]
        assert released == events[:2]
        events[2].passed.set()
        assert await readers[2] == "read"
        await turns(3)
        asked = [event.num_queries for event in events]
        await turns(10)
        assert asked == [event.num_queries for event in events], "an idle loop may sleep"
        for event in events:
            event.passed.clear()
    assert threading.active_count() <= threads
    waiter.close()


async def test_events_that_had_passed_before_their_await_are_given_back_at_once() -> None:
    waiter, released = LoopWaiter("copy"), list[FakeEvent]()
    for _ in range(3):
        event = FakeEvent()
        event.passed.set()
        assert await watched(waiter, event, released) == "read"
        assert released.pop() is event
    waiter.close()


async def test_a_completion_that_raises_leaves_the_next_await_its_looks() -> None:
    waiter, released = LoopWaiter("copy"), list[FakeEvent]()
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    bad, event = FakeEvent(), FakeEvent()

    def refuse() -> None:
        raise RuntimeError("a bug")

    completion = Completion(bad, finish=lambda: None, fail=lambda error: None, release=refuse)
    waiter.watch(completion)
    waiter.ask(completion)
    bad.passed.set()
    await turns(3)
    assert len(reported) == 1
    reader = asyncio.ensure_future(watched(waiter, event, released))
    await turns(3)
    event.passed.set()
    assert await asyncio.wait_for(reader, 5) == "read"
    waiter.close()


async def test_what_a_thread_without_a_loop_hands_out_is_seen_as_well() -> None:
    waiter, released, event = LoopWaiter("copy"), list[FakeEvent](), FakeEvent()
    ticket = await asyncio.to_thread(watched, waiter, event, released)
    reader = asyncio.ensure_future(ticket)
    await turns(3)
    assert not reader.done()
    event.passed.set()
    await turns(3)
    assert reader.result() == "read"
    waiter.close()


async def test_the_loop_wakes_for_an_event_that_passes_while_it_has_nothing_else_to_do() -> None:
    waiter, released = LoopWaiter("copy"), list[FakeEvent]()
    event = FakeEvent()
    ticket = watched(waiter, event, released)
    threading.Timer(0.02, event.passed.set).start()
    assert await asyncio.wait_for(ticket, 5) == "read"
    waiter.close()


async def test_a_device_error_that_the_loop_sees_fails_the_ticket() -> None:
    waiter, released = LoopWaiter("copy"), list[FakeEvent]()
    event = FakeEvent()
    reader = asyncio.ensure_future(watched(waiter, event, released))
    await turns(3)
    event.error = RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory"):
        await reader
    assert released == [event]
    waiter.close()


async def test_a_closed_waiter_of_the_loop_looks_at_a_stuck_step_only_now_and_then() -> None:
    waiter, released = LoopWaiter("copy"), list[FakeEvent]()
    event = FakeEvent()
    reader = asyncio.ensure_future(watched(waiter, event, released))
    await turns(3)
    waiter.close()
    await turns(2)
    asked = event.num_queries
    await turns(10)
    assert event.num_queries <= asked + 1
    with pytest.raises(MisuseError):
        watched(waiter, FakeEvent(), released)
    event.passed.set()
    assert await asyncio.wait_for(reader, 5) == "read"


def test_the_waiter_of_a_loop_that_has_ended_serves_the_next_one() -> None:
    waiter, released = LoopWaiter("copy"), list[FakeEvent]()
    left, event = FakeEvent(), FakeEvent()

    async def leave() -> None:
        reader = asyncio.ensure_future(watched(waiter, left, released))
        await turns(3)
        reader.cancel()

    async def read() -> str:
        reader = asyncio.ensure_future(watched(waiter, event, released))
        await turns(3)
        left.passed.set()
        event.passed.set()
        await turns(3)
        return reader.result()

    asyncio.run(leave())
    assert asyncio.run(read()) == "read"
    assert released == [left, event]
