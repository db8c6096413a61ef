"""The ASGI app: which path is answered by what, and who may ask."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from time import perf_counter

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.engine import Engine, EngineState
from .endpoint import Call, Endpoint, Handler, request_id_of
from .failures import Refused, failure_of
from .fan_out import FanOut
from .front import Front
from .metrics import CONTENT_TYPE, FrontMetrics
from .native import abort_request, detokenize, generate, json_response, server_info, tokenize
from .openai_chat import chat_completions
from .openai_completions import completions
from .openai_responses import responses
from .progress import Progress
from .settings import FrontSettings

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # for probes and scrapers, which carry no key
ADMIN_PATHS = frozenset({"/abort_request"})


def create_app(
    engine: Engine,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_key: str | Sequence[str] | None = None,
    admin_key: str | None = None,
    cors_origins: Sequence[str] = (),
    settings: FrontSettings | None = None,
) -> Starlette:
    """The app over `engine`, which may still be unstarted: until it is ready /health says 200 and all else 503.

    `served_model_name` is the name that clients use, or several: the first is the model's, the others are aliases.
    With `api_key` every path but /health, /ready and /metrics wants it as a bearer token; paths that act on other
    clients' requests want `admin_key` and do not exist without one.
    """
    names = (served_model_name,) if isinstance(served_model_name, str) else tuple(served_model_name or ())
    names = names or (engine.model_name,)
    settings = settings if settings is not None else FrontSettings()
    counters = FrontMetrics(names[0])
    front = Front(
        engine=engine,
        model_names=names,
        settings=settings,
        metrics=counters,
        fan_out=FanOut(counters.loop_lag_s),
        progress=Progress(settings.stuck_after_s),
    )
    keys = (api_key,) if isinstance(api_key, str) else tuple(api_key or ())
    middleware = [Middleware(KeyGate, keys=keys, admin_key=admin_key)]
    if cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)
    handlers = {HTTPException: _no_such_endpoint}
    return Starlette(routes=_routes(front, admin_key), middleware=middleware, exception_handlers=handlers)


def _routes(front: Front, admin_key: str | None) -> list[Route]:
    def route(method: str, path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(front, handler), methods=[method])

    routes = [
        route("GET", "/health", health),
        route("GET", "/ready", ready),
        route("GET", "/metrics", metrics),
        route("GET", "/server_info", server_info),
        route("GET", "/v1/models", list_models),
        route("GET", "/v1/models/{model:path}", one_model),
        route("POST", "/v1/completions", completions),
        route("POST", "/v1/chat/completions", chat_completions),
        route("POST", "/v1/responses", responses),
        route("POST", "/generate", generate),
        route("POST", "/tokenize", tokenize),
        route("POST", "/detokenize", detokenize),
    ]
    return [*routes, route("POST", "/abort_request", abort_request)] if admin_key is not None else routes


class KeyGate:
    """Lets a request through only with the key that its path wants."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_key: str | None) -> None:
        self._app = app
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
            await failure_of(refused).response(request_id_of(scope))(scope, receive, send)
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


async def health(front: Front, call: Call) -> Response:
    """Whether the process should live: 200 from the first moment until the engine dies or no step ends any more."""
    state = front.engine.state
    if state in (EngineState.READY, EngineState.DRAINING) and front.progress.is_stuck(front.engine, perf_counter()):
        return json_response({"status": "stuck"}, 503)
    return json_response({"status": state.value}, 200 if state.is_alive else 503)


async def ready(front: Front, call: Call) -> Response:
    """Whether requests should be sent here: 200 only between warm-up and drain."""
    is_ready = front.engine.state.is_ready
    return json_response({"status": front.engine.state.value}, 200 if is_ready else 503)


async def metrics(front: Front, call: Call) -> Response:
    return Response(front.metrics.render(front.engine), headers={"content-type": CONTENT_TYPE})


async def list_models(front: Front, call: Call) -> Response:
    front.check_open()
    return json_response({"object": "list", "data": [_model(front, name) for name in front.model_names]})


async def one_model(front: Front, call: Call) -> Response:
    front.check_open()
    return json_response(_model(front, front.model(call.request.path_params["model"])))


def _model(front: Front, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "slipstream",
        "root": front.model_names[0],
        "parent": None,
        "max_model_len": front.engine.limits.max_model_len,
    }


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    return failure_of(error).response(request_id_of(request.scope))
