"""A scheduler driven by hand: plan and commit in any order that the loop may take, with made-up outcomes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import pytest

from slipstream import SamplingParams
from slipstream.engine.request import Request
from slipstream.engine.request_builder import RequestBuilder
from slipstream.engine.scheduler.schedule_batch import NoBatch, ScheduleBatch
from slipstream.engine.scheduler.scheduler import Scheduler, Update
from slipstream.engine.worker import StepOutcome, WorkerLimits


class Hand:
    """Drives one scheduler and proves its laws after each call."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        num_rows: int = 8,
        chunk: int = 1024,
        prefill: int = 4096,
        max_queued_requests: int = 100,
        **settings: object,
    ) -> None:
        self.limits = WorkerLimits(
            num_pages=num_pages,
            page_size=page_size,
            num_rows=num_rows,
            max_model_len=num_pages * page_size,
            vocab_size=1000,
        )
        settings.setdefault("prefix_cache", True)
        self.scheduler = Scheduler(
            self.limits,
            chunked_prefill_size=chunk,
            max_prefill_tokens=prefill,
            max_queued_requests=max_queued_requests,
            **settings,  # type: ignore[arg-type]
        )
        self.memory = self.scheduler.memory
        self._builder = RequestBuilder(self.limits, None)
        self.tables: dict[int, dict[int, int]] = {}  # by row: column → page, as the device's table stands

    def add(self, prompt: Iterable[int], max_tokens: int = 8, *, salt: str | None = None, **params: object) -> Request:
        wanted = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        request = self._builder.build(list(prompt), wanted, None, request_id=None, salt=salt)  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request

    def plan(self, in_flight: ScheduleBatch | None = None) -> ScheduleBatch | NoBatch:
        planned = self.scheduler.plan(in_flight)
        if isinstance(planned, ScheduleBatch):
            self._apply(planned)
        self.scheduler.check()
        return planned

    def batch(self, in_flight: ScheduleBatch | None = None) -> ScheduleBatch:
        planned = self.plan(in_flight)
        assert isinstance(planned, ScheduleBatch), planned
        return planned

    def commit(self, batch: ScheduleBatch, token_id: int = 7, row_errors: dict[int, str] | None = None) -> list[Update]:
        """Commit a step in which every row drew `token_id`."""
        self.scheduler.sample_inputs(batch)
        ids = (token_id,) * len(batch.sample_indices)
        updates = self.scheduler.commit(batch, StepOutcome(token_ids=ids, row_errors=row_errors or {}))
        self.scheduler.check()
        return updates

    def step(self, token_id: int = 7) -> ScheduleBatch:
        """One whole step at depth 0."""
        batch = self.batch()
        self.commit(batch, token_id)
        return batch

    def run(self, limit: int = 2000) -> int:
        """Steps at depth 0 until nothing is left; how many it took."""
        for count in range(limit):
            if not self.scheduler.has_work():
                return count
            self.step()
        raise AssertionError("no end")

    def table(self, request: Request, num_positions: int) -> list[int]:
        """The pages that the device's table has for a request's first positions."""
        columns = self.tables[request.row]
        return [columns[column] for column in range(-(-num_positions // self.limits.page_size))]

    def _apply(self, batch: ScheduleBatch) -> None:
        writes = [array("i", packed) for packed in (batch.table_rows, batch.table_columns, batch.table_pages)]
        for row, column, page in zip(*writes, strict=True):
            self.tables.setdefault(row, {})[column] = page

    @property
    def num_home_pages(self) -> int:
        """Pages that nobody runs on: free, or cached and evictable."""
        return self.memory.pages.num_free + self.memory.tree.num_evictable_pages


@pytest.fixture
def hand() -> Callable[..., Hand]:
    return Hand
