"""What the rows of a step ask of the sampler, known on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import RowSampling

from ..sampling_params import GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNeeds:
    """The union over the rows that are not greedy: what none of them asks for is skipped. `max_top_k` 0: no row
    limits by rank.
    """

    any_random: bool = False
    max_top_k: int = 0
    any_top_p: bool = False
    any_min_p: bool = False

    @property
    def any_filter(self) -> bool:
        return self.max_top_k > 0 or self.any_top_p or self.any_min_p

    @classmethod
    def of(cls, samplings: Iterable[RowSampling]) -> SampleNeeds:
        """The needs of these rows together, greedy ones left out."""
        any_random = any_top_p = any_min_p = False
        max_top_k = 0
        for sampling in samplings:
            if is_greedy(sampling):
                continue
            any_random = True
            max_top_k = max(max_top_k, sampling.top_k)
            any_top_p |= sampling.top_p < 1.0
            any_min_p |= sampling.min_p > 0.0
        return cls(any_random=any_random, max_top_k=max_top_k, any_top_p=any_top_p, any_min_p=any_min_p)


def is_greedy(sampling: RowSampling) -> bool:
    """Whether a row takes its likeliest id. One id left by top-k is the same, ties included."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1
