"""Sampling as users of other engines found it wrong, on a real model: tiny temperatures, seeds beside strangers, scores
that disagree with what was drawn.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.errors import StepFailed
from slipstream.engine.forward.tp_worker import TpWorker
from slipstream.engine.outputs import Completion
from slipstream.engine.sampling_params import SamplingParams

PROMPT = [5, 9, 11, 9, 250, 7]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
NOISE = 1e-3  # logits of two fp32 computations of such a model differ by less


def engine(folder: Path, **settings: object) -> Engine:
    fields: dict[str, object] = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_running_requests": 64,
        "max_total_tokens": 8192, "skip_tokenizer": True, "chunked_prefill_size": 64,
    }  # fmt: skip
    return Engine(EngineConfig(**{**fields, **settings}))  # type: ignore[arg-type]


def prompt_of(number: int, length: int = 12) -> list[int]:
    return [(7 * number + 3 * position) % 290 + 5 for position in range(length)]


# ---- the ends of the scales


EXTREMES: tuple[dict[str, float], ...] = (
    *({"temperature": temperature} for temperature in (1e-4, 1e-5, 1e-6, 1e-7, 5e-324)),
    *({"top_p": mass} for mass in (1e-4, 1e-8, 1e-300)),
    {"temperature": 1e-4, "top_p": 1e-8, "min_p": 1.0, "top_k": 3},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 100.0, "top_k": 1},
)


async def test_tiny_temperatures_and_masses_draw_what_greedy_draws(folder, greedy) -> None:
    """The greedy choices of this model are well apart: all that is left of the distribution is its largest."""
    async with engine(folder) as running:
        answers = await asyncio.gather(
            *(
                running.complete(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, seed=seed, **how))
                for seed, how in enumerate(EXTREMES)
            )
        )
    for how, answer in zip(EXTREMES, answers, strict=True):
        assert list(answer.token_ids) == greedy(PROMPT, 12), how


@pytest.mark.parametrize("temperature", [1e-2, 1e-3])
async def test_small_temperatures_draw_what_is_nearly_the_likeliest(folder, temperature: float) -> None:
    """An id that is 40 temperatures behind has a chance of e⁻⁴⁰."""
    params = SamplingParams(max_tokens=100, temperature=temperature, seed=1, ignore_eos=True, logprobs=1)
    async with engine(folder) as running:
        answer = await running.complete(PROMPT, params)
    assert all(each.top_logprobs[0] - each.logprob < 40 * temperature for each in answer.logprobs)


async def test_temperature_has_its_effect(folder) -> None:
    async with engine(folder) as running:

        async def distinct(temperature: float) -> int:
            params = [SamplingParams(max_tokens=16, temperature=temperature, seed=n, ignore_eos=True) for n in range(8)]
            answers = await asyncio.gather(*(running.complete(PROMPT, how) for how in params))
            return len({token for answer in answers for token in answer.token_ids})

        cold, warm, hot = [await distinct(temperature) for temperature in (0.01, 1.0, 10.0)]
    assert cold < 20 < hot
    assert cold <= warm <= hot
    assert hot > 60, "nearly every id is as likely as any other"


async def test_ids_beyond_the_tokenizer_s_are_drawn_by_nobody(folder) -> None:
    """At such a temperature every id is as likely as any other."""
    fields = {"model": str(folder), "device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_total_tokens": 2048}
    hot = [SamplingParams(max_tokens=40, temperature=100.0, seed=seed, ignore_eos=True) for seed in range(8)]
    async with Engine.on(TpWorker(EngineConfig(**fields), folder, num_ids=262)) as running:  # type: ignore[arg-type]
        answers = await asyncio.gather(*(running.complete(PROMPT, how) for how in hot))
    async with engine(folder) as running:
        others = await asyncio.gather(*(running.complete(PROMPT, how) for how in hot))
    assert 240 < max(token for answer in answers for token in answer.token_ids) < 262
    assert max(token for answer in others for token in answer.token_ids) > 290


async def test_ids_biased_by_minus_100_are_drawn_in_none_of_ten_choices(folder, greedy) -> None:
    liked = tuple(dict.fromkeys(greedy(PROMPT, 20)))[:2]
    async with engine(folder) as running:
        params = [
            SamplingParams(
                max_tokens=20, temperature=1.2, seed=seed, ignore_eos=True, logit_bias=dict.fromkeys(liked, -100.0)
            )
            for seed in range(10)
        ]
        answers = await asyncio.gather(*(running.complete(PROMPT, how) for how in params))
        free = await running.complete(PROMPT, GREEDY)
    assert set(liked) & set(free.token_ids)
    assert all(not set(liked) & set(answer.token_ids) for answer in answers)


async def test_without_a_tokenizer_every_end_id_of_the_config_ends_and_waits_for_min_tokens(folder, tmp_path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path / name)
    config = json.loads((tmp_path / "config.json").read_text())
    config["eos_token_id"] = [2, 7]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    async with engine(tmp_path) as running:
        for end_id in (2, 7, 9):
            wants_to_end = {"max_tokens": 12, "temperature": 0.0, "logit_bias": {end_id: 90.0}}
            at_once = await running.complete(PROMPT, SamplingParams(**wants_to_end))
            assert (at_once.token_ids, at_once.finish_reason) == ((end_id,), "stop")
            later = await running.complete(PROMPT, SamplingParams(**wants_to_end, min_tokens=4))
            assert later.token_ids[-1] == end_id
            assert len(later.token_ids) == 5
            assert not {2, 7, 9} & set(later.token_ids[:4])
            ignored = await running.complete(PROMPT, SamplingParams(**wants_to_end, ignore_eos=True))
            assert (len(ignored.token_ids), ignored.finish_reason) == (12, "length")


async def test_a_row_of_nan_fails_its_request_and_seven_others_do_not_notice(folder, greedy) -> None:
    def poison(token_ids: Sequence[int], logits):
        return logits * float("nan") if len(token_ids) > 9 else logits

    async with engine(folder) as running:
        params = [
            SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logits_processors=(poison,) * (n == 3))
            for n in range(8)
        ]
        answers = await asyncio.gather(
            *(running.complete(prompt_of(n, 5), how) for n, how in enumerate(params)), return_exceptions=True
        )
        after = await running.complete(prompt_of(3, 5), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    assert isinstance(answers[3], StepFailed)
    assert "not finite" in str(answers[3])
    for number, answer in enumerate(answers):
        if number != 3:
            assert isinstance(answer, Completion)
            assert list(answer.token_ids) == greedy(prompt_of(number, 5), 9)
    assert list(after.token_ids) == greedy(prompt_of(3, 5), 9)


# ---- company


@pytest.mark.parametrize("row_invariant", [False, True])
async def test_a_seed_beside_strangers_without_one_draws_the_same_ten_times_over(folder, row_invariant: bool) -> None:
    seeded = SamplingParams(max_tokens=16, temperature=1.0, seed=42, ignore_eos=True)
    stranger = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
    async with engine(folder, row_invariant=row_invariant, prefix_cache=False) as running:
        drawn, strangers = set(), set()
        for turn in range(10):
            # In row-invariant mode also their number may change; else a batch of another size rounds otherwise.
            mates = [prompt_of(turn * 9 + n) for n in range(1 + turn % 4 if row_invariant else 3)]
            answer, *others = await asyncio.gather(
                running.complete(PROMPT, seeded), *(running.complete(mate, stranger) for mate in mates)
            )
            drawn.add(answer.token_ids)
            strangers.update(other.token_ids for other in others)
    assert len(drawn) == 1
    assert len(strangers) > 10


class Divergence(NamedTuple):
    """How far two runs of the same greedy requests agree."""

    num_tokens: int  # compared: up to the first difference
    num_flips: int
    widest: float  # of the flips, the largest margin between the two likeliest ids


def divergence(answers: Sequence[Completion], others: Sequence[Completion]) -> Divergence:
    """Both drew greedily with logprobs=2. Behind a first difference the histories are others: nothing to compare."""
    num_tokens, margins = 0, []
    for one, other in zip(answers, others, strict=True):
        for place, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            num_tokens += 1
            if a != b:
                top = one.logprobs[place].top_logprobs
                margins.append(top[0] - top[1])
                break
    return Divergence(num_tokens, len(margins), max(margins, default=0.0))


@pytest.mark.parametrize("row_invariant", [False, True])
async def test_greedy_text_does_not_depend_on_who_shares_the_batch_but_for_ties(
    folder, record_property, capsys, row_invariant: bool
) -> None:
    """Five prompts alone, five times each, then among forty-five others; the divergence is told."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
    async with engine(folder, row_invariant=row_invariant, prefix_cache=False) as running:
        alone = [[await running.complete(prompt_of(n), params) for n in range(5)] for _ in range(5)]
        crowd = await asyncio.gather(*(running.complete(prompt_of(n), params) for n in range(50)))
    assert all([each.token_ids for each in run] == [each.token_ids for each in alone[0]] for run in alone)
    found = divergence(alone[0], crowd[:5])
    record_property("divergence", str(found))
    with capsys.disabled():
        print(f"\n{'row-invariant' if row_invariant else 'default'} mode: {found}", end="")
    if row_invariant:
        assert found.num_flips == 0
        assert [each.logprobs for each in crowd[:5]] == [each.logprobs for each in alone[0]], "to the last bit"
    else:
        assert found.widest < NOISE


