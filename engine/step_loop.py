"""The overlap loop: the only file that knows that two steps coexist.

                      ┌ resolve N ┬ plan N+1 ┬ launch N+1 ┬ await N ┬ commit N ┬ deliver N ┬ a turn ┐
    loop              │           │          │            │·········│          │           │        │
    compute lane   ───── forward N ────┬ sample N ┬──────────── forward N+1 ─────────────────────────
    copy lane      ──────────────────────────────── ids N ───────────────────────────────────────────

When sample N is resolved, everything up to N-1 is committed, so masks and penalties see exact history, while forward N
still runs. At depth 0 the same code commits N before it plans N+1. While a burst comes in, plan N+1 waits until it is full or
N is over: one step of many prompts takes the device less time, and the host much less, than several of a few. With nothing
running it waits a moment, too: behind a step of one prompt all others would stand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ..streams import marks as phases
from ..streams.marks import MarkSwitch
from .errors import EngineDead, MisuseError, StepFailed
from .outputs import Failed
from .request import Request, RequestState
from .scheduler.schedule_batch import NoBatch, ScheduleBatch
from .scheduler.scheduler import Scheduler, Update
from .step_watch import StepWatch
from .worker import Launched, Worker

GATHER_S = 0.01  # so long a burst is waited for while the device is idle: twice what sixteen requests take to come in
LULL_S = 0.002  # and so long for the next of it: a crowd that is refused does not hold up who is not


class StepLoop:
    """Runs steps until it is closed. An exception out of `run` means that the engine cannot go on."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        *,
        overlap: bool,
        step_timeout_s: float = 600.0,
        marks: MarkSwitch | None = None,
        after_commit: Callable[[], None] | None = None,
        has_more_coming: Callable[[], bool] = lambda: False,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._overlap = overlap
        self._switch = marks if marks is not None else MarkSwitch()
        self._has_more_coming = has_more_coming
        self._after_commit = after_commit  # tests prove the laws of ownership here, after every step
        self._wake = asyncio.Event()
        self._num_arrived, self._arrived = 0, 0.0  # requests, and when that was last seen to grow
        self._closing = False
        self._is_paused = False
        self._watch = StepWatch(lambda: self.clock(), timeout_s=step_timeout_s, times=scheduler.step_times)
        self.still = asyncio.Event()  # set while nothing is in flight and nothing will be: idle, paused, or over
        self.idle = asyncio.Event()  # set while nothing is waiting, running or in flight, and once `run` is over
        self.clock: Callable[[], float] = time.monotonic  # deadlines are times of this clock
        self.num_settled = 0  # steps committed or failed: grows while there is progress

    def wake(self) -> None:
        """There may be work. Called on the loop thread."""
        self.idle.clear()  # at once: who adds a request and then waits for idle must wait for that request
        self._wake.set()

    def close(self) -> None:
        """Return from `run` as soon as the step in flight is committed."""
        self._closing = True
        self._wake.set()

    async def pause(self) -> None:
        """Launch nothing more until `resume`. Returns when nothing is in flight; deadlines wait as well."""
        self._is_paused = True
        self._wake.set()
        await self.still.wait()

    def resume(self) -> None:
        """Go on after a pause. Does nothing without one."""
        self._is_paused = False
        self._wake.set()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    async def run(self) -> None:
        """Run the timeline above, over and over. Returns once closed and nothing is in flight."""
        try:
            await self._run()
        finally:
            self.idle.set()  # whoever waits for the end of the work has it, one way or the other
            self.still.set()

    async def _run(self) -> None:
        scheduler = self._scheduler
        pending: Launched | None = None
        while not (self._closing and pending is None):
            if pending is None and (self._is_paused or not scheduler.has_work()):
                await self._rest()
                continue
            self.idle.clear()
            if pending is not None:
                self._resolve(pending)
                if not self._overlap or await self._gather(pending):
                    await self._settle(pending)
                    pending = None
            elif not scheduler.has_running:
                self._watch.rest()  # nobody waits for a token: what follows is no part of a step's time
                await self._gather(None)
            if scheduler.has_deadlines:  # behind the await: whose time is over is not planned
                self._deliver(scheduler.expire(self.clock()))
            plan = self._plan(pending)
            launched = self._launch(plan) if isinstance(plan, ScheduleBatch) else None
            if pending is not None:
                await self._settle(pending)
            elif plan is NoBatch.NOTHING and scheduler.has_work() and not (self._is_paused or self._closing):
                raise MisuseError(f"nothing is in flight and nothing can run: {scheduler.why_nothing_runs()}")
            if launched is not None and launched.error is not None:
                await self._settle(launched)  # a step that never started is failed before the next plan
                launched = None
            await asyncio.sleep(0)  # one real turn of the loop, always: the clients' turn
            pending = launched

    async def _gather(self, pending: Launched | None) -> bool:
        """Let a burst that is coming in fill the next step: until that is full, nothing has come for LULL_S, or nobody is left
        to come; with nothing in flight for GATHER_S, else until the step in flight is over. Returns whether it is.
        """
        scheduler, until = self._scheduler, self.clock() + GATHER_S
        while self._has_more_coming() and not (scheduler.can_fill_step or self._closing or self._is_paused):
            now = self.clock()
            if scheduler.num_arrived > self._num_arrived:
                self._num_arrived, self._arrived = scheduler.num_arrived, now
            if now - self._arrived > LULL_S:
                break
            if pending is not None:
                if await self._watch.ends_within(pending, LULL_S):
                    return True
            elif now > until:
                break
            else:
                await asyncio.sleep(0)
        return False

    async def _rest(self) -> None:
        """Wait until there may be something to do."""
        self._wake.clear()  # nothing is awaited between the look for work and here
        self._watch.rest()
        if not self._scheduler.has_work():
            self._scheduler.check_idle()
            self.idle.set()
        self.still.set()
        await self._wake.wait()
        self.still.clear()

    def _resolve(self, pending: Launched) -> None:
        marks = self._switch.marks
        mark = marks.start(phases.SAMPLE, pending.batch.step)
        inputs = self._scheduler.sample_inputs(pending.batch)
        try:
            pending.resolve(inputs)
        except (EngineDead, MisuseError):
            raise
        except Exception as error:
            pending.error = error  # its outcome will never come: settling fails its rows, the engine goes on
        marks.end(mark)

    def _plan(self, pending: Launched | None) -> ScheduleBatch | NoBatch:
        marks, step = self._switch.marks, self._scheduler.next_step
        mark = marks.start(phases.SCHEDULE, step)
        is_over = self._closing or self._is_paused
        plan = NoBatch.NOTHING if is_over else self._scheduler.plan(pending.batch if pending else None)
        marks.end(mark)
        return plan

    def _launch(self, batch: ScheduleBatch) -> Launched:
        marks = self._switch.marks
        mark = marks.start(phases.LAUNCH, batch.step, batch.num_rows, batch.num_tokens)
        self._watch.begin()
        try:
            return self._worker.launch(batch)
        except EngineDead:
            raise
        except Exception as error:
            return Launched(batch, None, None, error=error)
        finally:
            marks.end(mark)

    async def _settle(self, launched: Launched) -> None:
        """Await a step, commit it whether it failed or not, and deliver what it brought."""
        batch = launched.batch
        marks = self._switch.marks
        mark = marks.start(phases.AWAIT, batch.step)
        outcome, error = None, launched.error
        if launched.outcome is not None and error is None:
            try:
                outcome = await self._watch.outcome_of(launched)
            except EngineDead:
                raise
            except Exception as raised:
                error = raised
        marks.end(mark)
        mark = marks.start(phases.COMMIT, batch.step, batch.num_rows, len(outcome.token_ids) if outcome else 0)
        if outcome is not None:
            updates = self._scheduler.commit(batch, outcome)
        else:
            updates = self._scheduler.fail(batch, _as_step_failed(error, batch.step))
        if launched.outcome is not None:
            self._worker.committed(batch.step)
        self.num_settled += 1
        if self._after_commit is not None:
            self._after_commit()
        marks.end(mark)
        mark = marks.start(phases.SEND, batch.step)
        self._deliver(updates)
        marks.end(mark)

    def _deliver(self, updates: Sequence[Update]) -> None:
        """Deliver; a request whose sink raised is ended, if it has not just been."""
        for request in deliver(updates):
            cancelled = self._scheduler.abort(request)
            if cancelled is not None:
                error = StepFailed("its tokens could not be delivered")
                deliver([Update(request, (), "", Failed(error=error, usage=cancelled.usage))])


