"""An endpoint as an ASGI app: what it raises becomes the error body of the table, and every answer has its request id."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .connection import arrival
from .course import Course
from .failures import reported
from .frames import Shape, WholeShape
from .front import Front
from .sse import SseResponse
from .submission import Job, Urgency
from .tools import told_of_its_tool
from .whole import whole_answer

Handler = Callable[[Front, "Call"], Awaitable[Response]]
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ID_KEY = "slipstream.request_id"


def request_id_of(scope: Scope) -> str:
    """The request's id: the client's X-Request-Id if it can be echoed, else a new one; the same at each call."""
    known = scope.get(_ID_KEY)
    if isinstance(known, str):
        return known
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    request_id: str = sent if _GOOD_ID.fullmatch(sent) else secrets.token_hex(16)
    scope[_ID_KEY] = request_id
    return request_id


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of an endpoint. `request_id` may be replaced by one from the body.

    `names` says what fields that the engine may complain about are called in this endpoint's body.
    """

    request: Request
    request_id: str
    accepted_at: float
    course: Course | None = None  # once it generates
    names: dict[str, str] = field(default_factory=dict)

    def urgency(self, priority: int, deadline_s: float | None) -> Urgency:
        """The body's wishes; its deadline counts from the request's arrival."""
        return Urgency(priority=priority, deadline_at=None if deadline_s is None else self.accepted_at + deadline_s)


class Endpoint:
    """Runs one handler for each request."""

    def __init__(self, front: Front, handler: Handler) -> None:
        self._front = front
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(request=Request(scope, receive), request_id=request_id_of(scope), accepted_at=arrival(scope))
        try:
            response = await self._handler(self._front, call)
        except Exception as error:
            failure = reported(error, call.request_id)
            name, bracket, place = (failure.param or "").partition("[")
            if failure.param in call.names:
                failure = replace(failure, param=call.names[failure.param])
            elif name in call.names:
                failure = replace(failure, param=call.names[name] + bracket + place)
            failure = told_of_its_tool(failure)
            self._front.metrics.refused[failure.status] += 1
            response = failure.response(call.request_id)
        else:
            if not isinstance(response, SseResponse):
                response.headers["x-request-id"] = call.request_id
        await response(scope, receive, send)
        self._front.log.write(self._front, call, scope["path"], response.status_code)
        if self._front.spans is not None:
            self._front.spans.write(call, scope["path"], response.status_code)


def json_response(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def answer(front: Front, call: Call, shape: Shape, jobs: Sequence[Job], *, stream: bool) -> Response:
    """Generate `jobs` and answer with them in `shape`."""
    if stream:
        return SseResponse(front, shape, jobs, _begun(call, jobs))
    return await answer_whole(front, call, shape, jobs)


async def answer_whole(front: Front, call: Call, shape: WholeShape, jobs: Sequence[Job]) -> Response:
    """The same for an API that does not stream."""
    return await whole_answer(front, shape, jobs, call.request, _begun(call, jobs))


def _begun(call: Call, jobs: Sequence[Job]) -> Course:
    prompts = [job.prompt_ids for job in jobs if job.counts_prompt]
    call.course = Course(
        request_id=call.request_id,
        accepted_at=call.accepted_at,
        prompts=prompts,
        params=jobs[0].params if jobs else None,
    )
    return call.course
