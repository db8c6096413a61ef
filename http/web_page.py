"""The page at `/`: static files, and the numbers that its live view asks for twice a second."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter, perf_counter_ns

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .endpoint import Call, json_response, request_id_of
from .front import Front

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'self'",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """A route for the page and one for each file that it loads, all of them read now."""
    routes = []
    for path in sorted(STATIC.iterdir()):
        if path.suffix in MEDIA_TYPES:
            where = "/" if path.name == "index.html" else f"/static/{path.name}"
            routes.append(Route(where, StaticFile(path), methods=["GET"]))
    return routes


class StaticFile:
    """One file as an ASGI app."""

    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        self._headers = {**HEADERS, "content-type": MEDIA_TYPES[path.suffix]}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {**self._headers, "x-request-id": request_id_of(scope)}
        await Response(self._body, headers=headers)(scope, receive, send)


async def live(front: Front, call: Call) -> Response:
    """Counts, the times of the last steps, and their phases in microseconds before now: what the page shows."""
    times, socket_gaps = front.step_times, front.metrics.inter_token_s
    times.attach(front.engine)
    now_ns = perf_counter_ns()
    return json_response(
        {
            "at_s": perf_counter(),
            "state": front.engine.state.value,
            "model": front.model_names[0],
            "stats": front.engine.stats._asdict() if front.has_numbers else None,
            "step_s": list(times.last_step_s),
            "host_s": list(times.last_host_s),
            "socket_gaps": {"count": socket_gaps.num_observed, "sum_s": socket_gaps.total},
            "ranges": [
                (each.name, each.step, (each.start_ns - now_ns) // 1000, (each.end_ns - now_ns) // 1000)
                for each in times.ranges()
            ],
        }
    )
