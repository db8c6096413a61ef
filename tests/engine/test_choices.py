"""Several choices of one prompt: its whole pages are computed once, seeds tell the choices apart, an abort takes all."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from slipstream import SamplingParams
from slipstream.engine.scripted_worker import Script

PROMPT = [(5 * place) % 29 for place in range(62)]


def computed_positions(script, first_of):
    """How often each position of the prompt was computed, over all rows and steps."""
    counts = Counter()
    for batch in script.launched:
        for index in range(batch.num_decode, batch.num_rows):
            prior, new = batch.num_prior[index], batch.num_new[index]
            counts.update(place for place in range(prior, prior + new) if place < first_of)
    return counts


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [2, 15, 17, 18, 31, 32, 33, 48, 62])
async def test_the_whole_pages_of_a_prompt_are_computed_once_for_all_choices(scripted, overlap, page_size, length):
    script = Script(records=True)
    engine = scripted(
        script, overlap=overlap, page_size=page_size, num_pages=1024 // page_size, chunked_prefill_size=32
    )
    async with engine:
        params = [SamplingParams(max_tokens=6, seed=seed) for seed in range(5)]
        prompt = PROMPT[:length]
        answers = await asyncio.gather(*(engine.complete(prompt, how) for how in params))
        alone = [(await engine.complete(prompt, how)).token_ids for how in params]
    shared = (length - 1) // page_size * page_size
    first_five = Script(launched=[batch for batch in script.launched if batch.step < 40])
    counts = computed_positions(first_five, shared)
    assert set(counts) == set(range(shared))
    assert set(counts.values()) <= {1}
    assert [answer.token_ids for answer in answers] == alone
    assert len(set(alone)) == 5


async def test_an_abort_by_id_frees_all_choices(scripted, recorder, turns):
    async with scripted(num_pages=512) as engine:
        sinks = [recorder() for _ in range(4)]
        for seed, sink in enumerate(sinks):
            engine.submit(PROMPT, SamplingParams(max_tokens=100, seed=seed), sink, request_id="one")
        await asyncio.gather(*(sink.has_token.wait() for sink in sinks))
        assert engine.abort("one") == 4
        assert all(sink.ends for sink in sinks)
        await turns(10)
        stats = engine.stats
        assert stats.num_running == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


async def test_what_choices_compute_again_is_less_than_a_page_and_strangers_do_not_wait(scripted):
    script = Script(records=True)
    async with scripted(script, page_size=16, num_pages=64, chunked_prefill_size=64) as engine:
        await asyncio.gather(
            *(engine.complete(PROMPT[:30], SamplingParams(max_tokens=1, seed=seed)) for seed in range(4))
        )
        again = [row for batch in script.launched for row in batch.num_new[batch.num_decode :]]
        assert again == [30, 14, 14, 14]
        script.launched.clear()
        # The same first page, then something else: together in one step.
        prompts = [[7, *PROMPT[:20], last] for last in range(2)]
        await asyncio.gather(*(engine.complete(prompt, SamplingParams(max_tokens=1)) for prompt in prompts))
        assert [batch.num_new for batch in script.launched] == [(22, 22)]
