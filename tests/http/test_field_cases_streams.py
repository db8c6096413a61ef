"""Streams as users of other servers lost them: characters cut in two, an end that never came, silence that a proxy cut
off, one stream's fault in another's text.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import openai
import pytest

from slipstream.engine.scripted_worker import Script
from slipstream.engine.text.chat_template import ChatTemplate
from slipstream.http.openai_completions import CompletionShape
from slipstream.http.settings import FrontSettings

FAMILY = "👨\u200d👩\u200d👧"
TEXT = f"Žluťoučký kůň, ภาษาไทย, 한국어, 𝄞 and {FAMILY}!"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "PROMPT"}]}


def text_of(chunk: Any) -> str:
    """What a chunk adds, whichever endpoint it is from."""
    if "choices" not in chunk:
        return str(chunk.get("text", ""))
    choice = chunk["choices"][0]
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


@pytest.mark.parametrize("interval", ["1", "3"])
async def test_characters_of_several_tokens_come_whole_from_every_endpoint(
    serving: Any, scripted: Any, tokenizer: Any, interval: str
) -> None:
    """Every character here but the ASCII ones takes two to eighteen tokens, one for each byte."""
    assert len(tokenizer.encode(TEXT)) > 1.5 * len(TEXT)
    script = Script(token_of=scripted.saying(TEXT))
    async with serving(script, front=FrontSettings(stream_interval=interval)) as served:
        served.engine.chat_template = ChatTemplate("{{ messages[0].content }}")
        for path, body, streamed_text in (
            ("/v1/completions", {"prompt": "PROMPT", "max_tokens": 200}, None),
            ("/v1/chat/completions", {**CHAT, "max_tokens": 200}, None),
            ("/generate", {"text": "PROMPT", "sampling_params": {"max_tokens": 200}}, None),
            ("/v1/responses", {"input": "PROMPT", "max_output_tokens": 200}, "response.output_text.delta"),
        ):
            whole = (await served.post(path, body)).body.decode()
            streamed = await served.post(path, {**body, "stream": True})
            if streamed_text is None:
                deltas = [text_of(event) for event in streamed.events[:-1]]
            else:
                deltas = [data["delta"] for kind, data in streamed.events_by_kind if kind == streamed_text]
            assert "".join(deltas) == TEXT, path
            assert TEXT in whole
            assert all("\ufffd" not in delta and delta.encode("utf-8") for delta in deltas if delta)


async def test_bytes_that_are_no_text_spoil_one_stream_of_eight(serving: Any, tokenizer: Any) -> None:
    broken, fine = [0xE4, 0xFF, 0xC3, 0x41, 0xF0, 0x9F], "clean text"
    byte_ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    bad_ids = [byte_ids[bytes([byte])] for byte in broken]
    good_ids = tokenizer.encode(fine)

    def token_of(seed: int, history: Sequence[int]) -> int:
        ids = bad_ids if history[0] == 99 else good_ids
        return ids[(len(history) - 1) % len(ids)]

    async with serving(Script(token_of=token_of)) as served:
        clients = [await served.connect() for _ in range(8)]
        for number, client in enumerate(clients):
            params = {"max_tokens": 6 if number == 3 else len(good_ids), "ignore_eos": True}
            body = {"input_ids": [99 if number == 3 else 7], "sampling_params": params, "stream": True}
            await client.send("POST", "/generate", body)
        answers = [await client.answer() for client in clients]
    texts = ["".join(text_of(event) for event in answer.events[:-1]) for answer in answers]
    assert all(answer.events[-1] == "[DONE]" for answer in answers)
    assert texts[3] == bytes(broken).decode("utf-8", "replace")
    assert texts[:3] + texts[4:] == [fine] * 7


@pytest.mark.timeout(60)
async def test_a_thousand_streams_of_any_length_all_end(serving: Any, tokenizer: Any) -> None:
    """Ends at once by the model's end id, by a stop on the first token, by length; some with no text at all."""
    letter, empty = tokenizer.encode("a")[0], 0
    draw = random.Random(3)

    def token_of(seed: int, history: Sequence[int]) -> int:
        return empty if history[0] % 3 == 0 or len(history) > 1 + history[0] % 7 else letter

    def a_body() -> dict[str, Any]:
        params: dict[str, Any] = {"max_tokens": draw.randrange(9), "ignore_eos": draw.random() < 0.3}
        if draw.random() < 0.3:
            params["stop"] = "a"
        return {"prompt": [draw.randrange(1, 250)], "stream": True, **params}

    async with serving(Script(token_of=token_of, verifies=False), num_pages=1024) as served:

        async def one_client(count: int) -> list[Any]:
            client = await served.connect()
            ends = []
            for _ in range(count):
                path = draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/completions"])
                body = a_body()
                if path.endswith("chat/completions"):
                    body = {**CHAT, **{name: value for name, value in body.items() if name != "prompt"}}
                await client.send("POST", path, body)
                answer = await client.answer()
                *chunks, done = answer.events
                reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
                ends.append((answer.complete, done, reasons[-1], set(reasons[:-1])))
                client._answer.complete = False
            return ends

        ends = [end for each in await asyncio.gather(*[one_client(50) for _ in range(20)]) for end in each]
    assert len(ends) == 1000
    assert {end[:2] for end in ends} == {(True, "[DONE]")}, "a clean end of the body, on a connection that goes on"
    assert {end[2] for end in ends} == {"stop", "length"}
    assert all(end[3] <= {None} for end in ends), "only the last chunk has a reason"


