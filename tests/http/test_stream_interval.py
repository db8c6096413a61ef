"""Frames of several tokens: when the loop has no time for every token's own, or where an operator wants them so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slipstream.engine.errors import ConfigError
from slipstream.engine.scripted_worker import Script
from slipstream.http.settings import FrontSettings
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


def test_the_interval_rises_while_the_loop_is_full_and_falls_when_it_has_been_calm() -> None:
    interval = StreamInterval("auto", [0.002])
    seen = []
    for turn in range(12):
        interval.adjust(0.95, turn * 0.1)
        seen.append(interval.tokens)
    assert seen[:3] == [2, 3, 4]
    assert max(seen) == seen[-1] == MAX_INTERVAL
    interval.adjust(0.3, 1.2)
    assert interval.tokens == MAX_INTERVAL, "not at once"
    interval.adjust(0.7, 5.0)
    assert interval.tokens == MAX_INTERVAL, "it is just right"
    for turn in range(9):
        interval.adjust(0.3, 1.1 + CALM_S + 0.1 + turn)
    assert interval.tokens == 1


@pytest.mark.parametrize(("step_s", "most"), [(0.001, 8), (0.01, 4), (0.03, 1), (0.5, 1)])
def test_no_interval_keeps_text_for_longer_than_it_may(step_s: float, most: int) -> None:
    interval = StreamInterval("auto", [step_s])
    for turn in range(20):
        interval.adjust(1.0, turn)
    assert interval.tokens == most
    assert interval.tokens * step_s <= 0.05 or interval.tokens == 1


def test_a_fixed_interval_stays_and_the_auto_one_looks_at_the_loop_s_own_time() -> None:
    fixed = StreamInterval("3", [0.001])
    fixed.look(1.0)
    fixed.look(2.0)
    assert fixed.tokens == 3
    auto = StreamInterval("auto", [0.001])
    auto.look(1.0)
    auto.look(1000.0)  # this thread's CPU time cannot have filled so long a while
    assert auto.tokens == 1


@pytest.mark.parametrize("bad", ["0", "-1", "fast", "1.5", "999", 4, None])
def test_an_interval_that_cannot_be_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        FrontSettings(stream_interval=bad)
    assert caught.value.field == "stream_interval"


async def test_the_interval_is_exported(serving: Any) -> None:
    async with serving(front=FrontSettings(stream_interval="3")) as served:
        text = (await served.ask("GET", "/metrics")).body.decode()
    assert 'slipstream:stream_interval{model_name="tiny"} 3.0' in text
