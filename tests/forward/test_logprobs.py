"""Log-probabilities against transformers' forward: of drawn tokens, of prompts in slices, with caching and retraction."""

from __future__ import annotations

import asyncio
import functools

import pytest
import torch
import transformers

from slipstream.engine.outputs import Completion
from slipstream.engine.sampling import logprobs as logprobs_module
from slipstream.engine.sampling_params import SamplingParams

PROMPT = [(7 * position) % 290 + 5 for position in range(70)]


@pytest.fixture(scope="module")
def reference(folder):
    """All log-probabilities of a sequence. Shapes: → [T, vocab]: row t predicts token t + 1."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


@pytest.fixture
def engine(engine):
    """With room for longer prompts."""
    return functools.partial(engine, max_total_tokens=2048, chunked_prefill_size=32, page_size=16)


def check(given, expected, ids, first):
    """`given` are the log-probabilities of ids[first:]."""
    assert [each.token_id for each in given] == list(ids[first:])
    for position, each in enumerate(given, first):
        row = expected[position - 1]
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=2e-3)
        top = row.topk(len(each.top_ids))
        assert each.top_logprobs == pytest.approx(top.values.tolist(), abs=2e-3)
        assert list(each.top_logprobs) == sorted(each.top_logprobs, reverse=True)


@pytest.mark.parametrize("overlap", [True, False])
async def test_each_drawn_token_has_its_own_alternatives_whatever_the_others_ask(engine, reference, overlap):
    asked = [0, None, 5, None, 3, None, None, 1]
    params = [SamplingParams(max_tokens=9, seed=n, logprobs=k, ignore_eos=True) for n, k in enumerate(asked)]
    async with engine(overlap=overlap) as running:
        answers = await asyncio.gather(*(running.complete(PROMPT[n:], how) for n, how in enumerate(params)))
    for number, (answer, k) in enumerate(zip(answers, asked, strict=True)):
        if k is None:
            assert answer.logprobs == ()
            continue
        assert [len(each.top_ids) for each in answer.logprobs] == [k] * 9
        ids = [*PROMPT[number:], *answer.token_ids]
        check(answer.logprobs, reference(ids), ids, len(ids) - 9)


async def test_they_are_of_the_model_s_logits_and_not_of_the_changed_ones(engine, reference):
    params = SamplingParams(max_tokens=4, temperature=0.3, top_k=1, logit_bias={77: 100.0}, logprobs=2, ignore_eos=True)
    async with engine() as running:
        answer = await running.complete(PROMPT, params)
    assert answer.token_ids == (77, 77, 77, 77)
    ids = [*PROMPT, *answer.token_ids]
    check(answer.logprobs, reference(ids), ids, len(PROMPT))


@pytest.mark.parametrize("start", [0, 1, 40, 69, 70, 500])
@pytest.mark.parametrize("overlap", [True, False])
async def test_a_prompt_is_scored_from_its_start_even_where_it_is_cached(engine, reference, start, overlap):
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, logprob_start=start)
    expected = reference(PROMPT)
    async with engine(overlap=overlap, page_size=4) as running:
        for _ in range(2):
            answer = await running.complete(PROMPT, params)
            assert answer.token_ids == ()
            assert answer.finish_reason == "length"
            check(answer.prompt_logprobs, expected, PROMPT, max(start, 1))
        cached = answer.usage.cached_tokens
        other = await running.complete(PROMPT, SamplingParams(max_tokens=1, temperature=0.0))
    assert cached == min(max(start - 1, 0), 69) // 4 * 4
    assert other.usage.cached_tokens == 68


async def test_prompts_are_scored_in_slices_and_mixed_with_requests_that_want_nothing(engine, reference, monkeypatch):
    monkeypatch.setattr(logprobs_module, "SLICE_POSITIONS", 7)
    scored = SamplingParams(max_tokens=3, prompt_logprobs=1, logprobs=1, temperature=0.0, ignore_eos=True)
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    async with engine(chunked_prefill_size=16) as running:
        one, two, three = await asyncio.gather(
            running.complete(PROMPT, scored), running.complete(PROMPT[3:], free), running.complete(PROMPT[9:30], scored)
        )
    for answer, prompt in ((one, PROMPT), (three, PROMPT[9:30])):
        expected = reference([*prompt, *answer.token_ids])
        check(answer.prompt_logprobs, expected, prompt, 1)
        check(answer.logprobs, expected, [*prompt, *answer.token_ids], len(prompt))
    assert two.prompt_logprobs == two.logprobs == ()


async def test_prompt_logprobs_come_once_and_with_the_first_delta(engine):
    params = SamplingParams(max_tokens=5, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    async with engine() as running:
        deltas = [delta async for delta in running.generate(PROMPT, params)]
    assert len(deltas[0].prompt_logprobs) == len(PROMPT) - 1
    assert all(delta.prompt_logprobs == () for delta in deltas[1:])
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert len(Completion.of(deltas).logprobs) == 5


async def test_a_prompt_of_one_token_has_nothing_to_score(engine):
    async with engine() as running:
        answer = await running.complete([9], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert answer.prompt_logprobs == ()
