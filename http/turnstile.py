"""A burst of requests is let in a few at a time, so that steps and streams go on between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

AT_ONCE = 3  # requests: reading, checking and submitting one takes 0.3 to 1 ms, and a turn is not to be longer than 3
PATIENCE = 2  # times what the last few took: after that the next have their turn, whatever waits


class Turnstile:
    """Makes calls at once as long as few come; of many, AT_ONCE in a turn of the loop, in order, and the next when nothing
    waits to be written to the streams that go already. So a burst has the time in which the loop would wait for the
    device, and a third of all time where there is none.
    """

    __slots__ = ("_began", "_clock", "_is_busy", "_is_turning", "_num_entered", "_patient_until", "_waiting")

    def __init__(
        self, is_busy: Callable[[], bool] = lambda: False, *, clock: Callable[[], float] = perf_counter
    ) -> None:
        """`is_busy` says whether something waits to be written."""
        self._is_busy = is_busy
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_entered = 0  # in this turn, or in the one that is made up for
        self._began = 0.0
        self._patient_until = 0.0
        self._is_turning = False

    @property
    def is_crowded(self) -> bool:
        """Whether a burst is coming in, or was a moment ago."""
        return bool(self._waiting) or self._num_entered == AT_ONCE

    def enter(self, call: Callable[[], None]) -> None:
        """Make `call`, now or in a later turn. It must not raise."""
        if self._num_entered == AT_ONCE or self._waiting:
            self._waiting.append(call)
        else:
            self._let_in(call)

    def _let_in(self, call: Callable[[], None]) -> None:
        self._num_entered += 1
        if not self._is_turning:
            self._is_turning = True
            self._began = self._clock()
            asyncio.get_running_loop().call_soon(self._next_turn)
        call()

    def _next_turn(self) -> None:
        """The turn in which the tasks of what was let in begin, and do most of their work; some stand behind this in it."""
        asyncio.get_running_loop().call_soon(self._turn_over)

    def _turn_over(self) -> None:
        self._is_turning = False
        if self._num_entered < AT_ONCE and not self._waiting:
            self._num_entered = 0
            return
        now = self._clock()
        self._patient_until = now + PATIENCE * (now - self._began)
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and self._is_busy() and self._clock() < self._patient_until:
            asyncio.get_running_loop().call_soon(self._go_on)
            return
        self._num_entered = 0
        while self._waiting and self._num_entered < AT_ONCE:
            self._let_in(self._waiting.popleft())
