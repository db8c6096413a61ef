"""Deadlines and priorities through the engine."""

from __future__ import annotations

import asyncio

import pytest

from slipstream import SamplingParams
from slipstream.engine.errors import RequestError
from slipstream.engine.outputs import Failed, Finished

LONG = SamplingParams(max_tokens=200, seed=1)


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_running_request_ends_at_its_deadline_and_a_waiting_one_fails(
    scripted, recorder, overlap: bool
) -> None:
    now = 100.0
    async with scripted(overlap=overlap, num_rows=1) as engine:
        engine._loop.clock = lambda: now
        running, waiting, patient = recorder(), recorder(), recorder()
        engine.submit([1], LONG, running, deadline_s=5)
        engine.submit([1], LONG, waiting, deadline_s=5.0)
        engine.submit([1], SamplingParams(max_tokens=4), patient)
        await running.has_token.wait()
        assert not running.ends
        now = 105.0
        await running.has_end.wait()
        assert isinstance(running.ends[0], Finished)
        assert running.ends[0].reason == "deadline"
        assert 0 < running.ends[0].usage.output_tokens == len(running.token_ids) < 200
        assert isinstance(waiting.ends[0], Failed)
        assert isinstance(waiting.ends[0].error, RequestError)
        await patient.has_end.wait()
        assert len(patient.token_ids) == 4
        await engine.drain(5)
        assert engine.stats.num_free_pages + engine.stats.num_cached_pages == engine.stats.num_pages


async def test_a_stream_tells_its_deadline_like_any_other_end(scripted) -> None:
    now = 0.0
    async with scripted() as engine:
        engine._loop.clock = lambda: now
        reasons = []
        async for delta in engine.generate([1], LONG, deadline_s=1):
            now += 0.3
            reasons.append(delta.finished.reason if delta.finished is not None else None)
        assert reasons[-1] == "deadline"
        with pytest.raises(RequestError, match="deadline"):
            async for _ in engine.generate([1], LONG, deadline_s=0):
                pass


@pytest.mark.parametrize("deadline_s", [-1, float("nan"), float("inf"), True, "5", 10**400])
async def test_a_deadline_is_a_number_of_seconds_from_now(scripted, recorder, deadline_s: object) -> None:
    async with scripted() as engine:
        with pytest.raises(RequestError) as caught:
            engine.submit([1], LONG, recorder(), deadline_s=deadline_s)
        assert caught.value.param == "deadline_s"


@pytest.mark.parametrize("priority", [1.5, True, "1", None])
async def test_a_priority_is_an_integer(scripted, recorder, priority: object) -> None:
    async with scripted() as engine:
        with pytest.raises(RequestError) as caught:
            engine.submit([1], LONG, recorder(), priority=priority)
        assert caught.value.param == "priority"


async def test_under_the_priority_policy_the_highest_goes_first(scripted) -> None:
    async with scripted(num_rows=1, schedule_policy="priority") as engine:
        order: list[int] = []

        async def consume(priority: int) -> None:
            async for _ in engine.generate([1], SamplingParams(max_tokens=3), priority=priority):
                pass
            order.append(priority)

        await asyncio.gather(*map(consume, [0, 3, -1, 2]))
        assert order == [3, 2, 0, -1]
