"""Tool calls and reasoning over HTTP: streamed and whole the same message, at every length; choices that are enforced."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import openai
import pytest

from slipstream.engine.scripted_worker import Script
from slipstream.engine.text.chat_template import ChatTemplate

MARKERS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>"}
TEXTS = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "}{"}}\n</tool_call>',
    "mistral": 'Let me see.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "}{"}}]',
    "llama": '{"name": "add", "parameters": {"a": 1, "b": "}{"}}',
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"b": {"enum": ["x", "y"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "PROMPT"}], "tools": TOOLS, **more}


def template(marker: str, *, thinks: bool = False) -> ChatTemplate:
    """One that prints only the message, and mentions what real ones print."""
    mentions = f"{{# {marker} </think> #}}" if thinks else f"{{# {marker} #}}"
    return ChatTemplate("{{ messages[0].content }}{% if tools %}{% endif %}" + mentions)


def joined(events: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that a stream's deltas make, and the finish reason."""
    message: dict[str, Any] = {"content": "", "calls": []}
    reason = None
    for event in events[:-1]:
        choice = event["choices"][0]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning"] = message.get("reasoning", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], call["function"]["arguments"]])
            else:
                message["calls"][call["index"]][1] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return message, reason or ""


def whole(answer: Any) -> tuple[dict[str, Any], str]:
    choice = answer.json["choices"][0]
    given = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in given.get("tool_calls", [])]
    message = {"content": given["content"] or "", "calls": calls}
    if "reasoning_content" in given:
        message["reasoning"] = given["reasoning_content"]
    return message, choice["finish_reason"]


@pytest.mark.parametrize("form", list(TEXTS))
async def test_a_call_is_the_same_streamed_and_whole_at_every_length(
    serving: Any, scripted: Any, tokenizer: Any, form: str
) -> None:
    num_tokens = len(tokenizer.encode(TEXTS[form]))
    async with serving(Script(token_of=scripted.saying(TEXTS[form]))) as served:
        served.engine.chat_template = template(MARKERS[form])
        lengths = [*range(1, 60, 3), 120]
        for max_tokens in lengths:
            plain = whole(await served.post("/v1/chat/completions", body(max_tokens=max_tokens)))
            streamed = await served.post("/v1/chat/completions", body(max_tokens=max_tokens, stream=True))
            assert joined(streamed.events) == plain
            assert plain[1] == ("length" if max_tokens <= num_tokens else "tool_calls")
        message, reason = plain
        assert reason == "tool_calls"
        assert message["calls"] == [["add", '{"a": 1, "b": "}{"}']]
        assert message["content"] == ("" if form == "llama" else "Let me see.")


