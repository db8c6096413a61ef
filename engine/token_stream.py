"""`async for delta in engine.generate(…)`: one request as an async iterator that cannot be left running by accident."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol

from .errors import MisuseError
from .outbox import Outbox
from .outputs import Delta, Sink


class Handle(Protocol):
    """A submitted request."""

    @property
    def request_id(self) -> str: ...

    def abort(self) -> None:
        """End the request now. Does nothing if it has ended."""
        ...


class TokenStream:
    """The deltas of one request. The request starts with the first `anext` and is aborted when the stream is closed.

    Leaving the `async for` early does not close an iterator: use `async with`, or call `aclose`. A stream that is dropped
    while its request runs aborts it and warns.

    Raises (while iterating): RequestError, Overloaded, EngineDead before the first delta; StepFailed, EngineDead,
    RequestCancelled later.
    """

    def __init__(self, submit: Callable[[Sink], Awaitable[Handle]], *, whole: bool = False) -> None:
        """`whole`: one delta with everything, instead of one whenever something is new."""
        self._submit: Callable[[Sink], Awaitable[Handle]] | None = submit
        self._outbox = Outbox(whole=whole)
        self._handle: Handle | None = None
        self._finalizer: weakref.finalize[[Handle, Outbox, asyncio.AbstractEventLoop], TokenStream] | None = None
        self._is_over = False
        self._is_waiting = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_over:
            raise StopAsyncIteration
        if self._is_waiting:
            raise MisuseError("a stream has one consumer: another task waits for its next delta")
        self._is_waiting = True
        try:
            if self._submit is not None:
                await self._start(self._submit)
            delta = await self._outbox.take()
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._is_waiting = False
        if delta.finished is not None:
            self._close()
        return delta

    async def _start(self, submit: Callable[[Sink], Awaitable[Handle]]) -> None:
        self._submit = None
        handle = await submit(self._outbox)
        self._handle = handle
        if self._is_over:
            handle.abort()  # closed by another task while the prompt was being encoded
            return
        loop = asyncio.get_running_loop()
        self._finalizer = weakref.finalize(self, _abandon, handle, self._outbox, loop)
        self._finalizer.atexit = False

    async def aclose(self) -> None:
        """Abort the request if it still runs; iterating afterwards ends at once."""
        self._close()
        if self._handle is not None:
            self._handle.abort()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _close(self) -> None:
        self._is_over = True
        self._submit = None
        if self._finalizer is not None:
            self._finalizer.detach()


def _abandon(handle: Handle, outbox: Outbox, loop: asyncio.AbstractEventLoop) -> None:
    # The collector calls this on whatever thread it runs, and amid whatever the loop does: the abort waits for its turn.
    if not outbox.has_ended and not loop.is_closed():
        loop.call_soon_threadsafe(handle.abort)
        warnings.warn(
            f"the stream of request {handle.request_id} was dropped while it ran", ResourceWarning, stacklevel=2
        )
