"""A state machine over the scheduler: any order of arrivals, plans, commits, failures and aborts keeps its laws."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream import SamplingParams
from slipstream.engine.cache.radix_node import EvictionPolicy
from slipstream.engine.errors import StepFailed
from slipstream.engine.request import Request, RequestState
from slipstream.engine.request_builder import RequestBuilder
from slipstream.engine.scheduler import prefill_adder
from slipstream.engine.scheduler.schedule_batch import NoBatch, ScheduleBatch
from slipstream.engine.scheduler.scheduler import Scheduler, Update
from slipstream.engine.worker import StepOutcome, WorkerLimits

VOCAB = 5


class SchedulerMachine(RuleBasedStateMachine):
    """At most two steps are launched and not committed, as in the loop."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(6, 24),
        num_rows=st.integers(1, 5),
        prefix_cache=st.booleans(),
        ratio=st.sampled_from([0.0, 0.7]),
        policy=st.sampled_from(["fcfs", "lpm", "shortest-prefill", "priority", "preempting"]),
        eviction=st.sampled_from(["lru", "lfu", "fifo", "priority"]),
    )
    def open(
        self,
        page_size: int,
        num_pages: int,
        num_rows: int,
        prefix_cache: bool,
        ratio: float,
        policy: str,
        eviction: EvictionPolicy,
    ) -> None:
        self.limits = WorkerLimits(
            num_pages=num_pages,
            page_size=page_size,
            num_rows=num_rows,
            max_model_len=num_pages * page_size,
            vocab_size=VOCAB,
        )
        self.scheduler = Scheduler(
            self.limits,
            chunked_prefill_size=2 * page_size,
            max_prefill_tokens=4 * page_size,
            max_queued_requests=8,
            prefix_cache=prefix_cache,
            schedule_policy="priority" if policy == "preempting" else policy,
            priority_preemption=policy == "preempting",
            eviction_policy=eviction,
            on_pages_home=self.come_home,
        )
        self.homecomings = 0
        self.scheduler._planner.ratio.value = ratio
        self.patches = patch.object(prefill_adder, "SHARED_TOKENS", 4)
        self.patches.start()
        self.builder = RequestBuilder(self.limits, None)
        self.requests: list[Request] = []
        self.flights: list[ScheduleBatch] = []
        self.ended: dict[int, int] = {}

    @precondition(lambda self: len(self.scheduler._waiting) < 8)
    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
        max_tokens=st.integers(0, 12),
        stops=st.booleans(),
        priority=st.integers(-1, 1),
        repeats=st.booleans(),
    )
    def arrive(self, prompt: list[int], max_tokens: int, stops: bool, priority: int, repeats: bool) -> None:
        longest = self.limits.max_model_len
        if repeats and self.requests:
            prompt = self.requests[0].ids[:10].tolist()
        prompt = prompt[: longest - 1]
        params = SamplingParams(max_tokens=min(max_tokens, longest - len(prompt)), stop_token_ids=(3,) if stops else ())
        request = self.builder.build(prompt, params, None, request_id=None, salt=None, priority=priority)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.requests.append(request)

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def plan(self) -> None:
        in_flight = self.flights[-1] if self.flights else None
        planned = self.scheduler.plan(in_flight)
        if isinstance(planned, ScheduleBatch):
            self.flights.append(planned)
            assert 0 < planned.num_rows <= self.limits.num_rows
            assert len(set(planned.rows)) == planned.num_rows
            assert 0 not in planned.rows
            page_size, num_decode = self.limits.page_size, planned.num_decode
            prompts = planned.num_new[num_decode:]
            assert all(prompts)
            assert sum(prompts) <= 2 * page_size, "a chunk"
            assert planned.num_tokens <= max(4 * page_size, num_decode + page_size), "the input of a step"
            ends = [prior + new for prior, new in zip(planned.num_prior, planned.num_new, strict=True)]
            members = self.scheduler._flights[planned.step]
            cut = [row for row in range(num_decode, len(ends)) if ends[row] < len(members[row].ids)]
            assert cut in ([], [len(ends) - 1]), "one prompt at a time is in pieces, the last"
            for row in cut:
                assert ends[row] % page_size == 0
                room = max(2 * page_size - num_decode, page_size if len(prompts) == 1 else 0)
                assert sum(prompts) <= room, "a piece leaves room for the rows that decode"
        elif planned is NoBatch.DRAIN:
            assert in_flight is not None, "with nothing in flight there is nothing to drain"
        else:
            assert in_flight is not None or not self.scheduler.has_work(), "work, but nothing in flight and no plan"

    @precondition(lambda self: self.flights)
    @rule(
        tokens=st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=5),
        failing=st.sets(st.integers(0, 20), max_size=1),
    )
    def commit(self, tokens: list[int], failing: set[int]) -> None:
        batch = self.flights.pop(0)
        inputs = self.scheduler.sample_inputs(batch)
        assert inputs.dead <= set(range(batch.num_rows))
        outcome = StepOutcome(
            token_ids=tuple(tokens[: len(batch.sample_indices)]),
            row_errors={index: "row" for index in failing if index < batch.num_rows},
        )
        self.deliver(self.scheduler.commit(batch, outcome))

    def come_home(self, pages: Sequence[int]) -> None:
        """The canary's seam: pages that come home are free at that moment, each once."""
        assert len(set(pages)) == len(pages)
        assert set(pages) <= self.scheduler.memory.pages.free_pages()
        self.homecomings += len(pages)

    @precondition(lambda self: not self.flights)
    @rule()
    def flush(self) -> None:
        self.scheduler.flush_cache()
        stats = self.scheduler.stats
        assert stats.num_free_pages == stats.num_pages
        assert stats.num_running == 0

    @precondition(lambda self: self.flights)
    @rule()
    def fail(self) -> None:
        batch = self.flights.pop(0)
        self.deliver(self.scheduler.fail(batch, StepFailed("step", step=batch.step)))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        had_ended = request.has_ended
        end = self.scheduler.abort(request)
        assert (end is None) == had_ended
        if end is not None:
            self.ended[id(request)] = self.ended.get(id(request), 0) + 1

    def deliver(self, updates: list[Update]) -> None:
        for update in updates:
            assert id(update.request) not in self.ended, "an update after the end"
            if update.end is not None:
                self.ended[id(update.request)] = 1

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        live = [request for request in self.requests if not request.has_ended]
        assert set(live) == set(self.scheduler.requests())
        assert all(request.has_ended == (self.ended.get(id(request)) == 1) for request in self.requests)
        waiting = [request for request in live if request.state is RequestState.WAITING]
        assert self.scheduler._waiting.num_tokens == sum(len(request.ids) for request in waiting)
        assert all(not request.pages and request.row == 0 for request in waiting)
        for request in live:
            assert len(request.ids) <= request.max_total_tokens

    def teardown(self) -> None:
        """Whatever happened: what is left runs to its end, and everything comes home."""
        if not hasattr(self, "scheduler"):
            return
        try:
            self.run_to_the_end()
        finally:
            self.patches.stop()

    def run_to_the_end(self) -> None:
        for _ in range(5000):
            if len(self.flights) < 2:
                self.plan()
            if self.flights:
                self.commit([1, 2, 4, 0, 1], set())
            elif not self.scheduler.has_work():
                break
            self.laws_hold()
        assert not self.scheduler.has_work()
        stats = self.scheduler.stats
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        assert self.scheduler.memory.rows.num_free == self.limits.num_rows


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