async def test_an_answer_without_calls_is_content_and_stops(serving: Any, scripted: Any) -> None:
    async with serving(Script(token_of=scripted.saying("plain <tool and no more"))) as served:
        served.engine.chat_template = template("<tool_call>")
        answer = await served.post("/v1/chat/completions", body(max_tokens=60))
        assert whole(answer) == ({"content": "plain <tool and no more", "calls": []}, "stop")
        assert "tool_calls" not in answer.json["choices"][0]["message"]
        # The text before a stop string that falls into the parser's buffer comes before the finish.
        stopped = await served.post("/v1/chat/completions", body(max_tokens=60, stop=["<tool"], stream=True))
        assert joined(stopped.events) == ({"content": "plain ", "calls": []}, "stop")
        none = await served.post("/v1/chat/completions", body(max_tokens=60, tool_choice="none"))
        assert whole(none)[1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_is_enforced_and_a_cut_one_says_so(serving: Any, stream: bool) -> None:
    async with serving() as served:
        for seed in range(6):
            asked = body(tool_choice="required", parallel_tool_calls=False, max_tokens=150, seed=seed, stream=stream)
            answer = await served.post("/v1/chat/completions", asked)
            message, reason = joined(answer.events) if stream else whole(answer)
            assert reason == "tool_calls"
            ((name, arguments),) = message["calls"]
            assert name in ("add", "now")
            parsed = json.loads(arguments)
            assert parsed == {} if name == "now" else set(parsed) <= {"a", "b"} and 0 <= parsed["a"] <= 9
        for max_tokens in range(1, 40, 5):
            asked = body(tool_choice="required", max_tokens=max_tokens, seed=1, stream=stream)
            answer = await served.post("/v1/chat/completions", asked)
            _, reason = joined(answer.events) if stream else whole(answer)
            assert reason == "length"


async def test_a_constant_that_looks_like_a_reference_stays_what_it_is(serving: Any) -> None:
    likeness = {"$ref": "#/$defs/b"}
    parameters = {
        "type": "object",
        "properties": {"const": {"$ref": "#/$defs/b"}, "$ref": {"const": likeness}, "e": {"enum": [likeness]}},
        "required": ["const", "$ref", "e"],
        "$defs": {"b": {"const": 1}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    async with serving() as served:
        asked = body(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=300)
        message, reason = whole(await served.post("/v1/chat/completions", asked))
    assert reason == "tool_calls"
    assert json.loads(message["calls"][0][1]) == {"const": 1, "$ref": likeness, "e": likeness}


STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]


def calling(served: Any, scripted: Any, text: str) -> None:
    """Have the model begin with `text` and go on with whatever comes to its mind."""
    start = scripted.saying(text)
    end = len(served.engine.tokenizer.encode(text)) + len(served.engine.tokenizer.encode("PROMPT"))

    def token_of(seed: int, history: Any) -> int:
        return int(start(seed, history)) if len(history) < end else 34 + (seed * 7 + len(history) * 31) % 90

    served.worker.script = replace(served.worker.script, token_of=token_of)


@pytest.mark.parametrize(
    ("form", "begin", "thinks"),
    [
        ("hermes", "Well. <tool_call>", False),
        ("hermes", "<think>no <tool_call> x</think><tool_call>", True),
        ("mistral", "Well.[TOOL_CALLS]", False),
        ("mistral [ARGS]", "[TOOL_CALLS]add[ARGS]", False),
        ("llama", "{", False),
        ("llama", "<|python_tag|>", False),
    ],
)
async def test_a_call_that_the_model_chose_itself_keeps_to_a_strict_schema(
    serving: Any, scripted: Any, form: str, begin: str, thinks: bool
) -> None:
    marker = MARKERS[form.split()[0]] + form[7:]
    async with serving(Script(token_of=scripted.saying(begin))) as served:
        served.engine.chat_template = template(marker, thinks=thinks)
        calling(served, scripted, begin)
        loose = 0
        for seed in range(3):
            asked = body(max_tokens=400, parallel_tool_calls=False, seed=seed)
            answer = await served.post("/v1/chat/completions", {**asked, "tools": STRICT})
            message, reason = whole(answer)
            assert reason == "tool_calls", answer.body
            ((name, arguments),) = message["calls"]
            parsed = json.loads(arguments)
            assert parsed == {} if name == "now" else set(parsed) <= {"a", "b"} and 0 <= parsed["a"] <= 9
            free = whole(
                await served.post("/v1/chat/completions", {**asked, "parallel_tool_calls": True, "max_tokens": 90})
            )
            loose += free[1] == "length"
        assert loose, "without strict nothing keeps this model from nonsense"


async def test_strict_tools_leave_plain_answers_alone_and_later_calls_free(serving: Any, scripted: Any) -> None:
    text = TEXTS["hermes"].replace('"b": "}{"', '"b": "x"')
    for said, expected in (
        ("nothing to call {here}", {"content": "nothing to call {here}", "calls": []}),
        (text + text, {"content": "Let me see.Let me see.", "calls": [["add", '{"a": 1, "b": "x"}']] * 2}),
    ):
        async with serving(Script(token_of=scripted.saying(said))) as served:
            served.engine.chat_template = template("<tool_call>")
            answer = await served.post("/v1/chat/completions", body(tools=STRICT, max_tokens=200))
            assert whole(answer)[0] == expected
            one = await served.post("/v1/chat/completions", body(max_tokens=200, parallel_tool_calls=False))
            assert len(whole(one)[0]["calls"]) == min(1, len(expected["calls"]))


async def test_a_named_function_gets_its_arguments(serving: Any) -> None:
    async with serving() as served:
        choice = {"type": "function", "function": {"name": "add"}}
        for stream in (False, True):
            answer = await served.post("/v1/chat/completions", body(tool_choice=choice, max_tokens=90, stream=stream))
            message, reason = joined(answer.events) if stream else whole(answer)
            assert reason == "tool_calls"
            ((name, arguments),) = message["calls"]
            assert name == "add"
            assert 0 <= json.loads(arguments)["a"] <= 9
            assert message["content"] == ""


async def test_concurrent_required_calls_work_under_overlap(serving: Any) -> None:
    async with serving() as served:
        answer = await served.post(
            "/v1/chat/completions", body(tool_choice="required", n=8, max_tokens=150, seed=2, parallel_tool_calls=False)
        )
    choices = answer.json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 8
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}],
                "tool_choice": "required",
            },
            "tools[0]",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": STRICT, "response_format": {"type": "json_object"}}, "tools[0].function.strict"),
        ({}, "tools"),  # the template of these tests knows no tools
    ],
)
async def test_tools_that_cannot_be_used_are_refused_by_name(serving: Any, fields: dict[str, Any], param: str) -> None:
    async with serving() as served:
        answer = await served.post("/v1/chat/completions", body(**fields))
        assert answer.status == 400, answer.body
        assert answer.json["error"]["param"] == param


