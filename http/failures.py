"""One table from what can go wrong to what a client is told.

Every error body is OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..engine.errors import ConfigError, EngineDead, Overloaded, RequestError, StepFailed

log = logging.getLogger("slipstream.http")
CLIENT_GONE = 499  # for the log; nobody reads it


class Refused(Exception):
    """A request turned away by the HTTP front itself, before it meant anything to the engine."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class Aborted(Exception):
    """The request was aborted on the server's side while its client was still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a client is told: a status while nothing is sent yet, the body in any case."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def response(self, request_id: str | None = None) -> Response:
        headers = dict(self.headers)
        if request_id is not None:
            headers["x-request-id"] = request_id
        return Response(self.body(), self.status, headers, media_type="application/json")


def model_not_found(name: str) -> Refused:
    return Refused(404, f"the model {name!r} does not exist here", param="model", code="model_not_found")


def not_ready() -> Refused:
    """The engine is still starting: worth another try soon."""
    return Refused(
        503, "the engine is starting", kind="service_unavailable", code="starting", headers={"retry-after": "1"}
    )


def _refused(error: Refused) -> Failure:
    return Failure(
        status=error.status,
        kind=error.kind,
        message=str(error),
        param=error.param,
        code=error.code,
        headers=error.headers,
    )


def _http_exception(error: HTTPException) -> Failure:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers or {})
    return Failure(
        status=error.status_code, kind="invalid_request_error", message=str(error.detail), code=code, headers=headers
    )


def _request_error(error: RequestError) -> Failure:
    if error.code == "timeout":
        return Failure(
            status=408,
            kind="timeout_error",
            message=str(error),
            param=error.param,
            code="timeout",
            headers={"x-should-retry": "false"},  # the time that the client gave is over
        )
    return Failure(
        status=400,
        kind="invalid_request_error",
        message=str(error),
        param=error.param,
        code=error.code or "invalid_value",
    )


def _overloaded(error: Overloaded) -> Failure:
    retry_after = str(max(1, round(error.retry_after_s)))
    if error.draining:
        return Failure(
            status=503,
            kind="service_unavailable",
            message=str(error),
            code="draining",
            headers={"retry-after": retry_after, "connection": "close"},  # the next request is for another process
        )
    return Failure(
        status=429, kind="rate_limit_error", message=str(error), code="overloaded", headers={"retry-after": retry_after}
    )


def _step_failed(error: StepFailed) -> Failure:
    return Failure(status=500, kind="server_error", message=str(error), code="step_failed")


def _engine_dead(_: EngineDead) -> Failure:
    message = "the engine has stopped and takes no more requests"
    return Failure(status=503, kind="service_unavailable", message=message, code="engine_dead")


def _config_error(error: ConfigError) -> Failure:
    return Failure(status=500, kind="server_error", message=str(error), param=error.field, code="misconfigured")


def _aborted(_: Aborted) -> Failure:
    return Failure(
        status=503,
        kind="service_unavailable",
        message="the request was aborted by the server",
        code="aborted",
        headers={"x-should-retry": "false"},
    )


_TABLE: tuple[tuple[type[Exception], Callable[..., Failure]], ...] = (
    (Refused, _refused),
    (RequestError, _request_error),
    (Overloaded, _overloaded),
    (StepFailed, _step_failed),
    (EngineDead, _engine_dead),
    (Aborted, _aborted),
    (ConfigError, _config_error),
    (HTTPException, _http_exception),
)


def failure_of(error: Exception) -> Failure:
    """The row of the table for `error`; what is in no row is our bug, and told without details."""
    for kind, row in _TABLE:
        if isinstance(error, kind):
            return row(error)
    message = "internal error; the server's log has it"
    return Failure(status=500, kind="server_error", message=message, code="internal_error")


def reported(error: Exception, request_id: str) -> Failure:
    """`failure_of`, and the cause in the log where it lies on our side."""
    failure = failure_of(error)
    if failure.status >= 500 and not isinstance(error, (Refused, Overloaded, Aborted)):
        log.error("request_id=%s failed: %s", request_id, error, exc_info=error)
    return failure
