"""Requests as users sent them to other servers: malformed in every field, by aliases, with ids at the vocabulary's edge,
with extensions that were dropped in silence.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.engine.scripted_worker import Script
from slipstream.engine.text.chat_template import ChatTemplate
from slipstream.http.settings import FrontSettings

MESSAGES = [{"role": "user", "content": "go"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/generate": {"text": "x", "sampling_params": {"max_tokens": 1}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [3]},
}
DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]
MALFORMED: list[Any] = [
    True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, -0.5, 0.5, "", "x", "{}", '"{}"', "\u0000", "\ud7ff" * 9,
    [], [[]], [{}], ["x"], [None], [0], [-1], [2**63], [1.5], [[1], "x"], {}, {"": ""}, {"type": "x"}, {"schema": "x"},
    {"type": "json_schema", "json_schema": '"{}"'}, {"type": "json_schema", "json_schema": []},
    {"type": "json_schema", "json_schema": 5}, {"type": "json_schema", "json_schema": {"schema": "x"}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}}, {"type": "function", "function": None},
    {"role": "user", "content": {"a": 1}}, [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "assistant", "tool_calls": "x"}], [{"role": "assistant", "tool_calls": [{"function": {"arguments": 5}}]}],
    [{"role": "tool", "content": None, "tool_call_id": 5}], [{"type": "function", "function": {"name": 5}}],
    {"nan": "NaN"}, {"a": {"b": {"c": []}}}, DEEP,
]  # fmt: skip


def fields_of(document: dict[str, Any], path: str) -> list[str]:
    """The names of a body's fields, by the OpenAPI document."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    return list(document["components"]["schemas"][name]["properties"])


def malformed_bodies(document: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    base = BASES[path]
    for name in fields_of(document, path):
        for value in MALFORMED:
            yield {**base, name: value}
    if path == "/generate":
        name = "NativeSampling"
        for field in document["components"]["schemas"][name]["properties"]:
            for value in MALFORMED:
                yield {"text": "x", "sampling_params": {"max_tokens": 1, field: value}}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", list(BASES))
async def test_no_malformed_value_in_any_field_is_our_fault(serving: Any, path: str) -> None:
    """Every field that the endpoint documents, with everything that it does not expect: never a 5xx, and life goes on."""
    async with serving(engine_settings={"max_queued_requests": 100_000}) as served:
        document = (await served.ask("GET", "/openapi.json")).json
        bodies = list(malformed_bodies(document, path))
        assert len(bodies) >= len(MALFORMED)
        statuses: dict[int, int] = {}

        async def one_client(mine: list[dict[str, Any]]) -> None:
            client = await served.connect()
            for body in mine:
                await client.send("POST", path, body)
                answer = await client.answer()
                statuses[answer.status] = statuses.get(answer.status, 0) + 1
                assert answer.status < 500, (body, answer.body)
                if answer.status != 200:
                    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
                answer.complete = False
                if answer.headers.get("connection") == "close":
                    client.close()
                    client = await served.connect()

        await asyncio.gather(*[one_client(bodies[start::4]) for start in range(4)])
        assert statuses[400] > len(bodies) / 3
        assert (await served.post(path, BASES[path])).status == 200


async def test_a_format_of_nested_constants_and_enums_is_answered(serving: Any) -> None:
    """Streamed and whole; the grammar is compiled in time, or the request would hang without a word."""
    schema = {
        "type": "object",
        "properties": {
            "kind": {"const": "report"},
            "body": {
                "type": "object",
                "properties": {
                    "level": {"enum": ["low", "high", None, 3]},
                    "unit": {"const": {"name": "m", "si": True}},
                },
                "required": ["level", "unit"],
                "additionalProperties": False,
            },
        },
        "required": ["kind", "body"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "report", "schema": schema}}
    async with serving() as served:
        body = {"messages": MESSAGES, "response_format": wanted, "max_tokens": 200, "seed": 1}
        answer = await served.post("/v1/chat/completions", body)
        streamed = (await served.post("/v1/chat/completions", {**body, "stream": True})).events[:-1]
    text = answer.json["choices"][0]["message"]["content"]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == text
    document = json.loads(text)
    assert document["kind"] == "report"
    assert document["body"]["level"] in ("low", "high", None, 3)
    assert document["body"]["unit"] == {"name": "m", "si": True}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score"]
)
async def test_a_model_goes_by_its_names_and_by_no_other(serving: Any, path: str) -> None:
    async with serving(served_model_name=("tiny", "org/alias")) as served:
        body = {name: value for name, value in BASES[path].items() if name != "model"}
        for asked, expected in ((None, "tiny"), ("tiny", "tiny"), ("org/alias", "org/alias")):
            answer = await served.post(path, body if asked is None else {**body, "model": asked})
            assert (answer.status, answer.json["model"]) == (200, expected)
        for asked in ("nope", "", "TINY", "org"):
            answer = await served.post(path, {**body, "model": asked})
            assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found"), answer.body
            assert answer.json["error"]["param"] == "model"


