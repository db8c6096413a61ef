from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from slipstream.streams.errors import MisuseError
from slipstream.streams.ticket import Ticket
from slipstream.streams.wake import Completion, EventWaiter, HostFuncWaiter, ThreadWaiter


class FakeEvent:
    """A CUDA event that a test passes by hand."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: Exception | None = None
        self.num_waits = 0

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.num_waits += 1
        self.passed.wait(10)
        if self.error is not None:
            raise self.error


class FakeStream:
    """Calls host functions on its own thread when told to, as a CUDA driver does: C functions, with one pointer."""

    def __init__(self) -> None:
        self.queued: list[tuple[int, int]] = []

    def launch(self, stream: int, function: int, argument: int) -> None:
        self.queued.append((function, argument))

    def run_next(self) -> None:
        function, argument = self.queued.pop(0)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        thread = threading.Thread(target=call, args=(argument,))
        thread.start()


def watched(waiter: EventWaiter, event: FakeEvent, released: list[FakeEvent]) -> Ticket[str]:
    completion: Completion
    ticket: Ticket[str] = Ticket(poll=lambda: completion.poll())
    completion = Completion(
        event,
        finish=lambda: ticket.set_result("read"),
        fail=ticket.set_error,
        release=lambda: released.append(event),
    )
    waiter.watch(1, completion)
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


async def test_host_functions_wake_the_loop_in_order_without_a_thread_of_ours() -> None:
    stream, released = FakeStream(), list[FakeEvent]()
    waiter = HostFuncWaiter(stream.launch)
    events = [FakeEvent() for _ in range(3)]
    tickets = [watched(waiter, event, released) for event in events]
    await asyncio.sleep(0.01)
    assert not any(ticket.done() for ticket in tickets), "nothing is flushed before the stream gets there"
    stream.run_next()
    assert await asyncio.wait_for(tickets[0], 5) == "read"
    assert [ticket.done() for ticket in tickets] == [True, False, False]
    stream.run_next()
    stream.run_next()
    assert [await asyncio.wait_for(ticket, 5) for ticket in tickets[1:]] == ["read", "read"]
    assert released == events
    again = watched(waiter, FakeEvent(), released)
    stream.run_next()
    assert await asyncio.wait_for(again, 5) == "read"
    waiter.close()
    waiter.close()
    with pytest.raises(MisuseError):
        watched(waiter, FakeEvent(), released)


async def test_a_ticket_that_its_await_finished_is_not_finished_again_by_the_host_function() -> None:
    stream, released = FakeStream(), list[FakeEvent]()
    waiter = HostFuncWaiter(stream.launch)
    event = FakeEvent()
    ticket = watched(waiter, event, released)
    event.passed.set()
    assert await ticket == "read"
    assert released == []
    stream.run_next()
    await until(lambda: released == [event])
    waiter.close()