async def test_a_keyword_that_cannot_be_enforced_is_told_by_its_tool_and_its_path_there(serving: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"not": {}}}}
    flat = {"type": "function", "name": "f", "parameters": parameters}
    nested = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with serving() as served:
        chat = await served.post("/v1/chat/completions", body(tools=[*TOOLS, nested], tool_choice="required"))
        asked = {"input": "PROMPT", "tools": [flat], "tool_choice": "required"}
        response = await served.post("/v1/responses", asked)
    for answer, param in ((chat, "tools[2]"), (response, "tools[0]")):
        assert answer.status == 400
        error = answer.json["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_schema")
        assert error["message"] == "the schema cannot be enforced: $.$defs.b.not is not supported"


async def test_a_round_trip_with_empty_content_is_rendered(serving: Any, scripted: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "PROMPT"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    async with serving(Script(token_of=scripted.saying("two"))) as served:
        served.engine.chat_template = template("<tool_call>")
        answer = await served.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS, "max_tokens": 20})
    assert whole(answer) == ({"content": "two", "calls": []}, "stop")


async def test_reasoning_comes_apart_with_every_token_s_logprobs_once(serving: Any, scripted: Any) -> None:
    text = '<think>\nadd them</think>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    async with serving(Script(token_of=scripted.saying(text))) as served:
        served.engine.chat_template = template("<tool_call>", thinks=True)
        plain = await served.post("/v1/chat/completions", body(max_tokens=90, logprobs=True))
        streamed = await served.post("/v1/chat/completions", body(max_tokens=90, logprobs=True, stream=True))
        together = await served.post("/v1/chat/completions", body(max_tokens=90, separate_reasoning=False))
    assert whole(plain) == ({"content": "", "calls": [["add", "{}"]], "reasoning": "add them"}, "tool_calls")
    assert joined(streamed.events) == whole(plain)
    entries = [
        entry
        for event in streamed.events[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert entries == plain.json["choices"][0]["logprobs"]["content"]
    assert whole(together)[0]["content"].startswith("<think>")


async def test_the_openai_client_reads_a_streamed_call(serving: Any, scripted: Any) -> None:
    async with serving(Script(token_of=scripted.saying(TEXTS["hermes"]))) as served:
        served.engine.chat_template = template("<tool_call>")
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
            stream = await client.chat.completions.create(model="tiny", stream=True, max_tokens=120, **body())
            arguments = ""
            async for chunk in stream:
                for call in chunk.choices[0].delta.tool_calls or []:
                    arguments += (call.function.arguments if call.function else "") or ""
                    assert call.id is None or re.match("call_", call.id)
    assert json.loads(arguments) == {"a": 1, "b": "}{"}
