"""Which requests have run out of time."""

from __future__ import annotations

import heapq

from ..request import Request

SWEEP_FROM = 1024  # so many are kept before those that have ended are looked for


class Deadlines:
    """Requests by their deadline. Times are of one clock, in seconds; which one is the caller's choice."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._sweep_at = SWEEP_FROM

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request that has a deadline."""
        if request.deadline is not None:
            if len(self._heap) >= self._sweep_at:
                self._heap = [entry for entry in self._heap if not entry[2].has_ended]
                heapq.heapify(self._heap)
                self._sweep_at = max(SWEEP_FROM, 2 * len(self._heap))
            heapq.heappush(self._heap, (request.deadline, request.arrival, request))

    def due(self, now: float) -> list[Request]:
        """Take out those whose time is over and that have not ended, earliest first."""
        due = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].has_ended):
            request = heapq.heappop(self._heap)[2]
            if not request.has_ended:
                due.append(request)
        return due
