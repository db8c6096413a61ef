"""Streams: begun by the first `anext`, ended once, never left running by accident."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Awaitable

import pytest

from slipstream import SamplingParams
from slipstream.engine import engine as engine_module
from slipstream.engine.errors import MisuseError, RequestCancelled, RequestError, StepFailed
from slipstream.engine.outputs import Cancelled, Sink, Usage
from slipstream.engine.scripted_worker import Script
from slipstream.engine.token_stream import TokenStream

LONG = SamplingParams(max_tokens=200, seed=1)


async def test_a_stream_is_the_whole_answer_in_pieces_and_then_over(scripted) -> None:
    async with scripted() as engine:
        whole = await engine.complete([1, 2], SamplingParams(max_tokens=9, seed=1))
        stream = engine.generate([1, 2], SamplingParams(max_tokens=9, seed=1))
        deltas = [delta async for delta in stream]
        assert tuple(token_id for delta in deltas for token_id in delta.token_ids) == whole.token_ids
        assert [delta.finished is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_stream_that_nobody_iterates_starts_nothing(scripted) -> None:
    async with scripted() as engine:
        stream = engine.generate([1], LONG)
        assert not engine._scheduler.has_work()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_refused_request_raises_at_the_first_delta(scripted) -> None:
    async with scripted() as engine:
        stream = engine.generate([], LONG)
        with pytest.raises(RequestError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(RequestError, match="tokenizer"):
            await engine.complete("text")


async def test_leaving_the_with_block_aborts(scripted) -> None:
    async with scripted() as engine:
        async with engine.generate([1], LONG) as stream:
            await anext(stream)
            assert engine.stats.num_running == 1
        assert engine.stats.num_running == 0
        assert engine.num_aborted == 1


async def test_a_dropped_stream_warns_and_is_aborted(scripted, turns) -> None:
    async with scripted() as engine:
        stream = engine.generate([1], LONG, request_id="lost")
        await anext(stream)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del stream
            gc.collect()
        assert [(w.category, "lost" in str(w.message)) for w in caught] == [(ResourceWarning, True)]
        await turns(3)
        assert engine.stats.num_running == 0


async def test_a_finished_or_closed_stream_is_dropped_in_silence(scripted) -> None:
    async with scripted() as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            async for _ in engine.generate([1], SamplingParams(max_tokens=3)):
                pass
            stream = engine.generate([1], LONG)
            await anext(stream)
            await stream.aclose()
            del stream
            gc.collect()
        assert caught == []


async def test_a_stream_that_another_thread_collects_is_aborted_on_the_loop(scripted) -> None:
    async with scripted() as engine:
        stream = engine.generate([1], LONG)
        await anext(stream)
        box, aborted_on = [stream], []
        del stream
        handle = box[0]._handle
        real_abort = engine._scheduler.abort

        def abort(request):
            aborted_on.append(threading.get_ident())
            return real_abort(request)

        engine._scheduler.abort = abort
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await asyncio.to_thread(box.clear)
        while not handle.request.has_ended:
            await asyncio.sleep(0)
        assert aborted_on == [threading.get_ident()]


async def test_aclose_from_another_task_ends_a_waiting_consumer(scripted, monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "STOP_TIMEOUT_S", 0.01)
    async with scripted(Script(stuck_steps=frozenset({0}))) as engine:
        stream = engine.generate([1], LONG)
        waiting = asyncio.ensure_future(anext(stream))
        while engine.stats.num_running == 0:
            await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(RequestCancelled):
            await waiting
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_cancelling_the_wait_for_a_delta_aborts_the_request(scripted, turns) -> None:
    async with scripted() as engine:
        stream = engine.generate([1], LONG)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await turns(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert engine.stats.num_running == 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


class Submission:
    """A submit whose await the test ends."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.num_aborts = 0
        self.request_id = "r"
        self.sink: Sink | None = None

    async def __call__(self, sink: Sink) -> Submission:
        await self.may_go_on.wait()
        self.sink = sink
        return self

    def abort(self) -> None:
        self.num_aborts += 1
        assert self.sink is not None
        self.sink.end(Cancelled(usage=Usage(prompt_tokens=1, cached_tokens=0, output_tokens=0)))


async def test_a_stream_closed_while_its_prompt_is_encoded_is_aborted_once_submitted(turns) -> None:
    submission = Submission()
    stream = TokenStream(submission)
    waiting = asyncio.ensure_future(anext(stream))
    await turns(1)
    await stream.aclose()
    assert submission.num_aborts == 0
    submission.may_go_on.set()
    with pytest.raises(RequestCancelled):
        await waiting
    assert submission.num_aborts >= 1


async def test_a_second_consumer_is_refused_and_the_first_goes_on(turns) -> None:
    submission = Submission()
    stream = TokenStream(submission)
    first = asyncio.ensure_future(anext(stream))
    await turns(1)
    with pytest.raises(MisuseError, match="one consumer"):
        await anext(stream)
    submission.may_go_on.set()
    await turns(2)
    submission.sink.push([3], "x")
    assert (await first).token_ids == (3,)
    await stream.aclose()


async def test_a_failed_step_gives_its_tokens_and_then_its_error(scripted) -> None:
    async with scripted(Script(forward_faults=frozenset({4}))) as engine:
        seen: list[int] = []
        with pytest.raises(StepFailed, match="step 4"):
            async for delta in engine.generate([1], LONG):
                seen.extend(delta.token_ids)
        assert len(seen) == 4
        with pytest.raises(StepFailed, match="step"):
            await engine_that_fails_at_once(scripted)


def engine_that_fails_at_once(scripted) -> Awaitable[object]:
    async def run() -> object:
        async with scripted(Script(forward_faults=frozenset({0}))) as engine:
            return await engine.complete([1], LONG)

    return run()


async def test_each_of_many_streams_ends_right_after_its_last_token(scripted) -> None:
    """One channel a request: different lengths, none starves, none goes on waiting."""
    async with scripted(num_pages=256, num_rows=16) as engine:

        async def consume(length: int) -> int:
            count = 0
            async for delta in engine.generate([length % 31], SamplingParams(max_tokens=length, seed=length)):
                count += len(delta.token_ids)
            return count

        lengths = [1 + 3 * number for number in range(16)]
        assert await asyncio.gather(*map(consume, lengths)) == lengths
