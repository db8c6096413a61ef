"""Pausing, flushing the prefix cache, and its events, through the engine."""

from __future__ import annotations

import asyncio

import pytest

from slipstream import SamplingParams
from slipstream.engine.cache.radix_node import Removed, Stored
from slipstream.engine.cache.token_bytes import decode_token_ids
from slipstream.engine.errors import EngineDead, MisuseError
from slipstream.engine.outputs import Cancelled, Failed
from slipstream.engine.scripted_worker import Script

DEPTHS = pytest.mark.parametrize("overlap", [False, True])
LONG = SamplingParams(max_tokens=60, seed=1)


@DEPTHS
async def test_a_pause_stops_everything_and_changes_no_token(scripted, recorder, turns, overlap: bool) -> None:
    async with scripted() as undisturbed:
        expected = (await undisturbed.complete([1, 2], LONG)).token_ids
    async with scripted(overlap=overlap) as engine:
        sink, late = recorder(), recorder()
        engine.submit([1, 2], LONG, sink)
        for _ in range(7):
            await turns(5)
            await engine.pause()
            assert engine.is_paused
            had, steps = len(sink.token_ids), engine.stats.num_steps
            assert engine.num_settled_steps == steps, "nothing is in flight"
            await turns(20)
            assert (len(sink.token_ids), engine.stats.num_steps) == (had, steps)
            engine.resume()
            assert not engine.is_paused
        await engine.pause()
        engine.submit([1, 2], LONG, late)
        await turns(20)
        assert not late.token_ids, "it waits"
        engine.resume()
        for each in (sink, late):
            await each.has_end.wait()
            assert tuple(each.token_ids) == expected
        assert engine.stats.num_retractions == 0, "pausing alone recomputes nothing"


@DEPTHS
async def test_flushing_in_a_pause_computes_what_had_begun_anew_and_exactly(scripted, recorder, turns, overlap) -> None:
    requests = [([number, 3] * 5, SamplingParams(max_tokens=30, seed=number)) for number in range(4)]
    async with scripted(num_pages=256) as undisturbed:
        expected = [(await undisturbed.complete(prompt, params)).token_ids for prompt, params in requests]
    async with scripted(num_pages=256, overlap=overlap, chunked_prefill_size=8) as engine:
        sinks = [recorder() for _ in requests]
        for (prompt, params), sink in zip(requests, sinks, strict=True):
            engine.submit(prompt, params, sink)
        for _ in range(3):
            await turns(9)
            await engine.pause()
            engine.flush_cache()
            stats = engine.stats
            assert (stats.num_free_pages, stats.num_cached_pages, stats.num_running) == (stats.num_pages, 0, 0)
            engine.resume()
        await engine.drain(10)
        assert [tuple(sink.token_ids) for sink in sinks] == expected


async def test_an_idle_engine_is_flushed_and_a_busy_one_is_not(scripted, recorder) -> None:
    async with scripted() as engine:
        await engine.complete([1] * 20, SamplingParams(max_tokens=2))
        await asyncio.sleep(0)
        assert engine.stats.num_cached_pages
        engine.flush_cache()
        assert engine.stats.num_cached_pages == 0
        assert (await engine.complete([1] * 20, SamplingParams(max_tokens=2))).usage.cached_tokens == 0
        sink = recorder()
        engine.submit([1], LONG, sink)
        await sink.has_token.wait()
        with pytest.raises(MisuseError, match="pause"):
            engine.flush_cache()


async def test_a_paused_engine_closes_drains_and_aborts_at_once(scripted, recorder, turns) -> None:
    engine = scripted()
    await engine.start()
    running, aborted = recorder(), recorder()
    engine.submit([1], LONG, running)
    handle = engine.submit([2], LONG, aborted)
    await turns(6)
    await engine.pause()
    handle.abort()
    assert isinstance(aborted.ends[0], Cancelled)
    await engine.drain(0.01)
    assert isinstance(running.ends[0], Failed)
    async with asyncio.timeout(5):
        await engine.aclose()
        await engine.pause()  # of a closed engine: still already


