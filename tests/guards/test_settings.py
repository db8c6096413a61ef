"""The test settings themselves: a guard that never fires guards nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable

import pytest


def _sleep() -> object:
    return time.sleep(0.01)


def _wait_for_a_future() -> object:
    return concurrent.futures.Future[int]().result(timeout=0.01)


def _wait_for_a_queue() -> object:
    return queue.Queue[int]().get(timeout=0.01)


def _wait_for_a_thread() -> object:
    thread = threading.Thread(target=threading.Event().wait, args=(0.2,))
    thread.start()
    return thread.join()


@pytest.mark.parametrize("block", [_sleep, _wait_for_a_future, _wait_for_a_queue, _wait_for_a_thread])
async def test_a_call_that_blocks_the_loop_raises_and_is_remembered(
    block: Callable[[], object], loop_blocks: list[str]
) -> None:
    with pytest.raises(AssertionError, match="on the event loop's thread"):
        block()
    assert len(loop_blocks) == 1
    loop_blocks.clear()  # or this test would fail at its end


async def test_what_does_not_block_is_allowed_on_the_loop() -> None:
    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    done.set_result(3)
    full: queue.Queue[int] = queue.Queue()
    full.put(4)
    assert (done.result(), full.get()) == (3, 4)
    assert await asyncio.to_thread(lambda: time.sleep(0.001) or 5) == 5


def test_sleeping_without_a_loop_is_allowed() -> None:
    time.sleep(0.001)


async def test_an_async_test_has_a_short_limit(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert marker.args == (20,)
