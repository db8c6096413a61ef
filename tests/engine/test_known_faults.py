"""Faults that other engines had, by their row in the list of cases: O… of overlap, K… of the KV cache.

Those rows that are not here stand beside what they concern: test_overlap_cases, tests/scheduler, tests/cache, tests/forward.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.errors import RequestError
from slipstream.engine.outputs import Cancelled, End, Finished
from slipstream.engine.scheduler import new_token_ratio
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits
from slipstream.profiling.virtual_time import run_in_virtual_time

DEPTHS = pytest.mark.parametrize("overlap", [False, True])


async def answers(engine: Engine, recorder, requests, **options) -> list:
    sinks = [recorder() for _ in requests]
    for (prompt, params), sink in zip(requests, sinks, strict=True):
        engine.submit(prompt, params, sink, **{name: value(prompt) for name, value in options.items()})
    await engine.drain(15)
    assert all(isinstance(sink.ends[0], Finished) for sink in sinks)
    stats = engine.stats
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    return [tuple(sink.token_ids) for sink in sinks]


@pytest.mark.parametrize("concurrency", [1, 4, 8, 9, 16, 32, 64, 128])
@DEPTHS
async def test_o01_every_concurrency_gives_the_same_answers(scripted, recorder, concurrency: int, overlap) -> None:
    """Prefill batches of uneven lengths back to back, many requests through few relay places."""
    requests = [
        ([number % 31] * (1 + number * 7 % 23), SamplingParams(max_tokens=1 + number % 9, seed=number))
        for number in range(130)
    ]
    async with scripted(num_pages=2048, num_rows=1, overlap=False) as alone:
        expected = await answers(alone, recorder, requests[:40])
    async with scripted(
        num_pages=2048, num_rows=concurrency, overlap=overlap, chunked_prefill_size=16, max_prefill_tokens=24
    ) as engine:
        assert (await answers(engine, recorder, requests))[:40] == expected


@pytest.mark.parametrize("preempts", [False, True])
@DEPTHS
async def test_o07_preempted_with_a_token_in_flight_nothing_is_lost_or_doubled(
    scripted, recorder, overlap: bool, preempts: bool
) -> None:
    requests = [([number % 31, number // 31, 3], SamplingParams(max_tokens=40, seed=number)) for number in range(32)]
    async with scripted(num_pages=1024, num_rows=32) as roomy:
        expected = await answers(roomy, recorder, requests)
    with patch.object(new_token_ratio, "INITIAL", 0.0), patch.object(new_token_ratio, "LOWEST", 0.0):
        async with scripted(
            num_pages=40, num_rows=16, overlap=overlap, schedule_policy="priority", priority_preemption=preempts
        ) as tight:
            urgent: list = []

            async def arrive_late() -> None:
                for number in (5, 17, 29):
                    await asyncio.sleep(0)
                    urgent.append((number, recorder()))
                    tight.submit(*requests[number], urgent[-1][1], priority=9)
                    for _ in range(25):
                        await asyncio.sleep(0)

            arriving = asyncio.ensure_future(arrive_late())
            sinks = [recorder() for _ in requests]
            for number, ((prompt, params), sink) in enumerate(zip(requests, sinks, strict=True)):
                tight.submit(prompt, params, sink, priority=number % 3)
            await arriving
            await tight.drain(15)
            assert [tuple(sink.token_ids) for sink in sinks] == expected
            assert all(tuple(sink.token_ids) == expected[number] for number, sink in urgent)
            assert tight.death is None
            assert 0 < tight.stats.num_retractions < 32 * 40


def time_to_first_tokens(*, overlap: bool) -> list[float]:
    """Poisson arrivals of prompts of 3,500 tokens, on virtual time: seconds from each arrival to its first token."""

    class First:
        def __init__(self, arrival: float) -> None:
            self.arrival = arrival
            self.seconds: float | None = None

        def push(self, token_ids: Sequence[int], text: str) -> None:
            if self.seconds is None:
                self.seconds = asyncio.get_running_loop().time() - self.arrival

        def end(self, end: End) -> None:
            pass

    async def main() -> list[float]:
        draw, loop = random.Random(4), asyncio.get_running_loop()
        script = Script(cost_s=lambda batch: 5e-3 + 2e-5 * batch.num_tokens, verifies=False)
        limits = WorkerLimits(num_pages=8192, page_size=16, num_rows=64, max_model_len=8192, vocab_size=1000)
        async with Engine.on(ScriptedWorker(limits, script), overlap=overlap) as engine:
            sinks = []
            for number in range(60):
                await asyncio.sleep(draw.expovariate(8.0))
                sinks.append(First(loop.time()))
                engine.submit([number] * 3500, SamplingParams(max_tokens=8), sinks[-1])
            await engine.drain(1000)
        return [sink.seconds for sink in sinks if sink.seconds is not None]

    return run_in_virtual_time(main())


def test_o15_overlap_does_not_delay_the_first_token() -> None:
    on, off = time_to_first_tokens(overlap=True), time_to_first_tokens(overlap=False)
    assert len(on) == len(off) == 60
    assert statistics.mean(on) <= 1.05 * statistics.mean(off)


@pytest.mark.parametrize("rate", [2.0, 0.2])
def test_o16_a_trickle_of_requests_is_served_like_a_burst(rate: float) -> None:
    async def main() -> list[tuple[int, ...]]:
        script = Script(cost_s=lambda batch: 0.03)
        limits = WorkerLimits(num_pages=256, page_size=4, num_rows=8, max_model_len=512, vocab_size=31)
        async with Engine.on(ScriptedWorker(limits, script), page_size=4) as engine:
            engine.proves_laws = True
            tasks = []
            for number in range(10):
                tasks.append(asyncio.ensure_future(engine.complete([number, 1], SamplingParams(max_tokens=20, seed=7))))
                await asyncio.sleep(1 / rate if number < 8 else 0)
            whole = await asyncio.gather(*tasks)
            together = await asyncio.gather(
                *(engine.complete([number, 1], SamplingParams(max_tokens=20, seed=7)) for number in range(10))
            )
            assert [answer.token_ids for answer in whole] == [answer.token_ids for answer in together]
            return [answer.token_ids for answer in whole]

    assert len(run_in_virtual_time(main())) == 10


@DEPTHS
async def test_k01_twins_in_one_tick_and_a_third_that_reuses_freed_pages(scripted, recorder, overlap: bool) -> None:
    twin = ([1, 2, 3] * 66, SamplingParams(max_tokens=30, seed=1))
    third = ([9, 8] * 80, SamplingParams(max_tokens=30, seed=2))
    async with scripted(num_pages=512) as alone:
        solo = [(await alone.complete(*request)).token_ids for request in (twin, third)]
    async with scripted(num_pages=130, overlap=overlap, chunked_prefill_size=64, max_prefill_tokens=128) as engine:
        assert await answers(engine, recorder, [twin, twin, third, twin]) == [solo[0], solo[0], solo[1], solo[0]]


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 16, 256])
async def test_k02_a_prompt_of_whole_pages_that_is_all_cached_gives_the_same_answer(
    scripted, overlap: bool, page_size: int
) -> None:
    async with scripted(num_pages=4096 // page_size, page_size=page_size, overlap=overlap) as engine:
        for num_tokens in (256, 512):
            prompt = [(7 * place + num_tokens) % 31 for place in range(num_tokens)]
            first, again = [await engine.complete(prompt, SamplingParams(max_tokens=9, seed=1)) for _ in range(2)]
            assert again.token_ids == first.token_ids
            assert again.usage.cached_tokens == num_tokens - page_size, "the page of the last token is computed again"


@DEPTHS
async def test_k04_a_request_that_needs_nearly_the_whole_pool_runs_and_a_larger_one_is_refused(
    scripted, overlap: bool
) -> None:
    """Pages of two tokens, a context of twice the pool: neither is tried for ever."""
    script = Script(verifies=False)
    async with scripted(script, num_pages=2048, page_size=2, max_model_len=8192, overlap=overlap) as engine:
        engine._loop._after_commit = None
        whole = await engine.complete([1] * 10, SamplingParams(max_tokens=4084, seed=1))
        assert len(whole.token_ids) == 4084
        with pytest.raises(RequestError, match="exceed the limit of 4096"):
            await engine.complete([1] * 10, SamplingParams(max_tokens=4087))
        both = [engine.complete([number] * 10, SamplingParams(max_tokens=2300, seed=number)) for number in range(2)]
        assert [len(each.token_ids) for each in await asyncio.gather(*both)] == [2300, 2300]
        assert engine.stats.num_free_pages + engine.stats.num_cached_pages == 2048


@DEPTHS
async def test_k05_two_thousand_chats_leave_free_and_cached_pages_and_nothing_else(recorder, overlap: bool) -> None:
    draw = random.Random(5)
    limits = WorkerLimits(num_pages=600, page_size=16, num_rows=64, max_model_len=2048, vocab_size=1000)
    systems = [[draw.randrange(1000) for _ in range(48)] for _ in range(5)]
    requests = []
    for number in range(2000):
        system = systems[draw.randrange(5)] if draw.random() < 0.6 else []
        prompt = [*system, *(draw.randrange(1000) for _ in range(1 + int(draw.expovariate(1 / 60))))]
        requests.append((prompt[:1000], SamplingParams(max_tokens=1 + int(draw.expovariate(1 / 12)) % 60, seed=number)))
    async with Engine.on(ScriptedWorker(limits, Script(verifies=False)), overlap=overlap) as engine:
        await answers(engine, recorder, requests)
        engine._scheduler.check()
        assert engine.stats.num_cached_tokens > 20_000
        engine.flush_cache()
        assert engine.stats.num_free_pages == 600


@DEPTHS
async def test_k08_closing_after_two_chunks_of_a_long_prompt_keeps_them_as_cache(
    scripted, recorder, turns, overlap: bool
) -> None:
    async with scripted(num_pages=600, page_size=16, overlap=overlap, chunked_prefill_size=512) as engine:
        sink = recorder()
        handle = engine.submit([1, 2, 3, 4] * 2048, SamplingParams(max_tokens=4), sink)
        while engine.num_settled_steps < 2:
            await turns(1)
        handle.abort()
        assert isinstance(sink.ends[0], Cancelled)
        await turns(10)
        stats = engine.stats
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        assert stats.num_cached_pages >= 2 * 512 // 16
        again = await engine.complete([1, 2, 3, 4] * 300, SamplingParams(max_tokens=4))
        assert again.usage.cached_tokens >= 1024


@DEPTHS
async def test_k13_the_next_turn_finds_prompt_and_answer_but_for_the_newest_token(scripted, overlap: bool) -> None:
    async with scripted(page_size=1, num_pages=512, overlap=overlap) as engine:
        prompt = [5, 6, 7] * 20
        first = await engine.complete(prompt, SamplingParams(max_tokens=25, seed=1))
        follow_up = [*prompt, *first.token_ids, 1, 2, 3]
        second = await engine.complete(follow_up, SamplingParams(max_tokens=2))
        assert second.usage.cached_tokens == len(prompt) + 25 - 1


@DEPTHS
@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_k16_cold_and_cached_runs_give_the_same_answer(scripted, overlap: bool, prefix_cache: bool) -> None:
    async with scripted(overlap=overlap, prefix_cache=prefix_cache) as engine:
        params = SamplingParams(max_tokens=20, seed=3)
        whole = [await engine.complete([4, 5, 6] * 9, params) for _ in range(5)]
        assert len({answer.token_ids for answer in whole}) == 1
        assert [answer.usage.cached_tokens > 0 for answer in whole[1:]] == [prefix_cache] * 4


@DEPTHS
async def test_o19_long_chats_of_many_users_go_as_each_alone(scripted, recorder, overlap: bool) -> None:
    """Three turns each, every turn on top of the answer before it, 128 users at once against one at a time."""

    async def chat(engine: Engine, user: int) -> list[tuple[int, ...]]:
        history, turns = [user % 31, user // 31], []
        for turn in range(3):
            answer = await engine.complete(history, SamplingParams(max_tokens=12 + user % 5, seed=user))
            turns.append(answer.token_ids)
            history += [*answer.token_ids, turn, user % 7]
        return turns

    async with scripted(num_pages=4096, num_rows=1, overlap=False) as alone:
        expected = [await chat(alone, user) for user in range(128)]
    async with scripted(num_pages=2048, num_rows=128, overlap=overlap, chunked_prefill_size=64) as engine:
        assert await asyncio.gather(*[chat(engine, user) for user in range(128)]) == expected
        assert engine.stats.num_cached_tokens > 0
