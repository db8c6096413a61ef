"""Writing to all streams that have something new, in slices of the loop's time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import perf_counter
from typing import Protocol

from .metrics import Histogram
from .stream_interval import MAX_HOLD_S, StreamInterval

log = logging.getLogger("slipstream.http")
SLICE_STREAMS = 256  # 1.5 to 2.5 ms of the loop's time, two thirds of it the kernel's
RELEASE_EVERY_S = MAX_HOLD_S / 5


class Writable(Protocol):
    """A transport."""

    def write(self, data: bytes, /) -> None: ...


class Flushable(Protocol):
    @property
    def transport(self) -> Writable:
        """Where to write what `render` gave."""
        ...

    def render(self, now: float) -> bytes:
        """What is pending, as it goes over the wire; afterwards nothing is. `now` is perf_counter's."""
        ...


class Holding(Protocol):
    def lets_go(self, now: float) -> bool:
        """Write what is kept back if it is too old. False while there is something to keep."""
        ...


class FanOut:
    """Flushes each scheduled stream once, in order, from callbacks of the running loop.

    However many tokens come in one turn of the loop, it costs one callback, not one a stream; a very long queue is cut
    into slices with other work of the loop in between. (Short slices would be overtaken by steps, which may take no more
    than a turn each.) A slice is rendered, then written: Python and the kernel each find their caches warm, and a frame
    takes a sixth less than one by one. A stream that gets more text while it waits for its turn sends all of it in one
    frame: that is how output coalesces by itself when writing does not fit into a step.
    `interval` makes it coalesce before that, so that the steps keep their time.
    """

    __slots__ = ("_armed_at", "_held", "_lag_s", "_ready", "_release_timer", "_spent_s", "interval")

    def __init__(self, lag_s: Histogram, interval: StreamInterval) -> None:
        """`lag_s` gets the seconds from the first stream of a turn being scheduled to its flush."""
        self._ready: deque[Flushable] = deque()
        self._armed_at: float | None = None
        self._lag_s = lag_s
        self._held: dict[Holding, None] = {}
        self._release_timer: asyncio.TimerHandle | None = None
        self._spent_s = 0.0
        self.interval = interval

    @property
    def is_behind(self) -> bool:
        """Whether a stream waits for its turn."""
        return bool(self._ready)

    def schedule(self, stream: Flushable) -> None:
        """Have `stream` flushed in the next turn. The caller does not schedule it again before that."""
        self._ready.append(stream)
        if self._armed_at is None:
            self._armed_at = perf_counter()
            asyncio.get_running_loop().call_soon(self._run)

    def hold(self, holding: Holding) -> None:
        """`holding` keeps text back until it has enough; if that takes too long it is told to let go."""
        self._held[holding] = None
        if self._release_timer is None:
            self._release_timer = asyncio.get_running_loop().call_later(RELEASE_EVERY_S, self._release)

    def _release(self) -> None:
        now = perf_counter()
        due = [holding for holding in self._held if holding.lets_go(now)]
        for holding in due:
            del self._held[holding]
        self._release_timer = None
        if self._held:
            self._release_timer = asyncio.get_running_loop().call_later(RELEASE_EVERY_S, self._release)

    def _run(self) -> None:
        ready = self._ready
        now = perf_counter()
        self.interval.look(now, self._spent_s)
        if self._armed_at is not None:
            self._lag_s.observe(now - self._armed_at)
        rendered: list[tuple[Writable, bytes]] = []
        for _ in range(min(len(ready), SLICE_STREAMS)):  # streams scheduled meanwhile wait for the next turn
            stream = ready.popleft()
            try:
                body = stream.render(now)
                if body:
                    rendered.append((stream.transport, body))
            except Exception:  # one stream's bug is not to silence the others
                log.exception("a stream could not be rendered")
        for transport, body in rendered:
            try:
                transport.write(body)
            except Exception:
                log.exception("a stream could not be written")
        self._spent_s += perf_counter() - now
        if ready:
            self._armed_at = now
            asyncio.get_running_loop().call_soon(self._run)
        else:
            self._armed_at = None
