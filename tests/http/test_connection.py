"""What a connection makes of bytes that the parser alone would read otherwise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slipstream.http.connection import MAX_HEAD_BYTES
from slipstream.http.frames import PING
from slipstream.http.settings import FrontSettings

BODY = json.dumps({"prompt": "the stones", "max_tokens": 3, "ignore_eos": True}).encode()
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n"
SIZED = b"content-length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


def chunks(body: bytes) -> bytes:
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


@pytest.mark.parametrize("offer", [OFFER, OFFER.upper(), b"upgrade: websocket\r\nconnection: upgrade\r\n"])
@pytest.mark.parametrize(("framing", "body"), [(SIZED, BODY), (CHUNKED, chunks(BODY))])
async def test_a_body_behind_an_offer_of_another_protocol_is_read(
    serving: Any, offer: bytes, framing: bytes, body: bytes
) -> None:
    """Java's client offers HTTP/2 with every request, and sends its body as if nothing were."""
    async with serving() as served:
        client = await served.connect()
        for raw in (HEAD + offer + framing + body, HEAD + framing + body):  # and the connection goes on
            await client.send_raw(raw)
            answer = await client.answer()
            assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 3)
            client._answer.complete = False
        for part in (HEAD + offer, framing, body[:9], body[9:]):
            await client.send_raw(part)
        assert (await client.answer()).status == 200


async def test_a_body_that_speaks_of_an_upgrade_is_left_as_it_is(serving: Any) -> None:
    text = "line\r\nupgrade: it\r\nconnection: upgrade\r\n\r\n"
    async with serving() as served:
        client = await served.connect()
        body = json.dumps({"prompt": text}).replace(r"\r", "\r").replace(r"\n", "\n").encode()
        for raw in (b"", body):  # not JSON, so that the complaint tells how much of it there was
            length = b"POST /tokenize HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body)
            await client.send_raw(length + raw)
            if not raw:
                await client.send_raw(body)
            answer = await client.answer()
            assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")
            client._answer.complete = False
        whole = json.dumps({"tokens": served.engine.tokenizer.encode(text)}).encode()
        await client.send("POST", "/detokenize", whole)
        assert (await client.answer()).json["prompt"] == text


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
async def test_a_client_older_than_chunks_gets_a_stream_that_ends_with_the_connection(
    serving: Any, version: bytes
) -> None:
    """nginx speaks HTTP/1.0 to its upstreams unless it is told otherwise."""
    body = json.dumps({"prompt": "the stones", "max_tokens": 40, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/%b\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n" % (
        version,
        len(body),
    )
    async with serving(started=False) as served:
        client = await served.connect()
        await client.send_raw(head + body)
        early = await client.answer()
        assert early.json["error"]["code"] == "starting"
        await served.engine.start()
        client = await served.connect()
        await client.send_raw(head + body)
        answer = await client.answer()  # to the end of the connection, which is the end of the body
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert not {"transfer-encoding", "content-length"} & set(answer.headers)
        assert answer.body.startswith(b"data: ")
        assert answer.events[-1] == "[DONE]"
        assert answer.events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_ping_to_a_client_older_than_chunks_has_no_frame(serving: Any) -> None:
    body = json.dumps({"prompt": "the", "max_tokens": 5, "ignore_eos": True, "stream": True}).encode()
    async with serving(front=FrontSettings(ping_interval_s=0.01)) as served:
        await served.engine.pause()
        client = await served.connect()
        await client.send_raw(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = await client.read_until(lambda answer: len(answer.body) > 3 * len(PING))
        assert answer.body.replace(PING, b"") in PING
        served.engine.resume()
        answer = await client.answer()
        assert answer.events[-1] == "[DONE]"


async def test_an_answer_with_a_length_and_none_at_all_reach_a_client_older_than_chunks(serving: Any) -> None:
    async with serving() as served:
        for raw, status in (
            (b"POST /v1/completions HTTP/1.0\r\n" + SIZED + BODY, 200),
            (b"HEAD / HTTP/1.0\r\n\r\n", 200),
            (b"GET /nowhere HTTP/1.0\r\nexpect: 100-continue\r\n\r\n", 404),
        ):
            client = await served.connect()
            await client.send_raw(raw)
            answer = await client.read_until(lambda answer: False)  # it closes
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            assert "transfer-encoding" not in answer.headers


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",  # TLS
        b"GET / HTTP/1.7\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + CHUNKED + b"zz\r\n",
    ],
)
async def test_what_is_no_http_gets_an_error_like_any_other(
    serving: Any, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send_raw(raw)
        answer = await client.read_until(lambda answer: False)  # it closes
        assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
        error = answer.json["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_http", None)
        assert error["message"].startswith("the request is not valid HTTP/1.1")
        assert {"date", "content-length"} <= set(answer.headers)
        assert answer.headers["connection"] == "close"
        assert [record for record in caplog.records if record.exc_info] == []


async def test_a_head_that_is_too_large_gets_an_error_like_any_other(serving: Any) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send_raw(HEAD + b"x: " + b"y" * MAX_HEAD_BYTES)
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["code"]) == (431, "head_too_large")


