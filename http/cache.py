"""POST /flush_cache: drop every cached prefix."""

from __future__ import annotations

from starlette.responses import Response

from ..engine.errors import MisuseError
from .bodies import Strict
from .endpoint import Call, json_response
from .failures import Refused
from .front import Front
from .request_body import checked, optional_json


class FlushCacheBody(Strict):
    force: bool = False  # pause what runs; it is computed anew afterwards


async def flush_cache(front: Front, call: Call) -> Response:
    """Drop every cached prefix. While requests run it is refused with 409, unless `force` has them computed anew."""
    front.check_open()
    body = checked(FlushCacheBody, await optional_json(call.request, front.settings))
    engine = front.engine
    if body.force and not engine.is_paused:
        await engine.pause()
        try:
            engine.flush_cache()
        finally:
            engine.resume()
        return json_response({"flushed": True})
    try:
        engine.flush_cache()
    except MisuseError as error:
        raise Refused(409, "requests are running; try again, or force it", code="busy") from error
    return json_response({"flushed": True})
