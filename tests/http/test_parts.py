"""The front's parts by themselves: fan-out, frames, histograms, and a stream under a server that is not ours."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from time import perf_counter
from typing import Any

import pytest
from starlette.applications import Starlette

from slipstream.engine.errors import EngineDead, MisuseError, Overloaded, RequestError, StepFailed
from slipstream.engine.outputs import Usage
from slipstream.http.bodies import ChatBody
from slipstream.http.connection import ARRIVED_AT, arrival
from slipstream.http.failures import Aborted, Refused, failure_of
from slipstream.http.fan_out import SLICE_STREAMS, FanOut
from slipstream.http.frames import TEXT, template
from slipstream.http.metrics import Histogram
from slipstream.http.openai_chat import ChatShape
from slipstream.http.settings import FrontSettings
from slipstream.http.step_times import StepTimes
from slipstream.http.stream_interval import StreamInterval
from slipstream.http.turnstile import AT_ONCE, PATIENCE, Turnstile


class Written:
    """A stream, and the transport that it is written to."""

    def __init__(self, log: list[tuple[str, int]], number: int, *, fails_at: str = "") -> None:
        self._log, self._number, self._fails_at = log, number, fails_at
        self.transport = self

    def render(self, now: float) -> bytes:
        self._note("render")
        return b"frame"

    def write(self, data: bytes) -> None:
        assert data == b"frame"
        self._note("write")

    def _note(self, what: str) -> None:
        self._log.append((what, self._number))
        if self._fails_at == what:
            raise ValueError(f"this stream cannot {what}")


async def test_fan_out_writes_in_order_and_leaves_turns_between_slices() -> None:
    log: list[tuple[str, int]] = []
    fan_out = FanOut(Histogram((1.0,)), StreamInterval("1", StepTimes()))
    for number in range(3 * SLICE_STREAMS):
        fan_out.schedule(Written(log, number))
    assert log == [], "nothing is written inside the step loop's call"
    turns = 0
    while len(log) < 6 * SLICE_STREAMS:
        before = len(log)
        await asyncio.sleep(0)
        turns += 1
        assert len(log) - before <= 2 * SLICE_STREAMS
    assert [number for what, number in log if what == "write"] == list(range(3 * SLICE_STREAMS))
    assert turns >= 3
    fan_out.schedule(Written(log, -1))
    await asyncio.sleep(0)
    assert log[-1] == ("write", -1), "it runs again after it was empty"


async def test_a_slice_is_rendered_before_any_of_it_is_written() -> None:
    log: list[tuple[str, int]] = []
    fan_out = FanOut(Histogram((1.0,)), StreamInterval("1", StepTimes()))
    for number in range(SLICE_STREAMS):
        fan_out.schedule(Written(log, number))
    await asyncio.sleep(0)
    assert [what for what, _ in log] == ["render"] * SLICE_STREAMS + ["write"] * SLICE_STREAMS


@pytest.mark.parametrize("fails_at", ["render", "write"])
async def test_a_stream_that_fails_does_not_silence_the_others(caplog: pytest.LogCaptureFixture, fails_at: str) -> None:
    log: list[tuple[str, int]] = []
    fan_out = FanOut(Histogram((1.0,)), StreamInterval("1", StepTimes()))
    for number in range(4):
        fan_out.schedule(Written(log, number, fails_at=fails_at if number == 1 else ""))
    with caplog.at_level(logging.ERROR, "slipstream.http"):
        await asyncio.sleep(0)
    assert [number for what, number in log if what == "write" and number != 1] == [0, 2, 3]
    assert f"this stream cannot {fails_at}" in caplog.text


def test_a_template_is_cut_at_the_text_even_if_an_id_looks_like_it() -> None:
    cut = template({"id": TEXT, "text": TEXT, "end": 1})
    frame = cut.head + json.dumps('a "quoted" text\n').encode() + cut.tail
    assert json.loads(frame.removeprefix(b"data: ")) == {"id": TEXT, "text": 'a "quoted" text\n', "end": 1}
    assert frame.endswith(b"\n\n")


def test_a_frame_by_template_is_the_frame_that_the_shape_renders() -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "stream": True})
    shape = ChatShape(body, response_id="chatcmpl-1", model="m")
    cut = shape.text(3)
    assert cut is not None
    assert cut.head + b'"word"' + cut.tail == shape.frame(
        3, "word", lambda: Usage(prompt_tokens=1, cached_tokens=0, output_tokens=1)
    )


def test_a_histogram_counts_into_the_bucket_that_holds_the_value() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    buckets, total = histogram.cumulative()
    assert buckets == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert total == pytest.approx(7.65)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("bad", param="x"), 400, "invalid_value"),
        (RequestError("long", param="prompt", code="context_length_exceeded"), 400, "context_length_exceeded"),
        (Overloaded("full", retry_after_s=2.6), 429, "overloaded"),
        (Overloaded("bye", draining=True), 503, "draining"),
        (StepFailed("oom"), 500, "step_failed"),
        (EngineDead("gone"), 503, "engine_dead"),
        (Aborted(), 503, "aborted"),
        (Refused(413, "big", code="body_too_large"), 413, "body_too_large"),
        (MisuseError("a bug with /secret/paths"), 500, "internal_error"),
        (KeyError("x"), 500, "internal_error"),
    ],
)
def test_every_error_has_its_row(error: Exception, status: int, code: str) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.code) == (status, code)
    told = json.loads(failure.body())["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert "secret" not in told["message"]
    assert ("retry-after" in failure.headers) == isinstance(error, Overloaded)


class Asgi:
    """One request to an app by plain ASGI, as a server that is not ours makes it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.sent = b""
        self.is_over = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self._requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._gone = asyncio.Event()
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": [], "client": ("x", 1), "server": ("y", 2),
        }  # fmt: skip

    async def receive(self) -> dict[str, Any]:
        if self._requests:
            return self._requests.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        self.sent += message.get("body", b"")

    def hang_up(self) -> None:
        self._gone.set()


