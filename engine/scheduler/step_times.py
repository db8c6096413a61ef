"""What a step takes, learned from the steps that ran; and from that, how many prompt tokens a latency budget leaves room for.

A table by tokens, and slopes for the context that attention reads: decode rows read all of theirs for one token each, a
prompt attends in pairs of positions. The table has no shape to be fitted to: the floor of few tokens, where weights are
read anyway, and the line above it come out as they are measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..request import Request
from .schedule_batch import ScheduleBatch

MEMORY = 8  # steps that a cell of the table averages over
CELLS_PER_DOUBLING = 2
SLOPE_MEMORY = 0.995  # share of what is known about the slopes that is left after another step
INERTIA = 0.003  # how much the slopes hold on to what they were, so that what a step cannot tell does not run away
FIRST_TOKENS = 64  # prompt tokens that are tried beside decode rows before anything is known of such steps
MAX_GROWTH = 3  # times the largest prompt part beside decode rows so far, and times the most pairs of any step

Three = tuple[float, float, float]


class Load(NamedTuple):
    """What a step has to do."""

    tokens: int  # of decode rows and prompts together
    context: int  # positions that its decode rows attend to
    pairs: int  # of a prompt's new position and one that it attends to

    @classmethod
    def of(cls, batch: ScheduleBatch) -> Load:
        """The load of a batch."""
        num_decode = batch.num_decode
        pairs = sum(map(count_pairs, batch.num_prior[num_decode:], batch.num_new[num_decode:]))
        return cls(batch.num_tokens, sum(batch.num_prior[:num_decode]), pairs)


def count_pairs(num_prior: int, num_new: int) -> int:
    """Pairs of a new position and one that it attends to, itself included."""
    return num_new * (2 * num_prior + num_new + 1) // 2


class _Cell:
    """Means over the steps of one range of tokens, the newest counting most."""

    __slots__ = ("load", "seconds", "weight")

    def __init__(self) -> None:
        self.weight = 0
        self.seconds = 0.0
        self.load: Three = (0.0, 0.0, 0.0)

    def observe(self, load: Load, seconds: float) -> None:
        self.weight = min(self.weight + 1, MEMORY)
        share = 1 / self.weight
        self.seconds += share * (seconds - self.seconds)
        tokens, context, pairs = self.load
        self.load = (
            tokens + share * (load.tokens - tokens),
            context + share * (load.context - context),
            pairs + share * (load.pairs - pairs),
        )


class StepTable:
    """Seconds of a step by its load. `estimate` falls with none of its three parts."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._levels: list[tuple[float, float]] | None = None  # (tokens, seconds without context), ascending in both
        self._slopes = [0.0, 0.0, 0.0]  # seconds a token, inside a cell; a position; a pair
        # Decayed sums of the products of deviations from the cell's means: of the three parts, and of them with seconds.
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3

    def observe(self, load: Load, seconds: float) -> None:
        """Take in one step of at least one token."""
        cell = self._cells.setdefault(int(CELLS_PER_DOUBLING * math.log2(load.tokens)), _Cell())
        if cell.weight and cell.seconds > 0:
            # Of its cell's time, so that a long step does not count more than a short one.
            deviations = [(part - mean) / cell.seconds for part, mean in zip(load, cell.load, strict=True)]
            self._fit(deviations, seconds / cell.seconds - 1)
        cell.observe(load, seconds)
        self._levels = None

    def estimate(self, load: Load) -> float:
        """Seconds, or 0 as long as nothing was observed. Beyond the observed tokens the last line goes on."""
        if not self._cells:
            return 0.0
        levels = self._sorted()
        above = bisect_right(levels, float(load.tokens), key=lambda level: level[0])
        if above == 0 or len(levels) == 1:
            seconds = levels[0][1]
        else:
            (tokens_0, seconds_0), (tokens_1, seconds_1) = levels[min(above, len(levels) - 1) - 1 :][:2]
            seconds = seconds_0 + (seconds_1 - seconds_0) * (load.tokens - tokens_0) / (tokens_1 - tokens_0)
        return seconds + self._slopes[1] * load.context + self._slopes[2] * load.pairs

    def _fit(self, deviations: Sequence[float], deviation_s: float) -> None:
        """Least squares over the steps so far, held back by what the slopes were."""
        for i, one in enumerate(deviations):
            self._products[i] = SLOPE_MEMORY * self._products[i] + one * deviation_s
            row = self._squares[i]
            for j, other in enumerate(deviations):
                row[j] = SLOPE_MEMORY * row[j] + one * other
        holds = [INERTIA * self._squares[i][i] or 1.0 for i in range(3)]  # a part that never moved keeps its slope
        matrix = [[*row] for row in self._squares]
        for i in range(3):
            matrix[i][i] += holds[i]
        wanted = [
            product + hold * slope for product, hold, slope in zip(self._products, holds, self._slopes, strict=True)
        ]
        self._slopes = [max(slope, 0.0) for slope in _solve(matrix, wanted)]

    def _sorted(self) -> list[tuple[float, float]]:
        if self._levels is None:
            _, a_position, a_pair = self._slopes
            points = sorted(
                (cell.load[0], cell.seconds - a_position * cell.load[1] - a_pair * cell.load[2])
                for cell in self._cells.values()
            )
            highest = 0.0
            self._levels = []
            for tokens, seconds in points:
                highest = max(highest, seconds)
                self._levels.append((tokens, highest))
        return self._levels


