"""Hidden states over HTTP. The scripted worker's state of a position: its token, the position, a hash of the history."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest


def states_of(fields: dict[str, Any]) -> list[tuple[float, ...]]:
    """The token and the position of each state."""
    num_positions, size = fields["shape"]
    assert fields["dtype"] == "float32"
    values = struct.unpack(f"<{num_positions * size}f", base64.b64decode(fields["data"]))
    return [values[at : at + 2] for at in range(0, len(values), size)]


def expected(ids: list[int], first: int, end: int) -> list[tuple[float, ...]]:
    return [(float(ids[at]), float(at)) for at in range(first, end)]


def asking(mode: str, **more: Any) -> dict[str, Any]:
    return {"hidden_states": mode, "max_new_tokens": 6, "ignore_eos": True, **more}


@pytest.mark.parametrize(("mode", "max_tokens"), [("last", 6), ("full", 6), ("last", 0), ("full", 0)])
async def test_generate_brings_what_was_asked_for(serving: Any, tokenizer: Any, mode: str, max_tokens: int) -> None:
    prompt = tokenizer.encode("the stream slips past the stones")
    async with serving() as served:
        body = {"input_ids": prompt, "sampling_params": asking(mode, max_new_tokens=max_tokens)}
        answer = await served.post("/generate", body)
    assert answer.status == 200, answer.body
    first = 0 if mode == "full" else len(prompt) - 1
    assert answer.json["hidden_states"]["first"] == first
    end = max(len(prompt) + max_tokens - 1, len(prompt))
    ids = [*prompt, *answer.json["output_ids"]]
    assert states_of(answer.json["hidden_states"]) == expected(ids, first, end)


async def test_who_asks_for_none_gets_no_field_even_beside_one_who_does(serving: Any) -> None:
    async with serving() as served:
        for params in ({}, {"hidden_states": "none"}):
            answer = await served.post("/generate", {"text": "stones", "sampling_params": {"max_tokens": 3, **params}})
            assert answer.status == 200
            assert "hidden_states" not in answer.json
        both = await served.post("/generate", {"text": ["stones", "stream"], "sampling_params": asking("last")})
    assert [each["hidden_states"]["shape"] for each in both.json] == [[6, 3], [6, 3]]


@pytest.mark.parametrize("mode", ["last", "full"])
async def test_a_stream_has_the_states_ahead_of_the_tokens_drawn_from_them(
    serving: Any, tokenizer: Any, mode: str
) -> None:
    prompt = tokenizer.encode("the stream slips past the stones")
    async with serving() as served:
        body = {"input_ids": prompt, "stream": True, "sampling_params": asking(mode)}
        answer = await served.post("/generate", body)
    *events, done = answer.events
    assert done == "[DONE]"
    ids, states, next_position = list(prompt), [], 0 if mode == "full" else len(prompt) - 1
    for event in events:
        if "hidden_states" in event:
            assert event["hidden_states"]["first"] == next_position
            new = states_of(event["hidden_states"])
            next_position += len(new)
            states += new
            assert (event["text"], event["output_ids"]) == ("", [])
        ids += event["output_ids"]
        assert len(ids) <= next_position + 1, "a token without the state it was drawn from"
    assert len(ids) == len(prompt) + 6
    first = 0 if mode == "full" else len(prompt) - 1
    assert states == expected(ids, first, len(ids) - 1)


async def test_a_scoring_stream_has_the_prompt_s_states_and_no_text(serving: Any) -> None:
    async with serving() as served:
        body = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": asking("full", max_new_tokens=0)}
        answer = await served.post("/generate", body)
    states, end, done = answer.events
    assert states_of(states["hidden_states"]) == expected([5, 6, 7], 0, 3)
    assert end["meta_info"]["completion_tokens"] == 0
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
     ("/v1/responses", {"input": "x"}), ("/v1/embeddings", {"input": "x"})],
)  # fmt: skip
async def test_the_openai_endpoints_refuse_the_field(serving: Any, path: str, body: dict[str, Any]) -> None:
    async with serving() as served:
        for field in ("hidden_states", "return_hidden_states"):
            answer = await served.post(path, {**body, field: "last"})
            assert (answer.status, answer.json["error"]["param"]) == (400, field)


@pytest.mark.parametrize("mode", ["all", "", True, 1, ["last"]])
async def test_other_modes_are_refused_by_name(serving: Any, mode: object) -> None:
    async with serving() as served:
        answer = await served.post("/generate", {"text": "x", "sampling_params": {"hidden_states": mode}})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "sampling_params.hidden_states"


@pytest.mark.parametrize(("setting", "counted"), [("none", 6.0), ("last", 1.0), ("full", 0.0)])
async def test_the_metrics_count_the_steps_above_the_setting(serving: Any, setting: str, counted: float) -> None:
    async with serving(engine_settings={"hidden_states": setting}) as served:
        await served.post("/generate", {"text": "stones", "sampling_params": asking("full")})
        metrics = (await served.ask("GET", "/metrics")).body.decode()
    assert f'slipstream:num_eager_for_hidden_states_total{{model_name="tiny"}} {counted}' in metrics
