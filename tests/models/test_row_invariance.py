"""The demo model through the whole engine in row-invariant mode: exactly the same ids, whatever shares a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream import Engine, SamplingParams
from slipstream.engine.loader.demo_model import fetch_demo_model_blocking

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "List the planets of the solar system in order:",
    "def fibonacci(n):\n    ",
    "人工智能的未来",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_demo_model_blocking()


def settings_for(folder: Path, **more: object) -> dict[str, object]:
    return {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "cpu_threads": 1,
        "max_model_len": 2048,
        "max_total_tokens": 16_384,
        "chunked_prefill_size": 512,
        **more,
    }


async def greedy_ids(
    settings: dict[str, object], texts: Sequence[str], max_tokens: int
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Prompt ids and the ids drawn after them, all requests at once."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    async with Engine(**settings) as engine:
        prompts = [await engine.encode(text) for text in texts]
        answers = await asyncio.gather(*[engine.complete(prompt, params) for prompt in prompts])
    return [(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]


def test_depth_1_equals_depth_0_exactly_in_row_invariant_mode(folder: Path) -> None:
    """Batches are cut differently at the two depths; with arithmetic that does not see the batch the ids are the same."""
    texts = PROMPTS[:6]
    runs = [
        asyncio.run(greedy_ids(settings_for(folder, row_invariant=True, overlap=overlap), texts, 12))
        for overlap in (True, False)
    ]
    assert runs[0] == runs[1]


def test_a_row_does_not_see_its_batch_mates_in_row_invariant_mode(folder: Path) -> None:
    texts = PROMPTS[:4]
    together = asyncio.run(greedy_ids(settings_for(folder, row_invariant=True), texts, 10))
    alone = [asyncio.run(greedy_ids(settings_for(folder, row_invariant=True), [text], 10))[0] for text in texts[:2]]
    assert together[:2] == alone