def _solve(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """Solve a positive definite system by elimination; both are used up."""
    size = len(wanted)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            wanted[j] -= factor * wanted[i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(matrix[i][k] * solution[k] for k in range(i + 1, size))
        solution[i] = (wanted[i] - known) / matrix[i][i]
    return solution


class StepTimes:
    """The table of one engine, and the budget that it serves: seconds between two tokens of a running request."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self.table = StepTable()
        self._most_tokens = FIRST_TOKENS
        self._most_pairs = MAX_GROWTH * FIRST_TOKENS * FIRST_TOKENS

    def record(self, batch: ScheduleBatch, seconds: float) -> None:
        """Take in how long a step took, from the end of the one before it if that was in flight."""
        load = Load.of(batch)
        self.table.observe(load, seconds)
        self._most_pairs = max(self._most_pairs, MAX_GROWTH * load.pairs)
        if batch.num_decode:
            self._most_tokens = max(self._most_tokens, MAX_GROWTH * (batch.num_tokens - batch.num_decode))

    def allowance(self, decodes: Sequence[Request]) -> Allowance:
        """What the budget leaves for prompt tokens in a step with these decode rows."""
        context = sum(request.num_planned for request in decodes)
        load = Load(len(decodes), context, 0)
        return Allowance(self.table, load, self.budget_s, most_tokens=self._most_tokens, most_pairs=self._most_pairs)


class Allowance:
    """The prompt tokens of one step, spent request by request."""

    def __init__(self, table: StepTable, load: Load, budget_s: float, *, most_tokens: int, most_pairs: int) -> None:
        self._table = table
        self._load = load
        self._budget_s = budget_s
        self._num_left = most_tokens
        self._most_pairs = most_pairs

    def tokens(self, num_prior: int) -> int:
        """How many more tokens there is time for, in a prompt of which `num_prior` are computed."""
        low, high = 0, self._num_left
        while low < high:
            middle = (low + high + 1) // 2
            load = self._with(num_prior, middle)
            if load.pairs <= self._most_pairs and self._table.estimate(load) <= self._budget_s:
                low = middle
            else:
                high = middle - 1
        return low

    def spend(self, num_prior: int, num_new: int) -> None:
        """`num_new` tokens of a prompt of which `num_prior` are computed have joined the step."""
        self._load = self._with(num_prior, num_new)
        self._num_left = max(self._num_left - num_new, 0)

    def _with(self, num_prior: int, num_new: int) -> Load:
        tokens, context, pairs = self._load
        return Load(tokens + num_new, context, pairs + count_pairs(num_prior, num_new))
