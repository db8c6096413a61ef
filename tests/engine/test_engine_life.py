"""Starting, draining, closing and dying."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import warnings

import pytest

from slipstream import SamplingParams
from slipstream.engine import engine as engine_module
from slipstream.engine.engine import Engine, EngineState
from slipstream.engine.errors import ConfigError, EngineDead, MisuseError, Overloaded, RequestCancelled
from slipstream.engine.outputs import Cancelled, Failed, Finished
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits

LONG = SamplingParams(max_tokens=200, seed=1)
LIMITS = WorkerLimits(num_pages=64, page_size=4, num_rows=8, max_model_len=256, vocab_size=31)


def test_asyncio_run_returns_with_nothing_pending_in_debug_mode(scripted) -> None:
    async def main() -> tuple[set[asyncio.Task[object]], int]:
        async with scripted() as engine:
            whole = await engine.complete([1, 2], SamplingParams(max_tokens=3))
        left = asyncio.all_tasks() - {asyncio.current_task()}
        return left, len(whole.token_ids)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left, num_tokens = asyncio.run(main(), debug=True)
        gc.collect()
    assert left == set()
    assert num_tokens == 3


async def test_an_engine_that_is_idle_for_long_before_its_first_request_serves_it(scripted, turns) -> None:
    async with scripted() as engine:
        await turns(200)
        assert len((await engine.complete([1], SamplingParams(max_tokens=2))).token_ids) == 2
        await turns(200)
        assert len((await engine.complete([1], SamplingParams(max_tokens=2))).token_ids) == 2


async def test_an_idle_engine_does_nothing_until_it_is_woken(scripted, turns) -> None:
    async with scripted() as engine:
        await turns(5)
        checks = []
        real = engine._scheduler.check
        engine._scheduler.check = lambda: (checks.append(1), real())
        await turns(50)
        assert checks == []


def test_an_engine_made_outside_a_loop_starts_inside_one_and_refuses_another() -> None:
    engine = Engine.on(ScriptedWorker(LIMITS), page_size=4)
    in_use, done = threading.Event(), threading.Event()

    async def own() -> int:
        async with engine:
            whole = await engine.complete([1], SamplingParams(max_tokens=2))
            in_use.set()
            await asyncio.to_thread(done.wait)
            return len(whole.token_ids)

    async def other() -> None:
        calls = [
            lambda: engine.complete([1]),
            lambda: anext(engine.generate([1])),
            lambda: engine.drain(1),
            lambda: engine.aclose(),
        ]
        for call in calls:
            with pytest.raises(MisuseError, match="event loop that started it"):
                await call()
        with pytest.raises(MisuseError, match="event loop that started it"):
            engine.abort("x")

    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(own())))
    thread.start()
    assert in_use.wait(10)
    asyncio.run(other())
    with pytest.raises(MisuseError, match="thread"):
        engine.submit([1], None, None)  # type: ignore[arg-type]  # no loop at all
    done.set()
    thread.join()
    assert results == [2]


def test_an_engine_whose_loop_is_gone_says_so() -> None:
    engine = Engine.on(ScriptedWorker(LIMITS), page_size=4)

    async def start() -> None:
        await engine.start()

    async def use() -> None:
        await engine.complete([1])

    asyncio.run(start())
    with pytest.raises(MisuseError, match="event loop that started it"):
        asyncio.run(use())


async def test_an_engine_starts_once_and_takes_nothing_before(scripted, recorder) -> None:
    engine = scripted()
    with pytest.raises(Overloaded, match="starting"):
        engine.submit([1], None, recorder())
    with pytest.raises(MisuseError, match="not started"):
        _ = engine.stats
    async with engine:
        assert engine.state.is_ready
        with pytest.raises(MisuseError, match="starts once"):
            await engine.start()
    assert engine.state is EngineState.CLOSED
    with pytest.raises(EngineDead, match="closed"):
        engine.submit([1], None, recorder())
    with pytest.raises(MisuseError, match="starts once"):
        await engine.start()


class SlowStart(ScriptedWorker):
    """A worker whose start the test ends, and which counts its closings."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(LIMITS)
        self.may_go_on = asyncio.Event()
        self.error = error
        self.num_closings = 0

    async def start(self) -> WorkerLimits:
        await self.may_go_on.wait()
        if self.error is not None:
            raise self.error
        return await super().start()

    async def aclose(self) -> None:
        self.num_closings += 1
        await super().aclose()


