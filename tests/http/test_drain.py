"""Shutting down: signals, the order of endings, exit codes. The server runs in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

PROGRAM = """
import asyncio, sys, time
import uvloop
from slipstream.engine.engine import Engine
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits
from slipstream.http.app import create_app
from slipstream.http.server import serve

class SlowToStart(ScriptedWorker):
    async def start(self):
        print("starting", flush=True)
        await asyncio.sleep(START_S)
        return await super().start()

async def main():
    limits = WorkerLimits(num_pages=4096, page_size=4, num_rows=64, max_model_len=4096, vocab_size=300)
    engine = Engine.on(SlowToStart(limits, Script(step_time_s=0.005)), page_size=4, chunked_prefill_size=256)
    app = create_app(engine, served_model_name="tiny")
    return await serve(
        app, engine, port=PORT, drain_timeout_s=DRAIN_S, on_ready=lambda url: print(url, flush=True)
    )

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    code = runner.run(main())
print("left", flush=True)
sys.exit(code)
"""


@asynccontextmanager
async def process(*, drain_s: float = 30, start_s: float = 0, port: int = 0) -> AsyncIterator[Any]:
    program = PROGRAM.replace("DRAIN_S", str(drain_s)).replace("START_S", str(start_s)).replace("PORT", str(port))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        program,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONASYNCIODEBUG": "0"},
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def line(child: Any) -> str:
    return (await asyncio.wait_for(child.stdout.readline(), 10)).decode().strip()


def body(num_tokens: int, *, stream: bool = True) -> dict[str, Any]:
    return {"input_ids": [5, 6], "sampling_params": {"max_tokens": num_tokens, "ignore_eos": True}, "stream": stream}


async def port_of(child: Any) -> int:
    return int((await line(child)).rpartition(":")[2])


@pytest.mark.timeout(40)
async def test_sigterm_lets_live_streams_finish_refuses_new_ones_and_exits_zero(connect: Any) -> None:
    async with process() as child:
        assert await line(child) == "starting"
        port = await port_of(child)
        live = await connect(port)
        await live.send("POST", "/generate", body(200))
        await live.read_until(lambda answer: answer.body.count(b"data:") > 3)
        kept = await connect(port)
        await kept.send("GET", "/ready")
        assert (await kept.answer()).status == 200
        child.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)  # long before the stream is over, which takes a second
        for path, code in (("/ready", 503), ("/health", 200)):
            probe = await connect(port)
            await probe.send("GET", path)
            assert (await probe.answer()).status == code
        late = await connect(port)
        await late.send("POST", "/generate", body(5))
        refused = await late.answer()
        assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        events = (await live.answer()).events
        assert sum(len(event["output_ids"]) for event in events[:-1]) == 200
        assert events[-1] == "[DONE]"
        assert await line(child) == "left"
        assert await child.wait() == 0


@pytest.mark.timeout(40)
async def test_what_does_not_finish_in_time_gets_an_error_event(connect: Any) -> None:
    async with process(drain_s=0.2) as child:
        assert await line(child) == "starting"
        port = await port_of(child)
        stream, whole = await connect(port), await connect(port)
        await stream.send("POST", "/generate", body(4000))
        await whole.send("POST", "/generate", body(4000, stream=False))
        await stream.read_until(lambda answer: answer.body.count(b"data:") > 3)
        child.send_signal(signal.SIGTERM)
        answer = await stream.answer()
        assert answer.complete
        assert answer.events[-1]["error"]["code"] == "draining"
        assert (await whole.answer()).json["error"]["code"] == "draining"
        assert await child.wait() == 0


@pytest.mark.timeout(40)
async def test_ctrl_c_does_not_wait_for_streams(connect: Any) -> None:
    async with process() as child:
        assert await line(child) == "starting"
        port = await port_of(child)
        streams = [await connect(port) for _ in range(8)]
        for stream in streams:
            await stream.send("POST", "/generate", body(1500))
            await stream.read_until(lambda answer: answer.body.count(b"data:") > 3)
        child.send_signal(signal.SIGINT)
        sent_at = time.monotonic()
        for stream in streams:
            assert (await stream.answer()).events[-1]["error"]["code"] == "draining"
        assert await child.wait() == 0
        assert time.monotonic() - sent_at < 2


@pytest.mark.timeout(40)
async def test_a_second_signal_ends_at_once(connect: Any) -> None:
    async with process() as child:
        assert await line(child) == "starting"
        port = await port_of(child)
        stream = await connect(port)
        await stream.send("POST", "/generate", body(4000))
        await stream.read_until(lambda answer: answer.body.count(b"data:") > 3)
        child.send_signal(signal.SIGTERM)
        probe = await connect(port)
        status = 200
        while status == 200:
            await probe.send("GET", "/ready")
            status = (await probe.answer()).status
            probe._answer.complete = False
        child.send_signal(signal.SIGTERM)
        sent_at = time.monotonic()
        assert await child.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - sent_at < 2


@pytest.mark.timeout(40)
async def test_a_signal_during_the_start_stops_it(connect: Any, unused_port: int) -> None:
    async with process(start_s=60, port=unused_port) as child:
        assert await line(child) == "starting"
        probe = await connect(unused_port)
        await probe.send("GET", "/health")
        assert (await probe.answer()).status == 200
        child.send_signal(signal.SIGTERM)
        assert await line(child) == "left"
        assert await child.wait() == 0
