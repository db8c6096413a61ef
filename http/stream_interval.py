"""How many tokens a frame carries: one while the loop has time, more when writing frames no longer fits into a step."""

from __future__ import annotations

from .step_times import StepTimes

AUTO = "auto"
MAX_INTERVAL = 8  # tokens a frame, at most, by itself
MAX_HOLD_S = 0.05  # text is never kept back longer, whatever the interval
LOOK_EVERY_S = 0.1
CALM_S = 1.0  # after a rise, before the interval may fall again
MOST_LATE = 0.5  # share of steps whose results were there before the loop asked for them
MUCH_WRITING = 0.6  # share of the time: below that every token may still have its frame, at some cost to the steps


class StreamInterval:
    """The number of tokens that a stream waits for before it writes.

    By itself it is steered by what the steps show. Where most results are there before the loop asks for them, the loop
    is what everybody waits for, and if it does little but write, the interval rises. It falls again when the loop waits
    for the steps long enough to write the frames that would come on top. An operator may fix it.
    """

    def __init__(self, setting: str, times: StepTimes) -> None:
        """`setting` is AUTO or a number."""
        self._is_auto = setting == AUTO
        self._times = times
        self.tokens = 1 if self._is_auto else int(setting)
        self._looked_at = 0.0
        self._seen = (0, 0, 0.0, 0.0)
        self._num_late_looks = 0
        self._calm_from = 0.0

    def look(self, now: float, writing_s: float) -> None:
        """Adjust, if it is time to. `writing_s` is what the fan-out has taken so far. Called while there is something
        to write."""
        wall_s = now - self._looked_at
        if not self._is_auto or wall_s < LOOK_EVERY_S:
            return
        times = self._times
        seen = (times.step_s.num_observed, times.num_late, times.waited_s, writing_s)
        steps, late, waited_s, written_s = (new - old for new, old in zip(seen, self._seen, strict=True))
        self._looked_at, self._seen = now, seen
        if steps and wall_s < 10 * LOOK_EVERY_S:  # not after a pause
            self.adjust(late / steps, waited_s / wall_s, written_s / wall_s, now)

    def adjust(self, late: float, waiting: float, writing: float, now: float) -> None:
        """Follow the last while: the share of steps that were late, the shares of time spent waiting and writing."""
        if late > MOST_LATE and writing > MUCH_WRITING:
            self._num_late_looks += 1
            if self._num_late_looks > 1:  # one alone may be a burst of new requests
                self.tokens = min(self.tokens + 1, self._most())
                self._calm_from = now + CALM_S
            return
        self._num_late_looks = 0
        if self.tokens > 1 and now > self._calm_from and waiting > 2 * writing / (self.tokens - 1):
            self.tokens = min(self.tokens - 1, self._most())

    def _most(self) -> int:
        """So many tokens that the last of them comes before the first is too old; a part of that is for the writing."""
        steps = self._times.last_step_s
        if not steps:
            return 1
        return max(1, min(MAX_INTERVAL, int(0.8 * MAX_HOLD_S * len(steps) / sum(steps))))
