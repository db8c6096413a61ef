"""Whether the event loop turns: a timer on the loop says how long it was held, a thread says by which code."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Final, NamedTuple

PERIOD_S: Final = 0.002


class Held(NamedTuple):
    """The loop came to its timer late: it was held for [start_ns, end_ns), most often seen in `code`."""

    start_ns: int
    end_ns: int
    code: str


class LoopWatch:
    """Watches the running loop, from `start` to `stop`, both called on it.

    Costs the loop a timer every two milliseconds, and the interpreter a look from another thread as often.
    `limit_ns`: shorter delays are not kept.
    """

    def __init__(self, *, limit_ns: int = 3_000_000) -> None:
        self.held: list[Held] = []
        self._limit_ns = limit_ns
        self._due_ns = 0
        self._seen: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._over = threading.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._set_timer()
        threading.Thread(target=self._look, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self._due_ns = time.perf_counter_ns() + int(PERIOD_S * 1e9)
        self._timer = self._loop.call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        now = time.perf_counter_ns()
        if now - self._due_ns >= self._limit_ns:
            code = self._seen.most_common(1)[0][0] if self._seen else "code not seen"
            self.held.append(Held(self._due_ns, now, code))
        self._seen.clear()
        self._set_timer()

    def _look(self) -> None:
        """On the watching thread: where the loop's thread is, while it is late."""
        while not self._over.wait(PERIOD_S / 2):
            if time.perf_counter_ns() > self._due_ns + self._limit_ns // 3:
                frame = sys._current_frames().get(self._loop_thread)
                if frame is not None:
                    self._seen[_place(frame)] += 1
                del frame


def _place(frame: FrameType) -> str:
    """The innermost code, as file, line and name."""
    code = frame.f_code
    if code.co_filename.endswith(("asyncio/runners.py", "asyncio/base_events.py", "selectors.py")):
        return "no code of the loop's: it waited for a core or the interpreter"
    return f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}"
