"""One span a request, under its client's trace. Needs the packages of the extra `otel`."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest

from slipstream.engine.errors import ConfigError
from slipstream.engine.scripted_worker import Script
from slipstream.http.tracing import RequestSpans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> Any:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
    module = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    return module.InMemorySpanExporter()


@pytest.fixture
def spans(exporter: Any) -> RequestSpans:
    provider = importlib.import_module("opentelemetry.sdk.trace").TracerProvider()
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    return RequestSpans(provider)


async def test_a_request_is_one_span_under_its_client_s_trace(serving: Any, spans: RequestSpans, exporter: Any) -> None:
    body = {"prompt": "the stones", "max_tokens": 20, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with serving(Script(step_time_s=0.002), spans=spans) as served:
        await served.post("/v1/completions", {**body, "stream": True}, x_request_id="abc", **headers)
        await served.post("/v1/completions", {**body, "temperature": -1})
        await served.ask("GET", "/health")
        await served.idle()
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert span.kind.name == "SERVER"
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == PARENT
    told = dict(span.attributes)
    assert told["gen_ai.request.id"] == "abc"
    assert told["gen_ai.usage.completion_tokens"] == 20
    assert told["gen_ai.response.finish_reason"] == "length"
    assert told["http.response.status_code"] == 200
    assert 0 < told["gen_ai.latency.time_to_first_token"] < (span.end_time - span.start_time) * 1e-9
    (event,) = span.events
    assert span.start_time < event.timestamp < span.end_time
    assert "stones" not in str(told)


async def test_a_request_that_fails_has_a_span_that_says_so(serving: Any, spans: RequestSpans, exporter: Any) -> None:
    body = {"prompt": "the", "max_tokens": 20, "stream": True, "ignore_eos": True}
    async with serving(Script(forward_faults=frozenset({3})), spans=spans) as served:
        await served.post("/v1/completions", body)
        await served.idle()
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code.name == "ERROR"
    assert span.attributes["error.type"] == "step_failed"
    assert span.parent is None


def test_without_the_packages_the_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("slipstream.http.tracing.importlib.import_module", missing)
    with pytest.raises(ConfigError, match="otel") as caught:
        RequestSpans.exported_to("http://127.0.0.1:4318/v1/traces")
    assert caught.value.field == "otlp_traces_endpoint"


async def test_probes_are_not_logged_even_while_they_fail(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(started=False) as served:
        with caplog.at_level(logging.INFO, "slipstream.http"):
            assert (await served.ask("GET", "/ready")).status == 503
            assert (await served.ask("GET", "/v1/models")).status == 503
        await served.engine.start()
    assert [record.request["path"] for record in caplog.records] == ["/v1/models"]  # type: ignore[attr-defined]
