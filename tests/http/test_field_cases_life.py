"""A server's life as operators met it: ready before it was, half alive after a fault, memory that grew with requests."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.engine import Engine
from slipstream.engine.scripted_worker import Script
from slipstream.http.app import create_app
from slipstream.http.server import HttpServer

PROGRAM = """
import asyncio, sys
import uvloop
from slipstream.engine.engine import Engine
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits
from slipstream.http.app import create_app
from slipstream.http.server import serve

async def main():
    limits = WorkerLimits(num_pages=16384, page_size=4, num_rows=64, max_model_len=4096, vocab_size=300)
    script = Script(step_time_s=0.004, verifies=False, deadly_steps=frozenset(DEADLY))
    engine = Engine.on(ScriptedWorker(limits, script), page_size=4, chunked_prefill_size=256)
    app = create_app(engine, served_model_name="tiny")
    return await serve(app, engine, port=0, drain_timeout_s=5, on_ready=lambda url: print(url, flush=True))

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    code = runner.run(main())
sys.exit(code)
"""
IDS: dict[str, Any] = {"input_ids": [5, 6], "stream": True}


@asynccontextmanager
async def serving_process(*, deadly: tuple[int, ...] = ()) -> AsyncIterator[tuple[Any, int]]:
    """A server in a process of its own, and its port."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM.replace("DEADLY", repr(list(deadly))), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, env={**os.environ, "PYTHONASYNCIODEBUG": "0"},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        url = (await asyncio.wait_for(child.stdout.readline(), 15)).decode().strip()
        yield child, int(url.rpartition(":")[2])
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def body(num_tokens: int) -> dict[str, Any]:
    return {**IDS, "sampling_params": {"max_tokens": num_tokens, "ignore_eos": True}}


@pytest.mark.timeout(60)
async def test_a_fault_of_the_device_ends_every_stream_with_an_error_and_then_the_process(connect: Any) -> None:
    async with serving_process(deadly=(60,)) as (child, port):
        streams = [await connect(port) for _ in range(64)]
        for stream in streams:
            await stream.send("POST", "/generate", body(2000))
        answers = [await stream.answer() for stream in streams]
        assert all(answer.complete for answer in answers), "error endings, not broken bodies"
        assert [answer.events[-1]["error"]["code"] for answer in answers] == ["engine_dead"] * 64
        assert any(len(answer.events) > 3 for answer in answers)
        assert await asyncio.wait_for(child.wait(), 10) == 70, "its supervisor starts it anew"


@pytest.mark.timeout(60)
async def test_sixty_four_streams_are_finished_before_a_server_leaves(connect: Any) -> None:
    async with serving_process() as (child, port):
        streams = [await connect(port) for _ in range(64)]
        for stream in streams:
            await stream.send("POST", "/generate", body(150))
            await stream.read_until(lambda answer: b"data:" in answer.body)
        child.send_signal(signal.SIGTERM)
        answers = [await stream.answer() for stream in streams]
        assert {answer.events[-1] for answer in answers} == {"[DONE]"}
        assert {sum(len(event["output_ids"]) for event in answer.events[:-1]) for answer in answers} == {150}
        assert await asyncio.wait_for(child.wait(), 10) == 0


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model's shape without weights, which are made up at the start."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.timeout(120)
async def test_a_server_is_live_at_once_and_ready_only_after_real_forwards(
    model_folder: Path, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first forward of the warm-up is held up: until it has passed nobody is told to send requests."""
    from slipstream.engine.models.llama import LlamaForCausalLM  # imports torch

    begun, may_go_on, modes = threading.Event(), threading.Event(), []
    real = LlamaForCausalLM.forward

    def forward(self: Any, batch: Any, *rest: Any) -> Any:
        begun.set()
        assert may_go_on.wait(30)
        modes.append(batch)
        return real(self, batch, *rest)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    engine = Engine(
        model=str(model_folder), load_format="dummy", device="cpu", dtype="float32", cpu_threads=1,
        skip_tokenizer=True, max_total_tokens=256, max_running_requests=4,
    )  # fmt: skip

    async def status(method: str, path: str, sent: Any = None) -> int:
        client = await connect(server.port)
        await client.send(method, path, sent)
        return int((await client.answer()).status)

    async with HttpServer(create_app(engine), port=0) as server:
        starting = asyncio.ensure_future(engine.start())
        try:
            seen = set()
            while not begun.is_set():
                seen.add((await status("GET", "/health"), await status("GET", "/ready")))
                await asyncio.sleep(0.01)
            for _ in range(3):
                seen.add((await status("GET", "/health"), await status("GET", "/ready")))
            assert seen == {(200, 503)}
            assert await status("POST", "/generate", {"input_ids": [5]}) == 503
            assert not starting.done()
            may_go_on.set()
            await starting
            assert len(modes) >= 2, "prefill and decode"
            assert await status("GET", "/ready") == 200
            few = {"input_ids": [5], "sampling_params": {"max_tokens": 3}}
            assert await status("POST", "/generate", few) == 200
        finally:
            may_go_on.set()
            await asyncio.wait([starting])
            await engine.aclose()


@pytest.mark.timeout(60)
async def test_the_memory_of_a_server_does_not_grow_with_its_requests(serving: Any) -> None:
    """Streamed and whole, refused and hung up; the slope of what is allocated, after a warm-up."""
    async with serving(Script(verifies=False), num_pages=1024) as served:
        served.engine._loop._after_commit = None  # the proof of the laws takes its time

        async def one_client(number: int) -> None:
            client = await served.connect()
            for turn in range(12):
                kind = (number + turn) % 4
                asked = {"prompt": [number % 250, turn % 250, 3], "max_tokens": 3, "ignore_eos": True}
                more = ({"stream": True}, {}, {"temperature": "hot"}, {"max_tokens": 300, "stream": True})[kind]
                await client.send("POST", "/v1/completions", {**asked, **more})
                if kind == 3:
                    await client.read_until(lambda answer: b"data:" in answer.body)
                    client.reset()
                    client = await served.connect()
                else:
                    answer = await client.answer()
                    assert answer.status == (400 if kind == 2 else 200)
                    answer.complete = False
            client.close()

        blocks = []
        for _ in range(5):
            await asyncio.gather(*[one_client(number) for number in range(50)])
            await served.idle()
            for client in served.clients:
                client.close()
            served.clients.clear()
            served.engine.flush_cache()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        assert blocks[-1] - blocks[1] < 1500, f"1,800 requests, allocated blocks {blocks}"
        assert not asyncio.all_tasks() - {asyncio.current_task()} - served_tasks()


def served_tasks() -> set[asyncio.Task[Any]]:
    """Those of the engine and of the server itself."""
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("slipstream")}


async def test_the_gap_between_tokens_is_told_at_the_scheduler_and_at_the_socket(serving: Any) -> None:
    """So that an operator sees whether text processing or the device is what clients wait for."""
    async with serving(Script(step_time_s=0.004)) as served:
        asked = {"prompt": "the", "max_tokens": 40, "ignore_eos": True, "stream": True}
        await asyncio.gather(*[served.post("/v1/completions", asked) for _ in range(8)])
        lines = (await served.ask("GET", "/metrics")).body.decode().splitlines()
    label = '{model_name="tiny"}'
    told = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
    for name in ("inter_token_latency_seconds", "scheduler_inter_token_latency_seconds"):
        mean = told[f"slipstream:{name}_sum{label}"] / told[f"slipstream:{name}_count{label}"]
        assert 0.003 < mean < 0.05, name
