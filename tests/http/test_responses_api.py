"""The Responses API: the official client's view, and the numbered events."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from slipstream.engine.scripted_worker import Script


async def test_a_response_comes_whole_and_streamed_with_the_same_text(serving: Any) -> None:
    async with (
        serving(Script(token_of=lambda seed, history: sum(history) % 90 + 40)) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        asked: dict[str, Any] = {"model": "tiny", "input": "the stones", "temperature": 0, "max_output_tokens": 20}
        whole = await client.responses.create(**asked, instructions="be brief")
        stream = await client.responses.create(**asked, instructions="be brief", stream=True)
        events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert whole.output_text == text == final.output_text
    assert (whole.status, final.status) in {("completed", "completed"), ("incomplete", "incomplete")}
    assert kinds[-1] == f"response.{whole.status}"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.object == "response"


class Verdict(BaseModel):
    good: bool
    grade: Literal["a", "b"]


async def test_a_format_of_the_text_is_enforced_and_the_client_parses_it(serving: Any) -> None:
    async with (
        serving() as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        for _ in range(3):
            parsed = await client.responses.parse(model="tiny", input="x", text_format=Verdict, max_output_tokens=300)
            assert isinstance(parsed.output_parsed, Verdict)
            assert parsed.text is not None
            assert parsed.text.format is not None
            assert parsed.text.format.type == "json_schema"


async def test_an_answer_cut_off_by_the_limit_is_incomplete(serving: Any, scripted: Any) -> None:
    async with serving(Script(token_of=lambda seed, history: 70)) as served:
        cut = (await served.post("/v1/responses", {"input": "go", "max_output_tokens": 3})).json
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    assert cut["usage"]["output_tokens"] == 3


async def test_messages_with_text_parts_are_the_same_prompt_as_a_chat(serving: Any) -> None:
    items = [
        {"role": "developer", "content": "brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"role": "user", "content": "c"},
    ]
    messages = [
        {"role": role, "content": text}
        for role, text in (("system", "brief"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    async with serving() as served:
        response = (await served.post("/v1/responses", {"input": items, "max_output_tokens": 1})).json
        tokens = (await served.post("/tokenize", {"messages": messages})).json
    assert response["usage"]["input_tokens"] == tokens["count"]


BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {}),
    ("input", {"input": []}),
    ("input", {"input": 5}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}),
    ("input[0].name", {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}),
    ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}),
    ("input[0].content[0].type", {"input": [{"type": "reasoning", "content": [{"type": "output_text"}]}]}),
    ("input[0].type", {"input": ["x"]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
    ("temperature", {"input": "x", "temperature": -1}),
    ("max_output_tokens", {"input": "x", "max_output_tokens": -1}),
    ("max_output_tokens", {"input": "x", "max_output_tokens": 10**6}),
    ("input", {"input": "stones " * 600}),
    ("store", {"input": "x", "store": True}),
    ("previous_response_id", {"input": "x", "previous_response_id": "resp_1"}),
    ("tools[0].type", {"input": "x", "tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"input": "x", "tools": [{"type": "function"}]}),
    ("tools[0].strict", {"input": "x", "tools": [{"type": "function", "name": "f", "strict": 1}]}),
    ("tool_choice", {"input": "x", "tool_choice": "required"}),
    ("tool_choice", {"input": "x", "tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "mcp"}}),
    ("tools", {"input": "x", "tools": [{"type": "function", "name": "f"}]}),  # this template knows no tools
    ("text.format", {"input": "x", "text": {"format": {"type": "json_schema", "schema": 5}}}),
    ("text.format", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}),
    ("text.format.type", {"input": "x", "text": {"format": {"type": "grammar"}}}),
    ("text.verbosity", {"input": "x", "text": {"verbosity": "low"}}),
    (
        "tool_choice",
        {
            "input": "x",
            "text": {"format": {"type": "json_object"}},
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": "required",
        },
    ),
    (
        "tools[0].strict",
        {
            "input": "x",
            "text": {"format": {"type": "json_object"}},
            "tools": [{"type": "function", "name": "f", "strict": True}],
        },
    ),
    ("wat", {"input": "x", "wat": 1}),
]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_cannot_be_served_is_refused_by_name(serving: Any, stream: bool) -> None:
    async with serving() as served:
        for param, body in BAD:
            answer = await served.post("/v1/responses", {**body, "stream": stream})
            assert (answer.status, answer.json["error"]["param"]) == (400, param), body
        assert served.engine.stats.num_steps == 0


async def test_a_failure_mid_stream_is_an_error_event(serving: Any) -> None:
    async with serving(Script(forward_faults=frozenset({6}), token_of=lambda seed, history: 70)) as served:
        answer = await served.post("/v1/responses", {"input": "go", "stream": True})
    last = answer.events_by_kind[-1]
    assert last[0] == "error"
    assert last[1]["code"] == "step_failed"
