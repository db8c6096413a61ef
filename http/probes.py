"""What says how the server is doing and what it serves: /health, /ready, /metrics, /server_info, /v1/models."""

from __future__ import annotations

from time import perf_counter

from starlette.responses import Response

from ..engine.engine import EngineState
from .endpoint import Call, json_response
from .exposition import CONTENT_TYPE, exposition
from .front import Front


async def health(front: Front, call: Call) -> Response:
    """Whether the process should live: 200 from the first moment until the engine dies or no step ends any more."""
    state = front.engine.state
    if state in (EngineState.READY, EngineState.DRAINING) and front.progress.is_stuck(front.engine, perf_counter()):
        return json_response({"status": "stuck"}, 503)
    return json_response({"status": state.value}, 200 if state.is_alive else 503)


async def ready(front: Front, call: Call) -> Response:
    """Whether requests should be sent here: 200 only between warm-up (of the text process too) and drain."""
    state = front.engine.state
    if state.is_ready and front.text_process is not None and front.text_process.is_starting:
        state = EngineState.STARTING
    return json_response({"status": state.value}, 200 if state.is_ready else 503)


async def metrics(front: Front, call: Call) -> Response:
    """Counters and latencies in Prometheus' text format."""
    return Response(exposition(front), headers={"content-type": CONTENT_TYPE})


async def server_info(front: Front, call: Call) -> Response:
    """What runs here, its limits, and its scheduler's counts."""
    front.check_open()
    limits, stats = front.engine.limits, front.engine.stats
    return json_response(
        {
            "models": list(front.model_names),
            "state": front.engine.state.value,
            "max_model_len": limits.max_model_len,
            "vocab_size": limits.vocab_size,
            "page_size": limits.page_size,
            **stats._asdict(),
        }
    )


async def list_models(front: Front, call: Call) -> Response:
    """The served model under each of its names."""
    front.check_open()
    return json_response({"object": "list", "data": [_model(front, name) for name in front.model_names]})


async def one_model(front: Front, call: Call) -> Response:
    """One of them."""
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
