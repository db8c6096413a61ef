"""Edges of the overlap loop: known ends, surplus rows, bursts and pauses, exact fits, faults of one step."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from slipstream import SamplingParams
from slipstream.engine.errors import Overloaded, StepFailed
from slipstream.engine.outputs import Failed, Finished
from slipstream.engine.scheduler import new_token_ratio
from slipstream.engine.scripted_worker import Script

DEPTHS = pytest.mark.parametrize("overlap", [False, True])


async def run_all(engine, recorder, requests) -> list:
    sinks = [recorder() for _ in requests]
    for (prompt, params), sink in zip(requests, sinks, strict=True):
        engine.submit(prompt, params, sink)
    await engine.drain(15)
    assert all(len(sink.ends) == 1 for sink in sinks)
    return sinks


@DEPTHS
async def test_256_requests_for_one_token_take_one_step(scripted, recorder, overlap: bool) -> None:
    script = Script(records=True, verifies=False)
    async with scripted(script, overlap=overlap, num_pages=512, num_rows=256) as engine:
        sinks = await run_all(
            engine, recorder, [([number % 31], SamplingParams(max_tokens=1)) for number in range(256)]
        )
        assert all(len(sink.token_ids) == 1 and sink.ends[0].reason == "length" for sink in sinks)
        assert [batch.num_rows for batch in script.launched] == [256]
        assert engine.stats.num_steps == 1


@DEPTHS
async def test_an_end_known_beforehand_is_not_planned_again(scripted, recorder, overlap: bool) -> None:
    script = Script(records=True)
    async with scripted(script, overlap=overlap) as engine:
        (sink,) = await run_all(engine, recorder, [([1, 2], SamplingParams(max_tokens=7))])
        assert len(sink.token_ids) == 7
        assert [batch.num_rows for batch in script.launched] == [1] * 7


@pytest.mark.parametrize(("overlap", "num_steps"), [(False, 5), (True, 6)])
async def test_the_token_behind_a_stop_is_seen_nowhere(scripted, recorder, overlap: bool, num_steps: int) -> None:
    """At depth 1 the row is in one more step when its stop is found: that token is dropped."""
    script = Script(token_of=lambda seed, history: len(history), records=True)
    async with scripted(script, overlap=overlap, page_size=1) as engine:
        params = SamplingParams(max_tokens=20, stop_token_ids=(6,))
        (sink,) = await run_all(engine, recorder, [([1, 2], params)])
        assert sink.token_ids == [2, 3, 4, 5, 6]
        assert sink.ends == [Finished(reason="stop", stop_reason=6, usage=sink.ends[0].usage)]
        assert sink.ends[0].usage.output_tokens == 5
        assert engine.stats.num_output_tokens == 5
        assert len(script.launched) == num_steps
        # Cached is what was computed up to the stop: the prompt and the outputs before it.
        assert engine.stats.num_cached_pages == 2 + 4
        assert engine.stats.num_free_pages + 6 == engine.stats.num_pages


@DEPTHS
@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_one_plain_request_in_chunks_leaves_nothing_behind(
    scripted, recorder, overlap: bool, prefix_cache: bool
) -> None:
    async with scripted(
        overlap=overlap, page_size=1, num_pages=256, chunked_prefill_size=4, prefix_cache=prefix_cache
    ) as engine:
        (sink,) = await run_all(engine, recorder, [([1] * 11, SamplingParams(max_tokens=200))])
        assert len(sink.token_ids) == 200
        cached = 11 + 199 if prefix_cache else 0
        assert engine.stats.num_cached_pages == cached
        assert engine.stats.num_free_pages == 256 - cached


@DEPTHS
async def test_rows_that_a_small_budget_makes_wait_go_on_from_the_right_token(
    scripted, recorder, overlap: bool
) -> None:
    requests = [([number, 3] * 9, SamplingParams(max_tokens=12, seed=number)) for number in range(7)]
    async with scripted(num_pages=256) as roomy:
        expected = [sink.token_ids for sink in await run_all(roomy, recorder, requests)]
    async with scripted(
        num_pages=256, overlap=overlap, chunked_prefill_size=4, max_prefill_tokens=6, num_rows=5
    ) as tight:
        assert [sink.token_ids for sink in await run_all(tight, recorder, requests)] == expected


@DEPTHS
async def test_bursts_trickles_and_idle_edges_give_the_same_tokens(scripted, recorder, turns, overlap: bool) -> None:
    params = SamplingParams(max_tokens=6, seed=3)
    async with scripted(overlap=overlap) as engine:
        expected = (await engine.complete([4, 5, 6], params)).token_ids
        for gap in (0, 1, 2, 3, 5, 7, 11, 40):
            sinks = [recorder() for _ in range(3)]
            for sink in sinks:
                engine.submit([4, 5, 6], params, sink)
                await turns(gap)
            for sink in sinks:
                await sink.has_end.wait()
                assert tuple(sink.token_ids) == expected


@DEPTHS
async def test_more_scoring_requests_than_rows_are_all_served(scripted, recorder, overlap: bool) -> None:
    for max_tokens in (0, 1):
        async with scripted(overlap=overlap, num_rows=2) as engine:
            requests = [([number] * 5, SamplingParams(max_tokens=max_tokens)) for number in range(5)]
            sinks = await run_all(engine, recorder, requests)
            for sink in sinks:
                assert sink.ends[0].reason == "length"
                assert sink.ends[0].usage.output_tokens == max_tokens == len(sink.token_ids)


@DEPTHS
async def test_scoring_and_generating_requests_share_steps(scripted, recorder, overlap: bool) -> None:
    async with scripted(overlap=overlap, chunked_prefill_size=4) as engine:
        requests = [([number] * 9, SamplingParams(max_tokens=number % 3, seed=1)) for number in range(8)]
        sinks = await run_all(engine, recorder, requests)
        assert [len(sink.token_ids) for sink in sinks] == [number % 3 for number in range(8)]


@DEPTHS
async def test_six_rows_in_an_exactly_full_pool_retract_exactly_one(scripted, recorder, overlap: bool) -> None:
    """All six fill four pages each when the first needs a fifth: one row goes back and is recomputed exactly."""
    requests = [([0] * 12, SamplingParams(max_tokens=8, seed=0))]
    requests += [([number] * 10, SamplingParams(max_tokens=7, seed=number)) for number in range(1, 6)]
    async with scripted(num_pages=256) as roomy:
        expected = [sink.token_ids for sink in await run_all(roomy, recorder, requests)]
    with patch.object(new_token_ratio, "INITIAL", 0.0), patch.object(new_token_ratio, "LOWEST", 0.0):
        for num_pages, num_retractions in ((25, 0), (24, 1)):
            async with scripted(num_pages=num_pages, overlap=overlap, prefix_cache=False) as engine:
                sinks = await run_all(engine, recorder, requests)
                assert [sink.token_ids for sink in sinks] == expected
                assert engine.stats.num_retractions == num_retractions
                assert engine.stats.num_drains == (num_retractions if overlap else 0)


@DEPTHS
async def test_retraction_under_constant_pressure_ends_and_changes_no_token(scripted, recorder, overlap: bool) -> None:
    requests = [([number] * 6, SamplingParams(max_tokens=30, seed=number)) for number in range(20)]
    async with scripted(num_pages=512) as roomy:
        expected = [sink.token_ids for sink in await run_all(roomy, recorder, requests)]
    with patch.object(new_token_ratio, "INITIAL", 0.0), patch.object(new_token_ratio, "LOWEST", 0.0):
        async with scripted(num_pages=20, overlap=overlap) as tight:
            assert [sink.token_ids for sink in await run_all(tight, recorder, requests)] == expected
            assert 0 < tight.stats.num_retractions < 200


@DEPTHS
async def test_a_prompt_with_all_its_outputs_as_large_as_the_pool_is_served(scripted, recorder, overlap: bool) -> None:
    async with scripted(num_pages=64, page_size=2, max_model_len=512, overlap=overlap, vocab_size=97) as engine:
        (sink,) = await run_all(engine, recorder, [([1] * 10, SamplingParams(max_tokens=118))])
        assert len(sink.token_ids) == 118
        assert engine.stats.num_retractions == 0


@DEPTHS
@pytest.mark.parametrize("kind", ["launch_faults", "forward_faults", "resolve_faults"])
async def test_a_failed_step_fails_its_rows_and_the_engine_goes_on(
    scripted, recorder, overlap: bool, kind: str
) -> None:
    async with scripted(Script(**{kind: frozenset({3})}), overlap=overlap) as engine:
        sinks = await run_all(engine, recorder, [([number], SamplingParams(max_tokens=9)) for number in range(4)])
        assert all(isinstance(sink.ends[0], Failed) and sink.ends[0].error.step == 3 for sink in sinks)
        assert all(str(sink.ends[0].error).startswith("step 3 failed: scripted") for sink in sinks)
        assert engine.death is None
        assert engine.stats.num_free_pages + engine.stats.num_cached_pages == engine.stats.num_pages


@DEPTHS
async def test_the_engine_serves_again_after_a_failed_step(scripted, overlap: bool) -> None:
    script = Script(launch_faults=frozenset({1}), resolve_faults=frozenset({4}))
    async with scripted(script, overlap=overlap) as engine:
        outcomes = await asyncio.gather(
            *(engine.complete([1], SamplingParams(max_tokens=4)) for _ in range(2)), return_exceptions=True
        )
        assert all(isinstance(outcome, StepFailed) for outcome in outcomes)
        with pytest.raises(StepFailed):
            await engine.complete([1], SamplingParams(max_tokens=30))
        assert len((await engine.complete([1], SamplingParams(max_tokens=30))).token_ids) == 30


@DEPTHS
async def test_a_failing_row_fails_alone(scripted, recorder, overlap: bool) -> None:
    requests = [([number], SamplingParams(max_tokens=9, seed=number)) for number in range(3)]
    async with scripted() as healthy:
        expected = [sink.token_ids for sink in await run_all(healthy, recorder, requests)]
    async with scripted(Script(row_faults=frozenset({(4, 1)})), overlap=overlap) as engine:
        sinks = await run_all(engine, recorder, requests)
        assert isinstance(sinks[1].ends[0], Failed)
        assert "row 1 of step 4" in str(sinks[1].ends[0].error)
        assert sinks[1].token_ids == expected[1][:4]
        assert [sinks[0].token_ids, sinks[2].token_ids] == [expected[0], expected[2]]


async def test_the_worker_is_told_of_every_commit_of_a_launched_step(scripted, recorder) -> None:
    script = Script(
        launch_faults=frozenset({2}), forward_faults=frozenset({5}), resolve_faults=frozenset({7}), records=True
    )
    async with scripted(script) as engine:
        told, real = [], engine._worker.committed
        engine._worker.committed = lambda step: (told.append(step), real(step))
        for _ in range(5):
            sink = recorder()
            engine.submit([1], SamplingParams(max_tokens=4), sink)
            await sink.has_end.wait()
        await engine.drain(5)
        assert told == [batch.step for batch in script.launched]
        assert 2 not in told
        assert {5, 7} <= set(told)


@DEPTHS
async def test_first_tokens_come_before_the_next_prefill_is_through(scripted, recorder, overlap: bool) -> None:
    """Back-to-back prefills: a prompt's first token does not wait for the prompts behind it."""
    script = Script(records=True)
    async with scripted(script, overlap=overlap, num_pages=256, chunked_prefill_size=8, max_prefill_tokens=8) as engine:
        sinks = [recorder() for _ in range(6)]
        for number, sink in enumerate(sinks):
            engine.submit([number] * 8, SamplingParams(max_tokens=1), sink)
        await sinks[0].has_token.wait()
        assert engine.stats.num_steps <= 2
        await engine.drain(10)


