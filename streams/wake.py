"""Ways to learn on the event loop that a CUDA event has passed. Imports no torch: events are what the caller brings.

All of them start with a query: an await asks the event before it suspends, so work that has already finished costs no
wake.
`profiling/bench_wake.py` measures them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from .errors import MisuseError


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

    def watch(self, stream_handle: int, completion: Completion) -> None:
        """Finish `completion` when the work queued on the stream so far, its event included, has run."""
        ...

    def close(self) -> None:
        """Watch no more. Never waits."""
        ...


class ThreadWaiter:
    """A daemon thread that waits for one event after the other. `blocking=False` spins: a core while one is out."""

    def __init__(self, name: str, *, blocking: bool = True) -> None:
        self._name = name
        self._blocking = blocking
        self._queue: SimpleQueue[Completion | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def blocking_events(self) -> bool:
        return self._blocking

    def watch(self, stream_handle: int, completion: Completion) -> None:
        if self._closed:
            raise MisuseError(f"the waiter of {self._name!r} is closed")
        if self._thread is None:  # lanes that hand out no ticket need no thread
            self._thread = threading.Thread(target=self._work, name=f"wait-{self._name}", daemon=True)
            self._thread.start()
        self._queue.put(completion)

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


LaunchHostFunc = Callable[[int, int, int], None]
"""(stream, function, argument): have the driver call the C function `function(argument)` when the stream gets there."""


class HostFuncWaiter:
    """The driver itself writes to an eventfd that the loop watches: no waiting thread, no GIL outside the loop's thread.

    `cudaLaunchHostFunc` calls a C function of one pointer. A Python callback there would need the GIL on the driver's
    thread, which can deadlock against a CUDA call that holds it; so the function is libc's `fflush`, and the pointer
    a FILE whose buffer already holds the 8 bytes to write. After a CUDA error the driver calls nothing: only the
    query of an await sees it then.
    """

    def __init__(self, launch: LaunchHostFunc) -> None:
        self._launch = launch
        self._libc = _libc()
        self._flush = ctypes.cast(self._libc.fflush, ctypes.c_void_p).value or 0
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._free: list[int] = []
        self._watched: deque[tuple[Completion, int]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def blocking_events(self) -> bool:
        return False

    def watch(self, stream_handle: int, completion: Completion) -> None:
        if self._fd < 0:
            raise MisuseError("the waiter is closed")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._wake)
        file = self._free.pop() if self._free else self._open_file()
        if self._libc.fwrite(_ONE, 8, 1, file) != 1:
            raise OSError("could not fill the buffer of an eventfd")
        self._launch(stream_handle, self._flush, file)
        self._watched.append((completion, file))  # `_wake` runs on this thread, so not before this line

    def close(self) -> None:
        if self._fd < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        for file in self._free:  # the driver may still flush the others: they stay open
            self._libc.fclose(file)
        os.close(self._fd)
        self._fd = -1

    def _open_file(self) -> int:
        file: int | None = self._libc.fdopen(os.dup(self._fd), b"w")
        if not file:
            raise OSError(ctypes.get_errno(), "could not open a FILE on an eventfd")
        return file

    def _wake(self) -> None:
        for _ in range(os.eventfd_read(self._fd)):  # one per host function that ran, and a stream runs them in order
            completion, file = self._watched.popleft()
            self._free.append(file)
            completion.finish()
            completion.release()


_ONE = (1).to_bytes(8, "little")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
    libc.fdopen.restype = ctypes.c_void_p
    libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    libc.fwrite.restype = ctypes.c_size_t
    libc.fclose.argtypes = [ctypes.c_void_p]
    return libc
