"""How many tokens a frame carries: one while the loop has time, more when writing frames no longer fits into a step."""

from __future__ import annotations

import time
from collections.abc import Sequence

AUTO = "auto"
MAX_INTERVAL = 8  # tokens a frame, at most, by itself
MAX_HOLD_S = 0.05  # text is never kept back longer, whatever the interval
LOOK_EVERY_S = 0.1
CALM_S = 1.0  # after a rise, before the interval may fall again
BUSY, IDLE = 0.85, 0.5  # shares of the loop thread's time


class StreamInterval:
    """The number of tokens that a stream waits for before it writes.

    By itself it is steered by the CPU time that the loop's thread takes: above BUSY there is no room left for every
    token's frame beside the steps, and each further token a frame saves a share of that work. An operator may fix it.
    """

    def __init__(self, setting: str, step_s: Sequence[float]) -> None:
        """`setting` is AUTO or a number; `step_s` holds the last steps' times, kept up to date by its owner."""
        self._is_auto = setting == AUTO
        self._step_s = step_s
        self.tokens = 1 if self._is_auto else int(setting)
        self._looked_at: float | None = None
        self._cpu_s = 0.0
        self._calm_from = 0.0

    def look(self, now: float) -> None:
        """Adjust, if it is time to. Called on the loop's thread while there is something to write."""
        before_s, looked_at = self._cpu_s, self._looked_at
        if not self._is_auto or (looked_at is not None and now - looked_at < LOOK_EVERY_S):
            return
        self._looked_at, self._cpu_s = now, time.thread_time()
        if looked_at is not None:
            self.adjust((self._cpu_s - before_s) / (now - looked_at), now)

    def adjust(self, share: float, now: float) -> None:
        """Follow the loop's share of the last while."""
        if share > BUSY:
            self.tokens = min(self.tokens + 1, self._most())
            self._calm_from = now + CALM_S
        elif share < IDLE and now > self._calm_from:
            self.tokens = max(1, min(self.tokens - 1, self._most()))

    def _most(self) -> int:
        """So many tokens that the last of them comes before the first is too old; a part of that is for the writing."""
        if not self._step_s:
            return 1
        mean_s = sum(self._step_s) / len(self._step_s)
        return max(1, min(MAX_INTERVAL, int(0.8 * MAX_HOLD_S / mean_s)))
