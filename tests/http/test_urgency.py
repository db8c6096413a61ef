"""Priority, deadlines and bounds of the queue, and how ends are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slipstream.engine.scripted_worker import Script

SLOW = Script(step_time_s=0.005)
LONG: dict[str, Any] = {"prompt": "the stones", "max_tokens": 400, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "stones"}], "max_tokens": 400}


async def test_a_deadline_cuts_an_answer_like_a_length_and_says_why(serving: Any) -> None:
    async with serving(SLOW, num_pages=1024) as served:  # room for all three at once
        whole, streamed, native = await asyncio.gather(
            served.post("/v1/completions", {**LONG, "deadline_s": 0.15}),
            served.post("/v1/chat/completions", {**CHAT, "ignore_eos": True, "deadline_s": 0.15, "stream": True}),
            served.post(
                "/generate",
                {"text": "the", "sampling_params": {"max_tokens": 400, "ignore_eos": True}, "deadline_s": 0.15},
            ),
        )
    choice = whole.json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert 0 < whole.json["usage"]["completion_tokens"] < 100
    last = streamed.events[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "deadline")
    assert streamed.events[-1] == "[DONE]"
    assert native.status == 200, native.body
    assert native.json["meta_info"]["finish_reason"]["type"] == "deadline"


async def test_a_deadline_that_passes_in_the_queue_is_a_408_of_its_own(serving: Any) -> None:
    async with serving(SLOW, num_rows=1) as served:
        front = await served.connect()
        await front.send("POST", "/v1/completions", {**LONG, "max_tokens": 100, "stream": True})
        await front.read_until(lambda answer: b"data:" in answer.body)
        late, streamed = await asyncio.gather(
            served.post("/v1/completions", {**LONG, "deadline_s": 0.03}),
            served.post("/v1/completions", {**LONG, "deadline_s": 0.03, "stream": True}),
        )
        assert (late.status, late.json["error"]["code"], late.json["error"]["param"]) == (408, "timeout", "deadline_s")
        assert late.headers["x-should-retry"] == "false"
        assert streamed.events[-1]["error"]["code"] == "timeout"
        assert (await front.answer()).events[-1] == "[DONE]"


async def test_a_higher_priority_overtakes_in_the_queue(serving: Any) -> None:
    settings = {"schedule_policy": "priority"}
    order: list[str] = []
    async with serving(SLOW, num_rows=1, engine_settings=settings) as served:

        async def ask(name: str, priority: int) -> None:
            answer = await served.post("/v1/completions", {**LONG, "max_tokens": 10, "priority": priority})
            assert answer.status == 200
            order.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask("first", 9))
            await asyncio.sleep(0.02)
            group.create_task(ask("low", -1))
            group.create_task(ask("middle", 0))
            await asyncio.sleep(0.01)
            group.create_task(ask("high", 3))
    assert order == ["first", "high", "middle", "low"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", True),
        ("deadline_s", -1),
        ("deadline_s", "soon"),
        ("deadline_s", 1e9),
    ],
)
async def test_bad_urgency_names_its_field(serving: Any, field: str, value: object) -> None:
    async with serving() as served:
        for path, body in (("/v1/completions", LONG), ("/v1/chat/completions", CHAT), ("/generate", {"text": "x"})):
            answer = await served.post(path, {**body, field: value})
            assert (answer.status, answer.json["error"]["param"]) == (400, field), path


async def test_waiting_tokens_have_a_bound_too(serving: Any) -> None:
    settings = {"max_queued_tokens": 40}
    async with serving(SLOW, num_rows=1, engine_settings=settings) as served:
        front = await served.connect()
        await front.send("POST", "/v1/completions", {**LONG, "max_tokens": 60, "stream": True})
        await front.read_until(lambda answer: b"data:" in answer.body)
        waiting = await served.connect()
        await waiting.send("POST", "/v1/completions", {**LONG, "prompt": [5] * 30, "max_tokens": 2})
        while not served.engine.stats.num_waiting:
            await asyncio.sleep(0)
        refused = await served.post("/v1/completions", {**LONG, "prompt": [5] * 20, "max_tokens": 2})
        assert (refused.status, refused.json["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await waiting.answer()).status == 200
        await front.answer()


@pytest.mark.parametrize("stream", [False, True])
async def test_only_a_stop_that_was_asked_for_is_named(serving: Any, scripted: Any, stream: bool) -> None:
    comma = scripted._tokenizer.encode(",")[0]
    async with serving(Script(token_of=scripted.saying("over, the stones"))) as served:

        async def told(**fields: Any) -> object:
            answer = await served.post(
                "/v1/completions", {"prompt": "PROMPT", "max_tokens": 64, "stream": stream, **fields}
            )
            choice = answer.events[-2]["choices"][0] if stream else answer.json["choices"][0]
            assert choice["finish_reason"] == "stop"
            return choice["stop_reason"]

        assert await told() is None, "the model's own end"
        assert await told(stop_token_ids=[comma]) == comma
        assert await told(stop_token_ids=[0]) == 0, "its end id, asked for"
        assert await told(stop=["the"]) == "the"
        native = {"text": "PROMPT", "sampling_params": {"max_tokens": 64}}
        assert (await served.post("/generate", native)).json["meta_info"]["finish_reason"]["matched"] == 0
