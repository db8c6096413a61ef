"""Who runs next: admission, continuous batching, retraction, commit. Host integers only.

Owns every request from `add` to its end, and through RequestMemory all rows and pages. Knows nothing of tensors, clocks
or consumers. Two steps may coexist: `plan` may be called while one step is in flight, whose tokens are not known yet.

A request that ends while a launched step still names it stays in that step as a surplus row: its token is dropped and
what it held is held until that step is committed. Retraction happens only with nothing in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..cache.radix_node import EvictionPolicy
from ..config import SchedulePolicy
from ..errors import MisuseError, Overloaded, RequestError, StepFailed
from ..hidden_mode import HiddenMode, is_above
from ..outputs import Cancelled, End, Failed, Finished, FinishReason, HiddenStates, TokenLogprobs
from ..request import Request, RequestState
from ..worker import SampleInputs, StepOutcome, WorkerLimits
from .deadlines import Deadlines
from .request_memory import RequestMemory
from .running_set import RunningSet
from .sample_notes import gather_sample_inputs, row_fault
from .schedule_batch import NoBatch, ScheduleBatch
from .step_planner import StepPlanner
from .step_times import StepTimes
from .waiting_queue import WaitingQueue


class Update(NamedTuple):
    """What one step brought one request. `end` is its terminal event, if this was its last step."""

    request: Request
    token_ids: tuple[int, ...]
    text: str
    end: End | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first update after the prompt
    hidden_states: HiddenStates | None = None  # one a token, those of the prompt before the first


class SchedulerStats(NamedTuple):
    """Counts since the start, and what is there now."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # in the prefix tree, evictable
    num_steps: int  # launched steps
    num_drains: int  # times a plan had to wait for the step in flight
    num_retractions: int
    num_prompt_tokens: int  # admitted, cached or not
    num_cached_tokens: int  # of those, found in the prefix cache
    num_output_tokens: int
    num_eager_for_hidden: int  # steps that had to give more hidden states than graphs are captured for