@DEPTHS
async def test_no_row_drops_out_between_its_first_and_its_last_token(scripted, recorder, overlap: bool) -> None:
    script = Script(records=True)
    async with scripted(script, overlap=overlap, chunked_prefill_size=4, num_pages=256) as engine:
        requests = [([number] * (3 + 4 * number), SamplingParams(max_tokens=15)) for number in range(6)]
        await run_all(engine, recorder, requests)
        assert engine.stats.num_retractions == 0
        steps: dict[int, list[int]] = {}
        for batch in script.launched:
            for index, row in enumerate(batch.rows):
                if batch.samples[index]:
                    steps.setdefault(row, []).append(batch.step)
        for taken in steps.values():  # a row may serve one request after another
            runs = [taken[start : start + 15] for start in range(0, len(taken), 15)]
            assert all(run == list(range(run[0], run[0] + 15)) for run in runs)


@DEPTHS
async def test_queues_beyond_their_limits_are_refused_with_a_typed_error(scripted, recorder, overlap: bool) -> None:
    async with scripted(overlap=overlap, num_rows=1, max_queued_requests=3, max_queued_tokens=30) as engine:
        sinks = [recorder()]
        engine.submit([1] * 100, SamplingParams(max_tokens=3), sinks[0])  # alone, whatever its size
        with pytest.raises(Overloaded, match="100 tokens"):
            engine.submit([1], SamplingParams(max_tokens=3), recorder())
        await sinks[0].has_token.wait()
        for length in (10, 10, 10):
            sinks.append(recorder())
            engine.submit([2] * length, SamplingParams(max_tokens=3), sinks[-1])
        with pytest.raises(Overloaded, match="3 requests") as caught:
            engine.submit([1], SamplingParams(max_tokens=3), recorder())
        assert caught.value.retry_after_s > 0
        assert not caught.value.draining
        for sink in sinks:
            await sink.has_end.wait()
            assert isinstance(sink.ends[0], Finished)
        sinks.append(recorder())
        engine.submit([1] * 25, SamplingParams(max_tokens=3), sinks[-1])
        await engine.drain(10)
        assert engine._scheduler._waiting.num_tokens == 0
