"""The demo model through the whole engine against `transformers`, in fp32 on the folder that we converted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream import Engine, SamplingParams
from slipstream.engine.loader.demo_model import fetch_demo_model_blocking

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NUM_OUTPUTS = 64
FP32_NOISE = 2e-3  # logits of the two differ by less than this: what is closer than that to the best is a tie

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "List the planets of the solar system in order:",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "SELECT name, age FROM users WHERE",
    "for (int i = 0; i < n; ++i) {",
    "人工智能的未来",
    "从前有一座山，山里有",
    "今天天气很好，我们去",
    "🙂🙃😀 emoji:",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag and",
    "  12ab34  digits 2024-11-30 and 3.14159",
    "Le chat est sur la",
    "Der schnelle braune Fuchs springt",
    "Привет, как дела?",
    "\n\n\t\tindented\n\t\ttext\n",
    "A",
)


def prompt_texts() -> list[str]:
    """Nineteen short prompts and one that is longer than a chunk."""
    story = "The old lighthouse keeper wrote in his diary every single night about the waves, the wind and the birds. "
    return [*PROMPTS, story * 70]


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


def test_greedy_ids_equal_those_of_transformers(folder: Path, record_property: pytest.RecordProperty) -> None:
    """Each drawn id is the argmax of transformers' logits for the same history, or tied with it within fp32 noise.

    By induction that is equality with its greedy generate, and it costs one forward a prompt instead of 64.
    """
    import torch
    from transformers import AutoModelForCausalLM

    pairs = asyncio.run(greedy_ids(settings_for(folder), prompt_texts(), NUM_OUTPUTS))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ties = []
    assert len(pairs) == 20
    assert max(len(prompt) for prompt, _ in pairs) > 1_400
    for number, (prompt, drawn) in enumerate(pairs):
        assert len(drawn) == NUM_OUTPUTS
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *drawn[:-1]]]), logits_to_keep=NUM_OUTPUTS).logits[0]
        best, expected = logits.max(-1)
        for position, token_id in enumerate(drawn):
            if token_id != int(expected[position]):
                margin = float(best[position] - logits[position, token_id])
                assert margin < FP32_NOISE, f"prompt {number}, output {position}: {margin} below the best"
                ties.append((number, position, margin))
    record_property("ties", repr(ties))
    assert len(ties) <= 2, ties


def test_depth_1_equals_depth_0_exactly_in_row_invariant_mode(folder: Path) -> None:
    """Batches are cut differently at the two depths; with arithmetic that does not see the batch the ids are the same."""
    texts = prompt_texts()[:6]
    runs = [
        asyncio.run(greedy_ids(settings_for(folder, row_invariant=True, overlap=overlap), texts, 12))
        for overlap in (True, False)
    ]
    assert runs[0] == runs[1]


def test_a_row_does_not_see_its_batch_mates_in_row_invariant_mode(folder: Path) -> None:
    texts = prompt_texts()[:4]
    together = asyncio.run(greedy_ids(settings_for(folder, row_invariant=True), texts, 10))
    alone = [asyncio.run(greedy_ids(settings_for(folder, row_invariant=True), [text], 10))[0] for text in texts[:2]]
    assert together[:2] == alone
