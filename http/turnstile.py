"""A burst of requests is let in a few at a time, so that steps and streams go on between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

WITHOUT_PAUSE = 64  # of a burst: over so soon that a pause would only make more steps slow
AT_ONCE = 3  # requests: reading, checking and submitting one takes 0.3 to 1 ms, and a turn is not to be longer than 3


class Turnstile:
    """Makes calls at once as long as few come; of many, AT_ONCE in a turn of the loop, in order. In a long burst each turn
    is followed by as long a pause: half of the loop is left to those who stream already, however slow or busy its
    processor is.
    """

    __slots__ = ("_began", "_clock", "_is_turning", "_num_entered", "_num_in_burst", "_waiting")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_entered = 0  # in this turn, or in the one that is made up for
        self._num_in_burst = 0
        self._began = 0.0
        self._is_turning = False

    def enter(self, call: Callable[[], None]) -> None:
        """Make `call`, now or in a later turn. It must not raise."""
        if self._num_entered == AT_ONCE or self._waiting:
            self._waiting.append(call)
        else:
            self._let_in(call)

    def _let_in(self, call: Callable[[], None]) -> None:
        self._num_entered += 1
        self._num_in_burst += 1
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
        if self._num_entered < AT_ONCE:
            self._num_entered = self._num_in_burst = 0
        elif self._num_in_burst < WITHOUT_PAUSE:
            self._go_on()
        else:
            took = self._clock() - self._began
            asyncio.get_running_loop().call_later(took, self._go_on)

    def _go_on(self) -> None:
        self._num_entered = 0
        if not self._waiting:
            self._num_in_burst = 0
        while self._waiting and self._num_entered < AT_ONCE:
            self._let_in(self._waiting.popleft())
