"""The ASGI app: which path is answered by what, and who may ask."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.engine import Engine
from .endpoint import Call, Endpoint
from .failures import Refused
from .fan_out import FanOut
from .front import Front, Recorder
from .metrics import FrontMetrics
from .operations import OPERATIONS, Operation
from .progress import Progress
from .request_log import RequestLog
from .settings import FrontSettings
from .step_times import StepTimes
from .stream_interval import StreamInterval
from .text_process import TextProcess
from .tracing import RequestSpans
from .turnstile import Turnstile
from .web_page import page_routes

PAGE_ROUTES = page_routes()
OPEN_PATHS = frozenset(
    [
        *(route.path for route in PAGE_ROUTES),  # a page cannot send its key before it is there
        *(each.path for each in OPERATIONS if each.is_open),  # probes and scrapers carry none
    ]
)
ADMIN_PATHS = frozenset(each.path for each in OPERATIONS if each.is_admin)


def create_app(
    engine: Engine,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_key: str | Sequence[str] | None = None,
    admin_key: str | None = None,
    cors_origins: Sequence[str] = (),
    settings: FrontSettings | None = None,
    text_process: TextProcess | None = None,
    recorder: Recorder | None = None,
    spans: RequestSpans | None = None,
) -> Starlette:
    """The app over `engine`, which may still be unstarted: until it is ready /health says 200 and all else 503.

    `served_model_name` is the name that clients use, or several: the first is the model's, the others are aliases.
    With `api_key` every path but the probes, /metrics and the page's files wants it as a bearer token; paths that act on other
    clients' requests, or record them with `recorder`, want `admin_key` and do not exist without one.
    `text_process` takes in large bodies once its owner has started it; without one, bodies above 1 MiB are refused.
    `spans` writes a trace of each request. One app an engine, and given to `HttpServer` as it is: so the engine knows of
    bursts while they come in.
    """
    names = (served_model_name,) if isinstance(served_model_name, str) else tuple(served_model_name or ())
    names = names or (engine.model_name,)
    settings = settings if settings is not None else FrontSettings()
    counters = FrontMetrics()
    step_times = StepTimes()
    interval = StreamInterval(settings.stream_interval, step_times)
    front = Front(
        engine=engine,
        model_names=names,
        settings=settings,
        metrics=counters,
        fan_out=FanOut(counters.loop_lag_s, interval),
        step_times=step_times,
        text_process=text_process,
        progress=Progress(settings.stuck_after_s),
        log=RequestLog(shows_prompts=settings.log_prompts),
        recorder=recorder,
        spans=spans,
    )
    step_times.attach(engine)
    keys = (api_key,) if isinstance(api_key, str) else tuple(api_key or ())
    middleware = [Middleware(KeyGate, front=front, keys=keys, admin_key=admin_key)]
    if cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)

    async def no_such_endpoint(request: Request, error: Exception) -> Response:
        return cast(Response, _refusing(front, error))  # it is called as an app, as a response is

    handlers = {HTTPException: no_such_endpoint}
    operations = [each for each in OPERATIONS if admin_key is not None or not each.is_admin]
    app = Starlette(routes=_routes(front, operations), middleware=middleware, exception_handlers=handlers)
    turnstile = app.state.turnstile = Turnstile(lambda: front.fan_out.is_behind)  # for our own server
    engine.has_more_coming = lambda: turnstile.is_crowded
    return app


def _routes(front: Front, operations: Sequence[Operation]) -> list[Route]:
    return [
        *(
            Route(
                operation.path.replace("{model}", "{model:path}"),  # model names may have slashes
                Endpoint(front, operation.handler),
                methods=[operation.method],
            )
            # Routes are tried in order: those that many requests want come first.
            for operation in sorted(operations, key=lambda each: not each.streams)
        ),
        *PAGE_ROUTES,
    ]


class KeyGate:
    """Lets a request through only with the key that its path wants."""

    def __init__(self, app: ASGIApp, *, front: Front, keys: Sequence[str], admin_key: str | None) -> None:
        self._app = app
        self._front = front
        self._keys = [key.encode() for key in keys]
        self._admin_keys = [admin_key.encode()] if admin_key is not None else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            refused = Refused(
                401,
                "the API key is missing or wrong",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await _refusing(self._front, refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_admin = path in ADMIN_PATHS
        keys = self._admin_keys if is_admin else [*self._keys, *self._admin_keys]
        if not is_admin and (path in OPEN_PATHS or not self._keys):
            return True
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = sent.partition(b" ")
        # All keys are compared, each in constant time: the time taken says nothing of how close a guess was.
        matches = [hmac.compare_digest(token.strip(), key) for key in keys]
        return scheme.lower() == b"bearer" and any(matches)


def _refusing(front: Front, error: Exception) -> Endpoint:
    """An endpoint that answers with `error`, so that it is counted and logged as all errors are."""

    async def refuse(_: Front, call: Call) -> Response:
        raise error

    return Endpoint(front, refuse)
