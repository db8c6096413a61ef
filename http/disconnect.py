"""Noticing that a client is gone: the receive side is watched for as long as a request lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive


@asynccontextmanager
async def watching(receive: Receive, on_hang_up: Callable[[], None]) -> AsyncIterator[None]:
    """Call `on_hang_up` (once, on the loop thread) when the client closes, resets or half-closes inside the block.

    The request's body must have been read: whatever `receive` still brings besides a disconnect is dropped. A server
    also reports a disconnect once the response is complete, so `on_hang_up` must be harmless then.
    """
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(_watch(receive, on_hang_up), name="hang-up watch")
        try:
            yield
        finally:
            watcher.cancel()


async def _watch(receive: Receive, on_hang_up: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_hang_up()
