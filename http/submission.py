"""Handing a request's choices to the engine together, and taking them back together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from ..engine.engine import RequestHandle
from ..engine.errors import RequestError
from ..engine.grammar_session import CompiledGrammar
from ..engine.outputs import Cancelled, End, Failed, Sink, Usage
from ..engine.sampling_params import SamplingParams
from .course import Course
from .failures import Aborted
from .front import Front


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgency:
    """How a request stands among others. `deadline_at` is a time of `perf_counter`."""

    priority: int = 0
    deadline_at: float | None = None

    @property
    def seconds_left(self) -> float | None:
        return None if self.deadline_at is None else max(0.0, self.deadline_at - perf_counter())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice to generate. A prompt with several choices has several jobs, of which one counts its tokens."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    counts_prompt: bool = True
    urgency: Urgency = Urgency()
    grammar: CompiledGrammar | None = None  # what `params.structured_output` was compiled to


async def jobs_of(
    front: Front, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], urgency: Urgency
) -> list[Job]:
    """A choice for each prompt and each of `params`, which ask for the same grammar. Raises what compiling that raises."""
    if len(prompts) * len(params) > front.settings.max_choices:
        param = "n" if len(params) > 1 else "prompt"
        raise RequestError(f"at most {front.settings.max_choices} choices a request", param=param)
    grammar = await front.engine.compile_grammar(params[0])
    return [
        Job(prompt_ids=prompt_ids, params=each, counts_prompt=choice == 0, urgency=urgency, grammar=grammar)
        for prompt_ids in prompts
        for choice, each in enumerate(params)
    ]


def total_usage(jobs: Sequence[Job], usages: Sequence[Usage]) -> Usage:
    """The usage of a request from that of its choices: each prompt counts once, every output."""
    counted = [usage for job, usage in zip(jobs, usages, strict=True) if job.counts_prompt]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in counted),
        cached_tokens=sum(usage.cached_tokens for usage in counted),
        output_tokens=sum(usage.output_tokens for usage in usages),
    )


class Submission:
    """The submissions of one response: all of them or none, known to `front.live` until closed."""

    __slots__ = ("_course", "_front", "_handles", "_submitted_at")

    def __init__(self, front: Front, jobs: Sequence[Job], sinks: Sequence[Sink], course: Course) -> None:
        """Raises what the engine raises; then nothing stays submitted."""
        self._front = front
        self._course = course
        self._submitted_at = perf_counter()
        self._handles: list[RequestHandle] = []
        front.check_open()
        _check_room(front, jobs)
        num_prompts = sum(job.counts_prompt for job in jobs)
        number = -1
        try:
            for job, sink in zip(jobs, sinks, strict=True):
                number += job.counts_prompt
                urgency = job.urgency
                handle = front.engine.submit(
                    job.prompt_ids,
                    job.params,
                    sink,
                    request_id=course.request_id,
                    priority=urgency.priority,
                    deadline_s=urgency.seconds_left,
                    grammar=job.grammar,
                )
                self._handles.append(handle)
        except BaseException as error:
            self.abort()
            if isinstance(error, RequestError) and error.param == "prompt" and num_prompts > 1:
                raise RequestError(str(error), param=f"prompt[{number}]", code=error.code) from error
            raise
        front.live.setdefault(course.request_id, []).append(self)

    def num_cached_tokens(self, index: int) -> int:
        """Of a choice's prompt, once it has begun."""
        return self._handles[index].request.num_cached_tokens

    def saw_first(self, now: float) -> None:
        """The request's first token is on its way to the client."""
        course, metrics = self._course, self._front.metrics
        course.first_token_s = now - course.accepted_at
        metrics.first_token_s.observe(course.first_token_s)
        admitted_at = self._front.step_times.launched_at(self._handles[0].request.first_step)
        if admitted_at is not None:
            course.queue_s = max(0.0, admitted_at - self._submitted_at)
            metrics.queue_s.observe(course.queue_s)

    def abort(self) -> None:
        """Abort what still runs. Each of its sinks gets its end at once."""
        for handle in self._handles:
            handle.abort()

    def close(self) -> None:
        """The response is over: nothing of it may run on."""
        self.abort()
        alive = self._front.live.get(self._course.request_id, [])
        if self in alive:
            alive.remove(self)
            if not alive:
                del self._front.live[self._course.request_id]


def _check_room(front: Front, jobs: Sequence[Job]) -> None:
    """Raises: RequestError for choices that would never fit into the queue together, however long the client waits."""
    config = front.engine.config
    param = "prompt" if sum(job.counts_prompt for job in jobs) > 1 else "n"
    if len(jobs) > config.max_queued_requests:
        message = f"the request has {len(jobs)} choices; at most {config.max_queued_requests} can wait here"
        raise RequestError(f"{message} (max_queued_requests)", param=param)
    limit, num_tokens = config.max_queued_tokens, sum(len(job.prompt_ids) for job in jobs)
    if len(jobs) > 1 and limit is not None and num_tokens > limit:
        message = f"the request has {num_tokens} prompt tokens over all choices; at most {limit} can wait here"
        raise RequestError(f"{message} (max_queued_tokens)", param=param)


def count_end(front: Front, course: Course) -> None:
    """Add a response that is over, however it ended, to the metrics."""
    metrics = front.metrics
    metrics.request_s.observe(course.seconds or 0.0)
    metrics.finished.update(course.reasons)
    if course.error is not None:
        metrics.failed[course.error] += 1
    if course.hung_up:
        metrics.num_hang_ups += 1


def error_of(end: End) -> Exception | None:
    """Why a choice has no regular end, if so. A cancelled one was aborted by the server: nobody asks for a client
    that is gone."""
    if isinstance(end, Failed):
        return end.error
    return Aborted() if isinstance(end, Cancelled) else None
