"""The CPU twin of a CUDA stream: one worker thread that runs what it is handed, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from .errors import MisuseError
from .fence import Fence
from .hold import Hold, HoldList
from .ticket import Ticket

T = TypeVar("T")


class HostFence:
    """A position in a `HostLane`."""

    __slots__ = ("lane", "position")

    def __init__(self, lane: HostLane, position: int) -> None:
        self.lane = lane
        self.position = position

    def done(self) -> bool:
        return self.lane.completed >= self.position

    def wait_blocking(self) -> None:
        self.lane.wait_for_blocking(self.position)


class _Fault:
    """One failed job. Shared by all lanes that depend on it, so that exactly one ticket reports it."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error


class HostLane:
    """A `Lane` on one daemon thread.

    An exception in a job does not stop the lane. It is kept and fails the next ticket that depends on the job: of
    this lane, or of a lane that waited for a fence behind the job. It fails that one ticket only, so a failed step
    fails its own outcome and the next step starts clean. Thread-local state of the submitter (inference mode, context
    variables) does not reach the jobs: they set what they need.

    `delay`: a test's hook, called on the worker before each job, to shift lanes against each other.
    """

    def __init__(self, name: str, *, delay: Callable[[], None] | None = None) -> None:
        self.name = name
        self._delay = delay
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._submitted = 0
        self._completed = 0
        self._passed = threading.Condition()
        # (position, fault). The list is replaced, never changed: other workers read it.
        self._faults: list[tuple[int, _Fault]] = []
        self._held = HoldList()
        self._closed = False
        threading.Thread(target=self._work, name=f"lane-{name}", daemon=True).start()

    @property
    def completed(self) -> int:
        """Number of jobs that have run, the failed ones included."""
        return self._completed

    def submit(self, fn: Callable[[], None]) -> None:
        if self._closed:
            raise MisuseError(f"lane {self.name!r} is closed")
        self._submitted += 1
        self._jobs.put(fn)

    def fence(self) -> HostFence:
        return HostFence(self, self._submitted)

    def wait(self, fence: Fence) -> None:
        if isinstance(fence, HostFence) and fence.lane is self:
            return

        def pass_fence() -> None:
            fence.wait_blocking()
            if isinstance(fence, HostFence):
                self._inherit_faults(fence)

        self.submit(pass_fence)

    def ticket(self, read: Callable[[], T], *, hold: Hold | None = None, into: Ticket[T] | None = None) -> Ticket[T]:
        ticket: Ticket[T] = into if into is not None else Ticket()

        def complete() -> None:
            self._held.sweep()
            error = self._take_fault()
            if error is None:
                try:
                    value = read()
                except BaseException as exc:
                    error = exc
            if hold is not None:
                self._held.add(hold)
            try:
                if error is None:
                    ticket.set_result(value)
                else:
                    ticket.set_error(error)
            finally:
                del error  # its traceback names this frame: kept, the pair would wait for the cycle collector

        self.submit(complete)
        return ticket

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)

    def synchronize_blocking(self) -> None:
        self.wait_for_blocking(self._submitted)
        self._held.sweep()

    def wait_for_blocking(self, position: int) -> None:
        """Stop the calling thread until `position` jobs have run."""
        with self._passed:
            self._passed.wait_for(lambda: self._completed >= position)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._delay is not None:
                    self._delay()
                job()
            except BaseException as exc:
                self._record(_Fault(exc))
            job = None  # what the job closes over must not live until the next one arrives
            with self._passed:
                self._completed += 1
                self._passed.notify_all()

    def _record(self, fault: _Fault) -> None:
        live = [entry for entry in self._faults if entry[1].error is not None]
        self._faults = [*live, (self._completed + 1, fault)]

    def _inherit_faults(self, fence: HostFence) -> None:
        known = {id(fault) for _, fault in self._faults}
        for position, fault in fence.lane._faults:
            # Not what ran behind the fence, and not what came from here in the first place (lanes fence each other in
            # both directions).
            if position <= fence.position and fault.error is not None and id(fault) not in known:
                self._record(fault)

    def _take_fault(self) -> BaseException | None:
        faults, self._faults = self._faults, []
        error: BaseException | None = None
        for _, fault in faults:
            if error is None:
                error = fault.error
            # The later failures of a step follow from its first one; kept, they would keep its tensors, too.
            fault.error = None
        return error
