"""What the front counts. Latencies go into plain lists: a quarter of a microsecond an observation."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

INTER_TOKEN_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 2, 10)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_LOOP_LAG_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Histogram:
    """Counts by bucket; `observe` costs a bisection and two additions."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def num_observed(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus wants them, and the sum of what was observed."""
        so_far = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return buckets, self.total


class FrontMetrics:
    """Everything that one app counts by itself. Written by the front on the loop thread only."""

    def __init__(self) -> None:
        self.queue_s = Histogram(_FIRST_TOKEN_S)  # from submit to the launch of the first step with it
        self.first_token_s = Histogram(_FIRST_TOKEN_S)  # accept to the first frame's write
        self.inter_token_s = Histogram(INTER_TOKEN_S)  # between a choice's frames at the socket
        self.request_s = Histogram(_REQUEST_S)
        self.loop_lag_s = Histogram(_LOOP_LAG_S)  # from a token's push to its turn in the fan-out
        self.num_frames = 0  # text frames written; fewer than tokens where output coalesced
        self.finished: Counter[str] = Counter()  # choices by finish reason
        self.failed: Counter[str] = Counter()  # requests by error code
        self.refused: Counter[int] = Counter()  # requests answered with an error, by status
        self.num_hang_ups = 0
        self.num_write_timeouts = 0
