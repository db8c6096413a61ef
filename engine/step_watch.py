"""Awaits the steps: gives up one that never comes back, and measures the others where a latency budget is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .errors import EngineDead, MisuseError
from .scheduler.schedule_batch import ScheduleBatch
from .scheduler.step_times import StepTimes
from .worker import Launched, StepOutcome


class StepWatch:
    """One for a step loop. A step lasts from the end of the one before it, or from its launch if nothing ran before:
    what a client sees between two tokens.
    """

    def __init__(self, clock: Callable[[], float], *, timeout_s: float, times: StepTimes | None) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._times = times
        self._began: float | None = None

    def begin(self) -> None:
        """A step is being launched."""
        if self._times is not None and self._began is None:
            self._began = self._clock()

    def rest(self) -> None:
        """Nothing is in flight for a while."""
        self._began = None

    async def ends_within(self, launched: Launched, seconds: float) -> bool:
        """Whether the step is over, well or not, by then at the latest: awaiting its outcome will not wait."""
        ticket = launched.outcome
        if ticket is None or launched.error is not None:
            return True
        try:
            async with asyncio.timeout(seconds):
                await ticket
        except Exception:  # its own, which whoever settles it is told, or that the time is over
            return ticket.done()
        return True

    async def outcome_of(self, launched: Launched) -> StepOutcome:
        """Await the step. Raises: what it raised; EngineDead if it has not come back within the limit."""
        ticket = launched.outcome
        if ticket is None:
            raise MisuseError(f"step {launched.batch.step} was never launched")
        if ticket.done():
            outcome = await ticket
        else:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    outcome = await ticket
            except TimeoutError:
                if not limit.expired() or ticket.done():
                    raise
                raise EngineDead(self._why(launched.batch)) from None
        if self._times is not None:
            now = self._clock()
            if self._began is not None:
                self._times.record(launched.batch, now - self._began)
            self._began = now
        return outcome

    def _why(self, batch: ScheduleBatch) -> str:
        return (
            f"step {batch.step} ({batch.mode.name}, {batch.num_rows} rows, {batch.num_tokens} tokens)"
            f" has not come back within {self._timeout_s:g} s: its device is stuck"
        )
