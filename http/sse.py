"""A streamed answer: the step loop pushes text into it, and its frames go to the socket without a task switch.

The path of a token: the step loop calls `Choice.push`, which appends the text and marks the stream; once a turn of the
loop FanOut calls `render`, which makes one frame a choice, and hands them to the connection; the head goes in front of
the first of them, the last words behind the last. The request's task sleeps meanwhile. It writes only where a write may
have to wait: for a slow reader, and under a server that is not ours. While it waits, text piles up in the choices and
leaves in one frame each afterwards. In the end it tells ASGI that the response is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.outputs import End, Usage
from .choice import Choice
from .connection import DirectConnection, direct_connection
from .course import Course
from .disconnect import watching
from .failures import reported
from .fan_out import Writable
from .frames import PING, Shape
from .front import Front
from .submission import Job, Submission, count_end, error_of, total_usage

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
HEAD_WITHIN_S = 0.01  # the head leaves with the first frame, or alone after this


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
        "_head",
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
        self._head = b""  # as long as it is not written
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
        if not body:  # text that may become a tool call gives no frame yet
            return b""
        return self._kept_head() + (connection.ended(body) if self._is_told else connection.framed(body))

    # The request's task.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection = connection = direct_connection(scope)
        headers = [*HEADERS, (b"x-request-id", self._course.request_id.encode("latin-1"))]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        try:
            async with watching(scope, receive, self._hung_up):
                if connection is None:
                    await send(start)
                else:
                    self.transport = connection.transport
                    self._head = await connection.head(send, start)
                interval_s = self.front.settings.ping_interval_s
                self._arm_ping(min(HEAD_WITHIN_S, interval_s) if self._head else interval_s)
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
            if self._is_told:  # by `render`, with the end of the response
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            body = self._take(perf_counter())
            is_last = self._is_told
            if self._is_ping_due and not is_last:
                self._is_ping_due = False
                body = body or PING
            if body:
                await self._send(send, body, more=not is_last)
            if is_last:
                return
            if not self._is_fresh:  # nothing came while the write waited
                self._is_parked = False
                await self._woken.wait()
                self._is_parked = True

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        """Write; a client that does not take it in time, or lets too much pile up meanwhile, is given up."""
        self._say_head()
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

    def _say_head(self) -> None:
        if self._head:
            self.transport.write(self._kept_head())

    def _kept_head(self) -> bytes:
        """The head, if nobody has written it; whoever gets it does."""
        head, self._head = self._head, b""
        return head

    def _take(self, now: float) -> bytes:
        """What is new, and the last words behind it once it is over."""
        self._is_fresh = False
        self._last_write_at = now
        body = b""
        try:
            body = self._frames(now)
            if self._is_over:
                body += self._last_words()
        except Exception as error:  # a bug of ours, and it is too late for a status: the client is told in the stream
            self._is_over = self._is_parked = True
            self._woken.set()  # should telling fail as well, the task meets that and uvicorn cuts the connection
            self._error = self._error or error
            self._submission.abort()
            body += self._last_words()
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

    # A head that no frame takes along in time, and comments that keep proxies from cutting a silent stream: driven by the
    # clock, not by the engine.

    def _arm_ping(self, delay_s: float) -> None:
        self._ping_timer = asyncio.get_running_loop().call_later(delay_s, self._ping)

    def _ping(self) -> None:
        if self._is_given_up:  # and the transport perhaps closed
            return
        self._say_head()
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
