"""The whole engine on the CPU with counts kept as on CUDA, its kernel interpreted: the tokens of the host's edits."""

from __future__ import annotations

import asyncio
import contextlib
from unittest.mock import patch

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.forward import device_build, torch_step
from slipstream.engine.sampling.token_counts import TokenCounts
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import new_token_ratio

PREFIX = [5, 9, 11, 9, 250, 7, 7, 31, 2, 18, 90, 91, 92, 93, 94, 95, 96, 17]
HOW = (
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"frequency_penalty": 0.8, "presence_penalty": -0.3, "temperature": 0.0},
    {"repetition_penalty": 1.2, "logit_bias": {30: 4.0, 9: -8.0}, "temperature": 0.0},
    {"repetition_penalty": 1.3, "bad_words_ids": ((9,), (7, 5)), "min_tokens": 12, "seed": 3},
    {"frequency_penalty": 1.5, "allowed_token_ids": (3, 30, 31, 32, 64, 299), "seed": 4, "logprobs": 1},
    {"temperature": 0.0},
)
STOPS = tuple(range(200, 225))
NUMBERS = range(2 * len(HOW))


@pytest.fixture
def folder(tiny_llama):
    return tiny_llama


@contextlib.contextmanager
def counting(monkeypatch):
    """While this is open, the CPU's engines count as CUDA's do."""
    made = []
    limits_of, extras_of = device_build._limits, torch_step.StepExtras

    def limits(config, runner, *, memory_table):
        counts = TokenCounts(
            num_rows=config.max_running_requests,
            vocab_size=runner.model.config.vocab_size,
            next_ids=runner.row_state.relay.table,
            device=torch.device("cpu"),
        )
        made.append(counts)
        return limits_of(config, runner, memory_table=memory_table, counts_tokens=True)

    with monkeypatch.context() as patches:
        patches.setattr(device_build, "_limits", limits)
        patches.setattr(torch_step, "StepExtras", lambda *args, **more: extras_of(*args, counts=made[-1], **more))
        yield


def config_of(folder, **settings):
    return EngineConfig(
        **{
            "model": str(folder),
            "device": "cpu",
            "dtype": "float32",
            "cpu_threads": 1,
            "max_running_requests": 8,
            "max_total_tokens": 1024,
            "page_size": 4,
            "chunked_prefill_size": 8,
            "skip_tokenizer": True,
            "row_invariant": True,
            **settings,
        }
    )


async def tokens_of(folder, numbers=NUMBERS, **settings):
    """Two requests of each kind: one with the shared prefix, which takes several chunks, and one without it."""
    async with Engine(config_of(folder, **settings)) as engine:
        answers = await asyncio.gather(*(
            engine.complete(
                [*(PREFIX if number % 2 else ()), 40 + number, 8],
                SamplingParams(max_tokens=20, stop_token_ids=STOPS, **HOW[number // 2]),
            )
            for number in numbers
        ))  # fmt: skip
        return [answer.token_ids for answer in answers], engine.stats


@pytest.mark.timeout(120)
async def test_counting_on_the_device_draws_what_edits_draw_at_any_depth_after_retraction_and_alone(
    folder, monkeypatch
):
    by_edits, _ = await tokens_of(folder, overlap=True)
    with counting(monkeypatch):
        assert (await tokens_of(folder, overlap=True))[0] == by_edits
        assert (await tokens_of(folder, overlap=False))[0] == by_edits
        with patch.object(new_token_ratio, "INITIAL", 0.0), patch.object(new_token_ratio, "LOWEST", 0.0):
            pressed, stats = await tokens_of(folder, overlap=True, max_total_tokens=88)
        assert stats.num_retractions > 0
        assert pressed == by_edits
        for number in (1, 2, 6):
            assert (await tokens_of(folder, [number], overlap=True))[0] == [by_edits[number]]
    assert len(set(by_edits)) == len(by_edits)
    assert len({len(ids) for ids in by_edits}) > 2, "some must end early, and leave surplus rows"


async def test_penalties_on_the_device_change_what_the_same_prompt_gives(folder, monkeypatch):
    plain = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    wishes = [{}, {"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}, {"presence_penalty": 2.0}]
    with counting(monkeypatch):
        async with Engine(config_of(folder)) as engine:
            params = [SamplingParams(**plain, **wish) for wish in wishes]
            answers = await asyncio.gather(*(engine.complete(PREFIX, each) for each in params))
    drawn = [answer.token_ids for answer in answers]
    assert len(set(drawn)) == len(wishes)
    assert max(drawn[0].count(token) for token in drawn[0]) > max(drawn[2].count(token) for token in drawn[2])
