"""Writing to all streams that have something new, in slices of the loop's time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import perf_counter
from typing import Protocol

from .metrics import Histogram

log = logging.getLogger("slipstream.http")
SLICE_S = 0.0002  # rendering; handing the bytes to the kernel, when the turn ends, costs twice as much again
SLICE_STREAMS = 48
LOOK_EVERY = 8  # streams between two looks at the clock


class Flushable(Protocol):
    def flush(self, now: float) -> None:
        """Write what is pending. Must not block or raise. `now` is perf_counter's."""
        ...


class FanOut:
    """Flushes each scheduled stream once, in order, from callbacks of the running loop.

    However many tokens come in one turn of the loop, it costs one callback, not one a stream; a long queue is cut
    into slices with other work of the loop in between. A stream that gets more text while it waits for its turn sends
    all of it in one frame: that is how output coalesces by itself when writing does not fit into a step.
    """

    __slots__ = ("_armed_at", "_lag_s", "_ready")

    def __init__(self, lag_s: Histogram) -> None:
        """`lag_s` gets the seconds from the first stream of a turn being scheduled to its flush."""
        self._ready: deque[Flushable] = deque()
        self._armed_at: float | None = None
        self._lag_s = lag_s

    def schedule(self, stream: Flushable) -> None:
        """Have `stream` flushed in the next turn. The caller does not schedule it again before that."""
        self._ready.append(stream)
        if self._armed_at is None:
            self._armed_at = perf_counter()
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        ready = self._ready
        now = perf_counter()
        until = now + SLICE_S
        if self._armed_at is not None:
            self._lag_s.observe(now - self._armed_at)
        # Streams scheduled meanwhile wait for the next turn.
        for index in range(min(len(ready), SLICE_STREAMS)):
            if index % LOOK_EVERY == 0 and index:
                now = perf_counter()
                if now > until:
                    break
            stream = ready.popleft()
            try:
                stream.flush(now)
            except Exception:  # one stream's bug is not to silence the others
                log.exception("a stream could not be written")
        if ready:
            self._armed_at = now
            asyncio.get_running_loop().call_soon(self._run)
        else:
            self._armed_at = None
