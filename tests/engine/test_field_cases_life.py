"""What a long life costs: nothing is kept of requests that have ended, or that never quite began. And threads."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from array import array

import pytest

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.errors import MisuseError
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits

SHORT = SamplingParams(max_tokens=2, seed=1)


class SlowTokenizer:
    """Encodes to a long prompt over several turns of the loop."""

    eos_ids: frozenset[int] = frozenset()
    chat_template = None

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        for _ in range(3):
            await asyncio.sleep(0)
        return [1] * 50_000


def an_engine(**settings: object) -> Engine:
    limits = WorkerLimits(num_pages=4096, page_size=16, num_rows=32, max_model_len=65_536, vocab_size=1000)
    return Engine.on(ScriptedWorker(limits, Script(verifies=False)), **settings)


@pytest.mark.timeout(60)
async def test_thousands_of_submissions_cancelled_at_any_await_leave_no_memory_behind() -> None:
    """Prompts of 50,000 tokens: one that stayed for every hundredth would show as tens of megabytes."""
    async with an_engine(prefix_cache=False) as engine:
        engine.tokenizer = SlowTokenizer()  # type: ignore[assignment]  # only `encode_async` is asked for
        made: list[weakref.ref[array[int]]] = []
        engine.watch(lambda request: made.append(weakref.ref(request.ids)))

        async def cancelled_after(num_turns: int) -> None:
            consumer = asyncio.ensure_future(engine.complete("a long prompt", SHORT))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            consumer.cancel()
            await asyncio.gather(consumer, return_exceptions=True)

        async def wave(count: int) -> None:
            for start in range(0, count, 40):
                await asyncio.gather(*[cancelled_after(number % 8) for number in range(start, start + 40)])

        await wave(200)
        gc.collect()
        before = sys.getallocatedblocks()
        await wave(2_800)
        await engine.drain(10)
        gc.collect()
        assert made, "some came as far as the queue"
        assert not any(each() is not None for each in made), "a cancelled request is still alive"
        assert not list(engine._scheduler.requests())
        assert engine.stats.num_free_pages == engine.stats.num_pages
        made.clear()
        assert sys.getallocatedblocks() - before < 5000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("overlap", [False, True])
async def test_the_memory_of_a_busy_engine_does_not_grow_with_its_requests(overlap: bool) -> None:
    """Twelve thousand short requests, cached and not; the slope of what is allocated, after a warm-up."""
    async with an_engine(overlap=overlap) as engine:
        blocks = []
        for wave in range(6):
            for start in range(0, 2000, 100):
                await asyncio.gather(
                    *[
                        engine.complete([(wave * 2000 + number) % 997, number % 31, 5] * 6, SHORT)
                        for number in range(start, start + 100)
                    ]
                )
            engine.flush_cache()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        assert blocks[-1] - blocks[1] < 2000, f"8,000 requests, allocated blocks {blocks}"


def test_eight_threads_reach_an_engine_through_its_loop_and_not_past_it() -> None:
    ready, done = threading.Event(), threading.Event()
    held: list[tuple[Engine, asyncio.AbstractEventLoop]] = []

    async def own() -> None:
        async with an_engine() as engine:
            held.append((engine, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(done.wait)

    owner = threading.Thread(target=lambda: asyncio.run(own()))
    owner.start()
    assert ready.wait(10)
    engine, loop = held[0]
    answers: list[tuple[int, tuple[int, ...]]] = []
    refused: list[str] = []

    def call(number: int) -> None:
        for turn in range(5):
            params = SamplingParams(max_tokens=6, seed=number)
            whole = asyncio.run_coroutine_threadsafe(engine.complete([number, turn], params), loop).result(10)
            answers.append((number * 10 + turn, whole.token_ids))
        try:
            asyncio.run(engine.complete([number]))
        except MisuseError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    async def alone() -> list[tuple[int, tuple[int, ...]]]:
        async with an_engine() as other:
            return [
                (n * 10 + turn, (await other.complete([n, turn], SamplingParams(max_tokens=6, seed=n))).token_ids)
                for n in range(8)
                for turn in range(5)
            ]

    done.set()
    owner.join(10)
    assert sorted(answers) == asyncio.run(alone())
    assert len(refused) == 8
    assert all("event loop that started it" in message for message in refused)
