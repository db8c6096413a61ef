"""What the front counts, in Prometheus' format under vLLM's suffixes.

Latencies go into plain lists (a quarter of a microsecond an observation) and become Prometheus samples when scraped;
the engine's numbers are read from its stats then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.engine import Engine, EngineState

PREFIX = "slipstream:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
INTER_TOKEN_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 2, 10)
_LOOP_LAG_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Histogram:
    """Counts by bucket; `observe` costs a bisection and two additions."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def num_observed(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus wants them, and the sum of what was observed."""
        so_far = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return buckets, self.total


class FrontMetrics:
    """Everything that one app counts. Public counters are written by the front on the loop thread only."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.first_token_s = Histogram(_FIRST_TOKEN_S)  # accept to the first frame's write
        self.inter_token_s = Histogram(INTER_TOKEN_S)  # between a choice's frames at the socket
        self.request_s = Histogram(_REQUEST_S)
        self.loop_lag_s = Histogram(_LOOP_LAG_S)  # from a token's push to its turn in the fan-out
        self.num_frames = 0  # text frames written; fewer than tokens where output coalesced
        self.finished: Counter[str] = Counter()  # choices by finish reason
        self.failed: Counter[str] = Counter()  # requests by error code
        self.refused: Counter[int] = Counter()  # requests answered with an error, by status
        self.num_hang_ups = 0
        self.num_write_timeouts = 0

    def render(self, engine: Engine) -> bytes:
        """The exposition text, with the engine's numbers as they are now."""
        registry = CollectorRegistry()
        registry.register(_Snapshot(self, engine))
        return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, metrics: FrontMetrics, engine: Engine) -> None:
        self._metrics = metrics
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_numbers()
        yield from self._latencies()
        yield from self._counts()

    def _engine_numbers(self) -> Iterator[Metric]:
        if self._engine.state in (EngineState.NEW, EngineState.STARTING):
            return  # it has no numbers yet
        stats = self._engine.stats
        used = 1.0 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV pages that are not free, 0 to 1.", used),
            ("num_cached_pages", "KV pages that hold the prefix cache.", stats.num_cached_pages),
        ):
            yield self._gauge(name, text, value)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens admitted, cached or not.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.num_output_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
            ("num_preemptions", "Requests retracted to make room.", stats.num_retractions),
            ("num_steps", "Steps launched.", stats.num_steps),
            ("num_drains", "Steps planned only after the one in flight had come home.", stats.num_drains),
            ("num_aborts", "Requests aborted.", self._engine.num_aborted),
        ):
            yield self._counter(name, text, value)

    def _latencies(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From accept to the first write.", metrics.first_token_s),
            ("inter_token_latency_seconds", "Between a stream's frames at the socket.", metrics.inter_token_s),
            ("e2e_request_latency_seconds", "From accept to the last write.", metrics.request_s),
            ("loop_lag_seconds", "From a token to its turn in the fan-out.", metrics.loop_lag_s),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            buckets, total = histogram.cumulative()
            family.add_metric([metrics.model_name], buckets, total)
            yield family

    def _counts(self) -> Iterator[Metric]:
        metrics = self._metrics
        success = CounterMetricFamily(
            PREFIX + "request_success", "Choices that ran to their end.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(metrics.finished.items()):
            success.add_metric([metrics.model_name, reason], count)
        yield success
        failures = CounterMetricFamily(
            PREFIX + "request_failure", "Requests that ended in an error.", labels=["model_name", "code"]
        )
        for code, count in sorted(metrics.failed.items()):
            failures.add_metric([metrics.model_name, code], count)
        yield failures
        refusals = CounterMetricFamily(
            PREFIX + "http_errors", "Requests answered with an error status.", labels=["model_name", "status"]
        )
        for status, count in sorted(metrics.refused.items()):
            refusals.add_metric([metrics.model_name, str(status)], count)
        yield refusals
        for name, text, value in (
            ("stream_frames", "Text frames streamed; fewer than tokens where output coalesced.", metrics.num_frames),
            ("num_hang_ups", "Requests whose client went away before the end.", metrics.num_hang_ups),
            ("num_write_timeouts", "Streams cut because the client did not read.", metrics.num_write_timeouts),
        ):
            yield self._counter(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._metrics.model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._metrics.model_name], value)
        return family