async def test_an_engine_that_has_not_started_has_nothing_to_pause(scripted) -> None:
    engine = scripted()
    with pytest.raises(MisuseError, match="not started"):
        await engine.pause()
    with pytest.raises(MisuseError, match="not started"):
        engine.flush_cache()


async def test_who_subscribes_hears_of_each_prefix_that_comes_and_goes(scripted, turns) -> None:
    async with scripted(page_size=4) as engine:
        events: list[Stored | Removed] = []
        unsubscribe = engine.subscribe_cache(events.append)
        await engine.complete([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=5, seed=1))
        await turns(3)
        cached = [event for event in events if isinstance(event, Stored)]
        assert decode_token_ids(cached[0].prefix) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert sum(event.num_tokens for event in cached) == 12, "the prompt, and four of the five outputs"
        engine.flush_cache()
        await turns(2)
        gone = [event for event in events if isinstance(event, Removed)]
        assert sum(event.num_tokens for event in gone) == 12
        unsubscribe()
        count = len(events)
        await engine.complete([9] * 8, SamplingParams(max_tokens=2))
        await turns(3)
        assert len(events) == count


async def test_a_listener_that_raises_does_not_reach_the_engine(scripted, turns) -> None:
    async with scripted() as engine:
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
        engine.subscribe_cache(lambda event: 1 // 0)
        await engine.complete([1] * 8, SamplingParams(max_tokens=2))
        await turns(3)
        assert isinstance(reported[0], ZeroDivisionError)
        assert engine.death is None


@pytest.mark.parametrize(("policy", "stays"), [("fifo", "second"), ("lfu", "first"), ("priority", "first")])
async def test_the_eviction_policy_decides_what_stays_cached(scripted, policy: str, stays: str) -> None:
    """Two prefixes in a pool of two and a bit: the first is used twice and has the higher priority."""
    async with scripted(num_pages=12, page_size=4, eviction_policy=policy) as engine:
        params = SamplingParams(max_tokens=1)
        prompts = {"first": [1] * 17, "second": [2] * 17}
        for name in ("first", "second", "first"):
            async for _ in engine.generate(prompts[name], params, priority=1 if name == "first" else 0):
                pass
        if policy == "lfu":
            await engine.complete(prompts["first"], params)
        await engine.complete([3] * 18, params)  # takes the place of one
        cached = {name: engine._scheduler.memory.tree.match_length(bytes_of(prompts[name])) for name in prompts}
        assert cached[stays] == 16
        assert min(cached.values()) < 16


def bytes_of(ids: list[int]) -> bytes:
    from slipstream.engine.cache.token_bytes import encode_token_ids

    return encode_token_ids(ids)


class TestStuckSteps:
    """A step that never comes back takes the engine with it, after the time that the operator has set."""

    @DEPTHS
    async def test_the_engine_is_declared_dead_and_says_which_step_it_was(self, scripted, recorder, overlap) -> None:
        engine = scripted(Script(stuck_steps=frozenset({3})), overlap=overlap, step_timeout_s=0.05)
        await engine.start()
        sinks = [recorder() for _ in range(10)]
        for number, sink in enumerate(sinks):
            engine.submit([number], LONG, sink)
        async with asyncio.timeout(5):
            for sink in sinks:
                await sink.has_end.wait()
                assert isinstance(sink.ends[0].error, EngineDead)
        assert "step 3 (DECODE, 5 rows, 5 tokens) has not come back within 0.05 s" in str(engine.death)
        with pytest.raises(EngineDead, match="step 3"):
            engine.submit([1], LONG, recorder())
        async with asyncio.timeout(5):
            await engine.aclose()

    async def test_steps_that_are_slow_but_come_back_are_not_given_up(self, scripted) -> None:
        async with scripted(Script(step_time_s=0.02), step_timeout_s=0.5) as engine:
            assert len((await engine.complete([1], SamplingParams(max_tokens=8))).token_ids) == 8
        assert engine.death is None
