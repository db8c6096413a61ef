"""What the host remembers of how rows sample, to know what a step asks of the sampler without asking the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ..sampling.sample_needs import SampleNeeds, is_greedy
from ..scheduler.schedule_batch import RowSampling

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import RowStart

_PADDING: Final = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class RowSamplings:
    """The host's mirror of the sampling table, for rows that have started and for the padding row 0, which is greedy."""

    def __init__(self) -> None:
        self._by_row: dict[int, RowSampling] = {0: _PADDING}

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
