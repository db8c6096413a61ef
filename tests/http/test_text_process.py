"""Large bodies through the text process: the same answers, limits without it, and the pace of everybody else."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from slipstream.engine.errors import MisuseError, Overloaded, RequestError
from slipstream.engine.scripted_worker import Script
from slipstream.http.child_process import ChildProcess
from slipstream.http.failures import Refused
from slipstream.http.intake import INLINE_BYTES
from slipstream.http.settings import FrontSettings
from slipstream.http.text_process import TextProcess

pytestmark = pytest.mark.timeout(60)
WORDS = "the stream slips past the stones " * 2000  # 66 kB
BIG: dict[str, Any] = {"num_pages": 60_000, "max_model_len": 200_000}


@pytest.fixture
async def text_process(tokenizer: Any) -> AsyncIterator[TextProcess]:
    process = TextProcess()
    await process.start(tokenizer, tokenizer.chat_template)
    yield process
    await process.aclose()


def child_of(process: TextProcess) -> ChildProcess:
    assert process._child is not None
    return process._child


async def killed(child: ChildProcess) -> None:
    os.kill(child.pid, signal.SIGKILL)
    await child.wait(5)


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """A large body for every endpoint that takes prompts."""
    chat = [{"role": ("user", "assistant")[index % 2], "content": f"line {index}"} for index in range(2000)]
    ids = [index % 250 + 2 for index in range(20_000)]
    few = {"max_tokens": 2, "ignore_eos": True, "seed": 1}
    sampling = {"sampling_params": few}
    return [
        ("/v1/completions", {"prompt": WORDS, **few}),
        ("/v1/completions", {"prompt": [WORDS, "the"], **few}),
        ("/v1/completions", {"prompt": ids, **few}),
        ("/v1/chat/completions", {"messages": chat, **few}),
        ("/v1/responses", {"input": WORDS, "max_output_tokens": 2, "temperature": 0}),
        ("/generate", {"text": WORDS, **sampling}),
        ("/generate", {"input_ids": [ids], **sampling}),
        ("/tokenize", {"prompt": WORDS}),
        ("/tokenize", {"messages": chat}),
    ]


def said(answer: Any) -> Any:
    """What an answer says, without what differs from request to request."""
    told = answer.json
    if isinstance(told, list):
        return [(each["output_ids"], each["meta_info"]["prompt_tokens"]) for each in told]
    if "meta_info" in told:
        return told["output_ids"], told["meta_info"]["prompt_tokens"]
    if "output" in told:
        return told["usage"]  # it has no seed
    return told.get("choices"), told.get("usage", {}).get("prompt_tokens"), told.get("tokens")


async def test_every_large_body_gets_the_answer_that_it_gets_inline(serving: Any, text_process: TextProcess) -> None:
    engine_settings = {"prefix_cache": False, "chunked_prefill_size": 8192}
    async with (
        serving(Script(verifies=False), engine_settings=engine_settings, **BIG) as inline,
        serving(Script(verifies=False), engine_settings=engine_settings, text_process=text_process, **BIG) as beside,
    ):
        for number, (path, body) in enumerate(bodies(), 1):
            assert len(json.dumps(body)) > INLINE_BYTES
            here, there = await inline.post(path, body), await beside.post(path, body)
            assert here.status == there.status == 200, (path, here.body[:200], there.body[:200])
            assert said(here) == said(there), path
            assert text_process.num_jobs == number
        await beside.post("/v1/completions", {"prompt": "the", "max_tokens": 1})
        assert text_process.num_jobs == number, "small bodies stay"


async def test_what_is_wrong_with_a_large_body_is_told_as_ever(serving: Any, text_process: TextProcess) -> None:
    wrong: list[tuple[str, Any, int, str | None]] = [
        ("/v1/completions", {"prompt": WORDS, "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": WORDS, "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": [1 << 40] * 9000}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1] * 20_000, "model": "nope"}, 404, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "x" * 40_000}]}]}, 400, None),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": WORDS}]}, 400, "messages[0].role"),
        ("/v1/completions", b"{" * 40_000, 400, None),
        ("/v1/completions", b"[" + b"1," * 40_000 + b"1]", 400, None),
    ]
    async with serving(text_process=text_process) as served:
        for path, body, status, param in wrong:
            answer = await served.post(path, body)
            error = answer.json["error"]
            assert answer.status == status, (path, answer.body[:200])
            assert param is None or error["param"] == param, error
        assert text_process.num_jobs == len(wrong)
        too_long = await served.post("/v1/completions", {"prompt": WORDS})
        assert too_long.json["error"]["code"] == "context_length_exceeded"


async def test_without_it_a_megabyte_is_the_limit_and_with_it_the_setting(
    serving: Any, text_process: TextProcess
) -> None:
    body = {"prompt": "a" * 1_100_000, "max_tokens": 1}
    async with serving() as served:
        assert (await served.post("/v1/completions", body)).status == 413
    async with serving(text_process=text_process, front=FrontSettings(max_body_bytes=1_200_000)) as served:
        answer = await served.post("/v1/completions", body)
        assert answer.json["error"]["code"] == "context_length_exceeded", "it was read and encoded"
        assert (await served.post("/v1/completions", {"prompt": "a" * 1_300_000})).status == 413


async def test_while_it_starts_a_large_body_is_asked_to_come_again_and_a_small_one_is_served(serving: Any) -> None:
    async with serving(text_process=TextProcess()) as served:
        answer = await served.post("/v1/completions", {"prompt": "a" * 1_100_000, "max_tokens": 1})
        assert answer.status == 429
        assert "retry-after" in answer.headers
        assert (await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200


async def test_ready_waits_for_it(serving: Any, tokenizer: Any) -> None:
    process = TextProcess()
    async with serving(text_process=process) as served:
        starting = asyncio.create_task(process.start(tokenizer, None))
        await asyncio.sleep(0)
        answer = await served.ask("GET", "/ready")
        assert (answer.status, answer.json) == (503, {"status": "starting"})
        await starting
        assert (await served.ask("GET", "/ready")).status == 200
        await process.aclose()


async def test_sixty_four_streams_keep_their_pace_beside_huge_prompts(
    serving: Any, text_process: TextProcess, tokenizer: Any
) -> None:
    step_s = 0.02
    huge = json.dumps({"prompt": WORDS * 8, "max_tokens": 1, "temperature": "refused at the end"}).encode()
    chat = {"messages": [{"role": "user", "content": f"line {index} of the stream"} for index in range(2000)], "n": 0}
    engine_settings = {"prefix_cache": False}
    async with serving(
        Script(step_time_s=step_s, verifies=False), num_rows=80, num_pages=8192, text_process=text_process,
        engine_settings=engine_settings,
    ) as served:  # fmt: skip
        clients = [await served.connect() for _ in range(64)]
        for client in clients:
            body = {"prompt": "the", "max_tokens": 100, "ignore_eos": True, "stream": True}
            await client.send("POST", "/v1/completions", body)
        await clients[-1].read_until(lambda answer: answer.body.count(b"data:") > 3)
        loop, lags, num_heavy = asyncio.get_running_loop(), [], 0
        heavy = asyncio.gather(*[served.post("/v1/completions", huge) for _ in range(2)],
                               *[served.post("/v1/chat/completions", chat) for _ in range(2)])  # fmt: skip
        while not heavy.done():
            before = loop.time()
            await asyncio.sleep(0.001)
            lags.append(loop.time() - before - 0.001)
            num_heavy += 1
        assert [answer.status for answer in heavy.result()] == [400] * 4
        assert text_process.num_jobs == 4
        await asyncio.gather(*[client.answer() for client in clients])
    served.engine.proves_laws = False
    lags.sort()
    assert lags[len(lags) // 2] < step_s / 2
    assert lags[-1] < 0.15, "half a megabyte of text holds the loop for longer than this if it is encoded there"


async def test_a_child_that_dies_fails_its_job_and_is_replaced(text_process: TextProcess) -> None:
    raw = json.dumps({"prompt": WORDS * 4}).encode()
    first = child_of(text_process).pid
    job = asyncio.create_task(text_process.take_in("completions", raw), name="job")
    await asyncio.sleep(0.01)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(Overloaded, match="lost"):
        await job
    body, prompts = await text_process.take_in("completions", raw)
    assert (len(prompts), getattr(body, "prompt", None)) == (1, "")
    assert child_of(text_process).pid != first
    assert text_process.num_deaths == 1


async def test_a_child_that_dies_while_it_starts_is_replaced_for_the_next_job(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is ready by then and answers everybody else: it must not go down with its text process."""
    process = TextProcess()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        await process.start(tokenizer, tokenizer.chat_template)
    assert process.is_ready
    assert process.num_deaths == 1
    _, prompts = await process.take_in("completions", json.dumps({"prompt": WORDS}).encode())
    assert len(prompts[0]) > 1000
    await process.aclose()