# ---- scores


class Forced(NamedTuple):
    """Greedy answers, scored again as prompts."""

    num_tokens: int
    num_flips: int  # places where the scores have another id in front
    widest: float  # the largest margin of a flip
    noise: float  # the largest difference between a token's two log-probabilities


async def teacher_forced(running: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> Forced:
    """Generate greedily, then feed prompt and answer as a prompt and compare the likeliest ids with the answer."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    answers = await asyncio.gather(*(running.complete(prompt, params) for prompt in prompts))
    margins, noise = [], 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt, *answer.token_ids]
        scored = SamplingParams(max_tokens=0, prompt_logprobs=1, logprob_start=len(prompt))
        scores = (await running.complete(ids, scored)).prompt_logprobs
        assert [each.token_id for each in scores] == list(answer.token_ids)
        for drawn, score in zip(answer.logprobs, scores, strict=True):
            noise = max(noise, abs(drawn.logprob - score.logprob))
            if score.top_ids[0] != drawn.token_id:
                margins.append(score.top_logprobs[0] - score.logprob)
    return Forced(len(prompts) * num_tokens, len(margins), max(margins, default=0.0), noise)


def check_forced(found: Forced, *, most_noise: float, most_flips: float) -> None:
    assert found.noise < most_noise
    assert found.widest <= 4 * found.noise, "a flip that is no tie"
    assert found.num_flips <= max(1.0, most_flips * found.num_tokens)


async def test_scores_of_a_greedy_answer_have_its_tokens_in_front_but_for_ties(folder, record_property, capsys) -> None:
    async with engine(folder) as running:
        found = await teacher_forced(running, [prompt_of(n, 4 + 3 * n) for n in range(8)], 200)
    record_property("teacher_forced", str(found))
    with capsys.disabled():
        print(f"\n{found}", end="")
    check_forced(found, most_noise=5 * NOISE, most_flips=1e-3)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most_noise", "most_flips"), [("float32", NOISE, 1e-3), ("bfloat16", 1.0, 2e-2)])
async def test_the_demo_model_s_scores_of_its_greedy_answers_flip_only_at_ties(
    record_property, capsys, dtype: str, most_noise: float, most_flips: float
) -> None:
    from slipstream.engine.loader.demo_model import fetch_demo_model_blocking

    path = await asyncio.to_thread(fetch_demo_model_blocking)
    texts = (
        "The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n    ",
        "<|im_start|>user\nWrite a story about rain.<|im_end|>\n<|im_start|>assistant\n",
    )  # fmt: skip
    async with engine(path, dtype=dtype, skip_tokenizer=False, max_model_len=1024) as running:
        found = await teacher_forced(running, [await running.encode(text) for text in texts], 300)
    record_property("teacher_forced", str(found))
    with capsys.disabled():
        print(f"\n{dtype}: {found}", end="")
    check_forced(found, most_noise=most_noise, most_flips=most_flips)