async def test_ids_that_the_model_has_and_the_tokenizer_has_not_are_tolerated(serving: Any, tokenizer: Any) -> None:
    """Models round their vocabularies up: such an id is no text, and no reason to fall over either."""
    beyond, vocab_size = tokenizer.vocab_size, 300
    assert beyond < vocab_size
    async with serving(Script(token_of=lambda seed, history: vocab_size - 1)) as served:
        for prompt in ([beyond], [vocab_size - 1], [[beyond], [4, vocab_size - 1]]):
            body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, "logprobs": 1, "echo": True}
            answer = await served.post("/v1/completions", body)
            assert answer.status == 200, answer.body
            assert all(len(choice["logprobs"]["tokens"]) >= 4 for choice in answer.json["choices"])
            streamed = await served.post("/v1/completions", {"prompt": prompt, "max_tokens": 3, "stream": True})
            assert streamed.events[-1] == "[DONE]"
        for prompt in ([vocab_size], [-1], [2**31], [[4], [vocab_size]]):
            refused = await served.post("/v1/completions", {"prompt": prompt})
            place = "prompt[1]" if len(prompt) > 1 else "prompt"
            assert (refused.status, refused.json["error"]["param"]) == (400, place)


async def test_banned_ids_are_drawn_in_no_choice(serving: Any, tokenizer: Any) -> None:
    """Ten choices that would write nothing but two kinds of newlines; a stop list is set as well."""
    first, second = (tokenizer.encode(text)[0] for text in ("\n", "\r"))

    def token_of(seed: int, history: Any) -> int:
        return (first, second)[(seed + len(history)) % 2]

    async with serving(Script(token_of=token_of)) as served:
        body = {
            "prompt": "x", "n": 10, "max_tokens": 20, "temperature": 1.2, "stop": ["###", "END"], "ignore_eos": True,
            "logit_bias": {str(first): -100, str(second): -100},
        }  # fmt: skip
        whole = (await served.post("/v1/completions", body)).json["choices"]
        streamed = (await served.post("/v1/completions", {**body, "stream": True})).events[:-1]
        free = (await served.post("/v1/completions", {**body, "logit_bias": {}})).json["choices"]
    assert all(set(choice["text"]) <= {"\n", "\r"} for choice in free), "they would"
    assert all(not set(choice["text"]) & {"\n", "\r"} for choice in whole)
    assert all(not set(event["choices"][0]["text"]) & {"\n", "\r"} for event in streamed)
    assert all(choice["text"] for choice in whole)


