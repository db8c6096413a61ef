"""Grammar masks on the worker's own logits: constrained rows among free ones, valid and the same at both depths."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.forward.tp_worker import TpWorker
from slipstream.engine.grammar_session import GrammarSpec
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.text.tokenization import TextTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -99, "maximum": 99}, "s": {"type": "string", "maxLength": 6}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
JSON = GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA))
REGEX = GrammarSpec(kind="regex", source="[a-f]{3}(-[0-9]{2}){2}")


@pytest.fixture(scope="module")
def tokenizer(byte_level):
    made = byte_level()
    made.add_special_tokens(["<end>"])
    return TextTokenizer(made, eos_ids=frozenset({made.token_to_id("<end>")}))


async def answers(folder, tokenizer, *, overlap, backend):
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", cpu_threads=1, max_running_requests=24, max_total_tokens=4096,
        row_invariant=True, overlap=overlap,
    )  # fmt: skip
    made = Engine.on(TpWorker(config, folder), tokenizer=tokenizer, overlap=overlap, grammar_backend=backend)
    made.proves_laws = True
    async with made as running:
        params = [
            SamplingParams(
                max_tokens=80,
                seed=number,
                temperature=0.0 if number % 4 == 0 else 1.5,
                repetition_penalty=1.1,
                structured_output=(JSON, REGEX)[number % 2] if number < 12 else None,
            )
            for number in range(24)
        ]
        return await asyncio.gather(*(running.complete([5 + number, 9, 11], how) for number, how in enumerate(params)))


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "llguidance"])
async def test_constrained_rows_are_valid_and_equal_at_both_depths(folder, tokenizer, backend):
    pytest.importorskip(backend.replace("auto", "llguidance"))
    at_1 = await answers(folder, tokenizer, overlap=True, backend=backend)
    for number, answer in enumerate(at_1[:12]):
        assert answer.finish_reason == "stop", answer
        if number % 2:
            assert re.fullmatch(REGEX.source, answer.text), answer.text
        else:
            document = json.loads(answer.text)
            assert set(document) == {"n", "s"}
            assert -99 <= document["n"] <= 99
            assert len(document["s"]) <= 6
    at_0 = await answers(folder, tokenizer, overlap=False, backend=backend)
    assert [answer.token_ids for answer in at_0] == [answer.token_ids for answer in at_1]
