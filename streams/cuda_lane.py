"""A `Lane` on a CUDA stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from .cores import usable_cores
from .errors import MisuseError
from .fence import Fence
from .hold import Hold, HoldList
from .stream_ring import distinct_streams
from .ticket import Ticket
from .wake import Completion, EventWaiter, LoopWaiter, ThreadWaiter

T = TypeVar("T")

_CORES_TO_ASK = 4


class EventPool:
    """CUDA events without timing, used again once they have passed."""

    def __init__(self, *, blocking: bool = False) -> None:
        self._blocking = blocking
        self._free: deque[torch.cuda.Event] = deque()

    def __len__(self) -> int:
        return len(self._free)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event at the present end of `stream`."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=False, blocking=self._blocking)
        event.record(stream)
        return event

    def give_back(self, event: torch.cuda.Event) -> None:
        """Nobody asks this event any more. Waits that streams have queued on it outlive its next recording."""
        self._free.append(event)


class CudaFence:
    """A position in a `CudaLane`."""

    __slots__ = ("_cell", "_pool")

    def __init__(self, event: torch.cuda.Event, pool: EventPool) -> None:
        # A cell with one event, popped once: the event goes back to the pool exactly once, whichever thread sees it
        # passed.
        self._cell: list[torch.cuda.Event] = [event]
        self._pool = pool

    def done(self) -> bool:
        event = self.event()
        if event is None:
            return True
        if not event.query():
            return False
        self._retire()
        return True

    def wait_blocking(self) -> None:
        event = self.event()
        if event is not None:
            event.synchronize()
            self._retire()

    def event(self) -> torch.cuda.Event | None:
        """The recorded event; None once the fence was seen passed."""
        try:
            return self._cell[0]
        except IndexError:
            return None

    def _retire(self) -> None:
        try:
            event = self._cell.pop()
        except IndexError:
            return
        self._pool.give_back(event)


def default_waiter(name: str) -> EventWaiter:
    """The loop itself asks while a ticket is out; where that would take a core from somebody, a thread sleeps until the end
    of the step and wakes the loop, which learns of it later: a sleeping core wakes the later the longer it slept.
    """
    return ThreadWaiter(name) if usable_cores() < _CORES_TO_ASK else LoopWaiter(name)


class CudaLane:
    """A `Lane` whose queue is a CUDA stream.

    `submit` runs inline under the stream; all else is events. `waiter` decides how tickets wake the loop (see
    `default_waiter`); a lane owns its waiter, because completions are awaited in the order of one stream.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        stream: torch.cuda.Stream | None = None,
        waiter: EventWaiter | None = None,
    ) -> None:
        self.name = name
        self.stream = stream if stream is not None else distinct_streams(1, device)[0]
        self._waiter: EventWaiter = waiter if waiter is not None else default_waiter(name)
        self._fence_events = EventPool()
        self._ticket_events = EventPool(blocking=self._waiter.blocking_events)
        self._held = HoldList()
        self._closed = False

    def submit(self, fn: Callable[[], None]) -> None:
        self._check_open()
        with self.stream:  # torch.cuda.stream() does the same in Python, and takes 40 µs
            fn()

    def fence(self) -> CudaFence:
        return CudaFence(self._fence_events.record(self.stream), self._fence_events)

    def wait(self, fence: Fence) -> None:
        self._check_open()
        if not isinstance(fence, CudaFence):
            raise MisuseError(f"lane {self.name!r} waits for fences of CUDA lanes only")
        event = fence.event()
        if event is not None:
            self.stream.wait_event(event)

    def ticket(self, read: Callable[[], T], *, hold: Hold | None = None, into: Ticket[T] | None = None) -> Ticket[T]:
        self._check_open()
        event = self._ticket_events.record(self.stream)
        completion: Completion
        ticket: Ticket[T] = into if into is not None else Ticket()
        ticket.polled_by(lambda: self._waiter.ask(completion))

        def finish() -> None:
            try:
                value = read()
            except BaseException as exc:
                fail(exc)
                return
            self._drop(hold)
            ticket.set_result(value)

        def fail(error: BaseException) -> None:
            self._drop(hold)
            ticket.set_error(error)

        completion = Completion(event, finish=finish, fail=fail, release=lambda: self._ticket_events.give_back(event))
        self._waiter.watch(completion)
        return ticket

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._waiter.close()

    def synchronize_blocking(self) -> None:
        self.stream.synchronize()
        self._held.sweep()

    def _check_open(self) -> None:
        if self._closed:
            raise MisuseError(f"lane {self.name!r} is closed")

    def _drop(self, hold: Hold | None) -> None:
        """Never raises: after a sticky CUDA error no fence can be asked any more; its objects then stay referenced."""
        try:
            self._held.sweep()
            if hold is not None:
                self._held.add(hold)
        except RuntimeError:
            return
