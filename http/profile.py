"""/start_profile and /stop_profile: record what the engine does, while it serves."""

from __future__ import annotations

from pydantic import Field
from starlette.responses import Response

from ..engine.errors import MisuseError
from .bodies import Strict
from .endpoint import Call, json_response
from .failures import Refused
from .front import Front, Recorder
from .request_body import checked, optional_json


class StartProfileBody(Strict):
    num_steps: int = Field(1000, ge=1, le=2000)


class StopProfileBody(Strict):
    wait_s: float = Field(0.0, ge=0, le=600)


async def start_profile(front: Front, call: Call) -> Response:
    """Record the next steps; /stop_profile brings them."""
    recorder = _recorder(front)
    front.check_open()
    body = checked(StartProfileBody, await optional_json(call.request, front.settings))
    if recorder.is_recording:
        raise Refused(409, "a recording is under way; /stop_profile ends it", code="already_recording")
    recorder.start(num_steps=body.num_steps)
    return json_response({"num_steps": body.num_steps})


async def stop_profile(front: Front, call: Call) -> Response:
    """End the recording, after its steps or `wait_s` at the latest, and return it as a Chrome trace."""
    recorder = _recorder(front)
    body = checked(StopProfileBody, await optional_json(call.request, front.settings))
    if not recorder.is_recording:
        raise Refused(409, "nothing is being recorded", code="not_recording")
    try:
        trace = await recorder.stop(wait_s=body.wait_s)
    except MisuseError as error:
        raise Refused(409, str(error), code="not_recording") from error
    return Response(trace, media_type="application/json", headers={"content-encoding": "gzip"})


def _recorder(front: Front) -> Recorder:
    if front.recorder is None:
        raise Refused(404, "this server was started without a recorder", code="not_found")
    return front.recorder
