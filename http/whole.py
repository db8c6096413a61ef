"""An answer that is not streamed: collected until every choice has ended, or until nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter

from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import End, Finished, HiddenStates, TokenLogprobs
from .course import Course
from .disconnect import watching
from .failures import CLIENT_GONE
from .frames import Collected, WholeShape
from .front import Front
from .submission import Job, Submission, count_end, error_of, total_usage


class Collector:
    """One choice, as the engine's sink."""

    __slots__ = ("_over", "ended", "hidden_states", "logprobs", "prompt_logprobs", "texts", "token_ids")

    def __init__(self, over: Countdown) -> None:
        self._over = over
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.hidden_states: list[HiddenStates] = []
        self.ended: End | None = None

    def push(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self._over.saw_token()
        self.logprobs.extend(logprobs)
        if prompt_logprobs:
            self.prompt_logprobs = tuple(prompt_logprobs)
        if hidden_states is not None:
            self.hidden_states.append(hidden_states)
        self.token_ids.extend(token_ids)
        self.texts.append(text)

    def end(self, end: End) -> None:
        self.ended = end
        self._over.choice_ended(end)


class Countdown:
    """Is over when all choices have ended, or one of them badly."""

    def __init__(self, num_choices: int) -> None:
        self._num_running = num_choices
        self.error: Exception | None = None
        self.submission: Submission | None = None  # until its first token has come
        self.is_over = asyncio.Event()

    def saw_token(self) -> None:
        if self.submission is not None:
            self.submission.saw_first(perf_counter())
            self.submission = None

    def choice_ended(self, end: End) -> None:
        self._num_running -= 1
        self.error = self.error or error_of(end)
        if self._num_running == 0 or self.error is not None:
            self.is_over.set()


async def whole_answer(
    front: Front, shape: WholeShape, jobs: Sequence[Job], request: Request, course: Course
) -> Response:
    """Submit `jobs` and wait for all of them. A client that hangs up takes them with it.

    Raises: what the engine refuses them with, or what one of them failed with.
    """
    over = Countdown(len(jobs))
    collectors = [Collector(over) for _ in jobs]
    over.submission = submission = Submission(front, jobs, collectors, course)
    is_gone = False

    def hung_up() -> None:
        nonlocal is_gone
        is_gone = True
        over.is_over.set()

    try:
        async with watching(request.scope, request.receive, hung_up):
            await over.is_over.wait()
    finally:
        ends = [collector.ended for collector in collectors]
        submission.close()
        over.submission = None  # its requests' sinks know `over`: a cycle that the collector would have to find
    usage = total_usage(jobs, [collector.ended.usage for collector in collectors if collector.ended is not None])
    course.hung_up = is_gone and any(end is None for end in ends)
    course.end(ends, usage, None if course.hung_up else over.error)
    count_end(front, course)
    if course.hung_up:
        return Response(status_code=CLIENT_GONE)
    if over.error is not None:
        raise over.error
    choices = [
        Collected(
            index=index,
            text="".join(collector.texts),
            token_ids=collector.token_ids,
            end=end,
            logprobs=collector.logprobs,
            prompt_logprobs=collector.prompt_logprobs,
            hidden_states=HiddenStates.joined(collector.hidden_states),
        )
        for index, (collector, end) in enumerate(zip(collectors, ends, strict=True))
        if isinstance(end, Finished)
    ]
    return Response(shape.whole(choices, usage), media_type="application/json")
