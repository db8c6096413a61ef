"""The official client against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from slipstream.engine.scripted_worker import Script

STRICT: dict[str, Any] = {"_strict_response_validation": True}  # else the client takes what its types do not allow

LOOSE: dict[str, Any] = {"_strict_response_validation": False}  # its type of a completion has no null finish_reason


@asynccontextmanager
async def official(served: Any, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, **{**STRICT, **options}
    ) as client:
        yield client


async def test_a_completion_comes_whole(serving: Any, scripted: Any) -> None:
    async with serving(Script(token_of=scripted.saying("over the stones"))) as served, official(served) as client:
        reply = await client.completions.create(model="tiny", prompt="PROMPT", max_tokens=64)
    assert reply.choices[0].text == "over the stones"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens == len(served.engine.tokenizer.encode("PROMPT"))


async def test_streamed_and_whole_completions_are_the_same_text(serving: Any) -> None:
    async with serving() as served, official(served, **LOOSE) as client:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "the stream", "max_tokens": 40, "seed": 7}
        whole = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


async def test_a_chat_streams_role_deltas_finish_and_usage(serving: Any) -> None:
    async with serving() as served, official(served) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "the stones?"}],
            max_completion_tokens=12,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.content for chunk in middle)
    assert last.choices[0].delta.content is None
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 12


async def test_a_chat_comes_whole_with_the_same_text_as_streamed(serving: Any) -> None:
    async with serving() as served, official(served) as client:
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "stones"}],
            "max_tokens": 30,
            "seed": 5,
        }
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text
    assert whole.choices[0].message.role == "assistant"
    assert whole.object == "chat.completion"


async def test_closing_the_official_stream_aborts_the_request(serving: Any) -> None:
    async with serving() as served, official(served, **LOOSE) as client:
        stream = await client.completions.create(
            model="tiny", prompt="PROMPT", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        await served.idle()
        assert served.engine.num_aborted == 1


async def test_models_are_listed_and_found_by_every_name(serving: Any) -> None:
    async with serving(served_model_name=("tiny", "org/alias")) as served, official(served) as client:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == ["tiny", "org/alias"]
        for model in listed.data:
            assert (await client.models.retrieve(model.id)).id == model.id
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nope")
        assert caught.value.code == "model_not_found"


async def test_the_official_errors_name_parameter_code_and_request(serving: Any) -> None:
    async with serving() as served, official(served) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model="tiny", prompt="x", temperature=-1, extra_headers={"x-request-id": "mine"}
            )
        assert caught.value.param == "temperature"
        assert caught.value.request_id == "mine"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="nope", prompt="x")
        assert missing.value.code == "model_not_found"


async def test_several_choices_stream_interleaved_each_with_its_own_text(serving: Any) -> None:
    async with serving() as served, official(served) as client:
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "go"}],
            "n": 4,
            "seed": 11,
            "max_tokens": 20,
        }
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        chunks = [chunk async for chunk in stream]
    streamed = ["", "", "", ""]
    opened, finished = [], []
    for chunk in chunks:
        choice = chunk.choices[0]
        streamed[choice.index] += choice.delta.content or ""
        opened += [choice.index] if choice.delta.role else []
        finished += [choice.index] if choice.finish_reason else []
    assert streamed == [choice.message.content for choice in whole.choices]
    assert len(set(streamed)) == 4
    assert sorted(opened) == sorted(finished) == [0, 1, 2, 3]
    order = [chunk.choices[0].index for chunk in chunks]
    assert order != sorted(order)


async def test_a_batch_of_prompts_gives_choices_in_prompt_order(serving: Any) -> None:
    async with serving() as served, official(served) as client:
        prompts = ["the", "stream", "slips", "past"]
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "seed": 2, "temperature": 0}
        batch = await client.completions.create(prompt=prompts, **asked)
        singles = [await client.completions.create(prompt=prompt, **asked) for prompt in prompts]
        ids = [served.engine.tokenizer.encode(prompt) for prompt in prompts]
        by_ids = await client.completions.create(prompt=ids, **asked)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in batch.choices] == [single.choices[0].text for single in singles]
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in batch.choices]
    assert batch.usage is not None
    assert batch.usage.prompt_tokens == sum(map(len, ids))