FIELDS: dict[str, tuple[Any, Any]] = {
    "temperature": (1e-6, 0.0),  # below the threshold: greedy
    "top_k": (3, 3),
    "top_p": (0.25, 0.25),
    "min_p": (0.125, 0.125),
    "seed": (77, 77),
}
PARAMS: dict[str, tuple[Any, Any]] = {
    "min_tokens": (2, 2),
    "stop": ("zzz", ("zzz",)),
    "stop_token_ids": ([9], (9,)),
    "ignore_eos": (True, True),
    "include_stop_str_in_output": (True, True),
    "skip_special_tokens": (False, False),
    "repetition_penalty": (1.5, 1.5),
    "frequency_penalty": (0.5, 0.5),
    "presence_penalty": (0.25, 0.25),
    "logit_bias": ({"5": 2.0}, ((5, 2.0),)),
    "bad_words": (["qq"], ("qq",)),
    "allowed_token_ids": ([5, 6, 7], (5, 6, 7)),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_every_extension_reaches_the_engine(serving: Any, path: str) -> None:
    async with serving() as served:
        requests: list[Any] = []
        served.engine.watch(requests.append)
        for name, (value, expected) in (FIELDS | PARAMS).items():
            asked = {"max_tokens": 4, name: value}
            base = {key: kept for key, kept in BASES[path].items() if key not in ("max_tokens", "sampling_params")}
            answer = await served.post(
                path, {**base, "sampling_params": asked} if path == "/generate" else base | asked
            )
            assert answer.status == 200, (name, answer.body)
            seen = getattr(requests[-1].sampling if name in FIELDS else requests[-1].params, name)
            assert seen == expected, name
        if path == "/generate":
            return
        for name, value in (("priority", 3), ("deadline_s", 60)):
            assert (await served.post(path, {**BASES[path], name: value})).status == 200
            assert getattr(requests[-1], name.removesuffix("_s")), name


async def test_what_tokens_were_drawn_with_is_in_the_log_and_nothing_that_was_said(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"temperature": 10, "top_k": 7, "seed": 3, "stop": "secret", "presence_penalty": 0.5, "max_tokens": 4}
    async with serving() as served:
        with caplog.at_level(logging.INFO, "slipstream.http"):
            await served.post("/v1/completions", {"prompt": "x", **asked})
            await served.idle()
    sampling = "sampling=max_tokens:4,temperature:10.0,top_k:7,seed:3,presence_penalty:0.5"
    assert f" {sampling} " in caplog.text
    assert "secret" not in caplog.text


CALL_TEXT = (
    'Right.<tool_call>{"name": "add", "arguments": {"a": {"b": [1, {"c": "} {"}], "d": {}}, "e": "<b>"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]


@pytest.mark.parametrize("interval", ["1", "4"])
async def test_arguments_come_whole_however_many_tokens_a_frame_carries(
    serving: Any, scripted: Any, interval: str
) -> None:
    """Nested, empty, with braces and markup inside strings."""
    script = Script(token_of=scripted.saying(CALL_TEXT), step_time_s=0.001)
    async with serving(script, front=FrontSettings(stream_interval=interval)) as served:
        served.engine.chat_template = ChatTemplate(
            "{{ messages[0].content }}{% if tools %}{% endif %}{# <tool_call> #}"
        )
        body = {"messages": [{"role": "user", "content": "PROMPT"}], "tools": TOOLS, "max_tokens": 300}
        whole = (await served.post("/v1/chat/completions", body)).json["choices"][0]["message"]
        events = (await served.post("/v1/chat/completions", {**body, "stream": True})).events[:-1]
    arguments, content = ["", ""], ""
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            assert call["function"]["arguments"] is not None
            arguments[call["index"]] += call["function"]["arguments"]
    assert content == whole["content"] == "Right."
    assert arguments == [call["function"]["arguments"] for call in whole["tool_calls"]]
    assert json.loads(arguments[0]) == {"a": {"b": [1, {"c": "} {"}], "d": {}}, "e": "<b>"}
    assert arguments[1] == "{}"


async def test_good_requests_are_served_amid_bad_ones(serving: Any) -> None:
    """What is refused has no effect on who shares the batch."""
    draw = random.Random(1)
    good = {"prompt": "the", "max_tokens": 30, "ignore_eos": True, "seed": 2}
    bad: list[dict[str, Any]] = [
        {"logit_bias": {"191222": -100}}, {"prompt": [300]}, {"temperature": "hot"}, {"max_tokens": 10**6},
        {"response_format": {"type": "json_schema", "json_schema": []}}, {"stop": ["x"] * 100},
    ]  # fmt: skip
    async with serving(Script(step_time_s=0.001)) as served:
        expected = (await served.post("/v1/completions", good)).json["choices"][0]["text"]

        async def ask(body: dict[str, Any]) -> Any:
            await asyncio.sleep(draw.random() * 0.05)
            return await served.post("/v1/completions", body)

        answers = await asyncio.gather(
            *[ask(good if number % 2 else good | bad[number // 2 % 6]) for number in range(24)]
        )
    assert [answer.status for answer in answers] == [400, 200] * 12
    assert {answer.json["choices"][0]["text"] for answer in answers[1::2]} == {expected}
