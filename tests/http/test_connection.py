"""What a connection makes of bytes that the parser alone would read otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
