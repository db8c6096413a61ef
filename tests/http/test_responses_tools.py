"""Tools in the Responses API: the official client's round trip, the events of each item, and that strict is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from slipstream.engine.scripted_worker import Script
from slipstream.engine.text.chat_template import ChatTemplate

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS, "strict": True}
NOW = {"type": "function", "name": "now", "parameters": None, "strict": None}
CALLS = (
    'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "now"}</tool_call>'
)
THINKS = "<think>\nadd them</think>\nIt is 3."
TEMPLATE = "PROMPT{% if tools %}{% endif %}{# <tool_call> </think> #}"
ROUND_TRIP = (
    "{% for m in messages %}[{{ m.role }} {{ m.content }}{% for c in m.tool_calls %}"
    " {{ c.id }}={{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{{ m.tool_call_id }}{{ m.reasoning_content }}]{% endfor %}{{ tools | tojson }}"
)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "go", "tools": [ADD, NOW], "max_output_tokens": 300, **more}


def told(items: Any) -> list[tuple[str, ...]]:
    """What the items say, without their ids."""
    found: list[tuple[str, ...]] = []
    for item in items:
        if item.type == "function_call":
            found.append((item.type, item.name, item.arguments, item.status))
        else:
            found.append((item.type, "".join(part.text for part in item.content), item.status))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            CALLS,
            [
                ("message", "Let me see.", "completed"),
                ("function_call", "add", '{"a": 1}', "completed"),
                ("function_call", "now", "{}", "completed"),
            ],
        ),
        (THINKS, [("reasoning", "add them", "completed"), ("message", "It is 3.", "completed")]),
        ("", [("message", "", "completed")]),
    ],
)
async def test_items_come_whole_and_as_events_that_add_up_to_them(
    serving: Any, scripted: Any, text: str, expected: list[tuple[str, ...]]
) -> None:
    loose = asked(tools=[{**ADD, "strict": False}, NOW])
    async with (
        serving(Script(token_of=scripted.saying(text))) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        served.engine.chat_template = ChatTemplate(TEMPLATE)
        whole = await client.responses.create(**loose)
        events = [event async for event in await client.responses.create(**loose, stream=True)]
    assert told(whole.output) == expected
    final = events[-1].response
    assert told(final.output) == expected
    assert [tool.name for tool in final.tools] == ["add", "now"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[-1] == "response.completed"
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [event.output_index for event in done] == [*range(len(expected))]
    assert told(event.item for event in done) == expected
    for first, item in zip(added, final.output, strict=True):
        deltas = [e.delta for e in events if e.type.endswith(".delta") and e.item_id == item.id]
        assert first.item.id == item.id
        assert "".join(deltas) == (item.arguments if item.type == "function_call" else item.content[0].text)
        if item.type == "function_call":
            assert first.item.arguments == ""
            assert item.call_id == first.item.call_id != item.id


async def test_what_came_out_goes_in_again_with_the_outputs_of_the_calls(serving: Any, scripted: Any) -> None:
    async with (
        serving(Script(token_of=scripted.saying(CALLS))) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        served.engine.chat_template = ChatTemplate(TEMPLATE)
        first = await client.responses.create(**asked(tools=[NOW]))
        calls = [item for item in first.output if item.type == "function_call"]
        items: list[Any] = [{"role": "user", "content": "go"}]
        items += [
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
        ]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "3"}]
        parts = [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "on"}]
        items += [{"type": "function_call_output", "call_id": calls[1].call_id, "output": parts}]
        served.engine.chat_template = ChatTemplate(ROUND_TRIP)
        second = await client.responses.create(**asked(input=items, tools=[NOW], max_output_tokens=1))
        expected = (
            f'[user go][assistant Let me see. {calls[0].call_id}=add({{"a": 1}}) {calls[1].call_id}=now({{}})hm]'
            f"[tool 3{calls[0].call_id}][tool noon{calls[1].call_id}]"
            '[{"type": "function", "function": {"name": "now"}}]'
        )
        assert second.usage is not None
        assert second.usage.input_tokens == len(served.engine.tokenizer.encode(expected))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}, "auto"])
async def test_calls_keep_to_the_schema_where_they_must(
    serving: Any, scripted: Any, stream: bool, choice: object
) -> None:
    begin = "<tool_call>" if choice == "auto" else ""
    first = scripted.saying(begin)
    async with serving() as served:
        served.engine.chat_template = ChatTemplate(TEMPLATE)
        start = len(served.engine.tokenizer.encode("PROMPT" + begin))

        def token_of(seed: int, history: Any) -> int:
            return int(first(seed, history)) if len(history) < start else 34 + len(history) * 31 % 90

        served.worker.script = replace(served.worker.script, token_of=token_of)
        # Room for all the indentation that is allowed: this writer takes whatever is.
        body = asked(tools=[ADD], tool_choice=choice, parallel_tool_calls=False, stream=stream, max_output_tokens=450)
        answer = await served.post("/v1/responses", body)
    response = answer.events_by_kind[-1][1]["response"] if stream else answer.json
    (call,) = response["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "add", "completed")
    assert 0 <= json.loads(call["arguments"])["a"] <= 9
    assert (response["tool_choice"], response["parallel_tool_calls"]) == (choice, False)


async def test_a_call_that_is_cut_off_is_incomplete_and_none_is_made_where_none_may_be(
    serving: Any, scripted: Any
) -> None:
    async with serving(Script(token_of=scripted.saying(CALLS))) as served:
        served.engine.chat_template = ChatTemplate(TEMPLATE)
        num_tokens = len(served.engine.tokenizer.encode('Let me see. <tool_call>{"name": "add", "arguments": {"a"'))
        cut = (await served.post("/v1/responses", asked(max_output_tokens=num_tokens))).json
        none = (await served.post("/v1/responses", asked(tool_choice="none"))).json
    assert [item["status"] for item in cut["output"]] == ["completed", "incomplete"]
    assert cut["output"][1]["arguments"] == '{"a"'
    assert cut["status"] == "incomplete"
    assert [item["type"] for item in none["output"]] == ["message"]