async def test_the_cause_of_a_stream_s_fault_is_in_the_log_and_the_other_seven_are_whole(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "the", "max_tokens": 30, "ignore_eos": True, "seed": 4, "stream": True}
    async with serving(Script(row_faults=frozenset({(8, 0)}))) as served:
        expected = (await served.post("/v1/completions", {**body, "max_tokens": 4, "stream": False})).json
        clients = [await served.connect() for _ in range(8)]
        with caplog.at_level(logging.ERROR, "slipstream.http"):
            for number, client in enumerate(clients):
                await client.send("POST", "/v1/completions", body, x_request_id=f"r{number}")
            answers = [await client.answer() for client in clients]
        metrics = (await served.ask("GET", "/metrics")).body.decode()
    assert 'slipstream:request_failure_total{code="step_failed",model_name="tiny"} 1.0' in metrics
    failed = [answer for answer in answers if answer.events[-1] != "[DONE]"]
    assert len(failed) == 1
    assert failed[0].complete, "the chunked body ends as it should"
    error = failed[0].events[-1]["error"]
    assert (error["code"], error["type"]) == ("step_failed", "server_error")
    name = failed[0].headers["x-request-id"]
    assert f"request_id={name} failed: scripted: row 0 of step 8 fails" in caplog.text
    whole = {"".join(map(text_of, answer.events[:-1])) for answer in answers if answer not in failed}
    assert len(whole) == 1
    assert whole.pop().startswith(expected["choices"][0]["text"].rstrip("\ufffd"))


