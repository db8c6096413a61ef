"""Noticing that a client is gone: its connection is watched for as long as a request lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.types import Receive, Scope

from .connection import DirectConnection, direct_connection


def watching(scope: Scope, receive: Receive, on_hang_up: Callable[[], None]) -> AbstractAsyncContextManager[None]:
    """Call `on_hang_up` (once, on the loop thread) when the client closes, resets or half-closes inside the block.

    A connection of our own server tells by itself. Under another server `receive` does, in a task: the request's body
    must have been read, and whatever comes besides a disconnect is dropped. A disconnect is also reported once the
    response is complete, so `on_hang_up` must be harmless then.
    """
    connection = direct_connection(scope)
    return _receiving(receive, on_hang_up) if connection is None else _Watched(connection, on_hang_up)


class _Watched(AbstractAsyncContextManager[None]):
    def __init__(self, connection: DirectConnection, on_hang_up: Callable[[], None]) -> None:
        self._connection, self._on_hang_up = connection, on_hang_up

    async def __aenter__(self) -> None:
        self._connection.watch(self._on_hang_up)

    async def __aexit__(self, *raised: object) -> None:
        self._connection.unwatch(self._on_hang_up)


@asynccontextmanager
async def _receiving(receive: Receive, on_hang_up: Callable[[], None]) -> AsyncIterator[None]:
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
