"""A one-shot result that a lane promises and that the event loop awaits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar, cast

from .errors import MisuseError

T = TypeVar("T")


class Ticket(Generic[T]):
    """The result of work on a lane: set once, from any thread; awaited by any number of tasks of one event loop.

    A done ticket is read without a turn of the loop. Cancelling an awaiter leaves the ticket, and its other awaiters,
    as they are.

    `loop`: the loop that will await it; by default that of the first await.
    `poll`: called on the loop thread just before an await would suspend; it may complete the ticket, which saves the
    wake.
    """

    __slots__ = ("_claim", "_done", "_error", "_loop", "_poll", "_thread", "_value", "_waiters")

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, *, poll: Callable[[], None] | None = None
    ) -> None:
        self._loop = loop
        self._poll = poll
        self._claim = threading.Lock()  # taken by the completion and never given back: makes it one-shot across threads
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._thread = 0

    def polled_by(self, poll: Callable[[], None]) -> None:
        """Let an await look by `poll` before it suspends, as if it had been given at the start. Before the completion only."""
        self._poll = poll

    def set_result(self, value: T) -> None:
        """Complete with `value`. Raises MisuseError if already completed."""
        self._take_claim()
        self._value = value
        self._publish()

    def set_error(self, error: BaseException) -> None:
        """Complete with `error`, which every await and `result` raises. Raises MisuseError if already completed."""
        self._take_claim()
        self._error = error
        self._publish()

    def done(self) -> bool:
        """Whether a result or an error is there."""
        return self._done

    def result(self) -> T:
        """The value. Raises the stored error, or MisuseError if the ticket is not done."""
        if not self._done:
            raise MisuseError("the result of a ticket was read before it was done")
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the traceback names this frame: ticket, error and frame would wait for the cycle collector
        return cast(T, self._value)

    def __await__(self) -> Generator[asyncio.Future[None], None, T]:
        if not self._done and self._poll is not None:
            self._poll()
        if not self._done:
            yield from self._suspend()
        try:
            return self.result()
        finally:
            del self  # as in `result`

    def _suspend(self) -> Generator[asyncio.Future[None], None, None]:
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise MisuseError("a ticket was awaited on another event loop than its own")
        self._thread = threading.get_ident()
        waiter: asyncio.Future[None] = running.create_future()
        self._waiters.append(waiter)
        try:
            # The look comes after the append, as the completer sets `_done` before it looks at `_waiters`: one of the
            # two sees the other.
            if not self._done:
                yield from waiter
        finally:
            self._waiters.remove(waiter)

    def _take_claim(self) -> None:
        if not self._claim.acquire(blocking=False):
            raise MisuseError("a ticket was completed twice")

    def _publish(self) -> None:
        self._poll = None
        self._done = True
        if not self._waiters:
            return
        if threading.get_ident() == self._thread:
            self._wake()
            return
        loop = cast(asyncio.AbstractEventLoop, self._loop)  # set by the first awaiter
        try:
            loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            # The loop was closed while its tasks still waited: nobody is left to wake.
            if not loop.is_closed():
                raise

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