def deliver(updates: Sequence[Update]) -> list[Request]:
    """Hand every update to its request's sink, tokens before the end. Returns the requests whose sinks have raised.

    A sink must not raise; one that does is told to the event loop's exception handler, and hurts nobody else.
    """
    running = RequestState.RUNNING
    broken: list[Request] = []
    for request, token_ids, text, end, logprobs, prompt_logprobs, hidden_states in updates:
        if end is None and request.state is not running and request.has_ended:
            continue  # a sink before it in this very list has aborted it: it had its end
        try:
            if hidden_states is not None:
                request.sink.push(token_ids, text, logprobs, prompt_logprobs, hidden_states)
            elif logprobs or prompt_logprobs:
                request.sink.push(token_ids, text, logprobs, prompt_logprobs)
            elif token_ids or text:
                request.sink.push(token_ids, text)
        except Exception as error:
            broken.append(request)
            _tell(request, error)
        if end is not None:
            try:
                request.sink.end(end)
            except Exception as error:
                _tell(request, error)
    return broken


def _tell(request: Request, error: Exception) -> None:
    context = {"message": f"the sink of request {request.request_id} raised", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


def _as_step_failed(error: Exception | None, step: int) -> StepFailed:
    if isinstance(error, StepFailed):
        return error
    failed = StepFailed(f"step {step} failed: {error}", step=step)
    failed.__cause__ = error
    return failed
