"""A streamed answer: the step loop pushes text into it, and its frames go to the socket without a task switch.

The path of a token: the step loop calls `Choice.push`, which appends the text and marks the stream; once a turn of the
loop FanOut calls `render`, which makes one frame a choice, and hands them to the connection; the last words go the same
way. The request's task sleeps meanwhile. It writes only where a write may have to wait: for a slow reader, under a server
that is not ours, and at both ends of the response. While it waits, text piles up in the choices and leaves in one frame
each afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.outputs import End, Finished, HiddenStates, TokenLogprobs, Usage
from .connection import DirectConnection, direct_connection
from .course import Course
from .disconnect import watching
from .failures import reported
from .fan_out import RELEASE_EVERY_S, Writable
from .frames import PING, Shape, Template
from .front import Front
from .stream_interval import MAX_HOLD_S
from .submission import Job, Submission, count_end, error_of, total_usage

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Choice:
    """One choice of a stream: the engine's sink, and the text that is not written yet."""

    __slots__ = (
        "_due_at",
        "_fan_out",
        "_hidden",
        "_ids",
        "_index",
        "_last_at",
        "_metrics",
        "_num_output_tokens",
        "_num_prompt_tokens",
        "_scores",
        "_stream",
        "_template",
        "ended",
        "is_marked",
        "pending",
    )

    def __init__(self, stream: SseResponse, shape: Shape, index: int, num_prompt_tokens: int) -> None:
        self._stream = stream
        self._index = index
        self._template = shape.text(index)
        self._ids: list[int] | None = [] if shape.wants_ids else None
        self._scores: list[TokenLogprobs] | None = [] if shape.wants_logprobs else None
        self._hidden: list[HiddenStates] = []
        self._metrics = stream.front.metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._due_at = 0  # the number of output tokens at which the next frame is written
        self._fan_out = stream.front.fan_out
        self._last_at: float | None = None  # when the frame before was taken; None: the opening is still to come
        self.is_marked = False
        self.pending = ""
        self.ended: End | None = None

    @property
    def usage(self) -> Usage:
        """As far as it has come; the end brings the final one."""
        if self.ended is not None:
            return self.ended.usage
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._stream.num_cached_tokens(self._index),
            output_tokens=self._num_output_tokens,
        )

    def push(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self._num_output_tokens += len(token_ids)
        if self._scores is not None:
            self._scores.extend((*prompt_logprobs, *logprobs))
        if hidden_states is not None:
            self._hidden.append(hidden_states)
        if self._ids is not None:
            self._ids += token_ids
        elif not text:
            return
        if text:
            self.pending += text
        if self.is_marked:
            return
        if self._num_output_tokens < self._due_at:
            self._fan_out.hold(self)
            return
        self.is_marked = True
        self._stream.mark()

    def lets_go(self, now: float) -> bool:
        """Write what is kept back if it is too old. False while there is something to keep."""
        if self.is_marked or self.ended is not None or self._last_at is None:
            return True
        if now - self._last_at < MAX_HOLD_S - RELEASE_EVERY_S:
            return False
        self.is_marked = True
        self._stream.mark()
        return True

    def end(self, end: End) -> None:
        self.ended = end
        if not self.is_marked:
            self.is_marked = True
            self._stream.mark()
        self._stream.choice_ended(end)

    def take(self, shape: Shape, now: float) -> bytes:
        """What is new, as frames; afterwards nothing is pending."""
        self.is_marked = False
        before, self._last_at = self._last_at, now
        self._due_at = self._num_output_tokens + self._fan_out.interval.tokens
        template = self._template
        if before is None:
            return self._first(shape, now)
        self._metrics.inter_token_s.observe(now - before)
        if self.ended is not None or template is None or self._scores is not None or self._hidden:
            return self._any(shape)
        return self._by_template(template)  # as nearly every frame is

    def _by_template(self, template: Template) -> bytes:
        self._metrics.num_frames += 1
        head, tail = template
        text, self.pending = self.pending, ""
        if self._ids is None:
            return head + orjson.dumps(text) + tail
        frame = b'%b%b,"output_ids":%b%b' % (head, orjson.dumps(text), orjson.dumps(self._ids), tail)
        self._ids.clear()
        return frame

    def _first(self, shape: Shape, now: float) -> bytes:
        """What goes before a choice's first frame, and that frame."""
        self._stream.saw_first(now)
        return shape.opening(self._index, self._stream.usage) + self._any(shape)

    def _any(self, shape: Shape) -> bytes:
        """What is new, whatever it is."""
        frames, usage = b"", self._stream.usage
        hidden = HiddenStates.joined(self._hidden)
        if hidden is not None:
            self._hidden = []
            frames += shape.hidden(self._index, hidden)
        if self._scores and (self.pending or self._ids or self.ended is not None):
            frames += shape.scored(self._index, self.pending, self._scores, usage)
            self._scores = []
            self._ids = None if self._ids is None else []
            self.pending = ""
        elif self.pending or self._ids:
            if self._template is not None:
                frames += self._by_template(self._template)
            else:
                self._metrics.num_frames += 1
                frames += shape.frame(self._index, self.pending, usage)
                self.pending = ""
        if isinstance(self.ended, Finished):
            frames += shape.closing(self._index, self.ended, usage)
        return frames


class SseResponse(Response):
    """One response with the frames of all its choices, interleaved.

    Made means submitted: raises what the engine raises before anything is sent. The caller then calls it as an ASGI
    app, without an await in between; nothing of it runs on afterwards.
    """

    __slots__ = (
        "_choices",
        "_connection",
        "_course",
        "_error",
        "_is_fresh",
        "_is_given_up",
        "_is_over",
        "_is_parked",
        "_is_ping_due",
        "_is_told",
        "_jobs",
        "_last_write_at",
        "_num_running",
        "_ping_timer",
        "_shape",
        "_submission",
        "_woken",
        "front",
        "transport",
    )

    def __init__(self, front: Front, shape: Shape, jobs: Sequence[Job], course: Course) -> None:
        self.status_code = 200
        self.background = None
        self.front = front
        self._shape = shape
        self._jobs = jobs
        self._course = course
        self._last_write_at = course.accepted_at
        self._choices = [Choice(self, shape, index, len(job.prompt_ids)) for index, job in enumerate(jobs)]
        self._is_fresh = False  # some choice has something to write
        self._num_running = len(jobs)
        self._error: Exception | None = None
        self._connection: DirectConnection | None = None
        self._woken = asyncio.Event()
        self._ping_timer: asyncio.TimerHandle | None = None
        self._is_ping_due = False
        self._is_parked = True  # the request's task writes, and `render` gives nothing
        self.transport: Writable  # the connection's; what is rendered goes there
        self._is_given_up = False  # the client is gone, or as good as
        self._is_over = False  # all choices have ended, or one of them badly
        self._is_told = False  # the last words are rendered
        self._submission = Submission(front, jobs, self._choices, course)

    # Called by the choices, on the step loop.

    def mark(self) -> None:
        """A choice has something new, and had not before."""
        if not self._is_fresh:
            self._is_fresh = True
            if not self._is_parked:
                self.front.fan_out.schedule(self)

    def choice_ended(self, end: End) -> None:
        self._num_running -= 1
        if not self._is_given_up:
            self._error = self._error or error_of(end)
        if self._num_running == 0 or self._error is not None:
            self._is_over = True

    def saw_first(self, now: float) -> None:
        if self._course.first_token_s is None:
            self._submission.saw_first(now)

    def num_cached_tokens(self, index: int) -> int:
        return self._submission.num_cached_tokens(index)

    def usage(self) -> Usage:
        """Of all choices together, so far."""
        return total_usage(self._jobs, [choice.usage for choice in self._choices])

    # Called by FanOut.

    def render(self, now: float) -> bytes:
        if self._is_parked:
            return b""
        connection = self._connection
        if connection is None or not connection.is_writable:
            self._woken.set()
            return b""
        body = self._take(now)
        return connection.framed(body) if body else b""  # text that may become a tool call gives no frame yet

    # The request's task.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection = direct_connection(scope)
        if self._connection is not None:
            self.transport = self._connection.transport
        headers = [*HEADERS, (b"x-request-id", self._course.request_id.encode("latin-1"))]
        try:
            async with watching(scope, receive, self._hung_up):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._arm_ping(self.front.settings.ping_interval_s)
                await self._write_until_over(send)
        finally:
            self._is_given_up = self._is_parked = True
            if self._ping_timer is not None:
                self._ping_timer.cancel()
            ends = [choice.ended for choice in self._choices]
            self._submission.close()
            self._course.end(ends, self.usage(), self._error)
            count_end(self.front, self._course)
            # The engine's record knows the choices and they know this: without a cut all would wait for the cycle collector.
            self._choices = []
            del self._submission

    async def _write_until_over(self, send: Send) -> None:
        while not self._is_given_up:
            self._woken.clear()
            body = self._take(perf_counter())
            is_last = self._is_told
            if self._is_ping_due and not is_last:
                self._is_ping_due = False
                body = body or PING
            if body or is_last:
                await self._send(send, body, more=not is_last)
            if is_last:
                return
            if not self._is_fresh:  # nothing came while the write waited
                self._is_parked = False
                await self._woken.wait()
                self._is_parked = True

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        """Write; a client that does not take it in time, or lets too much pile up meanwhile, is given up."""
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if self._connection is not None and self._connection.is_writable:
            await send(message)  # which does not wait
            return
        try:
            async with asyncio.timeout(self.front.settings.write_timeout_s):
                await send(message)
        except TimeoutError:
            self._cut_off()
        if sum(len(choice.pending) for choice in self._choices) > self.front.settings.max_pending_chars:
            self._cut_off()

    def _take(self, now: float) -> bytes:
        """What is new, the last words behind it once it is over, and nothing behind those."""
        self._is_fresh = False
        self._last_write_at = now
        if self._is_told:
            return b""
        try:
            body = self._frames(now)
            if self._is_over:
                body += self._last_words()
        except Exception as error:  # a bug of ours, and the headers are out: the client is told in the stream
            self._is_over = True
            self._error = self._error or error
            self._submission.abort()
            body = self._last_words()
        finally:
            if self._is_over:
                self._is_told = self._is_parked = True
                self._woken.set()
        return body

    def _frames(self, now: float) -> bytes:
        choices = self._choices
        if len(choices) == 1 and choices[0].is_marked:
            return choices[0].take(self._shape, now)
        return b"".join([choice.take(self._shape, now) for choice in choices if choice.is_marked])

    def _last_words(self) -> bytes:
        if self._error is None:
            return self._shape.ending(self.usage())
        return self._shape.error(reported(self._error, self._course.request_id))

    def _hung_up(self) -> None:
        """The client is gone (or has all it came for, which makes this harmless)."""
        if not self._is_given_up:
            connection = self._connection
            if connection is not None and connection.has_timed_out:
                self.front.metrics.num_write_timeouts += 1
            self._course.hung_up = not self._is_over
            self._is_given_up = self._is_parked = True
            self._submission.abort()
            self._woken.set()

    def _cut_off(self) -> None:
        self.front.metrics.num_write_timeouts += 1
        self._is_given_up = True
        self._submission.abort()
        if self._connection is not None:
            self._connection.abort()

    # Comments that keep proxies from cutting a silent stream; driven by the clock, not by the engine.

    def _arm_ping(self, delay_s: float) -> None:
        self._ping_timer = asyncio.get_running_loop().call_later(delay_s, self._ping)

    def _ping(self) -> None:
        interval_s = self.front.settings.ping_interval_s
        now = perf_counter()
        silence_s = now - self._last_write_at
        if silence_s >= interval_s * 0.999:  # timers may fire a little early
            silence_s = 0.0
            if not self._is_parked:
                self._last_write_at = now
                if self._connection is not None and self._connection.is_writable:
                    self.transport.write(self._connection.framed(PING))
                else:
                    self._is_ping_due = True
                    self._woken.set()
        self._arm_ping(interval_s - silence_s)