class Scheduler:
    """Plans steps and commits them, in turn."""

    def __init__(
        self,
        limits: WorkerLimits,
        *,
        chunked_prefill_size: int,
        max_prefill_tokens: int,
        max_queued_requests: int,
        prefix_cache: bool,
        max_queued_tokens: int | None = None,
        schedule_policy: SchedulePolicy = "fcfs",
        policy_window: int = 128,
        priority_preemption: bool = False,
        eviction_policy: EvictionPolicy = "lru",
        itl_budget_s: float | None = None,
        hidden_states: HiddenMode = "none",
        on_pages_home: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.limits = limits
        self.memory = RequestMemory(
            limits, prefix_cache=prefix_cache, eviction_policy=eviction_policy, on_pages_home=on_pages_home
        )
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._waiting = WaitingQueue(schedule_policy, self.memory.tree, window=policy_window)
        self._deadlines = Deadlines()
        self._running = RunningSet()
        self._planner = StepPlanner(
            self.memory,
            self._waiting,
            self._running,
            chunk_tokens=chunked_prefill_size,
            input_tokens=max_prefill_tokens,
            preempts=priority_preemption,
            step_times=None if itl_budget_s is None else StepTimes(itl_budget_s),
        )
        self._flights: dict[int, list[Request]] = {}  # requests in row order, by launched step
        self._next_step = 0
        self.num_arrived = 0  # requests since the start
        self._num_output_tokens = 0
        self._captured = hidden_states
        self._num_eager_for_hidden = 0

    # ---- arrivals and departures

    def add(self, request: Request) -> None:
        """Queue a request that has been checked against the limits. Raises: Overloaded."""
        if len(self._waiting) >= self._max_queued_requests:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again later")
        num_tokens = self._waiting.num_tokens + len(request.ids)
        # One request alone is let in whatever its size: later would be no better.
        if self._waiting and self._max_queued_tokens is not None and num_tokens > self._max_queued_tokens:
            raise Overloaded(f"{self._waiting.num_tokens} tokens are waiting already; try again later")
        request.arrival = self.num_arrived
        self.num_arrived += 1
        request.arrival_step = self._next_step
        self._waiting.add(request)
        self._deadlines.add(request)

    def abort(self, request: Request) -> Cancelled | None:
        """End a request now, waiting or running; return its terminal event, or None if it had ended before."""
        if request.has_ended:
            return None
        end = Cancelled(usage=request.usage)
        self._end(request, RequestState.CANCELLED, keep=True)
        return end

    @property
    def can_fill_step(self) -> bool:
        """Whether the next step is full, as far as can be told: a prompt that comes later would have no place in it."""
        return self._planner.can_fill_step

    @property
    def has_deadlines(self) -> bool:
        """Some request may run out of time: `expire` is to be called now and then."""
        return bool(self._deadlines)

    def expire(self, now: float) -> list[Update]:
        """End the requests whose deadline is over: what has begun is finished as it is, the others fail."""
        updates = []
        for request in self._deadlines.due(now):
            if request.state is RequestState.WAITING and not request.num_retractions:
                late = RequestError("its deadline passed while the request waited", param="deadline_s", code="timeout")
                updates.append(self._fail(request, late))
                continue
            try:
                text = request.text.flush() if request.text is not None else ""
            except Exception as error:
                updates.append(self._fail(request, _row_fault("its text failed", error)))
            else:
                updates.append(Update(request, (), text, self._finish(request, "deadline", None)))
        return updates

    def abort_all(self, error: Exception) -> list[Update]:
        """End everything with an error: the engine is dead. Nothing comes home any more."""
        updates = []
        for request in list(self.requests()):
            request.move(RequestState.FAILED)
            updates.append(Update(request, (), "", Failed(error=error, usage=request.usage)))
        self._waiting.clear()
        self._running.clear()
        return updates

    def requests(self) -> Iterator[Request]:
        """Every request that has not ended."""
        yield from self._running
        yield from self._waiting

    def has_work(self) -> bool:
        """Some request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def has_running(self) -> bool:
        """Some request has begun and not ended."""
        return bool(self._running)

    @property
    def next_step(self) -> int:
        """The number that the next batch will have."""
        return self._next_step

    @property
    def stats(self) -> SchedulerStats:
        pages = self.memory.pages
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=pages.num_pages,
            num_free_pages=pages.num_free,
            num_cached_pages=self.memory.tree.num_evictable_pages,
            num_steps=self._next_step,
            num_drains=self._planner.num_drains,
            num_retractions=self._planner.num_retractions,
            num_prompt_tokens=self._planner.num_prompt_tokens,
            num_cached_tokens=self._planner.num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_eager_for_hidden=self._num_eager_for_hidden,
        )

    def check(self) -> None:
        """Prove, page by page, that every row and page is where it belongs. Raises: MisuseError."""
        self.memory.check(self._running)
        if not self.has_work() and not self._flights:
            self.check_idle()

    def check_idle(self) -> None:
        """With nothing to do and nothing in flight: everything is home, by the counts alone, so that the next request
        does not wait for the proof. Raises: MisuseError.
        """
        self._planner.ratio.reset()
        self.memory.check_home()

    def why_nothing_runs(self) -> str:
        """What the first of the waiting lacks, for whoever finds that nothing is in flight and nothing can be planned."""
        stats = self.stats
        there = f"{self.memory.num_available_pages} of {stats.num_pages} pages, {self.memory.rows.num_free} rows free"
        first = next(iter(self._waiting.first(1)), None)
        lacks = "" if first is None else f"; first waits {first!r}, {self.memory.pages_for(len(first.ids) + 1)} pages"
        return f"{stats.num_running} running, {stats.num_waiting} waiting; {there}{lacks}"

    def flush_cache(self) -> None:
        """Drop every cached prefix. What runs is sent back to the queue first, and will be computed anew.

        Raises: MisuseError with a step in flight.
        """
        if self._flights:
            raise MisuseError("the prefix cache is flushed only while nothing is in flight: idle or paused")
        self._planner.send_all_back()
        self.memory.tree.flush()

    # ---- before a step

    def sample_inputs(self, batch: ScheduleBatch) -> SampleInputs:
        """What the sample of `batch` must know; call when every step before it is committed."""
        return gather_sample_inputs(batch, self._flights[batch.step], vocab_size=self.limits.vocab_size)

    def plan(self, in_flight: ScheduleBatch | None) -> ScheduleBatch | NoBatch:
        """Decide the next step. With a step in flight it may be Drain: commit that one, then plan again."""
        lineup = self._planner.line_up(self._next_step, is_in_flight=in_flight is not None)
        if lineup is None:
            return NoBatch.DRAIN
        if lineup.is_empty:
            return NoBatch.NOTHING
        batch, members = lineup.freeze(self._next_step)
        self._flights[batch.step] = members
        self._next_step += 1
        self._num_eager_for_hidden += is_above(batch.hidden_mode, self._captured)
        for request, _, samples in lineup.extends:
            self._running.advance(request, ends_prefill=samples or request.num_planned == len(request.ids))
        return batch

    # ---- after a step

    @property
    def step_times(self) -> StepTimes | None:
        """Where each step's duration is recorded, if a latency budget is to be kept."""
        return self._planner.step_times

    def commit(self, batch: ScheduleBatch, outcome: StepOutcome) -> list[Update]:
        """Take in what a step computed. Surplus rows are dropped. Returns what to deliver, in row order."""
        members = self._take_flight(batch)
        updates: list[Update] = []
        num_plain = 0
        if not (outcome.row_errors or outcome.logprobs or outcome.prompt_logprobs or outcome.hidden_states):
            # Nearly every row of nearly every step: a decode row that brings its token and nothing else.
            num_plain, running, append = batch.num_decode, RequestState.RUNNING, self._append
            for request, token_id in zip(members[:num_plain], outcome.token_ids, strict=False):
                if request.state is running:
                    fault = request.fault
                    updates.append(append(request, token_id) if fault is None else self._fail(request, fault))
        if num_plain < len(members):
            self._commit_rows(batch, outcome, members, num_plain, updates)
        return updates

    def _commit_rows(
        self, batch: ScheduleBatch, outcome: StepOutcome, members: list[Request], first: int, updates: list[Update]
    ) -> None:
        """The same for the rows from `first` on, whatever they are; before it every row samples."""
        token_ids = iter(outcome.token_ids[first:])
        for index, request in enumerate(members[first:], first):
            samples = batch.samples[index]
            token_id = next(token_ids) if samples else None
            if request.state is not RequestState.RUNNING:
                continue
            if index in outcome.row_errors or request.fault is not None:
                fault = request.fault or row_fault(
                    request, outcome.row_errors[index], step=batch.step, vocab_size=self.limits.vocab_size
                )
                updates.append(self._fail(request, fault))
                continue
            if index in outcome.prompt_logprobs:
                request.add_scores(outcome.prompt_logprobs[index])
            if index in outcome.pooled:
                request.add_pooled(outcome.pooled[index], starts=batch.num_prior[index] == 0)
            if index in outcome.hidden_states:
                request.add_hidden(outcome.hidden_states[index])
            if index >= batch.num_decode:
                request.num_prefilled = batch.num_prior[index] + batch.num_new[index]
                request.prefill_committed = samples
            if token_id is not None:
                update = self._append(request, token_id)
                if request.params.logprobs is not None or request.prompt_logprobs:
                    logprobs = (outcome.logprobs[index],) if update.token_ids and index in outcome.logprobs else ()
                    update = update._replace(logprobs=logprobs, prompt_logprobs=request.take_scores())
                if update.token_ids and request.hidden_states:
                    update = update._replace(hidden_states=request.take_hidden())
                updates.append(update)
            elif request.num_prefilled == request.max_total_tokens:
                end = self._finish(request, "length", None)
                updates.append(Update(request, (), "", end, (), request.take_scores(), request.take_hidden()))
            if index >= batch.num_decode and not request.has_ended:
                self.memory.share(request)

    def fail(self, batch: ScheduleBatch, error: Exception) -> list[Update]:
        """Commit a step that failed, or that never started: its living rows end with `error`, the others go on."""
        members = self._take_flight(batch)
        return [self._fail(request, error) for request in members if request.state is RequestState.RUNNING]

    def _take_flight(self, batch: ScheduleBatch) -> list[Request]:
        self.memory.commit(batch.step)
        return self._flights.pop(batch.step)

    def _append(self, request: Request, token_id: int) -> Update:
        """Commit one drawn token."""
        ids, stream = request.ids, request.text
        reason: FinishReason | None = None
        text, stop = "", None
        is_stop = token_id in request.stop_ids
        if request.rules is not None and not is_stop:
            try:
                reason = "stop" if request.rules.accept(token_id) else None
            except Exception as error:
                return self._fail(request, _row_fault("structured output failed", error))
        ids.append(token_id)
        self._num_output_tokens += 1
        if reason is None and len(ids) >= request.max_total_tokens:
            reason = "length"
        if stream is not None:
            try:
                if is_stop:
                    text = stream.end_at(token_id)
                else:
                    looks = request.is_plain or request.num_outputs >= request.params.min_tokens
                    text, stop = stream.push(token_id, looks_for_stops=looks)
                    if reason is not None and stop is None:
                        text += stream.flush()
            except Exception as error:
                return self._fail(request, _row_fault("its text failed", error))
        if is_stop:
            named = request.stop_texts.get(token_id, token_id)
            return Update(request, (token_id,), text, self._finish(request, "stop", named))
        if stop is not None:
            return Update(request, (token_id,), text, self._finish(request, "stop", stop))
        end = None if reason is None else self._finish(request, reason, None)
        # What a NamedTuple's own constructor does, at half its cost: this is made for every token of every request.
        return tuple.__new__(Update, (request, (token_id,), text, end, (), (), None))

    def _finish(self, request: Request, reason: FinishReason, stop_reason: str | int | None) -> Finished:
        end = Finished(reason=reason, stop_reason=stop_reason, usage=request.usage, embedding=request.embedding)
        self._end(request, RequestState.FINISHED, keep=True)
        return end

    def _fail(self, request: Request, error: Exception) -> Update:
        end = Failed(error=error, usage=request.usage)
        # What a failed row computed is not to be trusted: only what the tree had before stays.
        self._end(request, RequestState.FAILED, keep=False)
        return Update(request, (), "", end)

    def _end(self, request: Request, state: RequestState, *, keep: bool) -> None:
        was_running = request.state is RequestState.RUNNING
        if was_running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.move(state)
        if was_running:
            self.memory.release(request, keep=keep)


def _row_fault(what: str, error: Exception) -> StepFailed:
    """The end of the one request whose own part raised."""
    fault = StepFailed(f"{what}: {error}")
    fault.__cause__ = error
    return fault
