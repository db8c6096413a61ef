"""The lanes that a ScriptedWorker runs on besides a thread: one counts turns of the event loop, one its clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class TurnLane:
    """A lane that runs one job a turn of the event loop."""

    def __init__(self) -> None:
        self.name = "turns"
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def submit(self, fn: Callable[[], None]) -> None:
        self._jobs.append(fn)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_one)

    def close(self) -> None:
        self._jobs.clear()

    def _run_one(self) -> None:
        if not self._jobs:
            self._is_scheduled = False
            return
        asyncio.get_running_loop().call_soon(self._run_one)
        self._jobs.popleft()()


class TimerLane:
    """A lane whose jobs take time of the event loop's clock, and no processor: on a loop of virtual time, a simulation."""

    def __init__(self) -> None:
        self.name = "timers"
        self._jobs: deque[tuple[Callable[[], None], float]] = deque()
        self._is_busy = False

    def submit(self, fn: Callable[[], None], seconds: float = 0.0) -> None:
        """Run `fn` at the end of the `seconds` that it takes, behind all that was submitted before."""
        self._jobs.append((fn, seconds))
        if not self._is_busy:
            self._begin_next()

    def close(self) -> None:
        self._jobs.clear()

    def _begin_next(self) -> None:
        self._is_busy = bool(self._jobs)
        if self._is_busy:
            fn, seconds = self._jobs.popleft()
            asyncio.get_running_loop().call_later(seconds, self._end, fn)

    def _end(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        finally:
            self._begin_next()
