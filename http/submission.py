"""Handing a request's choices to the engine together, and taking them back together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from ..engine.engine import RequestHandle
from ..engine.outputs import Cancelled, End, Failed, Finished, Sink, Usage
from ..engine.sampling_params import SamplingParams
from .failures import Aborted, failure_of
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

    __slots__ = ("_front", "_handles", "_request_id")

    def __init__(self, front: Front, jobs: Sequence[Job], sinks: Sequence[Sink], request_id: str) -> None:
        """Raises what the engine raises; then nothing stays submitted."""
        self._front = front
        self._request_id = request_id
        self._handles: list[RequestHandle] = []
        front.check_open()
        try:
            for job, sink in zip(jobs, sinks, strict=True):
                urgency = job.urgency
                handle = front.engine.submit(
                    job.prompt_ids,
                    job.params,
                    sink,
                    request_id=request_id,
                    priority=urgency.priority,
                    deadline_s=urgency.seconds_left,
                )
                self._handles.append(handle)
        except BaseException:
            self.abort()
            raise
        front.live.setdefault(request_id, []).append(self)

    def abort(self) -> None:
        """Abort what still runs. Each of its sinks gets its end at once."""
        for handle in self._handles:
            handle.abort()

    def close(self) -> None:
        """The response is over: nothing of it may run on."""
        self.abort()
        alive = self._front.live.get(self._request_id, [])
        if self in alive:
            alive.remove(self)
            if not alive:
                del self._front.live[self._request_id]


def count_end(front: Front, ends: Sequence[End | None], error: Exception | None, seconds: float) -> None:
    """Add a response that is over, however it ended, to the metrics."""
    metrics = front.metrics
    metrics.request_s.observe(seconds)
    for end in ends:
        if isinstance(end, Finished):
            metrics.finished[end.reason] += 1
    if error is not None:
        metrics.failed[failure_of(error).code or "unknown"] += 1


def error_of(end: End) -> Exception | None:
    """Why a choice has no regular end, if so. A cancelled one was aborted by the server: nobody asks for a client
    that is gone."""
    if isinstance(end, Failed):
        return end.error
    return Aborted() if isinstance(end, Cancelled) else None