@pytest.mark.parametrize("stream", [True, False])
async def test_garbage_behind_a_request_does_not_spoil_its_answer(serving: Any, stream: bool) -> None:
    """As of a client that counts its body short: the connection ends with the answer, and holds nothing else."""
    body = json.dumps({"prompt": "the", "max_tokens": 30, "ignore_eos": True, "stream": stream}).encode()
    sized = b"content-length: %d\r\n\r\n" % len(body)
    async with serving() as served:
        client = await served.connect()
        await client.send_raw(HEAD + sized + body + b"\x00garbage")
        if stream:
            await client.read_until(lambda answer: answer.body.count(b"data:") > 2)
            await client.send_raw(b"and more of it")
        answer = await client.answer()
        assert (answer.status, answer.complete) == (200, True)
        if stream:
            assert answer.events[-1] == "[DONE]"
        else:
            assert answer.json["usage"]["completion_tokens"] == 30
        assert await asyncio.get_running_loop().sock_recv(client.sock, 100) == b""


async def test_a_bad_body_behind_a_request_does_not_spoil_its_answer(serving: Any) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send_raw(HEAD + SIZED + BODY + HEAD + CHUNKED + b"zz\r\n")
        answer = await client.answer()
        assert (answer.status, answer.complete, answer.json["usage"]["completion_tokens"]) == (200, True, 3)
        assert await asyncio.get_running_loop().sock_recv(client.sock, 100) == b""


async def test_what_stands_behind_a_body_has_no_say(serving: Any) -> None:
    trailer = b"x-request-id: theirs\r\nx: y\r\n\r\n"
    async with serving() as served:
        client = await served.connect()
        await client.send_raw(HEAD + CHUNKED)
        await client.send_raw(chunks(BODY)[:-2] + trailer)
        answer = await client.answer()
        assert answer.status == 200
        assert answer.headers["x-request-id"] != "theirs"


async def test_the_rest_of_a_body_whose_request_has_been_answered_does_not_keep_the_connection_alive(
    serving: Any,
) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send_raw(b"POST /nowhere HTTP/1.1\r\nhost: t\r\n" + CHUNKED)
        assert (await client.answer()).status == 404
        (connection,) = served.server._server.server_state.connections
        timer = connection.timeout_keep_alive_task
        connection.data_received(b"1\r\na\r\n")
        assert connection.timeout_keep_alive_task is timer
        assert not timer.cancelled()
        client._answer.complete = False
        await client.send_raw(b"0\r\n\r\n" + HEAD + SIZED + BODY)  # and then it goes on as ever
        assert (await client.answer()).status == 200
        assert timer.cancelled()
        assert connection.timeout_keep_alive_task is not timer
