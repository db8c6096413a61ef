"""The debug canary on the CPU: free pages hold NaN, and only who reads one that is free notices."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.forward.tp_worker import TpWorker
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import new_token_ratio
from slipstream.engine.scheduler.schedule_batch import RowSampling, RowStart, ScheduleBatch
from slipstream.engine.worker import SampleInputs, StepOutcome

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
PROMPTS = [[(7 * row + 3 * position) % 290 + 5 for position in range(length)]
           for row, length in enumerate((5, 40, 70, 17, 16, 1, 33))]  # fmt: skip


def config(folder, **settings) -> EngineConfig:
    chosen = {
        "page_size": 4,
        "max_total_tokens": 400,
        "max_running_requests": 8,
        "chunked_prefill_size": 32,
        **settings,
    }
    return EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        skip_tokenizer=True,
        debug_canary=True,
        **chosen,
    )


def batch(
    step: int, *, prior: int, ids: list[int], pages: list[tuple[int, int]], starts: bool = False
) -> ScheduleBatch:
    """One row: a prompt if it has ids, else a decode; `pages` are (column, page) that its table learns."""
    return ScheduleBatch(
        step=step,
        num_decode=0 if ids else 1,
        rows=(1,),
        num_prior=(prior,),
        num_new=(len(ids) or 1,),
        samples=(True,),
        extend_ids=array("i", ids).tobytes(),
        table_rows=array("i", [1] * len(pages)).tobytes(),
        table_columns=array("i", [column for column, _ in pages]).tobytes(),
        table_pages=array("i", [page for _, page in pages]).tobytes(),
        starts=(RowStart(row=1, sampling=GREEDY),) if starts else (),
    )


async def run(worker: TpWorker, step: ScheduleBatch) -> StepOutcome:
    launched = worker.launch(step)
    launched.resolve(SampleInputs())
    outcome = await launched.outcome
    worker.committed(step.step)
    return outcome


async def test_a_row_that_reads_a_free_page_fails_alone_and_a_clean_one_does_not(folder) -> None:
    worker = TpWorker(config(folder), folder)
    await worker.start()
    first = await run(worker, batch(0, prior=0, ids=[5, 6, 7, 8, 9], pages=[(0, 1), (1, 2)], starts=True))
    assert not first.row_errors
    worker.poison([3, 4])
    assert not (await run(worker, batch(1, prior=5, ids=[], pages=[]))).row_errors, "others' free pages"
    worker.poison([1])
    assert "not finite" in (await run(worker, batch(2, prior=6, ids=[], pages=[]))).row_errors[0]
    # Given out again they are clean: the same prompt on pages 3 and 1 draws what it drew on 1 and 2.
    again = await run(worker, batch(3, prior=0, ids=[5, 6, 7, 8, 9], pages=[(0, 3), (1, 1)], starts=True))
    assert (again.token_ids, again.row_errors) == (first.token_ids, {})
    await worker.aclose()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_it_raises_no_false_alarm_under_pressure(folder, greedy, overlap, page_size, monkeypatch) -> None:
    """Retractions, evictions, duplicates, chunks and partly filled pages: every page comes home and goes out many times."""
    monkeypatch.setattr(new_token_ratio, "INITIAL", 0.0)
    monkeypatch.setattr(new_token_ratio, "LOWEST", 0.0)
    made = config(folder, page_size=page_size, overlap=overlap, max_total_tokens=192)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    async with Engine(made) as engine:
        for _ in range(2):
            answers = await asyncio.gather(*(engine.complete(ids, params) for ids in (*PROMPTS, PROMPTS[1])))
        assert engine.stats.num_retractions > 0
    for ids, answer in zip(PROMPTS, answers, strict=False):
        assert list(answer.token_ids) == greedy(ids, 40)


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_a_prompt_five_times_over_gets_one_answer_cached_or_not(folder, prefix_cache) -> None:
    """In row-invariant mode a cached prefix is bit for bit what computing it again would give."""
    made = config(folder, row_invariant=True, prefix_cache=prefix_cache)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    async with Engine(made) as engine:
        answers = [await engine.complete(PROMPTS[2], params) for _ in range(5)]
        assert len({answer.token_ids for answer in answers}) == 1
        assert [answer.usage.cached_tokens > 0 for answer in answers] == [False, *[prefix_cache] * 4]
    async with Engine(config(folder, row_invariant=True, prefix_cache=not prefix_cache)) as engine:
        assert (await engine.complete(PROMPTS[2], params)).token_ids == answers[0].token_ids
