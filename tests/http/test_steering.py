"""Penalties, biases and structured output over HTTP, by all the names that clients use."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from slipstream.engine.scripted_worker import Script

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "k": {"enum": ["a", "b"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}
REGEX = "[a-c]{3}-[0-9]{2}"


def is_schema(text: str) -> bool:
    document = json.loads(text)
    return set(document) == {"n", "k"} and 0 <= document["n"] <= 99 and document["k"] in "ab"


def is_regex(text: str) -> bool:
    return re.fullmatch(REGEX, text) is not None


def is_choice(text: str) -> bool:
    return text in ("rot", "grün")


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}, is_schema),
    ({"structured_outputs": {"json": SCHEMA}}, is_schema),
    ({"structured_outputs": {"regex": REGEX}}, is_regex),
    ({"structured_outputs": {"choice": ["rot", "grün"]}}, is_choice),
    ({"structured_outputs": {"grammar": 'root ::= "rot" | "grün"'}}, is_choice),
    ({"guided_json": json.dumps(SCHEMA)}, is_schema),
    ({"guided_regex": REGEX}, is_regex),
    ({"guided_choice": ["rot", "grün"]}, is_choice),
    ({"guided_grammar": 'root ::= "rot" | "grün"'}, is_choice),
    ({"regex": REGEX}, is_regex),
    ({"ebnf": 'root ::= "rot" | "grün"'}, is_choice),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_every_form_gives_valid_text(serving: Any, stream: bool) -> None:
    async with serving() as served:
        for fields, is_valid in FORMS:
            for seed in range(3):
                body = {"messages": MESSAGES, "seed": seed, "stream": stream, "max_tokens": 120, **fields}
                answer = await served.post("/v1/chat/completions", body)
                assert answer.status == 200, answer.body
                if stream:
                    choices = [event["choices"][0] for event in answer.events[:-1]]
                    text = "".join(choice["delta"].get("content", "") for choice in choices)
                    reason = choices[-1]["finish_reason"]
                else:
                    text = answer.json["choices"][0]["message"]["content"]
                    reason = answer.json["choices"][0]["finish_reason"]
                assert reason == "stop"
                assert is_valid(text), (fields, text)


async def test_completions_and_several_choices_are_constrained_too(serving: Any) -> None:
    async with serving() as served:
        body = {"prompt": ["a", "b"], "n": 3, "regex": REGEX, "max_tokens": 20, "seed": 4}
        answer = await served.post("/v1/completions", body)
    assert [is_regex(choice["text"]) for choice in answer.json["choices"]] == [True] * 6


async def test_a_json_object_is_one(serving: Any, scripted: Any) -> None:
    async with serving(Script(token_of=scripted.saying('{"a": [1, 2]}'))) as served:
        body = {"prompt": "PROMPT", "response_format": {"type": "json_object"}, "max_tokens": 40}
        answer = await served.post("/v1/completions", body)
    assert answer.json["choices"][0]["text"] == '{"a": [1, 2]}'


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format", r"\$\.not is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a name and a schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text"),
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json", "uniqueItems"),
        ({"structured_outputs": {"yaml": "x"}}, "structured_outputs.yaml", "not supported"),
        ({"guided_regex": "(a"}, "guided_regex", "cannot be used"),
        ({"guided_choice": []}, "guided_choice", "non-empty"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "cannot go with regex"),
        ({"guided_json": "a" * 70_000}, "guided_json", "65536"),
        ({"logit_bias": {"１": 3}}, "logit_bias", "token ids"),
    ],
)  # fmt: skip
async def test_what_cannot_be_enforced_is_a_400_with_the_place(
    serving: Any, fields: dict[str, Any], param: str, message: str
) -> None:
    async with serving() as served:
        answer = await served.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
        assert answer.status == 400, answer.body
        assert answer.json["error"]["param"] == param
        assert re.search(message, answer.json["error"]["message"])
        assert served.engine.stats.num_steps == 0


async def test_what_leaves_no_token_to_draw_on_the_way_is_the_request_s_fault(serving: Any) -> None:
    body = {"prompt": "x", "guided_choice": ["ab"], "bad_words": ["b"], "max_tokens": 4}
    async with serving() as served:
        answer = await served.post("/v1/completions", body)
        assert answer.status == 400, answer.body
        assert answer.json["error"]["param"] == "guided_choice"
        assert "to draw" in answer.json["error"]["message"]
        answer = await served.post("/v1/completions", {**body, "stream": True})
        assert answer.status == 200
        assert answer.events[-1]["error"]["code"] == "invalid_value"
        await served.idle()


async def test_penalties_and_biases_are_honoured(serving: Any, tokenizer: Any) -> None:
    stuck = Script(token_of=lambda seed, history: 70)
    async with serving(stuck) as served:

        async def ids(**more: Any) -> list[int]:
            body = {"prompt": "x", "max_tokens": 6, "ignore_eos": True, **more}
            text = (await served.post("/v1/completions", body)).json["choices"][0]["text"]
            return tokenizer.encode(text)

        plain = await ids()
        assert len(set(plain)) == 1
        for more in (
            {"presence_penalty": 0.5},
            {"frequency_penalty": 0.5},
            {"repetition_penalty": 1.9},
            {"logit_bias": {"70": -100}},
            {"bad_words": [tokenizer.decode([70])]},
            {"allowed_token_ids": [80, 81]},
        ):
            assert await ids(**more) != plain, more
        assert set(await ids(logit_bias={"90": 100})) == {90}


async def test_the_native_endpoint_takes_them_too(serving: Any) -> None:
    async with serving() as served:
        how = {"regex": REGEX, "max_new_tokens": 20, "repetition_penalty": 1.2, "seed": 2}
        answer = await served.post("/generate", {"text": "x", "sampling_params": how})
        assert is_regex(answer.json["text"])
        refused = await served.post("/generate", {"text": "x", "sampling_params": {"guided_regex": "(a"}})
    assert refused.status == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_no_allowed_ids_at_all_are_refused_by_name_and_null_allows_all(serving: Any, path: str) -> None:
    async with serving() as served:
        for ids, status in (([], 400), (None, 200)):
            fields = {"allowed_token_ids": ids, "max_tokens": 1}
            body = {"text": "x", "sampling_params": fields} if path == "/generate" else {"prompt": "x", **fields}
            if "chat" in path:
                body["messages"] = MESSAGES
                del body["prompt"]
            answer = await served.post(path, body)
            assert answer.status == status, answer.body
            assert status == 200 or "allowed_token_ids" in answer.body.decode()
