"""/metrics in Prometheus' format, under vLLM's suffixes: made when scraped, from counters and the engine's stats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .front import Front
from .metrics import Histogram

PREFIX = "slipstream:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(front: Front) -> bytes:
    """Everything that is counted, as it is now."""
    front.step_times.attach(front.engine)
    registry = CollectorRegistry()
    registry.register(_Snapshot(front))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, front: Front) -> None:
        self._front = front
        self._model = front.model_names[0]

    def collect(self) -> Iterator[Metric]:
        if self._front.has_numbers:
            yield from self._engine_gauges()
            yield from self._engine_counters()
        yield from self._latencies()
        yield from self._steps()
        yield from self._requests()

    def _engine_gauges(self) -> Iterator[Metric]:
        stats = self._front.engine.stats
        held = stats.num_pages - stats.num_free_pages - stats.num_cached_pages  # as vLLM counts: the cache gives way
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        text = "Share of the KV pages that requests hold, 0 to 1."
        yield self._gauge("kv_cache_usage_perc", text, held / stats.num_pages if stats.num_pages else 0.0)
        yield self._gauge("num_pages", "KV pages.", stats.num_pages)
        yield self._gauge("num_free_pages", "KV pages that hold nothing.", stats.num_free_pages)
        yield self._gauge(
            "num_cached_pages", "KV pages of the prefix cache that no request holds.", stats.num_cached_pages
        )

    def _engine_counters(self) -> Iterator[Metric]:
        stats = self._front.engine.stats
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens admitted, cached or not.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.num_output_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
            ("num_preemptions", "Requests retracted to make room.", stats.num_retractions),
            ("num_steps", "Steps launched.", stats.num_steps),
            ("num_drains", "Steps planned only after the one in flight had come home.", stats.num_drains),
            (
                "num_eager_for_hidden_states",
                "Steps that had to give more hidden states than graphs are captured for, and ran eagerly.",
                stats.num_eager_for_hidden,
            ),
            ("num_aborts", "Requests aborted.", self._front.engine.num_aborted),
        ):
            yield self._counter(name, text, value)
        text = "Forwards by the runner that computed them: graphs, or eager."
        yield self._by("num_forwards", text, "runner", self._front.engine.num_forwards)

    def _latencies(self) -> Iterator[Metric]:
        metrics, times = self._front.metrics, self._front.step_times
        for name, text, histogram in (
            ("request_queue_time_seconds", "From submit to the first step with the request.", metrics.queue_s),
            ("time_to_first_token_seconds", "From accept to the first write.", metrics.first_token_s),
            ("inter_token_latency_seconds", "Between a stream's frames at the socket.", metrics.inter_token_s),
            ("scheduler_inter_token_latency_seconds", "The step that brought each token.", times.inter_token_s),
            ("e2e_request_latency_seconds", "From accept to the last write.", metrics.request_s),
            ("loop_lag_seconds", "From a token to its turn in the fan-out.", metrics.loop_lag_s),
            ("step_time_seconds", "From the commit of one step to that of the next.", times.step_s),
            ("step_host_time_seconds", "Of a step's time, that in which the loop did not wait for it.", times.host_s),
            (
                "exposed_host_time_seconds",
                "Host time that the device may have waited for, at most: all of it where results were there first.",
                times.exposed_s,
            ),
        ):
            yield self._histogram(name, text, histogram)

    def _steps(self) -> Iterator[Metric]:
        times = self._front.step_times
        yield self._by("step_phase_seconds", "The loop's time by what it did in a step.", "phase", times.phase_s)
        text = "Steps launched with nothing in flight: the first ones, those after a drain, all without overlap."
        yield self._counter("num_steps_alone", text, times.num_alone)

    def _requests(self) -> Iterator[Metric]:
        metrics = self._front.metrics
        text = "Tokens that a frame waits for; above 1 the loop has no time for every token's own."
        yield self._gauge("stream_interval", text, self._front.fan_out.interval.tokens)
        yield self._by("request_success", "Choices that ran to their end.", "finished_reason", metrics.finished)
        yield self._by("request_failure", "Requests that ended in an error.", "code", metrics.failed)
        refused = {str(status): count for status, count in metrics.refused.items()}
        yield self._by("http_errors", "Requests answered with an error status.", "status", refused)
        for name, text, value in (
            ("stream_frames", "Text frames streamed; fewer than tokens where output coalesced.", metrics.num_frames),
            ("num_hang_ups", "Requests whose client went away before the end.", metrics.num_hang_ups),
            (
                "num_write_timeouts",
                "Streams cut because the client took nothing for too long.",
                metrics.num_write_timeouts,
            ),
        ):
            yield self._counter(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for key, value in sorted(values.items()):
            family.add_metric([self._model, key], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        buckets, total = histogram.cumulative()
        family.add_metric([self._model], buckets, total)
        return family
