"""The debug canary: free pages hold NaN, so that a row which reads one fails with logits that are not finite."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...streams.lane import Lane
    from ..scheduler.schedule_batch import ScheduleBatch
    from .kv_pool import KVPool


class PageCanary:
    """Spoils pages that come home and cleans them when they are given out again: what a row has not filled yet of its
    last page is masked, and masked values must be finite.

    Called on the loop thread; the pool is written on its home lane, in launch order. Costs nothing until `poison` is
    called. Copies from pageable memory, so a step with it may stop the host.
    """

    def __init__(self, pool: KVPool, lane: Lane) -> None:
        self._pool = pool
        self._lane = lane
        self._poisoned: set[int] = set()

    def poison(self, pages: Sequence[int]) -> None:
        """Fill free pages with NaN, behind every step launched so far."""
        self._poisoned.update(pages)
        self._fill(list(pages), float("nan"))

    def clean(self, batch: ScheduleBatch) -> None:
        """Zero the poisoned pages that this step is the first to name; call before its forward is submitted."""
        if self._poisoned and batch.table_pages:
            fresh = self._poisoned.intersection(array("i", batch.table_pages))
            if fresh:
                self._poisoned -= fresh
                self._fill(sorted(fresh), 0.0)

    def _fill(self, pages: list[int], value: float) -> None:
        def fill() -> None:
            with torch.inference_mode():
                index = torch.tensor(pages, dtype=torch.int64).to(self._pool.keys[0].device)
                for layer in (*self._pool.keys, *self._pool.values):
                    layer.index_fill_(0, index, value)

        self._lane.submit(fill)
