from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from slipstream.streams.errors import MisuseError
from slipstream.streams.ticket import Ticket


async def read(ticket: Ticket[int]) -> int:
    return await ticket


def run_without_turns(coroutine: Coroutine[Any, Any, int]) -> int:
    """Drive a coroutine that must not suspend."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return int(stop.value)
    coroutine.close()
    raise AssertionError("the coroutine gave up a turn of the loop")


def test_a_done_ticket_is_read_without_a_turn_of_the_loop() -> None:
    ticket: Ticket[int] = Ticket()
    ticket.set_result(7)
    assert run_without_turns(read(ticket)) == 7
    assert ticket.done()
    assert ticket.result() == 7


async def test_every_awaiter_gets_the_value_a_thread_sets() -> None:
    ticket: Ticket[int] = Ticket()
    readers = [asyncio.create_task(read(ticket)) for _ in range(3)]
    await asyncio.sleep(0)
    threading.Thread(target=ticket.set_result, args=(5,)).start()
    assert await asyncio.wait_for(asyncio.gather(*readers), 5) == [5, 5, 5]


async def test_completion_by_a_thread_wakes_the_loop_once_for_all_awaiters() -> None:
    loop = asyncio.get_running_loop()
    ticket: Ticket[int] = Ticket(loop)
    readers = [asyncio.create_task(read(ticket)) for _ in range(3)]
    await asyncio.sleep(0)
    calls: list[object] = []
    original = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
        calls.append(args)
        return original(*args, **kwargs)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
    try:
        threading.Thread(target=ticket.set_result, args=(1,)).start()
        await asyncio.gather(*readers)
    finally:
        del loop.call_soon_threadsafe  # type: ignore[method-assign]
    assert len(calls) == 1


async def test_completion_on_the_loop_thread_needs_no_thread_safe_call() -> None:
    loop = asyncio.get_running_loop()
    ticket: Ticket[int] = Ticket()
    reader = asyncio.create_task(read(ticket))
    await asyncio.sleep(0)

    def refuse(*args: Any, **kwargs: Any) -> asyncio.Handle:
        raise AssertionError("a wake through the self-pipe was not needed")

    loop.call_soon_threadsafe = refuse  # type: ignore[method-assign]
    try:
        ticket.set_result(2)
        assert await reader == 2
    finally:
        del loop.call_soon_threadsafe  # type: ignore[method-assign]


async def test_a_stored_error_is_raised_by_await_and_by_result() -> None:
    ticket: Ticket[int] = Ticket()
    ticket.set_error(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        await ticket
    with pytest.raises(ValueError, match="lost"):
        ticket.result()


def test_reading_the_result_too_early_is_misuse() -> None:
    with pytest.raises(MisuseError):
        Ticket[int]().result()


def test_a_second_completion_is_misuse_and_changes_nothing() -> None:
    ticket: Ticket[int] = Ticket()
    ticket.set_result(1)
    with pytest.raises(MisuseError):
        ticket.set_result(2)
    with pytest.raises(MisuseError):
        ticket.set_error(ValueError())
    assert ticket.result() == 1


def test_of_many_threads_that_complete_at_once_exactly_one_wins() -> None:
    for _ in range(50):
        ticket: Ticket[int] = Ticket()
        barrier = threading.Barrier(4)
        refused: list[int] = []

        def complete(
            value: int, ticket: Ticket[int] = ticket, barrier: threading.Barrier = barrier, refused: list[int] = refused
        ) -> None:
            barrier.wait()
            try:
                ticket.set_result(value)
            except MisuseError:
                refused.append(value)

        threads = [threading.Thread(target=complete, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted([*refused, ticket.result()]) == [0, 1, 2, 3]


async def test_cancelling_an_awaiter_leaves_the_ticket_and_the_others_alone() -> None:
    ticket: Ticket[int] = Ticket()
    leaver, stayer = asyncio.create_task(read(ticket)), asyncio.create_task(read(ticket))
    await asyncio.sleep(0)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert not ticket.done()
    ticket.set_result(3)
    assert await stayer == 3
    assert await ticket == 3


def test_completion_after_the_loop_was_closed_is_tolerated() -> None:
    ticket: Ticket[int] = Ticket()
    loop = asyncio.new_event_loop()
    reader = loop.create_task(read(ticket))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    thread = threading.Thread(target=ticket.set_result, args=(4,))
    thread.start()
    thread.join()
    assert ticket.result() == 4
    del reader


async def test_awaiting_on_another_loop_is_misuse() -> None:
    other = asyncio.new_event_loop()
    try:
        with pytest.raises(MisuseError):
            await Ticket[int](other)
    finally:
        other.close()


def test_the_poll_of_an_await_can_complete_the_ticket_without_a_turn() -> None:
    ticket: Ticket[int] = Ticket(poll=lambda: ticket.set_result(9))
    assert run_without_turns(read(ticket)) == 9


def test_a_completed_ticket_forgets_its_poll() -> None:
    class Batch:
        pass

    batch = Batch()
    gone = weakref.ref(batch)
    ticket: Ticket[int] = Ticket(poll=lambda batch=batch: None)  # type: ignore[misc]
    del batch
    assert gone() is not None
    ticket.set_result(1)
    assert gone() is None


async def test_a_failed_ticket_dies_with_its_last_reference() -> None:
    class Loss(Exception):
        pass

    ticket: Ticket[int] = Ticket()
    ticket.set_error(Loss())
    gone = weakref.ref(ticket.__getattribute__("_error"))
    gc.disable()
    try:
        with contextlib.suppress(Loss):
            await ticket
        del ticket
        assert gone() is None
    finally:
        gc.enable()


async def test_no_wake_is_lost_between_an_await_and_a_completion_at_the_same_moment() -> None:
    for spin in range(300):
        ticket: Ticket[int] = Ticket()
        thread = threading.Thread(target=ticket.set_result, args=(spin,))
        thread.start()
        assert await asyncio.wait_for(read(ticket), 5) == spin
        await asyncio.to_thread(thread.join)


async def test_making_setting_and_awaiting_a_ticket_takes_microseconds() -> None:
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for value in range(2000):
            ticket: Ticket[int] = Ticket()
            ticket.set_result(value)
            await ticket
        best = min(best, (time.perf_counter() - started) / 2000)
    assert (
        best < 20e-6
    )  # ten times the aim of 2 µs: this must not fail on a busy machine, but on a turn of the loop or a thread hop
