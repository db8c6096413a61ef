"""The worker on the CPU: steps, faults and their radius, and the engine over it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from array import array

import pytest

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.errors import ConfigError, MisuseError, StepFailed
from slipstream.engine.forward.kv_pool import KVPool
from slipstream.engine.forward.tp_worker import TpWorker
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler.schedule_batch import RowSampling, RowStart, ScheduleBatch
from slipstream.engine.worker import SampleInputs

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
PAGE = 16


def config(**settings):
    return EngineConfig(
        **{
            "model": "tiny",
            "device": "cpu",
            "dtype": "float32",
            "cpu_threads": 1,
            "max_running_requests": 8,
            "max_total_tokens": 1024,
            "page_size": PAGE,
            **settings,
        }
    )


@pytest.fixture
async def worker(folder):
    made = TpWorker(config(), folder)
    await made.start()
    yield made
    await made.aclose()


def prompt(step, rows, *, length=5, samples=True, sampling=GREEDY):
    """A prefill step in which row r has prompt (r, r+1, …) on page r."""
    ids = [row + offset for row in rows for offset in range(length)]
    return ScheduleBatch(
        step=step,
        num_decode=0,
        rows=tuple(rows),
        num_prior=(0,) * len(rows),
        num_new=(length,) * len(rows),
        samples=(samples,) * len(rows),
        extend_ids=array("i", ids).tobytes(),
        table_rows=array("i", rows).tobytes(),
        table_columns=array("i", [0] * len(rows)).tobytes(),
        table_pages=array("i", rows).tobytes(),
        starts=tuple(RowStart(row=row, sampling=sampling) for row in rows),
    )


def decode(step, rows, prior):
    return ScheduleBatch(
        step=step,
        num_decode=len(rows),
        rows=tuple(rows),
        num_prior=(prior,) * len(rows),
        num_new=(1,) * len(rows),
        samples=(True,) * len(rows),
        extend_ids=b"",
        table_rows=b"",
        table_columns=b"",
        table_pages=b"",
        starts=(),
    )


async def run(worker, batch, inputs=None):
    launched = worker.launch(batch)
    launched.resolve(inputs or SampleInputs())
    try:
        return await launched.outcome
    finally:
        worker.committed(batch.step)


def mixed_lengths(step):
    """One token more for rows 8 (12 tokens so far) and 1 (5 tokens)."""
    return dataclasses.replace(decode(step, [8, 1], 0), num_prior=(12, 5))


# ---- steps


async def test_limits_tell_what_the_pool_holds(folder):
    worker = TpWorker(config(max_total_tokens=100), folder)
    limits = await worker.start()
    assert (limits.num_pages, limits.page_size, limits.num_rows) == (6, 16, 8)
    assert limits.max_model_len == 96
    assert limits.vocab_size == 300
    with pytest.raises(MisuseError, match="starts once"):
        await worker.start()
    await worker.aclose()


async def test_prefill_and_decode_give_what_transformers_generates(worker, greedy):
    outcome = await run(worker, prompt(0, [3, 5]))
    ids = [[token] for token in outcome.token_ids]
    for step in range(1, 6):
        outcome = await run(worker, decode(step, [3, 5], 4 + step))
        for row, token in zip(ids, outcome.token_ids, strict=True):
            row.append(token)
    assert ids == [greedy([3, 4, 5, 6, 7], 6), greedy([5, 6, 7, 8, 9], 6)]


async def test_two_steps_may_be_open_and_the_second_reads_the_first_ones_ids_on_the_device(worker, greedy):
    first = worker.launch(prompt(0, [3]))
    first.resolve(SampleInputs())
    second = worker.launch(decode(1, [3], 5))
    second.resolve(SampleInputs())
    outcomes = [await first.outcome, await second.outcome]
    assert [outcome.token_ids[0] for outcome in outcomes] == greedy([3, 4, 5, 6, 7], 2)
    worker.committed(0)
    worker.committed(1)


async def test_an_outcome_is_awaitable_before_the_step_is_resolved(worker, greedy):
    launched = worker.launch(prompt(0, [3]))
    waiting = asyncio.ensure_future(asyncio.wait_for(launched.outcome, 10))
    await asyncio.sleep(0)
    assert not waiting.done()
    launched.resolve(SampleInputs())
    assert list((await waiting).token_ids) == greedy([3, 4, 5, 6, 7], 1)
    with pytest.raises(MisuseError, match="resolved twice"):
        launched.resolve(SampleInputs())


async def test_a_step_in_which_no_row_samples_completes_without_ids(worker, greedy):
    outcome = await run(worker, prompt(0, [3, 4], samples=False))
    assert outcome.token_ids == ()
    batch = prompt(1, [3], length=2)
    chunk = dataclasses.replace(batch, num_prior=(5,), extend_ids=array("i", [8, 9]).tobytes(), starts=())
    assert list((await run(worker, chunk)).token_ids) == greedy([3, 4, 5, 6, 7, 8, 9], 1)


async def test_more_open_steps_than_staging_slots_are_a_misuse(worker):
    for step in range(3):
        launched = worker.launch(prompt(step, [3]))
        launched.resolve(SampleInputs())
        await launched.outcome
    with pytest.raises(MisuseError, match="no staging slot free"):
        worker.launch(prompt(3, [3]))
    worker.committed(0)
    assert len((await run(worker, prompt(3, [3]))).token_ids) == 1


async def test_a_dead_row_leaves_the_relay_alone(worker, greedy):
    await run(worker, prompt(0, [3, 5]))
    # Row 3 is dead in this step: its sample is dropped, so the next step feeds it the first id again.
    await run(worker, decode(1, [3, 5], 5), SampleInputs(dead=frozenset({0})))
    again = await run(worker, decode(2, [3, 5], 5))
    assert again.token_ids[0] == greedy([3, 4, 5, 6, 7], 2)[1]


async def test_suppressed_ids_are_not_drawn(worker, greedy):
    best = greedy([3, 4, 5, 6, 7], 1)[0]
    inputs = SampleInputs(suppressed=((1, (best, 10_000)),))
    outcome = await run(worker, prompt(0, [5, 3]), inputs)
    assert outcome.token_ids[0] == greedy([5, 6, 7, 8, 9], 1)[0]
    assert outcome.token_ids[1] != best


# ---- faults


async def test_a_forward_that_raises_fails_its_own_step_only(worker, greedy, monkeypatch):
    model = type(find_model(worker))
    real = model.forward
    monkeypatch.setattr(model, "forward", lambda *_: 1 / 0)
    launched = worker.launch(prompt(0, [3]))
    launched.resolve(SampleInputs())
    with pytest.raises(StepFailed, match="step 0 failed: division by zero") as caught:
        await launched.outcome
    assert caught.value.step == 0
    worker.committed(0)
    monkeypatch.setattr(model, "forward", real)
    assert list((await run(worker, prompt(1, [3]))).token_ids) == greedy([3, 4, 5, 6, 7], 1)


async def test_a_row_with_nan_logits_fails_alone(worker, greedy):
    model = find_model(worker)
    clean = model.embedding[5].clone()
    model.embedding[5] = float("nan")
    outcome = await run(worker, prompt(0, [6, 1]))  # the prompt of row 1 holds id 5
    assert list(outcome.row_errors) == [1]
    assert "not finite" in outcome.row_errors[1]
    assert outcome.token_ids[0] == greedy([6, 7, 8, 9, 10], 1)[0]
    outcome = await run(worker, decode(1, [6, 1], 5), SampleInputs(dead=frozenset({1})))
    assert outcome.row_errors == {}
    # Its page, given to a longer row's neighbour, does no harm.
    model.embedding[5] = clean
    await run(worker, prompt(2, [8], length=12))
    await run(worker, prompt(3, [1]))
    assert (await run(worker, mixed_lengths(4))).row_errors == {}


async def test_closing_is_quick_and_later_launches_are_refused(folder):
    worker = TpWorker(config(), folder)
    await worker.start()
    worker.launch(prompt(0, [3])).resolve(SampleInputs())
    await asyncio.wait_for(worker.aclose(), 10)
    with pytest.raises(MisuseError, match="closed"):
        worker.launch(prompt(1, [3]))
    await TpWorker(config(), folder).aclose()  # never started: nothing to close


async def test_a_worker_that_has_not_started_launches_nothing(folder):
    with pytest.raises(MisuseError, match="not started"):
        TpWorker(config(), folder).launch(prompt(0, [3]))


async def test_a_checkpoint_that_does_not_fit_is_a_configuration_error(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="safetensors"):
        await TpWorker(config(), tmp_path).start()
    dummy = TpWorker(config(load_format="dummy"), tmp_path)
    assert (await dummy.start()).vocab_size == 300
    await dummy.aclose()


# ---- under the engine


class ExpectsNothing:
    """A ratio that never learns, so that the scheduler admits more than will fit."""

    value = 0.0

    def record_decode_step(self):
        pass

    def record_retraction(self, **_):
        pass

    def reset(self):
        pass


def engine(folder, **settings):
    return Engine(
        config(model=str(folder), skip_tokenizer=True, chunked_prefill_size=32, max_prefill_tokens=64, **settings)
    )


PROMPTS = [[(7 * row + 3 * position) % 290 + 5 for position in range(length)] for row, length in
           enumerate((5, 40, 100, 17, 16, 1, 33))]  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [True, False])
async def test_concurrent_requests_get_the_text_they_would_get_alone(folder, greedy, overlap, page_size):
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    async with engine(folder, overlap=overlap, page_size=page_size) as running:
        answers = await asyncio.gather(*(running.complete(ids, params) for ids in PROMPTS))
        repeated = await running.complete(PROMPTS[2], params)
    for ids, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer.token_ids) == greedy(ids, 12)
    # Its prompt is in the prefix cache now.
    assert repeated.token_ids == answers[2].token_ids
    assert repeated.usage.cached_tokens >= 96


async def test_with_too_few_pages_requests_are_retracted_and_resumed_without_a_trace(folder, greedy):
    # Without ignore_eos: of requests that cannot end early the scheduler expects all their tokens.
    params = SamplingParams(max_tokens=90, temperature=0.0)
    short = [PROMPTS[5], PROMPTS[0], PROMPTS[4], PROMPTS[3], [9, 8, 7], [200, 100]]
    async with engine(folder, max_total_tokens=300, page_size=4) as running:
        running._scheduler._planner.ratio = ExpectsNothing()
        answers = await asyncio.gather(*(running.complete(ids, params) for ids in short))
        retractions = running.stats.num_retractions
    assert [list(answer.token_ids) for answer in answers] == [greedy(ids, 90) for ids in short]
    assert retractions > 0, "the pool was too large to matter"


async def test_in_row_invariant_mode_both_depths_draw_the_same_tokens_under_pressure(folder):
    async def texts(overlap):
        made = engine(folder, overlap=overlap, row_invariant=True, max_total_tokens=112, page_size=4)
        async with made as running:
            running._scheduler._planner.ratio = ExpectsNothing()
            answers = await asyncio.gather(*(
                running.complete(PROMPTS[k], SamplingParams(
                    max_tokens=30, temperature=0.0 if k == 3 else 1.2, top_p=0.95, seed=k))
                for k in (0, 3, 4, 5, 6)
            ))  # fmt: skip
            assert running.stats.num_retractions > 0
            return answers

    both = [await texts(overlap) for overlap in (True, False)]
    assert [answer.token_ids for answer in both[0]] == [answer.token_ids for answer in both[1]]


def find_model(worker):
    """The model inside the worker, wherever the build keeps it."""
    step = worker._built.make_step
    for cell in step.__closure__:
        parts = cell.cell_contents
        if hasattr(parts, "runner"):
            return parts.runner.model
    raise AssertionError("no model found")


async def test_a_closed_engine_gives_its_memory_back_without_the_cycle_collector(folder):
    def pools():
        return sum(type(thing) is KVPool for thing in gc.get_objects())

    gc.collect()
    before = pools()
    gc.disable()
    try:
        engine = Engine(config(model=str(folder), skip_tokenizer=True))
        async with engine:
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
            assert pools() == before + 1
        assert pools() == before, "the engine is still here, its device memory is not"
    finally:
        gc.enable()


async def test_a_closed_worker_says_so_and_keeps_its_counts(folder):
    worker = TpWorker(config(), folder)
    await worker.start()
    launched = worker.launch(prompt(0, [1]))
    launched.resolve(SampleInputs())
    await launched.outcome
    await worker.aclose()
    assert worker.num_forwards == {"EagerRunner": 1}
    with pytest.raises(MisuseError, match="closed"):
        worker.launch(prompt(1, [1]))
    with pytest.raises(MisuseError, match="once"):
        await worker.start()
    await worker.aclose()
