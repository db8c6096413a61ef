"""What the host remembers of how rows sample, to know what a step asks of the sampler without asking the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..sampling.sample_needs import SampleNeeds, is_greedy

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import RowSampling, RowStart


class RowSamplings:
    """The host's mirror of the sampling table, for rows that have started."""

    def __init__(self) -> None:
        self._by_row: dict[int, RowSampling] = {}

    def apply(self, starts: Iterable[RowStart]) -> None:
        """Take what a step's starts say."""
        for start in starts:
            self._by_row[start.row] = start.sampling

    def random_among(self, rows: Iterable[int]) -> tuple[tuple[int, ...], SampleNeeds]:
        """The indices of the rows that are not greedy, and what they need."""
        by_row = self._by_row
        random: list[int] = []
        samplings: list[RowSampling] = []
        for index, row in enumerate(rows):
            sampling = by_row[row]
            if not is_greedy(sampling):
                random.append(index)
                samplings.append(sampling)
        return tuple(random), SampleNeeds.of(samplings)
