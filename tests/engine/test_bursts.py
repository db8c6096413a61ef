"""Plans while a burst comes in: they wait for it, and for nothing else."""

from __future__ import annotations

import asyncio

import pytest

from slipstream import SamplingParams
from slipstream.engine.outputs import Failed
from slipstream.engine.scripted_worker import Script
from slipstream.engine.step_loop import GATHER_S, LULL_S


@pytest.mark.parametrize(
    ("is_coming", "first_tokens", "prompt_tokens", "rows"),
    [
        (False, 2, 2, [1, 1, 2]),
        (True, 2, 2, [1, 2]),
        (True, 2, 8, [1, 2]),
        (True, 11, 2, [1, 2]),
        (True, 16, 2, [1, 1, 2]),
    ],
    ids=["nobody more", "a burst", "a burst that fills a step", "behind the end of a long prompt", "in a long prompt"],
)
async def test_while_a_burst_comes_in_a_step_is_planned_when_the_one_before_is_over(
    scripted, recorder, turns, is_coming: bool, first_tokens: int, prompt_tokens: int, rows: list[int]
) -> None:
    """Or as soon as there is enough for it: who comes later could not join it anyway."""
    is_full = is_coming and prompt_tokens == 8
    script = Script(records=True, late_turns=lambda step: 0 if step else 10_000 if is_full else 20)
    params = SamplingParams(max_tokens=5, seed=1)
    async with scripted(chunked_prefill_size=8) as quiet:
        prompts = [1] * first_tokens, [3] * prompt_tokens
        expected = [(await quiet.complete(prompt, params)).token_ids for prompt in prompts]
    async with scripted(script, chunked_prefill_size=8) as engine:
        engine._loop.clock = lambda: 0.0
        sinks = [recorder(), recorder()]
        engine.submit(prompts[0], params, sinks[0])
        engine.has_more_coming = lambda: is_coming and bool(script.launched)
        while not script.launched:
            await turns(1)
        await turns(5)
        engine.submit(prompts[1], params, sinks[1])
        await turns(5)
        while is_full and len(script.launched) < 2:
            await turns(1)
        assert not is_full or not engine.num_settled_steps, "step 0 is still out"
        await engine.drain(15)
        assert [batch.num_rows for batch in script.launched][: len(rows)] == rows
        assert [tuple(sink.token_ids) for sink in sinks] == expected


@pytest.mark.parametrize("ends", ["full", "all there", "a lull", "too long", "closed"])
async def test_a_burst_that_finds_nothing_running_fills_the_first_step(scripted, recorder, turns, ends: str) -> None:
    script, params = Script(records=True), SamplingParams(max_tokens=2, seed=1)
    async with scripted(script, chunked_prefill_size=64) as engine:
        now, is_coming = 0.0, True
        engine._loop.clock = lambda: now
        engine.has_more_coming = lambda: is_coming

        async def come(num_tokens: int) -> None:
            nonlocal now
            engine.submit([1] * num_tokens, params, recorder())
            await turns(5)
            now += LULL_S * 0.9
            await turns(5)

        for num_tokens in (2, 3, 2):
            await come(num_tokens)
        assert not script.launched
        if ends == "full":
            await come(64)
        elif ends == "all there":
            is_coming = False
        elif ends == "a lull":
            now += LULL_S * 0.2
        elif ends == "too long":
            while now <= GATHER_S:
                assert not script.launched
                await come(1)
        else:
            async with asyncio.timeout(15):
                await engine.aclose()
            return
        await turns(5)
        assert script.launched[0].num_new[:3] == (2, 3, 2)
        await engine.drain(15)


async def test_a_pool_without_room_is_not_kept_waiting_for_more(scripted, recorder, turns) -> None:
    """Twelve pages of four: the first takes eight, and nobody of the burst finds the five that it wants."""
    script = Script(records=True, late_turns=lambda step: 20 if step == 4 else 0)
    async with scripted(script, num_pages=12, page_size=4) as engine:
        engine.has_more_coming = lambda: True
        engine.submit([1] * 12, SamplingParams(max_tokens=20, seed=1, ignore_eos=True), recorder())
        while len(script.launched) < 5:
            await turns(1)
            if len(script.launched) > 1:
                engine.submit([2] * 12, SamplingParams(max_tokens=8, ignore_eos=True), recorder())
        await turns(5)
        assert len(script.launched) == 6, "step 4 is still out"


async def test_what_is_waited_for_with_nothing_running_is_no_part_of_a_step(scripted, recorder, turns) -> None:
    """The next of a burst are there when the only one that ran ends: the device never rests, and is idle all the same."""
    now, lasted, script = 0.0, [], Script(records=True)
    async with scripted(script, num_rows=1, itl_budget_ms=1000) as engine:
        engine._loop.clock = lambda: now
        engine._scheduler.step_times.record = lambda batch, seconds: lasted.append(seconds)
        sinks = [recorder(), recorder()]
        for sink in sinks:
            engine.submit([1] * 4, SamplingParams(max_tokens=1), sink)
        engine.has_more_coming = lambda: bool(sinks[0].ends)
        while not sinks[1].ends:
            await turns(1)
            if sinks[0].ends and len(script.launched) == 1:
                now += GATHER_S
    assert now >= GATHER_S
    assert lasted == [0.0, 0.0]


async def test_a_crowd_that_submits_nothing_costs_no_overlap(scripted, recorder, turns) -> None:
    script = Script(records=True, late_turns=lambda step: 20 if step == 4 else 0)
    async with scripted(script) as engine:
        engine.has_more_coming = lambda: True
        engine.submit([1, 2], SamplingParams(max_tokens=9, seed=1), recorder())
        while len(script.launched) < 5:
            await turns(1)
        await turns(5)
        assert len(script.launched) == 6, "step 4 is still out"
        await engine.drain(15)


async def test_a_full_house_is_not_kept_waiting_for_more(scripted, recorder, turns) -> None:
    script = Script(records=True, late_turns=lambda step: 20 if step == 4 else 0)
    async with scripted(script, num_rows=1) as engine:
        engine.has_more_coming = lambda: True
        for _ in range(2):
            engine.submit([1, 2], SamplingParams(max_tokens=9, seed=1), recorder())
        while len(script.launched) < 5:
            await turns(1)
            engine.submit([1, 2], SamplingParams(max_tokens=1), recorder())
        await turns(5)
        assert len(script.launched) == 6, "step 4 is still out"
        await engine.drain(15)


@pytest.mark.parametrize("is_coming", [False, True])
async def test_a_deadline_that_passes_while_a_plan_waits_is_kept(scripted, recorder, turns, is_coming: bool) -> None:
    async with scripted(Script(late_turns=lambda step: 20), chunked_prefill_size=64) as engine:
        now = 0.0
        engine._loop.clock = lambda: now
        first, late = recorder(), recorder()
        engine.submit([1, 2], SamplingParams(max_tokens=8, seed=1), first)
        while not engine.stats.num_steps:
            await turns(1)
        engine.has_more_coming = lambda: is_coming
        engine.submit([5], SamplingParams(max_tokens=1), recorder())  # somebody of the burst
        await turns(10 if is_coming else 30)
        engine.submit([3] * 8, SamplingParams(max_tokens=8, seed=1), late, deadline_s=1)
        now = 2.0
        await engine.drain(15)
        assert isinstance(late.ends[0], Failed)
        assert not late.token_ids
        assert len(first.token_ids) == 8