async def call(app: Starlette, asgi: Asgi) -> None:
    await app(asgi.scope, asgi.receive, asgi.send)  # type: ignore[arg-type]


async def test_a_stream_is_whole_under_any_asgi_server(serving: Any) -> None:
    asked = {"prompt": "the", "max_tokens": 20, "ignore_eos": True, "seed": 1}
    async with serving(front=FrontSettings(ping_interval_s=0.01)) as served:
        asgi = Asgi({**asked, "stream": True})
        await asyncio.wait_for(call(served.server._config.app, asgi), 5)
        whole = (await served.post("/v1/completions", asked)).json["choices"][0]["text"]
    events = [block[6:] for block in asgi.sent.decode().split("\n\n") if block.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


async def test_a_disconnect_under_any_asgi_server_aborts(serving: Any) -> None:
    async with serving() as served:
        asgi = Asgi({"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True})
        task = asyncio.create_task(call(served.server._config.app, asgi), name="call")
        while asgi.sent.count(b"data:") < 3:
            await asyncio.sleep(0)
        asgi.hang_up()
        await asyncio.wait_for(task, 5)
        assert served.engine.num_aborted == 1


async def test_a_cancelled_handler_leaves_nothing_running(serving: Any) -> None:
    async with serving() as served:
        for stream in (True, False):
            asgi = Asgi({"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": stream})
            task = asyncio.create_task(call(served.server._config.app, asgi), name="call")
            while not served.engine.stats.num_running:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await served.idle()
        assert served.engine.num_aborted == 2


async def test_writes_that_wait_let_text_pile_up_and_then_join_it(serving: Any) -> None:
    async with serving() as served:
        asgi = Asgi({"prompt": "the", "max_tokens": 100, "ignore_eos": True, "seed": 3, "stream": True})
        task = asyncio.create_task(call(served.server._config.app, asgi), name="call")
        while not asgi.sent:
            await asyncio.sleep(0)
        asgi.writable.clear()
        await served.idle()
        asgi.writable.set()
        await asyncio.wait_for(task, 5)
    assert asgi.sent.endswith(b"data: [DONE]\n\n")
    assert asgi.sent.count(b"data:") < 50


async def test_too_much_piled_up_text_ends_the_stream(serving: Any) -> None:
    async with serving(front=FrontSettings(max_pending_chars=50)) as served:
        asgi = Asgi({"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True})
        task = asyncio.create_task(call(served.server._config.app, asgi), name="call")
        while not asgi.sent:
            await asyncio.sleep(0)
        asgi.writable.clear()
        while served.engine.stats.num_output_tokens < 200:
            await asyncio.sleep(0)
        asgi.writable.set()
        await asyncio.wait_for(task, 5)
        assert b"[DONE]" not in asgi.sent
        assert served.engine.num_aborted == 1


async def test_a_request_says_one_line_in_the_log_without_its_prompt(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        with caplog.at_level(logging.INFO, "slipstream.http"):
            await served.post("/v1/completions", {"prompt": "a secret", "max_tokens": 1}, x_request_id="abc")
            await served.idle()
    lines = [record.getMessage() for record in caplog.records if record.name == "slipstream.http"]
    assert len(lines) == 1
    assert lines[0].startswith("request_id=abc path=/v1/completions status=200 seconds=")
    assert "secret" not in caplog.text


class Clock:
    """Time that passes only as work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("num_busy_turns", [0, 5, 10_000])
async def test_a_burst_enters_a_few_at_a_time_in_order_when_nothing_waits_or_it_has_waited_long_enough(
    num_busy_turns: int,
) -> None:
    clock, entered, at = Clock(), list[int](), list[float]()
    num_left = 0

    def is_busy() -> bool:
        nonlocal num_left
        if num_left == 0:
            return False
        num_left -= 1
        clock.now += 0.125
        return True

    def enter(number: int) -> None:
        nonlocal num_left
        entered.append(number)
        at.append(clock.now)
        clock.now += 0.25
        num_left = num_busy_turns

    turnstile = Turnstile(is_busy, clock=clock)
    num_all = 4 * AT_ONCE + 1
    for burst in range(2):
        entered.clear()
        at.clear()
        for number in range(num_all):
            turnstile.enter(functools.partial(enter, number))
        assert entered == list(range(AT_ONCE)), "the first do not wait, after a burst neither"
        while len(entered) < num_all:
            before = len(entered)
            await asyncio.sleep(0)
            assert len(entered) - before <= AT_ONCE
        assert entered == list(range(num_all)), burst
        pauses = [at[index] - at[index - 1] - 0.25 for index in range(AT_ONCE, num_all, AT_ONCE)]
        assert pauses == [min(0.125 * num_busy_turns, PATIENCE * 0.25 * AT_ONCE)] * len(pauses)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_few_requests_enter_at_once_turn_after_turn() -> None:
    entered: list[int] = []
    turnstile = Turnstile()
    for number in range(5 * (AT_ONCE - 1)):
        turnstile.enter(functools.partial(entered.append, number))
        assert entered[-1] == number
        if number % (AT_ONCE - 1) == AT_ONCE - 2:
            await asyncio.sleep(0)
            await asyncio.sleep(0)


async def test_a_probe_does_not_wait_behind_a_burst(serving: Any) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    async with serving(num_pages=2048) as served:
        clients = [await served.connect() for _ in range(8 * AT_ONCE)]
        probe = await served.connect()
        for client in clients:
            await client.send("POST", "/generate", body)
        await probe.send("GET", "/health")
        assert (await probe.answer()).status == 200
        num_submitted = served.engine.stats.num_prompt_tokens // 3 + served.engine.stats.num_waiting
        assert num_submitted < len(clients)
        assert served.engine.has_more_coming()
        for client in clients:
            assert (await client.answer()).status == 200
        assert not served.engine.has_more_coming()


def test_a_request_arrives_when_its_head_is_there_not_when_its_turn_comes() -> None:
    assert arrival({ARRIVED_AT: 12.5}) == 12.5
    before = perf_counter()
    assert before <= arrival({}) <= perf_counter(), "another server tells no time"
