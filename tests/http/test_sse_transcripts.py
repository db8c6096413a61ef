"""What goes over the wire, byte for byte, and what happens when a stream does not end well."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slipstream.engine.scripted_worker import Script
from slipstream.http.settings import FrontSettings
from slipstream.http.sse import SseResponse

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "seed": 1, "ignore_eos": True}
GOLDEN_COMPLETION = """\
data: {"id":"cmpl-golden","object":"text_completion","created":0,"model":"tiny","system_fingerprint":null,"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null}]}

data: {"id":"cmpl-golden","object":"text_completion","created":0,"model":"tiny","system_fingerprint":null,"choices":[{"index":0,"text":"\\"","logprobs":null,"finish_reason":null,"stop_reason":null}]}

data: {"id":"cmpl-golden","object":"text_completion","created":0,"model":"tiny","system_fingerprint":null,"choices":[{"index":0,"text":"b","logprobs":null,"finish_reason":null,"stop_reason":null}]}

data: {"id":"cmpl-golden","object":"text_completion","created":0,"model":"tiny","system_fingerprint":null,"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null}]}

data: [DONE]

"""  # noqa: E501
GOLDEN_CHAT = """\
data: {"id":"chatcmpl-golden","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":null,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}

data: {"id":"chatcmpl-golden","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":null,"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}

data: {"id":"chatcmpl-golden","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":null,"choices":[{"index":0,"delta":{"content":"b"},"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}

data: {"id":"chatcmpl-golden","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":null,"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}

data: {"id":"chatcmpl-golden","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":null,"choices":[],"usage":{"prompt_tokens":@,"completion_tokens":2,"total_tokens":#,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}}

data: [DONE]

"""  # noqa: E501


def at_created_zero(text: str) -> str:
    head, *rest = text.split('"created":')
    return head + "".join('"created":0' + part[part.index(",") :] for part in rest)


async def test_a_streamed_completion_reads_exactly_so(serving: Any, scripted: Any) -> None:
    async with serving(Script(token_of=scripted.saying('a"b'))) as served:
        body = {"model": "tiny", "prompt": "PROMPT", "stream": True, "stream_options": {}}
        answer = await served.post("/v1/completions", body, x_request_id="golden")
    assert at_created_zero(answer.body.decode()) == GOLDEN_COMPLETION
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "golden"
    assert answer.headers["transfer-encoding"] == "chunked"


async def test_a_streamed_chat_with_usage_reads_exactly_so(serving: Any, tokenizer: Any) -> None:
    letters = tokenizer.encode("ab")
    async with serving(Script(token_of=lambda seed, history: letters[history[-1] in letters])) as served:
        body = {**CHAT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        answer = await served.post("/v1/chat/completions", body, x_request_id="golden")
    num_prompt = answer.events[-2]["usage"]["prompt_tokens"]
    golden = GOLDEN_CHAT.replace("@", str(num_prompt)).replace("#", str(num_prompt + 2))
    assert at_created_zero(answer.body.decode()) == golden


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_usage_comes_only_when_it_is_asked_for(serving: Any, options: Any) -> None:
    async with serving() as served:
        body = {**CHAT, "max_tokens": 3, "stream": True, "stream_options": options}
        events = (await served.post("/v1/chat/completions", body)).events
    assert all("usage" not in event for event in events[:-1])
    assert all(event["choices"] for event in events[:-1])
    assert events[-1] == "[DONE]"


async def test_continuous_usage_counts_up_in_every_chunk(serving: Any) -> None:
    async with serving() as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": "the", "max_tokens": 6, "ignore_eos": True, "stream": True, "stream_options": options}
        *chunks, done = (await served.post("/v1/completions", body)).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert chunks[-1]["choices"] == []
    assert done == "[DONE]"


async def test_continuous_usage_is_whole_from_the_first_chunk_on(serving: Any, tokenizer: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "stream": True, "stream_options": options}
    async with serving() as served:
        for path, prompt in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the stream slips " * 4}]}),
            ("/v1/completions", {"prompt": "past the stones " * 4, "echo": True}),
        ):
            for num_cached in (False, True):
                *chunks, last, _ = (await served.post(path, {**asked, **prompt})).events
                assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)
                cached = {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in [*chunks, last]}
                assert len(cached) == 1
                assert (cached != {0}) is num_cached


async def test_no_token_at_all_still_makes_a_whole_stream(serving: Any, tokenizer: Any) -> None:
    async with serving(Script(token_of=lambda seed, history: 0)) as served:
        chat = (await served.post("/v1/chat/completions", {**CHAT, "ignore_eos": False, "stream": True})).events
        text = (await served.post("/v1/completions", {"prompt": "x", "stream": True})).events
    role, last, done = chat
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"
    assert [event["choices"][0]["finish_reason"] for event in text[:-1]] == ["stop"]


async def test_a_stop_string_is_named_and_cut_streamed_or_not(serving: Any, scripted: Any) -> None:
    script = Script(token_of=scripted.saying("over the stones"))
    async with serving(script) as served:
        for stop, keep, expected in (("the", False, "over "), (["zz", "the"], True, "over the")):
            body = {"prompt": "PROMPT", "stop": stop, "include_stop_str_in_output": keep, "max_tokens": 50}
            whole = (await served.post("/v1/completions", body)).json["choices"][0]
            chunks = (await served.post("/v1/completions", {**body, "stream": True})).events[:-1]
            assert whole["text"] == "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
            assert whole["stop_reason"] == chunks[-1]["choices"][0]["stop_reason"] == "the"
            assert whole["finish_reason"] == "stop"
            assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1]), "an empty delta"


async def test_a_step_that_fails_mid_stream_ends_that_stream_with_an_error_event(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Script(forward_faults=frozenset({6}))) as served:
        body = {"prompt": "the", "max_tokens": 50, "ignore_eos": True, "stream": True}
        answer = await served.post("/v1/completions", body, x_request_id="unlucky")
        assert answer.status == 200
        assert [record.getMessage()[:18] for record in caplog.records] == ["request_id=unlucky"]
        assert answer.complete, "the chunked body must end cleanly"
        *chunks, error = answer.events
        # How many frames the tokens of the five good steps share depends on how busy the machine is.
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert error["error"]["code"] == "step_failed"
        after = await served.post("/v1/completions", {**body, "stream": False})
        assert after.status == 200


async def test_a_row_that_fails_leaves_the_other_streams_alone(serving: Any) -> None:
    async with serving(Script(row_faults=frozenset({(8, 0)}))) as served:
        clients = [await served.connect() for _ in range(8)]
        body = {"prompt": "the", "max_tokens": 30, "ignore_eos": True, "stream": True}
        for client in clients:
            await client.send("POST", "/v1/completions", body)
        answers = [await client.answer() for client in clients]
    lasts = [answer.events[-1] for answer in answers]
    assert sum(last == "[DONE]" for last in lasts) == 7
    assert sum("error" in last for last in lasts if last != "[DONE]") == 1


async def test_a_step_that_fails_is_a_500_when_nothing_was_streamed(serving: Any) -> None:
    async with serving(Script(forward_faults=frozenset({2}))) as served:
        answer = await served.post("/v1/completions", {"prompt": "the", "max_tokens": 50, "ignore_eos": True})
    assert answer.status == 500
    assert answer.json["error"]["code"] == "step_failed"


async def test_pings_cover_the_wait_for_the_first_token_by_the_clock(serving: Any) -> None:
    front = FrontSettings(ping_interval_s=0.02)
    async with serving(Script(step_time_s=0.15), front=front) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", {"prompt": "the", "max_tokens": 1, "stream": True})
        answer = await client.read_until(lambda answer: answer.body.count(b": ping\n\n") >= 3)
        assert b"data:" not in answer.body
        answer = await client.answer()
    assert answer.events[-1] == "[DONE]"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[SseResponse, list[bytes]]:
    """What the fan-out writes for each stream, write by write."""
    writes: dict[SseResponse, list[bytes]] = {}
    render = SseResponse.render

    def rendered(self: SseResponse, now: float) -> bytes:
        body = render(self, now)
        writes.setdefault(self, []).extend([body] if body else [])
        return body

    monkeypatch.setattr(SseResponse, "render", rendered)
    return writes


async def test_a_head_leaves_with_the_first_frame_in_one_write(
    serving: Any, monkeypatch: pytest.MonkeyPatch, written: dict[SseResponse, list[bytes]]
) -> None:
    monkeypatch.setattr("slipstream.http.sse.HEAD_WITHIN_S", 60.0)
    async with serving() as served:
        bodies = [{"prompt": "the", "max_tokens": 1 + index, "ignore_eos": True, "stream": True} for index in range(4)]
        clients = [await served.connect() for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            await client.send("POST", "/v1/completions", body)
        answers = [await client.answer() for client in clients]
    assert all(answer.complete and answer.events[-1] == "[DONE]" for answer in answers)
    assert len(written) == len(bodies)
    for first, *others in written.values():
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\n\r\n" in first
        assert b"data: " in first
        assert not any(body.startswith(b"HTTP") for body in others)


async def test_a_head_that_no_frame_takes_along_goes_alone(serving: Any) -> None:
    async with serving() as served:
        await served.engine.pause()
        client = await served.connect()
        await client.send(
            "POST", "/v1/completions", {"prompt": "the", "max_tokens": 2, "ignore_eos": True, "stream": True}
        )
        answer = await client.read_until(lambda answer: answer.status > 0)
        assert (answer.status, answer.body) == (200, b"")
        served.engine.resume()
        answer = await client.answer()
    assert answer.events[-2]["choices"][0]["finish_reason"] == "length"


async def test_tokens_of_a_busy_stream_come_one_frame_each(serving: Any) -> None:
    async with serving(Script(step_time_s=0.002)) as served:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_tokens": 20, "ignore_eos": True}, "stream": True}
        *frames, last, done = (await served.post("/generate", body)).events
    assert [len(frame["output_ids"]) for frame in frames] == [1] * 20
    assert last["meta_info"]["completion_tokens"] == 20
    assert done == "[DONE]"


async def test_the_end_of_streams_that_end_together_waits_for_no_task(
    serving: Any, monkeypatch: pytest.MonkeyPatch, written: dict[SseResponse, list[bytes]]
) -> None:
    """Each request's task takes a while to end; the last token, the last words and the body's end have left by then, in one
    write: who stops at [DONE] finds the connection fit for the next request."""

    async def sent(*_: object, **__: object) -> None:
        raise AssertionError("a task had to write")

    monkeypatch.setattr(SseResponse, "_send", sent)
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_tokens": 20, "ignore_eos": True}, "stream": True}
    async with serving() as served:
        clients = [await served.connect() for _ in range(8)]
        answers: list[Any] = []
        for _ in range(2):
            for client in clients:
                await client.send("POST", "/generate", body)
            answers += [await client.next_answer() for client in clients]
        await served.idle()
    assert all(answer.events[-1] == "[DONE]" for answer in answers)
    ends = [body for bodies in written.values() for body in bodies if b"[DONE]" in body]
    assert len({id(answer) for answer in answers}) == len(ends) == 16
    assert all(end.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for end in ends)


async def test_a_steady_reader_of_a_large_last_frame_gets_all_of_it(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes several write timeouts, but nobody waits for it: the end is in the transport's hands."""
    monkeypatch.setattr("slipstream.http.connection.SOCKET_BUFFER_BYTES", 4096)
    body = {"input_ids": [[5, 6, 7 + index] for index in range(128)], "stream": True}
    body["sampling_params"] = {"max_tokens": 1, "ignore_eos": True}
    async with serving(num_pages=4096, num_rows=256, front=FrontSettings(write_timeout_s=0.1)) as served:
        client = await served.connect(receive_buffer=4096)
        await client.send("POST", "/generate", body)
        received = b""
        async with asyncio.timeout(20):
            while not received.endswith(b"0\r\n\r\n"):
                await asyncio.sleep(0.02)  # the reader's pace
                part = await asyncio.get_running_loop().sock_recv(client.sock, 2048)
                assert part, "cut off"
                received += part
        await served.idle()
    assert received.count(b'"finish_reason":{"type":"length"') == 128
    assert received.count(b"[DONE]") == 1


async def test_a_client_that_goes_while_its_head_is_kept_is_no_error(
    serving: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer may be due between the loss of the connection and the end of the request's task."""
    hung_up = SseResponse._hung_up

    def late(self: SseResponse) -> None:
        hung_up(self)
        asyncio.get_running_loop().call_soon(self._ping)

    monkeypatch.setattr(SseResponse, "_hung_up", late)
    monkeypatch.setattr("slipstream.http.sse.HEAD_WITHIN_S", 60.0)
    async with serving() as served:
        await served.engine.pause()
        client = await served.connect()
        await client.send("POST", "/v1/completions", {"prompt": "the", "stream": True})
        async with asyncio.timeout(5):
            while not served.engine.stats.num_waiting:
                await asyncio.sleep(0)
        client.reset()
        async with asyncio.timeout(5):
            while served.engine.stats.num_waiting:
                await asyncio.sleep(0)
        served.engine.resume()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_many_streams_at_once_each_get_their_own_tokens(serving: Any) -> None:
    async with serving(num_pages=2048) as served:
        bodies = [
            {"prompt": f"stream {index}", "max_tokens": 5 + index % 7, "seed": index, "temperature": 1, "n": 1}
            for index in range(48)
        ]
        wholes = [(await served.post("/v1/completions", body)).json["choices"][0]["text"] for body in bodies]
        clients = [await served.connect() for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            await client.send("POST", "/v1/completions", {**body, "stream": True})
        answers = await asyncio.gather(*[client.answer() for client in clients])
    texts = ["".join(event["choices"][0]["text"] for event in answer.events[:-1]) for answer in answers]
    assert texts == wholes


async def test_every_event_is_json_of_its_own(serving: Any) -> None:
    """Any token, control characters and quotes included, leaves a frame that parses."""
    async with serving(Script(token_of=lambda seed, history: (history[-1] * 7 + 1) % 300)) as served:
        body = {"prompt": "t", "max_tokens": 300, "ignore_eos": True, "stream": True, "skip_special_tokens": False}
        answer = await served.post("/v1/completions", body)
        whole = (await served.post("/v1/completions", {**body, "stream": False})).json
    text = "".join(event["choices"][0]["text"] for event in answer.events[:-1])
    assert text == whole["choices"][0]["text"]
    assert json.dumps(text).isascii()