async def test_a_child_that_took_its_pipe_with_it_is_replaced_for_the_next_job(text_process: TextProcess) -> None:
    child = child_of(text_process)
    child.writer.transport.close()
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await text_process.take_in("tokenize", b'{"prompt": "the"}')
    _, prompts = await text_process.take_in("tokenize", b'{"prompt": "the"}')
    assert prompts


async def test_a_job_that_is_cancelled_leaves_no_answer_behind(text_process: TextProcess) -> None:
    job = asyncio.create_task(text_process.take_in("completions", json.dumps({"prompt": WORDS}).encode()), name="job")
    await asyncio.sleep(0.005)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    _, prompts = await text_process.take_in("tokenize", b'{"prompt": "the"}')
    assert len(prompts[0]) <= 3


async def test_a_job_that_is_cancelled_while_a_child_starts_leaves_no_answer_behind(text_process: TextProcess) -> None:
    """Else each job after it would be given the answer of the one before: one client's prompt to another."""
    raw = b'{"prompt": "the"}'
    expected = await text_process.take_in("tokenize", raw)
    for pause_s in (0.0, 0.01, 0.05, 0.2):
        await killed(child_of(text_process))
        job = asyncio.create_task(text_process.take_in("tokenize", raw), name="job")
        await asyncio.sleep(pause_s)
        job.cancel()
        await asyncio.wait([job])
        assert await text_process.take_in("tokenize", raw) == expected
        with pytest.raises(RequestError, match="nope"):
            await text_process.take_in("tokenize", b'{"nope": 1}')


