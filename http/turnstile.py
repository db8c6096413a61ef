"""A burst of requests is let in a few a turn of the loop, so that steps and streams go on between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

A_TURN = 3  # requests: reading, checking and submitting one takes 0.3 to 0.5 ms, and a turn is not to be longer than 2


class Turnstile:
    """Makes calls at once as long as few come; of many, A_TURN in each turn of the loop, in order."""

    __slots__ = ("_is_turning", "_num_entered", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_entered = 0  # in this turn
        self._is_turning = False

    def enter(self, call: Callable[[], None]) -> None:
        """Make `call`, now or in a later turn. It must not raise."""
        if self._num_entered < A_TURN and not self._waiting:
            self._num_entered += 1
            call()
        else:
            self._waiting.append(call)
        self._keep_turning()

    def _keep_turning(self) -> None:
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_turning = False
        self._num_entered = 0
        while self._waiting and self._num_entered < A_TURN:
            self._num_entered += 1
            self._waiting.popleft()()
        if self._num_entered:
            self._keep_turning()
