"""A client that goes away is aborted, however it goes and whatever its request is doing; nobody else notices."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from slipstream.engine.scripted_worker import Script
from slipstream.http import connection, server
from slipstream.http.settings import FrontSettings

LONG: dict[str, Any] = {"prompt": "the stones", "max_tokens": 480, "ignore_eos": True}
SLOW = Script(step_time_s=0.002)
WAYS = ("close", "reset", "shut")


async def aborted(served: Any, count: int = 1) -> None:
    """Wait for `count` aborts, then for every page to be home."""
    async with asyncio.timeout(3):
        while served.engine.num_aborted < count:
            await asyncio.sleep(0)
    await served.idle()


async def running(served: Any, count: int = 1) -> None:
    async with asyncio.timeout(3):
        while served.engine.stats.num_running + served.engine.stats.num_waiting < count:
            await asyncio.sleep(0)


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_is_aborted_when_its_client_goes(serving: Any, way: str) -> None:
    async with serving(SLOW) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", {**LONG, "stream": True})
        await client.read_until(lambda answer: answer.body.count(b"data:") >= 3)
        getattr(client, way)()
        await aborted(served)
        assert served.engine.stats.num_output_tokens < 100


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_is_not_streamed_is_aborted_as_well(serving: Any, way: str) -> None:
    async with serving(SLOW) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", LONG)
        await running(served)
        getattr(client, way)()
        await aborted(served)
        assert served.engine.stats.num_output_tokens < 100


@pytest.mark.parametrize("way", WAYS)
async def test_a_client_whose_body_ends_in_one_large_piece_is_aborted_as_well(serving: Any, way: str) -> None:
    """The protocol stops reading behind such a piece, and nobody asks for the next one."""
    async with serving(SLOW) as served:
        client = await served.connect()
        payload = json.dumps({**LONG, "user": "x" * 150_000}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % len(payload)
        await client.send_raw(head)
        await asyncio.sleep(0.02)
        (there,) = served.server._server.server_state.connections
        there.data_received(payload)  # as it may come from a socket, in one piece
        await running(served)
        getattr(client, way)()
        await aborted(served)
        assert served.engine.stats.num_output_tokens < 100


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_has_asked_for_more_goes_as_quietly_as_others(
    serving: Any, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Behind the request that is answered stands another one, which the protocol takes for the current one."""
    async with serving(SLOW) as served:
        client = await served.connect()
        payload = json.dumps({**LONG, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % len(payload)
        with caplog.at_level(logging.INFO):
            await client.send_raw(head + payload + b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n")
            await running(served)
            client.reset()
            await aborted(served)
            await served.server.responses_written(5)
        lines = [record.getMessage() for record in caplog.records if record.name == "slipstream.http"]
        assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == []
        assert len([line for line in lines if "path=/v1/completions" in line]) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_before_the_first_token_is_aborted(serving: Any, stream: bool) -> None:
    async with serving(Script(step_time_s=0.05)) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", {**LONG, "stream": stream})
        await running(served)
        client.close()
        await aborted(served)
        assert served.engine.stats.num_output_tokens <= 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_queued_request_leaves_the_queue_with_its_client(serving: Any, stream: bool) -> None:
    async with serving(SLOW, num_pages=32, max_model_len=128) as served:
        first = await served.connect()
        await first.send("POST", "/v1/completions", {**LONG, "max_tokens": 120, "stream": True})
        await first.read_until(lambda answer: b"data:" in answer.body)
        waiting = [await served.connect() for _ in range(6)]
        for client in waiting:
            await client.send("POST", "/v1/completions", {**LONG, "max_tokens": 120, "stream": stream})
        await running(served, 7)
        for client in waiting:
            client.close()
        async with asyncio.timeout(3):
            while served.engine.num_aborted < 6:
                await asyncio.sleep(0)
        answer = await first.answer()
        assert answer.events[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
async def test_all_choices_of_all_prompts_go_together(serving: Any, stream: bool) -> None:
    async with serving(SLOW, num_pages=4096) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", {**LONG, "prompt": ["a", "b", "c"], "n": 4, "stream": stream})
        await running(served, 12)
        client.close()
        await aborted(served, 12)


async def test_a_client_that_closes_while_the_last_token_is_in_flight_leaves_nothing(serving: Any) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "ignore_eos": True}, "stream": True}
    async with serving(SLOW) as served:
        for num_frames in range(9):
            client = await served.connect()
            await client.send("POST", "/generate", body)
            await client.read_until(lambda answer, wanted=num_frames: answer.body.count(b"data:") >= wanted)
            client.close()
        await served.idle()
        assert served.engine.state.is_ready


async def test_two_hundred_killed_clients_leave_a_clean_house(serving: Any) -> None:
    async with serving(Script(step_time_s=0.001), num_pages=2048) as served:
        for wave in range(8):
            clients = [await served.connect() for _ in range(25)]
            for index, client in enumerate(clients):
                await client.send("POST", "/v1/completions", {**LONG, "stream": bool(index % 3)})
            await running(served, 25)
            for index, client in enumerate(clients):
                client.reset() if (index + wave) % 2 else client.close()
            await aborted(served, 25 * (wave + 1))
        answer = await served.post("/v1/completions", {**LONG, "max_tokens": 4})
        assert answer.json["usage"]["completion_tokens"] == 4
        metrics = (await served.ask("GET", "/metrics")).body.decode()
        assert 'slipstream:num_requests_running{model_name="tiny"} 0.0' in metrics
        assert 'slipstream:num_hang_ups_total{model_name="tiny"} 200.0' in metrics
        assert 'code="aborted"' not in metrics, "nobody was aborted but by hanging up"


async def test_a_kept_connection_serves_one_request_after_another(serving: Any) -> None:
    async with serving() as served:
        client = await served.connect()
        for stream in (True, False, True):
            await client.send("POST", "/v1/completions", {**LONG, "max_tokens": 3, "stream": stream})
            answer = await client.answer()
            assert answer.status == 200
            assert answer.complete
            client._answer.complete = False
        assert served.engine.num_aborted == 0


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room in the kernel, so that a test notices a slow reader early."""
    monkeypatch.setattr(connection, "SOCKET_BUFFER_BYTES", 4096)
    monkeypatch.setattr(connection, "WRITE_BUFFER_BYTES", 4096)


FLOOD = {
    "input_ids": [list(range(1, 250))] * 16,
    "sampling_params": {"max_tokens": 250, "ignore_eos": True},
    "stream": True,
}


@pytest.mark.usefixtures("small_buffers")
async def test_a_reader_that_stops_is_cut_off_and_the_others_never_wait(serving: Any) -> None:
    front = FrontSettings(write_timeout_s=0.3)
    async with serving(num_pages=8192, front=front) as served:
        stuck = await served.connect(receive_buffer=4096)
        await stuck.send("POST", "/generate", FLOOD)
        await running(served, 16)
        others = [await served.connect() for _ in range(4)]
        for client in others:
            await client.send("POST", "/v1/completions", {**LONG, "max_tokens": 200, "stream": True})
        for client in others:
            assert (await client.answer()).events[-1] == "[DONE]"
        cut = 'num_write_timeouts_total{model_name="tiny"} 1.0'
        async with asyncio.timeout(5):
            while cut not in (await served.ask("GET", "/metrics")).body.decode():
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("small_buffers")
async def test_a_reader_that_the_kernel_gives_up_is_counted_as_cut_off_too(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "set_up_listener", lambda sock, _: connection.set_up_listener(sock, 0.3))
    async with serving(num_pages=8192) as served:
        stuck = await served.connect(receive_buffer=4096)
        await stuck.send("POST", "/generate", FLOOD)
        cut = 'num_write_timeouts_total{model_name="tiny"} 1.0'
        async with asyncio.timeout(8):
            while cut not in (await served.ask("GET", "/metrics")).body.decode():
                await asyncio.sleep(0.02)


@pytest.mark.usefixtures("small_buffers")
async def test_a_slow_reader_gets_everything_in_fewer_frames(serving: Any) -> None:
    async with serving(num_pages=8192) as served:
        slow = await served.connect(receive_buffer=4096)
        await slow.send("POST", "/generate", FLOOD)
        await running(served, 16)
        await served.idle()  # everything is generated before the client reads on
        *frames, done = (await slow.answer()).events
    assert done == "[DONE]"
    assert sum(len(frame["output_ids"]) for frame in frames) == 16 * 250
    assert len(frames) < 16 * 250 / 2, "hardly anything was coalesced"