async def test_a_start_that_fails_closes_the_worker_and_the_engine() -> None:
    worker = SlowStart(ConfigError("no room", field="max_total_tokens"))
    worker.may_go_on.set()
    engine = Engine.on(worker, page_size=4)
    with pytest.raises(ConfigError, match="no room"):
        await engine.start()
    assert engine.state is EngineState.CLOSED
    assert worker.num_closings == 1


async def test_closing_an_engine_while_it_starts_leaves_it_closed(turns) -> None:
    worker = SlowStart()
    engine = Engine.on(worker, page_size=4)
    starting = asyncio.ensure_future(engine.start())
    await turns(2)
    await engine.aclose()
    worker.may_go_on.set()
    with pytest.raises(EngineDead, match="while it was starting"):
        await starting
    assert engine.state is EngineState.CLOSED
    assert worker.num_closings >= 1
    assert engine._supervisor is None


async def test_a_cancelled_start_closes_the_worker(turns) -> None:
    worker = SlowStart()
    starting = asyncio.ensure_future(Engine.on(worker, page_size=4).start())
    await turns(2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert worker.num_closings == 1


async def test_closing_ends_every_request_as_cancelled_at_once(scripted, recorder, turns) -> None:
    engine = scripted(num_rows=2)
    await engine.start()
    sinks = [recorder() for _ in range(5)]
    for sink in sinks:
        engine.submit([1], LONG, sink)
    await turns(8)
    closing = asyncio.ensure_future(engine.aclose())
    await turns(1)
    assert all(isinstance(sink.ends[0], Cancelled) for sink in sinks)
    await closing
    await engine.aclose()  # again does no harm
    engine._scheduler.check()


async def test_closing_works_from_two_tasks_at_once(scripted, turns) -> None:
    engine = scripted()
    await engine.start()
    consumer = asyncio.ensure_future(engine.complete([1], LONG))
    await turns(6)
    await asyncio.gather(engine.aclose(), engine.aclose())
    with pytest.raises(RequestCancelled):
        await consumer
    assert engine._supervisor.done()


async def test_closing_with_a_stuck_step_returns_in_bounded_time(scripted, monkeypatch, turns) -> None:
    monkeypatch.setattr(engine_module, "STOP_TIMEOUT_S", 0.05)
    engine = scripted(Script(stuck_steps=frozenset({2})))
    await engine.start()
    consumer = asyncio.ensure_future(engine.complete([1], LONG))
    await turns(30)
    stuck_at = engine.num_settled_steps
    await turns(30)
    assert engine.num_settled_steps == stuck_at == 2, "progress stops, and that can be seen from outside"
    async with asyncio.timeout(5):
        await engine.aclose()
    with pytest.raises(RequestCancelled):
        await consumer
    assert engine._supervisor.done()
    assert isinstance(engine.death, EngineDead)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_drain_lets_what_is_there_finish_and_takes_nothing_new(scripted, recorder) -> None:
    async with scripted(num_rows=2) as engine:
        sinks = [recorder() for _ in range(5)]
        for sink in sinks:
            engine.submit([1], SamplingParams(max_tokens=12), sink)
        draining = asyncio.ensure_future(engine.drain(10))
        await asyncio.sleep(0)
        assert engine.state is EngineState.DRAINING
        with pytest.raises(Overloaded) as caught:
            engine.submit([1], None, recorder())
        assert caught.value.draining
        await draining
        assert all(isinstance(sink.ends[0], Finished) and len(sink.token_ids) == 12 for sink in sinks)


async def test_drain_waits_for_a_request_that_was_added_just_before(scripted, recorder, turns) -> None:
    async with scripted() as engine:
        await turns(3)  # the loop has gone idle
        sink = recorder()
        engine.submit([1], SamplingParams(max_tokens=3), sink)
        assert not engine._loop.idle.is_set(), "from this moment on, whatever runs first"
        await engine.drain(10)
        assert isinstance(sink.ends[0], Finished)


async def test_what_is_left_when_the_drain_ends_gets_an_error_of_its_own(scripted, recorder, turns) -> None:
    async with scripted(num_rows=1) as engine:
        running, waiting = recorder(), recorder()
        engine.submit([1], LONG, running)
        engine.submit([2], LONG, waiting)
        await running.has_token.wait()
        await engine.drain(0)
        for sink in (running, waiting):
            assert isinstance(sink.ends[0], Failed)
            assert isinstance(sink.ends[0].error, Overloaded)
            assert sink.ends[0].error.draining
        assert sink.ends[0].usage.output_tokens == len(sink.token_ids)
        await turns(6)
        assert engine.stats.num_free_pages + engine.stats.num_cached_pages == engine.stats.num_pages


async def test_drain_of_an_idle_a_closed_or_an_unstarted_engine_returns(scripted) -> None:
    engine = scripted()
    await engine.drain(10)
    await engine.start()
    await engine.drain(10)
    await engine.aclose()
    await engine.drain(10)


async def test_drain_ends_with_the_engine(scripted) -> None:
    async with scripted(Script(deadly_steps=frozenset({5}))) as engine:
        consumer = asyncio.ensure_future(engine.complete([1], LONG))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await engine.drain(1000)
        with pytest.raises(EngineDead):
            await consumer


async def die(engine: Engine, recorder, num_running: int = 64) -> None:
    """Let an engine run into its death with many requests, waiting and running."""
    sinks = [recorder() for _ in range(num_running)]
    for number, sink in enumerate(sinks):
        engine.submit([number % 31], LONG, sink)
    consumers = [asyncio.ensure_future(engine.complete([3], LONG)) for _ in range(4)]
    async with asyncio.timeout(10):
        results = await asyncio.gather(*consumers, return_exceptions=True)
    assert all(isinstance(result, EngineDead) for result in results)
    assert all(len(sink.ends) == 1 and isinstance(sink.ends[0].error, EngineDead) for sink in sinks)
    assert engine.state is EngineState.DEAD
    assert not engine.state.is_alive
    assert isinstance(engine.death, EngineDead)
    for _ in range(2):
        with pytest.raises(EngineDead, match=re.escape(str(engine.death))) as caught:
            engine.submit([1], None, recorder())
        assert caught.value.__cause__ is engine.death
    with pytest.raises(EngineDead):
        await engine.complete([1])
    assert engine.abort("anything") == 0
    async with asyncio.timeout(5):
        await engine.aclose()
    assert engine.state is EngineState.DEAD


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_dead_device_reaches_every_consumer_and_the_late_comers(scripted, recorder, overlap: bool) -> None:
    engine = scripted(Script(deadly_steps=frozenset({7})), overlap=overlap, num_pages=512)
    await engine.start()
    await die(engine, recorder)
    assert "step 7 kills the device" in str(engine.death)


@pytest.mark.parametrize("where", ["plan", "commit", "sample_inputs"])
async def test_a_bug_in_the_scheduler_reaches_every_consumer_and_the_late_comers(
    scripted, recorder, where: str
) -> None:
    engine = scripted(num_pages=512)
    await engine.start()
    real, calls = getattr(engine._scheduler, where), []

    def broken(*args):
        calls.append(1)
        if len(calls) > 5:
            raise ZeroDivisionError("a bug")
        return real(*args)

    setattr(engine._scheduler, where, broken)
    await die(engine, recorder)
    assert "a bug" in str(engine.death)
    assert isinstance(engine.death.__cause__, ZeroDivisionError)


async def test_a_launch_that_finds_the_device_dead_kills_the_engine(scripted, recorder) -> None:
    engine = scripted(num_pages=512)
    await engine.start()

    def launch(batch):
        raise EngineDead("the device is gone")

    engine._worker.launch = launch
    await die(engine, recorder)
    assert str(engine.death) == "the device is gone"


async def test_a_broken_law_of_ownership_kills_the_engine(scripted, recorder) -> None:
    engine = scripted(num_pages=512)
    await engine.start()
    engine._scheduler.memory.pages.take(1)  # a page that nobody owns
    await die(engine, recorder)
    assert isinstance(engine.death.__cause__, MisuseError)


async def test_work_that_cannot_run_kills_the_engine_instead_of_spinning(scripted, recorder) -> None:
    engine = scripted(num_pages=512)
    await engine.start()
    engine._scheduler._planner._line_up_prefills = lambda lineup, step: None
    await die(engine, recorder)
    assert "nothing can run" in str(engine.death)
    assert "64 waiting" in str(engine.death)
    assert "first waits <Request req-0" in str(engine.death)
