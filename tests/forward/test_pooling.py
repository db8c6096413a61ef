"""Pooled hidden states against transformers: last and mean, in chunks, cached, and among requests that draw."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
import torch
import transformers

from slipstream.engine.errors import RequestError
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import new_token_ratio

PROMPTS = [[(7 * place + start) % 290 + 5 for place in range(length)] for start, length in ((0, 70), (3, 1), (9, 33))]


@pytest.fixture(scope="module")
def hidden(folder):
    """Hidden states behind the last norm. Shapes: → [T, hidden size]."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def states(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).last_hidden_state[0]

    return states


@pytest.mark.parametrize("overlap", [True, False])
async def test_pooled_states_are_those_of_transformers(engine, hidden, overlap):
    drawing = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    async with engine(overlap=overlap) as running:
        for _ in range(2):  # the second time the prompts are cached
            jobs = [
                running.complete(prompt, SamplingParams(max_tokens=0, pooling=pooling))
                for prompt in PROMPTS
                for pooling in ("last", "mean")
            ]
            *found, free = await asyncio.gather(*jobs, running.complete(PROMPTS[0], drawing))
            assert len(free.token_ids) == 12
            assert free.embedding is None
            for number, prompt in enumerate(PROMPTS):
                last, mean = found[2 * number : 2 * number + 2]
                states = hidden(prompt)
                assert torch.allclose(torch.tensor(last.embedding), states[-1], atol=2e-4)
                assert torch.allclose(torch.tensor(mean.embedding), states.mean(0), atol=2e-4)
                assert last.token_ids == mean.token_ids == ()


async def test_pooling_goes_with_no_tokens_only():
    for how in ({"pooling": "max", "max_tokens": 0}, {"pooling": "last"}, {"pooling": "mean", "max_tokens": 3}):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**how)
        assert caught.value.param == "pooling"


async def test_under_pressure_no_part_of_a_prompt_counts_twice(engine, hidden):
    with patch.object(new_token_ratio, "INITIAL", 0.0):
        async with engine(max_total_tokens=112) as running:
            drawing = [
                running.complete(PROMPTS[0][k:40], SamplingParams(max_tokens=40, temperature=0.0)) for k in range(3)
            ]
            *_, pooled = await asyncio.gather(
                *drawing, running.complete(PROMPTS[0], SamplingParams(max_tokens=0, pooling="mean"))
            )
    assert torch.allclose(torch.tensor(pooled.embedding), hidden(PROMPTS[0]).mean(0), atol=2e-4)
