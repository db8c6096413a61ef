"""Aborts, wherever they strike: one end at once, nobody else hurt, everything home."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.errors import RequestCancelled
from slipstream.engine.outputs import Cancelled, Finished
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits

LONG = SamplingParams(max_tokens=100, seed=1)


def assert_all_home(engine: Engine) -> None:
    stats = engine.stats
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    assert engine._scheduler.memory.rows.num_free == engine._scheduler.memory.rows.num_rows
    assert engine._scheduler._waiting.num_tokens == 0
    engine._scheduler.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after_turns", range(12))
async def test_an_abort_at_any_turn_ends_at_once_and_brings_everything_home(
    scripted, recorder, turns, overlap: bool, after_turns: int
) -> None:
    async with scripted(overlap=overlap, chunked_prefill_size=4, num_rows=2) as engine:
        sinks = [recorder() for _ in range(4)]
        handles = [engine.submit([number] * 10, LONG, sink) for number, sink in enumerate(sinks)]
        await turns(after_turns)
        for handle, sink in zip(handles, sinks, strict=True):
            handle.abort()
            assert len(sink.ends) == 1, "at once"
            assert isinstance(sink.ends[0], Cancelled)
            assert sink.ends[0].usage.output_tokens == len(sink.token_ids)
            handle.abort()  # again does nothing
        await engine.drain(10)
        assert all(len(sink.ends) == 1 for sink in sinks)
        assert engine.num_aborted == 4
        assert_all_home(engine)


async def test_abort_by_id_reaches_all_that_share_it_and_no_other(scripted, recorder, turns) -> None:
    async with scripted(num_rows=1) as engine:
        twins, other = [recorder(), recorder()], recorder()
        for sink in twins:
            engine.submit([1], LONG, sink, request_id="twin")
        engine.submit([2], SamplingParams(max_tokens=3), other, request_id="other")
        await turns(3)
        assert engine.abort("twin") == 2
        assert engine.abort("twin") == 0
        await other.has_end.wait()
        assert isinstance(other.ends[0], Finished)
        assert all(isinstance(sink.ends[0], Cancelled) for sink in twins)


async def test_an_abort_after_the_end_changes_nothing(scripted, recorder) -> None:
    async with scripted() as engine:
        sink = recorder()
        handle = engine.submit([1], SamplingParams(max_tokens=2), sink)
        await sink.has_end.wait()
        handle.abort()
        assert isinstance(sink.ends[0], Finished)
        assert engine.num_aborted == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 25), min_size=1, max_size=12), st.booleans())
def test_cancelling_a_consumer_while_its_forward_is_in_flight_hurts_nobody_else(
    delays: list[int], overlap: bool
) -> None:
    """Victims are cancelled after some turns, while their steps run; the witness's tokens are those it has alone."""

    async def play() -> None:
        limits = WorkerLimits(num_pages=256, page_size=4, num_rows=16, max_model_len=512, vocab_size=31)
        engine = Engine.on(
            ScriptedWorker(limits, Script(late_turns=lambda step: step % 3)), page_size=4, overlap=overlap
        )
        engine.proves_laws = True
        params = SamplingParams(max_tokens=40, seed=9)
        async with engine:
            alone = await engine.complete([5, 5], params)
            witness = asyncio.ensure_future(engine.complete([5, 5], params))
            victims = [asyncio.ensure_future(engine.complete([7, number], LONG)) for number in range(len(delays))]
            for turn in range(26):
                for victim, delay in zip(victims, delays, strict=True):
                    if delay == turn:
                        victim.cancel()
                await asyncio.sleep(0)
            for victim in victims:
                with pytest.raises(asyncio.CancelledError):
                    await victim
            assert (await witness).token_ids == alone.token_ids
            assert engine.death is None
            assert not engine._supervisor.done()
            await engine.drain(10)
            assert_all_home(engine)

    asyncio.run(play())


async def test_a_timeout_around_a_consumer_ends_that_consumer_only(scripted, turns) -> None:
    async with scripted() as engine:
        witness = asyncio.ensure_future(engine.complete([1], SamplingParams(max_tokens=30, seed=2)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                while True:  # ends by the timeout, at whatever await it strikes
                    await engine.complete([2], LONG)
        assert len((await witness).token_ids) == 30
        await engine.drain(10)
        assert_all_home(engine)


class SlowTokenizer:
    """Encodes over several turns of the loop."""

    eos_ids: frozenset[int] = frozenset()
    chat_template = None

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        for _ in range(self.num_turns):
            await asyncio.sleep(0)
        return [1, 2, 3]


@pytest.mark.parametrize("after_turns", range(10))
async def test_a_cancel_at_any_await_within_submission_leaves_no_state(
    scripted, turns, monkeypatch, after_turns: int
) -> None:
    async with scripted() as engine:
        engine.tokenizer = SlowTokenizer(4)  # type: ignore[assignment]  # only `encode_async` is asked for
        consumers = [asyncio.ensure_future(engine.complete("long prompt", LONG)) for _ in range(20)]
        await turns(after_turns)
        for consumer in consumers:
            consumer.cancel()
        results = await asyncio.gather(*consumers, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert list(engine._scheduler.requests()) == []
        await engine.drain(10)
        assert_all_home(engine)


async def test_a_refused_submission_leaves_no_state(scripted, recorder) -> None:
    async with scripted() as engine:
        for prompt in ([], [99], [1] * 500):
            sink = recorder()
            with pytest.raises(Exception, match=r"prompt|vocabulary"):
                engine.submit(prompt, None, sink)
            assert sink.ends == []
        assert not engine._scheduler.has_work()
        assert engine._scheduler.num_arrived == 0


async def test_who_waits_for_a_request_that_another_aborts_is_told(scripted, turns) -> None:
    async with scripted() as engine:
        consumer = asyncio.ensure_future(engine.complete([1], LONG, request_id="mine"))
        await turns(8)
        assert engine.abort("mine") == 1
        with pytest.raises(RequestCancelled):
            await consumer


class AbortsSibling:
    """A sink whose first token, or end, aborts another request in the middle of a delivery."""

    def __init__(self) -> None:
        self.sibling = None

    def push(self, token_ids, text: str) -> None:
        if self.sibling is not None:
            self.sibling.abort()

    def end(self, end) -> None:
        pass


async def test_a_sink_that_aborts_a_sibling_amid_a_delivery_gives_it_one_end_and_no_token_after(
    scripted, recorder, turns
) -> None:
    async with scripted() as engine:
        first, second = AbortsSibling(), recorder()
        engine.submit([1], SamplingParams(max_tokens=5), first)
        first.sibling = engine.submit([2], LONG, second)
        await engine.drain(10)
        assert [type(end) for end in second.ends] == [Cancelled]
        assert second.token_ids == []
        assert_all_home(engine)
