"""What every lane offers: work in order, fences between lanes, tickets towards the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from .fence import Fence
from .hold import Hold
from .ticket import Ticket

T = TypeVar("T")


class Lane(Protocol):
    """A queue of device work that runs in the order of submission.

    One thread, the event loop's, submits to all lanes. Nothing here waits for the device except what ends in
    `_blocking`.
    """

    @property
    def name(self) -> str:
        """For threads, traces and error messages."""
        ...

    def submit(self, fn: Callable[[], None]) -> None:
        """Run `fn` behind everything submitted so far, and forget it as soon as it has run.

        On CUDA `fn` runs at once on the calling thread, with this lane's stream current: what it launches is what is
        queued, and what it raises is raised here. On the host twin a worker thread runs it; what it raises fails the
        next ticket that depends on it. Raises MisuseError once the lane is closed.
        """
        ...

    def fence(self) -> Fence:
        """The position after everything submitted so far."""
        ...

    def wait(self, fence: Fence) -> None:
        """Whatever is submitted from now on waits for `fence`; the caller does not."""
        ...

    def ticket(self, read: Callable[[], T], *, hold: Hold | None = None, into: Ticket[T] | None = None) -> Ticket[T]:
        """A ticket that completes with `read()` once everything submitted so far has run.

        `read` runs on whichever thread sees the completion; it reads host memory and must not touch the loop or a
        lane. `hold` is dropped before the ticket completes, or, if it names fences of other lanes not yet passed, at
        a later ticket of this lane. `into` is completed, and returned, instead of a new ticket: one that was promised
        before its work was submitted.
        """
        ...

    def close(self) -> None:
        """Take no more work. Never waits: what was submitted still runs, and a stuck step keeps only a daemon thread."""
        ...

    def synchronize_blocking(self) -> None:
        """Stop the calling thread until everything submitted so far has run."""
        ...
