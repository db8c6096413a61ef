"""What an operator can see: every latency and count in /metrics, one line a request in the log."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.scripted_worker import Script
from slipstream.http.settings import FrontSettings
from slipstream.http.step_times import StepTimes

LONG: dict[str, Any] = {"prompt": "the stones", "max_tokens": 20, "ignore_eos": True}


async def numbers(served: Any) -> dict[str, float]:
    """Every sample without other labels than the model, and those with one more as name{value}."""
    text = (await served.ask("GET", "/metrics")).body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            more = [value for key, value in sample.labels.items() if key != "model_name"]
            name = sample.name.removeprefix("slipstream:")
            found[f"{name}{{{more[0]}}}" if more else name] = sample.value
    return found


async def test_the_step_s_times_are_measured_at_the_scheduler(serving: Any) -> None:
    async with serving(Script(step_time_s=0.005, launch_cost_s=0.001)) as served:
        await asyncio.gather(*[served.post("/v1/completions", {**LONG, "stream": True}) for _ in range(3)])
        seen = await numbers(served)
    steps = seen["num_steps_total"]
    assert seen["step_time_seconds_count"] == steps
    assert seen["step_time_seconds_sum"] / steps == pytest.approx(0.005, rel=0.7)
    assert seen["scheduler_inter_token_latency_seconds_count"] == seen["generation_tokens_total"] == 60
    assert 0.001 < seen["step_host_time_seconds_sum"] / steps < seen["step_time_seconds_sum"] / steps
    assert seen["exposed_host_time_seconds_sum"] < seen["step_host_time_seconds_sum"]
    assert seen["step_phase_seconds_total{launch}"] >= 0.001 * steps
    assert seen["step_phase_seconds_total{await}"] > seen["step_phase_seconds_total{commit}"]
    assert seen["num_steps_alone_total"] < steps / 2


async def test_waiting_in_the_queue_is_told_apart_from_the_first_token(serving: Any) -> None:
    async with serving(Script(step_time_s=0.005), num_rows=1) as served:
        await asyncio.gather(*[served.post("/v1/completions", LONG) for _ in range(2)])
        seen = await numbers(served)
    assert seen["request_queue_time_seconds_count"] == seen["time_to_first_token_seconds_count"] == 2
    assert 0.05 < seen["request_queue_time_seconds_sum"] < seen["time_to_first_token_seconds_sum"]


async def test_pages_hits_drains_aborts_and_errors_are_counted(serving: Any) -> None:
    async with serving(Script(step_time_s=0.002)) as served:
        prompt = {"prompt": list(range(40)), "max_tokens": 2, "ignore_eos": True}
        for _ in range(2):
            await served.post("/v1/completions", prompt)
        gone = await served.connect()
        await gone.send("POST", "/v1/completions", {**LONG, "max_tokens": 400, "stream": True})
        await gone.read_until(lambda answer: b"data:" in answer.body)
        busy = await numbers(served)
        gone.close()
        while not served.engine.num_aborted:
            await asyncio.sleep(0)
        await served.post("/v1/completions", {"prompt": 3})
        await served.idle()
        seen = await numbers(served)
    assert seen["prefix_cache_hits_total"] >= 36
    assert seen["prefix_cache_queries_total"] >= 80
    assert seen["num_pages"] == seen["num_free_pages"] + seen["num_cached_pages"] == 256
    assert 0 < busy["kv_cache_usage_perc"] < 1
    assert seen["num_cached_pages"] > 0
    assert seen["kv_cache_usage_perc"] == 0, "what only the cache holds is there for the asking"
    assert (seen["num_aborts_total"], seen["num_hang_ups_total"]) == (1, 1)
    assert seen["http_errors_total{400}"] == 1
    assert {"num_drains_total", "num_preemptions_total", "loop_lag_seconds_count", "stream_frames_total"} <= set(seen)


async def test_a_request_s_line_says_how_it_went(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        with caplog.at_level(logging.INFO, "slipstream.http"):
            await served.post("/v1/completions", {**LONG, "stream": True}, x_request_id="abc")
            await served.post("/v1/completions", {"prompt": 3}, x_request_id="bad")
            await served.ask("GET", "/health")
            await served.idle()
    good, bad = [record for record in caplog.records if record.name == "slipstream.http"]
    pattern = (
        r"request_id=abc path=/v1/completions status=200 seconds=[\d.]+ prompt_tokens=\d+ cached_tokens=0"
        r" output_tokens=20 sampling=max_tokens:20,ignore_eos:true finish=length queue_s=[\d.]+ first_token_s=[\d.]+"
    )
    assert re.fullmatch(pattern, good.getMessage()), good.getMessage()
    assert good.request["output_tokens"] == 20  # type: ignore[attr-defined]
    assert re.fullmatch(r"request_id=bad path=/v1/completions status=400 seconds=[\d.]+", bad.getMessage())


async def test_wrong_keys_and_paths_are_counted_and_logged_as_other_errors_are(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(api_key="k", admin_key="root") as served:
        with caplog.at_level(logging.INFO, "slipstream.http"):
            refused = await served.post("/v1/completions", LONG, x_request_id="nokey")
            await served.post("/flush_cache", None, authorization="Bearer k")
            lost = await served.post("/v2/nothing", LONG, authorization="Bearer k")
            wrong = await served.ask("GET", "/v1/completions", authorization="Bearer k")
        seen = await numbers(served)
    assert refused.headers["x-request-id"] == "nokey"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert (lost.json["error"]["code"], wrong.json["error"]["code"]) == ("not_found", "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert {status: seen[f"http_errors_total{{{status}}}"] for status in (401, 404, 405)} == {401: 2, 404: 1, 405: 1}
    lines = [record.getMessage() for record in caplog.records if record.name == "slipstream.http"]
    assert [line.split(" seconds")[0].split(" ", 1)[1] for line in lines] == [
        "path=/v1/completions status=401",
        "path=/flush_cache status=401",
        "path=/v2/nothing status=404",
        "path=/v1/completions status=405",
    ]
    assert lines[0].startswith("request_id=nokey ")


async def test_a_prompt_is_logged_only_where_that_was_asked_for(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(front=FrontSettings(log_prompts=True)) as served:
        with caplog.at_level(logging.INFO, "slipstream.http"):
            await served.post("/v1/completions", {"prompt": 'a "secret"', "max_tokens": 1})
            await served.idle()
    assert r'prompt="a \"secret\""' in caplog.text


def test_step_times_are_those_of_the_loop() -> None:
    times = StepTimes()
    for step in range(3):
        for name in ("schedule", "launch", "sample", "await", "commit", "send"):
            times.end(times.start(name, step, 0, 5))
    assert [each.step for each in times.ranges()] == [0] * 6 + [1] * 6 + [2] * 6
    assert times.step_s.num_observed == 3
    assert times.inter_token_s.num_observed == 15
    assert times.num_alone == 3
    assert times.launched_at(2) is not None
    assert times.launched_at(3) is None
    assert times.launched_at(-1) is None


def test_a_step_that_was_launched_before_anybody_looked_is_not_measured() -> None:
    times = StepTimes()
    times.end(times.start("commit", 7, 0, 5))
    assert times.step_s.num_observed == 0


async def test_the_cache_is_flushed_when_idle_and_by_force(serving: Any) -> None:
    async with serving(Script(step_time_s=0.002), admin_key="root", num_pages=512) as served:
        prompt = {"prompt": list(range(2, 42)), "max_tokens": 2, "ignore_eos": True, "seed": 1}
        first = await served.post("/v1/completions", prompt)
        assert served.engine.stats.num_cached_pages > 0
        assert (await served.post("/flush_cache", None)).status == 401
        assert (await served.post("/flush_cache", None, authorization="Bearer root")).json == {"flushed": True}
        assert served.engine.stats.num_cached_pages == 0
        client = await served.connect()
        await client.send("POST", "/v1/completions", {**prompt, "max_tokens": 200, "stream": True})
        await client.read_until(lambda answer: b"data:" in answer.body)
        busy = await served.post("/flush_cache", {}, authorization="Bearer root")
        assert (busy.status, busy.json["error"]["code"]) == (409, "busy")
        forced = await served.post("/flush_cache", {"force": True}, authorization="Bearer root")
        assert forced.json == {"flushed": True}
        assert served.engine.stats.num_cached_pages * 4 < 40 + 200
        text = "".join(event["choices"][0]["text"] for event in (await client.answer()).events[:-1])
        again = await served.post("/v1/completions", {**prompt, "max_tokens": 200})
        assert text == again.json["choices"][0]["text"], "what ran was computed anew, to the same end"
        assert text.startswith(first.json["choices"][0]["text"].rstrip("\ufffd"))
