"""What a step takes, learned from the steps that ran; and from that, how many prompt tokens a latency budget leaves room for.

A step is taken for its decode part plus what its prompt tokens add. Both are tables by size (rows; tokens), interpolated,
with one slope for the context that attention reads (positions; pairs of positions). Two tables, since a decode row
reads all of its context for one token and a prompt reads it once for many. A table has no shape to be fitted to: the
floor of few tokens, where weights are read anyway, and the line above it come out as they are measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from ..request import Request
from .schedule_batch import ScheduleBatch

MEMORY = 8  # observations that a cell of a table averages over
CELLS_PER_DOUBLING = 2
SLOPE_DECAY = 0.98  # of what is known about the context's slope, an observation
FIRST_TOKENS = 64  # prompt tokens that are tried beside decode rows before anything is known
MAX_GROWTH = 2  # times the largest prompt part seen so far


class CostTable:
    """Seconds by size and context. `estimate` does not fall with either."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._levels: list[tuple[float, float]] | None = None  # (size, seconds without context), ascending in both
        self._slope = 0.0  # seconds a unit of context
        self._moments = [
            0.0
        ] * 5  # size², size·context, context², size·seconds, context·seconds, around the cells' means

    @property
    def largest(self) -> float:
        """The largest size observed, 0 before the first."""
        return self._sorted()[-1][0] if self._cells else 0.0

    def knows(self, size: int) -> bool:
        """Whether something of about this size was observed."""
        return _place(size) in self._cells

    def observe(self, size: int, context: int, seconds: float) -> None:
        """Take in one measurement; `size` is at least 1."""
        cell = self._cells.setdefault(_place(size), _Cell())
        if cell.weight:
            keep = SLOPE_DECAY
            ds, dc, dt = size - cell.size, context - cell.context, seconds - cell.seconds
            products = (ds * ds, ds * dc, dc * dc, ds * dt, dc * dt)
            self._moments = [keep * old + new for old, new in zip(self._moments, products, strict=True)]
            self._fit_slope()
        cell.observe(size, context, seconds)
        self._levels = None

    def estimate(self, size: float, context: float) -> float:
        """Seconds; 0 for nothing, or as long as nothing was observed. Beyond the observed sizes the last line goes on."""
        if size <= 0 or not self._cells:
            return 0.0
        levels = self._sorted()
        above = bisect_right(levels, size, key=lambda level: level[0])
        if above == 0 or len(levels) == 1:
            seconds = levels[0][1]
        else:
            (size_0, seconds_0), (size_1, seconds_1) = levels[min(above, len(levels) - 1) - 1 :][:2]
            seconds = seconds_0 + (seconds_1 - seconds_0) * (size - size_0) / (size_1 - size_0)
        return seconds + self._slope * context

    def _fit_slope(self) -> None:
        """Least squares of seconds over size and context inside the cells, where size changes little."""
        ss, sc, cc, st, ct = self._moments
        determinant = ss * cc - sc * sc
        if determinant > 0.01 * ss * cc > 0:
            self._slope = max((ct * ss - st * sc) / determinant, 0.0)
        elif cc > 0 and ss == 0:
            self._slope = max(ct / cc, 0.0)
        # Else both moved together, and what is due to which cannot be told: the slope stays.

    def _sorted(self) -> list[tuple[float, float]]:
        if self._levels is None:
            points = sorted((cell.size, cell.seconds - self._slope * cell.context) for cell in self._cells.values())
            highest = 0.0
            self._levels = []
            for size, seconds in points:
                highest = max(highest, seconds)
                self._levels.append((size, highest))
        return self._levels


class _Cell:
    """Means of what was observed at sizes of one range, the newest counting most."""

    __slots__ = ("context", "seconds", "size", "weight")

    def __init__(self) -> None:
        self.weight = 0
        self.size = self.context = self.seconds = 0.0

    def observe(self, size: int, context: int, seconds: float) -> None:
        self.weight = min(self.weight + 1, MEMORY)
        share = 1 / self.weight
        self.size += share * (size - self.size)
        self.context += share * (context - self.context)
        self.seconds += share * (seconds - self.seconds)


def _place(size: int) -> int:
    return int(CELLS_PER_DOUBLING * math.log2(size))


class StepTimes:
    """The two tables of one engine, and the budget that they serve: seconds between two tokens of a running request."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self.decode = CostTable()
        self.prompt = CostTable()

    def record(self, batch: ScheduleBatch, seconds: float) -> None:
        """Take in how long a step took, from the end of the one before it if that was in flight."""
        num_decode = batch.num_decode
        context = sum(batch.num_prior[:num_decode])
        if num_decode == batch.num_rows:
            self.decode.observe(num_decode, context, seconds)
            return
        num_tokens = batch.num_tokens - num_decode
        num_pairs = sum(map(_pairs, batch.num_prior[num_decode:], batch.num_new[num_decode:]))
        if num_decode:
            added = seconds - self.decode.estimate(num_decode, context)
            self.prompt.observe(num_tokens, num_pairs, max(added, 0.0))
        elif not self.prompt.knows(num_tokens):
            # A first guess: too high by what a step costs in itself, so what is measured beside decode rows takes over.
            self.prompt.observe(num_tokens, num_pairs, seconds)

    def allowance(self, decodes: Sequence[Request]) -> Allowance:
        """What the budget leaves for prompt tokens in a step with these decode rows."""
        context = sum(request.num_planned for request in decodes)
        return Allowance(self.prompt, self.budget_s - self.decode.estimate(len(decodes), context))


class Allowance:
    """The prompt tokens of one step, spent request by request."""

    def __init__(self, prompt: CostTable, seconds: float) -> None:
        self._prompt = prompt
        self._seconds = seconds
        self._num_tokens = 0
        self._num_pairs = 0

    def tokens(self, num_prior: int) -> int:
        """How many more tokens there is time for, in a prompt of which `num_prior` are computed."""
        most = int(MAX_GROWTH * self._prompt.largest) or FIRST_TOKENS
        low, high = 0, max(most - self._num_tokens, 0)
        while low < high:
            middle = (low + high + 1) // 2
            num_pairs = self._num_pairs + _pairs(num_prior, middle)
            if self._prompt.estimate(self._num_tokens + middle, num_pairs) <= self._seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def spend(self, num_prior: int, num_new: int) -> None:
        """`num_new` tokens of a prompt of which `num_prior` are computed have joined the step."""
        self._num_tokens += num_new
        self._num_pairs += _pairs(num_prior, num_new)


def _pairs(num_prior: int, num_new: int) -> int:
    """Pairs of a new position and one that it attends to."""
    return num_new * (2 * num_prior + num_new + 1) // 2
