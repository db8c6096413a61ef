"""The demo model, greedy in float32: every id is the one transformers would choose after the same ids."""

from __future__ import annotations

import asyncio

import pytest
import torch

from slipstream.engine.engine import Engine
from slipstream.engine.loader.demo_model import DEMO_MODEL_NAME
from slipstream.engine.loader.model_source import resolve_model
from slipstream.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 64
NOISE = 1e-3  # logits of two fp32 computations of this model differ by less

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "The three primary colours are",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three planets.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders",
    "for (let i = 0; i < 10; i++) {",
    "北京是中国的首都,",
    "今天天气很好,我们去",
    "人工智能的未来",
    "🎉🎂 Happy birthday! 🎁",
    "🌍🌎🌏 are",
    "1 + 1 = 2, 2 + 2 = 4, 12345 + 67890 =",
    "A",
    "\n\n",
    "The history of computing began long ago. " * 190,
)


@pytest.fixture(scope="module")
def folder():
    return resolve_model(DEMO_MODEL_NAME).path


@pytest.fixture(scope="module")
def reference(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def test_greedy_ids_are_those_of_transformers_for_twenty_prompts(folder, reference, capsys):
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 2048, "chunked_prefill_size": 512}
    async with Engine(model=str(folder), **settings) as engine:
        prompts = [await engine.encode(text) for text in PROMPTS]
        answers = await asyncio.gather(*(engine.complete(ids, params) for ids in prompts))
    assert max(map(len, prompts)) >= 1500
    ties = []
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS
        # By induction this is what generate() gives: each id is the best one after those before it.
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *answer.token_ids]])
            logits = reference(ids, logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        short = logits.max(-1).values - chosen
        assert float(short.max()) < NOISE, f"{text!r} leaves transformers at output {int(short.argmax())}"
        ties += [(text, int(at), float(short[at])) for at in short.nonzero()[:, 0]]
    with capsys.disabled():
        for text, at, margin in ties:
            print(f"\na tie within noise: {text!r}, output {at}, margin {margin:.1e}", end="")
    assert len(ties) <= 2
