"""One OpenTelemetry span a request, if its packages are installed (the extra `otel`): written when all is known."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..engine.errors import ConfigError

if TYPE_CHECKING:
    from .endpoint import Call

NAME = "slipstream"
ATTRIBUTES: Mapping[str, str] = {  # vLLM's names, by ours
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "cached_tokens": "gen_ai.usage.cached_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens",
    "sampling": "slipstream.sampling",
    "finish": "gen_ai.response.finish_reason",
    "queue_s": "gen_ai.latency.time_in_queue",
    "first_token_s": "gen_ai.latency.time_to_first_token",
    "error": "error.type",
    "hung_up": "slipstream.client_hung_up",
}


class RequestSpans:
    """Writes spans of requests that generated, each under the trace that its client's `traceparent` names."""

    def __init__(self, provider: Any | None = None) -> None:
        """`provider`: a TracerProvider; None takes the process's own, which some agent may have set up.

        Raises: ConfigError if OpenTelemetry's API is not installed.
        """
        self._propagate = _module("opentelemetry.propagate")
        self._trace = _module("opentelemetry.trace")
        self._tracer = self._trace.get_tracer(NAME, tracer_provider=provider)

    @classmethod
    def exported_to(cls, endpoint: str) -> RequestSpans:
        """Spans go to a collector, by OTLP over HTTP, in a thread of the exporter's own; at exit it sends what is left.

        Raises: ConfigError if the packages are not installed.
        """
        exporter = _module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter(endpoint=endpoint)
        resource = _module("opentelemetry.sdk.resources").Resource.create({"service.name": NAME})
        provider = _module("opentelemetry.sdk.trace").TracerProvider(resource=resource)
        provider.add_span_processor(_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter))
        return cls(provider)

    def write(self, call: Call, path: str, status: int) -> None:
        """The response has been sent, or its client is gone. Does nothing for what did not generate."""
        course = call.course
        if course is None:
            return
        end_ns = time.time_ns()
        start_ns = end_ns - round((perf_counter() - call.accepted_at) * 1e9)
        parent = self._propagate.extract(dict(call.request.headers))
        span = self._tracer.start_span(
            f"POST {path}", context=parent, kind=self._trace.SpanKind.SERVER, start_time=start_ns
        )
        if span.is_recording():
            span.set_attribute("gen_ai.request.id", call.request_id)
            span.set_attribute("http.response.status_code", status)
            for name, value in course.fields().items():
                span.set_attribute(ATTRIBUTES[name], value)
            if course.first_token_s is not None:
                span.add_event("first token", timestamp=start_ns + round(course.first_token_s * 1e9))
            if course.error is not None:
                span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_ns)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = "otlp_traces_endpoint needs OpenTelemetry: install slipstream-llm[otel]"
        raise ConfigError(message, field="otlp_traces_endpoint") from error
