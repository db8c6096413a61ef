"""Frames of several tokens: when the loop has no time for every token's own, or where an operator wants them so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slipstream.engine.errors import ConfigError
from slipstream.engine.scripted_worker import Script
from slipstream.http.settings import FrontSettings
from slipstream.http.step_times import StepTimes
from slipstream.http.stream_interval import CALM_S, MAX_INTERVAL, StreamInterval

A_LETTER = Script(step_time_s=0.003, token_of=lambda seed, history: 65)
BODY: dict[str, Any] = {"prompt": "the", "max_tokens": 21, "ignore_eos": True, "stream": True}


def pieces(answer: Any) -> list[str]:
    return [event["choices"][0]["text"] for event in answer.events[:-1] if event["choices"][0]["text"]]


async def test_a_fixed_interval_joins_tokens_but_not_the_first(serving: Any) -> None:
    async with serving(A_LETTER, front=FrontSettings(stream_interval="5")) as served:
        joined = await served.post("/v1/completions", BODY)
        native = await served.post(
            "/generate", {"text": "the", "sampling_params": {"max_tokens": 21, "ignore_eos": True}, "stream": True}
        )
    lengths = [len(piece) for piece in pieces(joined)]
    assert lengths[0] == 1, "the first token never waits"
    assert sum(lengths) == 21
    assert len(lengths) <= 7
    assert sum(len(event["output_ids"]) for event in native.events[:-1]) == 21


async def test_text_that_waits_for_a_step_that_is_long_is_let_go_in_time(serving: Any) -> None:
    late = Script(step_time_s=0.12, token_of=lambda seed, history: 65)
    async with serving(late, front=FrontSettings(stream_interval="50")) as served:
        loop, client = asyncio.get_running_loop(), await served.connect()
        await client.send("POST", "/v1/completions", {**BODY, "max_tokens": 4})
        await client.read_until(lambda answer: answer.body.count(b"data:") >= 1)
        first = loop.time()
        await client.read_until(lambda answer: answer.body.count(b"data:") >= 2)
        assert loop.time() - first < 0.24, "the second token came after one step, not with the end"
        assert len(pieces(await client.answer())) == 4


async def test_ends_are_never_held(serving: Any) -> None:
    async with serving(A_LETTER, front=FrontSettings(stream_interval="200")) as served:
        answer = await asyncio.wait_for(served.post("/v1/completions", {**BODY, "max_tokens": 3}), 1)
    assert "".join(pieces(answer)) == pieces(answer)[0][0] * 3
    assert answer.events[-1] == "[DONE]"


def steps_of(step_s: float) -> StepTimes:
    times = StepTimes()
    times.last_step_s.append(step_s)
    return times


LATE = {"late": 0.9, "waiting": 0.0, "writing": 0.7}
FREE = {"late": 0.1, "waiting": 0.6, "writing": 0.1}


def test_the_interval_rises_while_the_loop_is_late_and_falls_when_it_has_time_again() -> None:
    interval = StreamInterval("auto", steps_of(0.002))
    seen = []
    for turn in range(12):
        interval.adjust(**LATE, now=turn * 0.1)
        seen.append(interval.tokens)
    assert seen[:4] == [1, 2, 3, 4], "one late look may be a burst of new requests"
    assert max(seen) == seen[-1] == MAX_INTERVAL
    interval.adjust(**FREE, now=1.2)
    assert interval.tokens == MAX_INTERVAL, "not at once"
    interval.adjust(late=0.2, waiting=0.1, writing=0.4, now=5.0)
    assert interval.tokens == MAX_INTERVAL, "the time that is left would not do for more frames"
    for turn in range(9):
        interval.adjust(**FREE, now=1.1 + CALM_S + 0.1 + turn)
    assert interval.tokens == 1


def test_a_loop_that_is_late_for_other_reasons_writes_every_token() -> None:
    interval = StreamInterval("auto", steps_of(0.002))
    for turn in range(9):
        interval.adjust(late=1.0, waiting=0.0, writing=0.5, now=turn)
    assert interval.tokens == 1


@pytest.mark.parametrize(("step_s", "most"), [(0.001, 8), (0.01, 4), (0.03, 1), (0.5, 1)])
def test_no_interval_keeps_text_for_longer_than_it_may(step_s: float, most: int) -> None:
    interval = StreamInterval("auto", steps_of(step_s))
    for turn in range(20):
        interval.adjust(**LATE, now=turn)
    assert interval.tokens == most
    assert interval.tokens * step_s <= 0.05 or interval.tokens == 1


def test_it_looks_at_what_the_steps_did_since_it_looked_before() -> None:
    times = steps_of(0.002)
    interval = StreamInterval("auto", times)
    fixed = StreamInterval("3", times)
    for look in range(5):
        for _ in range(50):  # steps that end at once: the loop is always late
            for name in ("launch", "await", "commit"):
                times.end(times.start(name, look * 50 + _, 0, 1))
        interval.look(100.0 + 0.2 * look, 0.15 * look)
        fixed.look(100.0 + 0.2 * look, 0.15 * look)
    assert interval.tokens > 1
    assert fixed.tokens == 3
    interval.look(100.9, 0.65)
    risen = interval.tokens
    interval.look(200.0, 50.0)  # after a pause
    assert interval.tokens == risen


@pytest.mark.parametrize("bad", ["0", "-1", "fast", "1.5", "999", 4, None])
def test_an_interval_that_cannot_be_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        FrontSettings(stream_interval=bad)
    assert caught.value.field == "stream_interval"


async def test_the_interval_is_exported(serving: Any) -> None:
    async with serving(front=FrontSettings(stream_interval="3")) as served:
        text = (await served.ask("GET", "/metrics")).body.decode()
    assert 'slipstream:stream_interval{model_name="tiny"} 3.0' in text