async def test_a_child_that_died_with_nothing_to_do_is_replaced_unnoticed(text_process: TextProcess) -> None:
    await killed(child_of(text_process))
    _, prompts = await text_process.take_in("tokenize", b'{"prompt": "the"}')
    assert prompts
    assert text_process.num_deaths == 1


async def test_a_child_that_hangs_is_replaced(text_process: TextProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of(text_process)
    os.kill(child.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.http.text_process.JOB_TIMEOUT_S", 0.2)
        with pytest.raises(Overloaded, match="lost"):
            await text_process.take_in("tokenize", b'{"prompt": "the"}')
    assert child.returncode == -signal.SIGKILL
    _, prompts = await text_process.take_in("tokenize", b'{"prompt": "the"}')
    assert prompts


async def test_large_requests_whose_clients_have_gone_hold_up_nobody(serving: Any, text_process: TextProcess) -> None:
    body = {"prompt": WORDS, "user": "x" * 500_000}
    async with serving(text_process=text_process) as served:
        child = child_of(text_process)
        os.kill(child.pid, signal.SIGSTOP)
        clients = [await served.connect() for _ in range(5)]
        for client in clients:
            await client.send("POST", "/v1/completions", body)
        while text_process._num_waiting_bytes < 5 * len(json.dumps(body)):
            await asyncio.sleep(0.005)
        for client in clients:
            client.reset()
        await asyncio.sleep(0.05)
        os.kill(child.pid, signal.SIGCONT)
        told = (await served.post("/v1/completions", body)).json["error"]["code"]
        assert told == "context_length_exceeded", "it was read and encoded"
        assert text_process.num_jobs == 2, "the one that was under way, and the one that is wanted"


async def test_it_is_closed_while_a_job_is_under_way(text_process: TextProcess) -> None:
    job = asyncio.create_task(text_process.take_in("completions", json.dumps({"prompt": WORDS}).encode()), name="job")
    await asyncio.sleep(0.001)
    await text_process.aclose()
    with pytest.raises((Overloaded, MisuseError)):
        await job
    assert text_process.num_deaths == 0


async def test_too_much_waiting_is_refused_and_a_closed_process_takes_nothing(
    text_process: TextProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.http.text_process.MAX_WAITING_BYTES", 100)
    with pytest.raises(Overloaded):
        await text_process.take_in("completions", b"x" * 101)
    with pytest.raises(RequestError, match="prompt"):
        await text_process.take_in("completions", b"{}")
    with pytest.raises(Refused):
        await text_process.take_in("completions", b"[]")
    with pytest.raises(MisuseError, match="KeyError"):
        await text_process.take_in("no such endpoint", b"{}")
    child = text_process._child
    await text_process.aclose()
    assert child is not None
    assert child.returncode == 0, "it ends when its input does"
    with pytest.raises(MisuseError):
        await text_process.take_in("completions", b"{}")


async def test_it_ends_with_its_parent(tokenizer: Any) -> None:
    process = TextProcess()
    await process.start(tokenizer, None)
    child = child_of(process)
    child.writer.close()  # what the parent's death does
    assert await child.wait(5) == 0
    await process.aclose()


async def test_its_start_leaves_the_memory_of_the_server_as_it_is() -> None:
    """After a fork each page that is written to is copied first: the loop pays for that with streams under way."""
    page_size, num_pages = resource.getpagesize(), 4000
    memory = bytearray(page_size * num_pages)
    for at in range(0, len(memory), page_size):
        memory[at] = 1
    child = await ChildProcess.start([sys.executable, "-c", "input()"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for at in range(0, len(memory), page_size):
        memory[at] = 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < num_pages / 4
    with pytest.raises(TimeoutError):
        await child.wait(0.05)
    assert child.returncode is None
    await child.kill()
    await child.kill()
    assert child.returncode == -signal.SIGKILL


async def test_a_program_that_is_not_there_is_an_error_and_leaves_no_socket() -> None:
    with pytest.raises(FileNotFoundError):
        await ChildProcess.start(["/no/such/program"])


@pytest.mark.parametrize("pause_s", [0.0, 0.005, 0.05])
async def test_a_start_that_is_cancelled_leaves_no_process_and_its_socket_to_nobody_else(
    pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen, end = subprocess.Popen, socket.socketpair
    ends: list[socket.socket] = []

    def slow(command: Any, *, stdin: int, **options: Any) -> subprocess.Popen[bytes]:
        time.sleep(0.02)
        assert os.fstat(stdin).st_ino == os.fstat(ends[1].fileno()).st_ino, "it is still the child's own"
        started.append(popen(command, stdin=stdin, **options))
        return started[-1]

    def pair() -> tuple[socket.socket, socket.socket]:
        ends.extend(end())
        return ends[0], ends[1]

    monkeypatch.setattr(subprocess, "Popen", slow)
    monkeypatch.setattr(socket, "socketpair", pair)
    task = asyncio.create_task(ChildProcess.start(["/bin/sleep", "60"]), name="start")
    await asyncio.sleep(pause_s)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        await task.result().kill()
    monkeypatch.undo()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not (pause_s == 0.0 or (started and started[0].poll() is not None)):
        await asyncio.sleep(0.01)
    assert all(process.poll() is not None for process in started)
    assert pause_s == 0.0 or started