@pytest.mark.parametrize("where", ["frame", "closing", "ending"])
async def test_a_frame_that_cannot_be_made_ends_its_stream_with_an_error_event(
    serving: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A fault of ours behind the headers is neither a broken body nor silence."""
    real = getattr(CompletionShape, where)

    def breaks(self: Any, *rest: Any) -> bytes:
        if self._base["id"] == "cmpl-unlucky":
            raise ValueError("no frame for this")
        return bytes(real(self, *rest))

    monkeypatch.setattr(CompletionShape, where, breaks)
    if where == "frame":  # text that no template renders
        monkeypatch.setattr(CompletionShape, "text", lambda self, index: None)
    body = {"prompt": "the", "max_tokens": 12, "ignore_eos": True, "stream": True}
    async with serving() as served:
        others = [await served.connect() for _ in range(3)]
        for client in others:
            await client.send("POST", "/v1/completions", body)
        answer = await served.post("/v1/completions", body, x_request_id="unlucky")
        assert answer.complete
        assert answer.events[-1]["error"]["code"] == "internal_error"
        assert (len(answer.events) > 1) == (where != "frame"), "what could be made has been sent"
        assert "no frame" not in answer.body.decode()
        for client in others:
            assert (await client.answer()).events[-1] == "[DONE]"
        await served.idle()


async def test_an_error_event_that_cannot_be_made_either_is_no_whole_answer(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client learns from the cut that something is missing."""

    def breaks(*_: object) -> bytes:
        raise ValueError("no words")

    monkeypatch.setattr(CompletionShape, "closing", breaks)
    monkeypatch.setattr(CompletionShape, "error", breaks)
    async with serving() as served:
        body = {"prompt": "the", "max_tokens": 12, "ignore_eos": True, "stream": True}
        answer = await served.post("/v1/completions", body)
        assert answer.status in (0, 200)  # the head may be cut off as well
        assert not answer.complete
        await served.idle()


@asynccontextmanager
async def impatient_proxy(port: int, read_timeout_s: float) -> AsyncIterator[int]:
    """Forwards bytes both ways, and closes when the server has been silent for too long, as gateways do."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float | None) -> None:
        try:
            while received := await asyncio.wait_for(reader.read(65536), limit_s):
                writer.write(received)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(reader, up_writer, None), forward(up_reader, writer, read_timeout_s))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_long_wait_in_the_queue_and_a_pause_survive_an_impatient_proxy(serving: Any, connect: Any) -> None:
    front = FrontSettings(ping_interval_s=0.04)
    body = {"prompt": "the", "max_tokens": 60, "ignore_eos": True, "stream": True}
    async with serving(Script(step_time_s=0.008), num_rows=1, front=front) as served:
        first = await served.connect()
        await first.send("POST", "/v1/completions", body)  # half a second in the only row
        await first.read_until(lambda answer: b"data:" in answer.body)
        async with impatient_proxy(served.server.port, 0.2) as port:
            queued = await connect(port)
            await queued.send("POST", "/v1/completions", {**body, "max_tokens": 20})
            answer = await queued.read_until(lambda answer: b"data:" in answer.body)
            assert answer.body.startswith(b": ping\n\n: ping\n\n"), "from the start, while it has not begun"
            await queued.read_until(lambda answer: answer.body.count(b"data:") > 3)
            before = answer.body.count(b": ping")
            await served.engine.pause()  # what it looks like to a client whose request was sent back to the queue
            await asyncio.sleep(0.4)
            served.engine.resume()
            answer = await queued.answer()
            assert answer.body.count(b": ping") >= before + 3
            assert answer.complete
            assert answer.events[-1] == "[DONE]"
        await first.answer()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_streams", [1, 64])
async def test_tokens_arrive_while_they_are_made(serving: Any, num_streams: int) -> None:
    """Not all at the end: a reader of the raw bytes sees most tokens of a stream long before its last one."""
    num_tokens, step_s = 40, 0.015
    loop = asyncio.get_running_loop()
    body = {"prompt": "the", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}

    async def watch(client: Any) -> list[float]:
        await client.send("POST", "/v1/completions", body)
        times: list[float] = []

        def seen(answer: Any) -> bool:
            times.extend([loop.time()] * (answer.body.count(b"data:") - len(times)))
            return bool(answer.complete)

        await client.read_until(seen)
        return times

    async with serving(Script(step_time_s=step_s, verifies=False), num_pages=4096) as served:
        served.engine._loop._after_commit = None  # the proof of the laws takes longer than the step
        clients = [await served.connect() for _ in range(num_streams)]
        began = loop.time()
        arrivals = await asyncio.gather(*[watch(client) for client in clients])
    for times in arrivals:
        half = times[len(times) // 2]
        assert times[0] - began < 0.5 * (times[-1] - began), "the first token comes long before the last"
        assert times[-1] - half > 0.25 * num_tokens * step_s, "the second half takes its time"
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        assert sum(gap > 0.3 * step_s for gap in gaps) > 0.4 * num_tokens, "tokens do not come in bursts"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_that_only_some_choices_hit_ends_only_those(serving: Any, tokenizer: Any, stream: bool) -> None:
    letters = tokenizer.encode("abcdefgh")

    def token_of(seed: int, history: Sequence[int]) -> int:
        return letters[(seed + len(history)) % (8 if seed % 2 else 4)]  # even seeds never come to the h

    script = Script(token_of=token_of, records=True)
    async with serving(script) as served:
        prompt = list(range(2, 42))
        body = {"prompt": prompt, "n": 4, "seed": 0, "temperature": 1, "max_tokens": 20, "stop": "h", "stream": stream}
        answer = await served.post("/v1/completions", body)
        computed = sum(sum(batch.num_new[batch.num_decode :]) for batch in script.launched)
    if stream:
        texts, reasons = ["", "", "", ""], [None] * 4
        for event in answer.events[:-1]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["text"]
            assert reasons[choice["index"]] is None, "nothing comes after a choice's end"
            reasons[choice["index"]] = choice["finish_reason"]
    else:
        texts = [choice["text"] for choice in answer.json["choices"]]
        reasons = [choice["finish_reason"] for choice in answer.json["choices"]]
    assert reasons == ["length", "stop", "length", "stop"]
    assert all("h" not in text for text in texts)
    assert [len(texts[0]), len(texts[2])] == [20, 20]
    assert len(set(texts)) == 4
    assert computed < 2 * len(prompt), "the prompt's whole pages are computed once for all choices"


async def test_no_delta_is_empty_while_a_stop_is_watched_for(serving: Any, scripted: Any) -> None:
    text = "the end is near, the End is not"
    async with serving(Script(token_of=scripted.saying(text))) as served:
        served.engine.chat_template = ChatTemplate("{{ messages[0].content }}")
        for stop in ("END", ["ends", "Endless", "near!"]):
            chunks = (await served.post("/v1/chat/completions", {**CHAT, "stop": stop, "stream": True})).events[:-1]
            role, *content, last = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert role == {"role": "assistant", "content": ""}
            assert last == {}
            assert all(delta["content"] for delta in content)
            assert "".join(delta["content"] for delta in content) == text


async def test_a_client_that_checks_every_field_reads_whole_streams(serving: Any, scripted: Any) -> None:
    """The official client with its strict validation on: a key that is missing or empty would raise."""
    async with (
        serving(Script(token_of=scripted.saying("over the stones"))) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        served.engine.chat_template = ChatTemplate("{{ messages[0].content }}")
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "stream": True}
        options: dict[str, Any] = {"include_usage": True}
        for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"stream_options": options}, {"n": 2}, {"stop": "the"}):
            stream = await client.chat.completions.create(messages=CHAT["messages"], **asked, **more)
            reasons = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
            assert [each for each in reasons if each is not None] == ["stop"] * more.get("n", 1)
            assert reasons[-1] == "stop"
        whole: dict[str, Any] = {"model": "tiny", "max_tokens": 40}
        for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}):
            reply = await client.chat.completions.create(messages=CHAT["messages"], **whole, **more)
            assert reply.choices[0].message.content == "over the stones"
        for more in ({}, {"logprobs": 2}, {"echo": True}):  # its type of a completion's chunk has no null, OpenAI's has
            text = await client.completions.create(prompt="PROMPT", **whole, **more)
            assert text.choices[0].text.endswith("over the stones")
