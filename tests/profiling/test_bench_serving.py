"""The open-loop load: the same for every server, timed from when it was due, and honest about failures."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.engine.errors import ConfigError
from slipstream.profiling.bench_serving import Answer, OpenLoad, _scripted_server, drive, measure, summary

LOAD = OpenLoad(rate=200, num_requests=6, prompt_words=4, output_tokens=4)


def test_every_server_gets_the_same_arrivals() -> None:
    load = OpenLoad(rate=10, num_requests=2000, prompt_words=8, output_tokens=9)
    arrivals = load.arrivals()
    assert arrivals == load.arrivals()
    assert arrivals[0].due_s == 0
    assert 170 < arrivals[-1].due_s < 230  # 2,000 at ten a second
    assert {len(each.prompt.split()) for each in arrivals} == set(range(4, 9))
    assert {each.max_tokens for each in arrivals} == set(range(4, 10))


def test_times_count_from_when_a_request_was_due() -> None:
    late = Answer(due=10.0, chunks=[12.0, 12.5], num_tokens=2, end=13.0)
    broken = Answer(due=10.0, chunks=[10.1], end=11.0, error="EOFError")
    row = summary([late, broken], rate=3)
    assert (row["requests"], row["failed"], row["ttft_ms_p50"], row["itl_ms_p99"]) == (2, 1, 2000, 500)
    assert row["tokens_per_s"] == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="EOFError"):
        summary([broken], rate=3)


def test_without_an_address_the_bench_measures_a_scripted_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--requests", "12", "--rate", "100", "--tokens", "6", "--prompt-words", "3"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "serving", *arguments, "--json", str(tmp_path / "s.json")])
    assert stopped.value.code == 0
    row = json.loads((tmp_path / "s.json").read_text())["results"]["scripted"]
    assert (row["requests"], row["failed"]) == (12, 0)
    assert row["ttft_ms_p50"] >= 5
    assert row["itl_ms_p50"] > 3
    assert "ttft_ms_p99" in capsys.readouterr().out


async def test_servers_are_driven_side_by_side_by_the_model_that_each_has(capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncExitStack() as stack:
        urls = [await _scripted_server(stack, LOAD) for _ in range(2)]
        rows = await measure({"ours": urls[0], "peer": urls[1] + "/v1/"}, None, None, LOAD)
    assert [(name, row["failed"]) for name, row in rows.items()] == [("ours", 0), ("peer", 0)]
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://127.0.0.1:9", "does not say"), ("https://x", "no address"), ("localhost:80", "no address")],
)
async def test_a_peer_that_is_not_there_is_said_before_anything_is_measured(
    url: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncExitStack() as stack:
        ours = await _scripted_server(stack, LOAD)
        with pytest.raises(ConfigError, match=reason):
            await measure({"ours": ours, "peer": url}, None, None, LOAD)
    assert not capsys.readouterr().out


ANSWERS = {
    "an error status": (b'HTTP/1.1 429 no\r\n\r\n{"error": "full"}\n', "429"),
    "an error event": (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "dead"}}\n\n', "dead"),
    "a stream cut off": (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n', "end mark"),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_a_peer_that_fails_is_counted_and_its_reason_told(kind: str) -> None:
    content, reason = ANSWERS[kind]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match=reason):
            await drive(f"http://127.0.0.1:{port}", "m", None, LOAD)
