"""Ways to learn on the event loop that a CUDA event has passed. Imports no torch: events are what the caller brings.

All of them start with a query: an await asks the event before it suspends, so work that has already finished costs no
wake.
`profiling/bench_wake.py` measures them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Protocol

from .errors import MisuseError

LOOK_EVERY_S: Final = 0.01  # at what a closed waiter still has


class WakeEvent(Protocol):
    """What of `torch.cuda.Event` is needed here."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Completion:
    """What to do once when `event` has passed: on whichever thread sees it first, so not always in the order of events.

    `finish` and `fail` must not raise. `release` is given the event back when no thread waits on it any more.
    """

    __slots__ = ("_claim", "_fail", "_finish", "_release", "event")

    def __init__(
        self,
        event: WakeEvent,
        *,
        finish: Callable[[], None],
        fail: Callable[[BaseException], None],
        release: Callable[[], None],
    ) -> None:
        self.event = event
        self._claim = threading.Lock()
        self._finish: Callable[[], None] | None = finish
        self._fail: Callable[[BaseException], None] | None = fail
        self._release = release

    @property
    def finished(self) -> bool:
        return self._claim.locked()

    def poll(self) -> None:
        """Finish if the event has passed; never blocks."""
        if self.finished:
            return
        try:
            passed = self.event.query()
        except BaseException as exc:
            self.fail(exc)
            return
        if passed:
            self.finish()

    def finish(self) -> None:
        if self._claim.acquire(blocking=False):
            finish, self._finish, self._fail = self._finish, None, None
            if finish is not None:
                finish()

    def fail(self, error: BaseException) -> None:
        if self._claim.acquire(blocking=False):
            fail, self._finish, self._fail = self._fail, None, None
            if fail is not None:
                fail(error)

    def release(self) -> None:
        """Called by the waiter alone, when it has done with the event."""
        self._release()


class EventWaiter(Protocol):
    """Finishes the completions of one lane, in order."""

    @property
    def blocking_events(self) -> bool:
        """Whether its events are to be made with `blocking=True`: a wait then sleeps instead of spinning."""
        ...

    def watch(self, completion: Completion) -> None:
        """Take in one more completion, behind all others. On any thread."""
        ...

    def ask(self, completion: Completion) -> None:
        """Finish it if its event has passed; otherwise somebody is about to wait for it. On the loop's thread; never waits.
        A completion that nobody asks for may stay unfinished until somebody asks for one behind it.
        """
        ...

    def close(self) -> None:
        """Watch no more. Never waits."""
        ...


class ThreadWaiter:
    """A daemon thread that sleeps until one event after the other has passed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Completion | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def blocking_events(self) -> bool:
        return True

    def watch(self, completion: Completion) -> None:
        if self._closed:
            raise MisuseError(f"the waiter of {self._name!r} is closed")
        if self._thread is None:  # lanes that hand out no ticket need no thread
            self._thread = threading.Thread(target=self._work, name=f"wait-{self._name}", daemon=True)
            self._thread.start()
        self._queue.put(completion)

    def ask(self, completion: Completion) -> None:
        completion.poll()

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)

    def _work(self) -> None:
        while (completion := self._queue.get()) is not None:
            if not completion.finished:
                try:
                    completion.event.synchronize()
                except BaseException as exc:
                    completion.fail(exc)
                else:
                    completion.finish()
            completion.release()
            completion = None


class LoopWaiter:
    """Nobody sleeps: from the first await on the loop asks in each of its turns, and takes one after the other without a pause
    until nothing is out any more, or, once it is closed, a hundred times a second.

    That is a core, as with a thread that spins; but the loop sees the event in its next turn, however busy it is, and is
    awake when it does: no thread has to be given the GIL first, and none has to wake another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._watched: deque[Completion] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # that has a look due
        self._closed = False

    @property
    def blocking_events(self) -> bool:
        return False

    def watch(self, completion: Completion) -> None:
        if self._closed:
            raise MisuseError(f"the waiter of {self._name!r} is closed")
        self._watched.append(completion)

    def ask(self, completion: Completion) -> None:
        completion.poll()
        self._let_go()
        running = asyncio.get_running_loop()
        if not completion.finished and self._loop is not running:
            self._look_again(running)

    def close(self) -> None:
        self._closed = True  # what is still out may be a step that hangs: from now on a look now and then does

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = None  # first: whatever a completion raises, the next await looks again
        watched = self._watched
        while watched:
            watched[0].poll()
            if not watched[0].finished:
                self._look_again(loop)
                return
            self._let_go()

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if self._closed:
            loop.call_later(LOOK_EVERY_S, self._look, loop)
        else:
            loop.call_soon(self._look, loop)

    def _let_go(self) -> None:
        """Give back the events of those in front that are finished, also where no await had to wait for one."""
        while self._watched and self._watched[0].finished:
            self._watched.popleft().release()
