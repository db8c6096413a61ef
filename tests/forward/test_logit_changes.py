"""Changed logits on the CPU: equal to transformers' processors, in the tensors and in whole generations."""

from __future__ import annotations

import asyncio
from array import array

import pytest
import torch
import transformers
from transformers.generation import logits_process as reference

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.errors import StepFailed
from slipstream.engine.logit_rules import LogitRules, mask_of
from slipstream.engine.sampling.logit_changes import LogitChanges, unpacked
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.worker import SampleInputs

VOCAB = 300
PROMPT = [5, 9, 11, 9, 250, 7]


def changed(logits, histories, num_prompt_tokens, how):
    """The logits after the rules of `how`, one row a history."""
    edits, suppressed = [], []
    for index, history in enumerate(histories):
        rules = LogitRules(
            how,
            num_prompt_tokens=num_prompt_tokens,
            vocab_size=VOCAB,
            bad_sequences=how.bad_words_ids,
        )
        edit = rules.edit(index, array("i", history))
        edits += [edit] if edit is not None else []
        suppressed.append((index, rules.bans(array("i", history))))
    inputs = SampleInputs(edits=tuple(edits), suppressed=tuple(suppressed))
    packed = LogitChanges.packed(inputs, range(len(histories)), vocab_size=VOCAB)
    return applied(packed, logits)


def applied(packed, logits):
    out = logits.clone()
    block = torch.frombuffer(bytearray(packed.block), dtype=torch.int32)
    packed.edit_(out, block)
    assert packed.restrict_(out, block) == {}
    return out


@pytest.fixture
def logits():
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)) * 4


HISTORIES = [[*PROMPT, 1, 2, 1], [*PROMPT, 7, 7, 7], [*PROMPT, 250, 9, 11]]


def test_the_repetition_penalty_is_transformers(logits):
    ours = changed(logits, HISTORIES, 6, SamplingParams(repetition_penalty=1.3))
    theirs = reference.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(HISTORIES), logits.clone())
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, logits)


def test_biases_are_transformers(logits):
    ours = changed(logits, HISTORIES, 6, SamplingParams(logit_bias={7: 3.5, 299: -100.0, 0: 0.25}))
    bias = {(7,): 3.5, (299,): -100.0, (0,): 0.25}
    assert torch.equal(ours, reference.SequenceBiasLogitsProcessor(bias)(torch.tensor(HISTORIES), logits.clone()))


def test_bad_words_are_transformers(logits):
    words = ((4,), (7, 7, 8), (9, 11, 3), (250, 250))
    ours = changed(logits, HISTORIES, 6, SamplingParams(bad_words_ids=words))
    processor = reference.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=2)
    assert torch.equal(ours, processor(torch.tensor(HISTORIES), logits.clone()))
    assert ours.isinf().sum() == 5


def test_frequency_and_presence_follow_their_definition(logits):
    ours = changed(logits, HISTORIES, 6, SamplingParams(frequency_penalty=0.5, presence_penalty=0.25))
    expected = logits.clone()
    for row, history in enumerate(HISTORIES):
        for token in set(history[6:]):
            expected[row, token] -= 0.5 * history[6:].count(token) + 0.25
    assert torch.allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("vocab", [31, 32, 33, 64, 300])
def test_masks_unpack_to_the_ids_that_made_them(vocab):
    ids = [token for token in range(vocab) if token * 7 % 5 < 2]
    words = torch.frombuffer(bytearray(mask_of(ids, vocab)), dtype=torch.int32).view(1, -1)
    assert unpacked(words, vocab)[0].nonzero()[:, 0].tolist() == ids


def test_a_processor_has_a_copy_of_its_row_while_it_runs_and_afterwards(logits):
    kept = []

    def replaces(history, row):
        kept.append(row)
        row.fill_(7.0)
        return torch.arange(float(VOCAB))

    def raises(history, row):
        row.fill_(7.0)
        raise ValueError("half done")

    inputs = SampleInputs(processors=((0, (replaces,), b""), (2, (raises,), b"")))
    packed = LogitChanges.packed(inputs, range(3), vocab_size=VOCAB)
    out = logits.clone()
    failed = packed.restrict_(out, torch.empty(0, dtype=torch.int32))
    assert list(failed) == [2]
    kept[0].fill_(9.0)
    assert torch.equal(out[0], torch.arange(float(VOCAB)))
    assert torch.equal(out[1:], logits[1:])


def test_dead_rows_and_ids_beyond_the_vocabulary_change_nothing(logits):
    inputs = SampleInputs(dead=frozenset({1}), suppressed=((0, (3, 5000)), (1, (4,))), masks=((1, b"\0" * 40),))
    packed = LogitChanges.packed(inputs, (0, 1, 2), vocab_size=VOCAB)
    out = applied(packed, logits)
    assert (out != logits).nonzero().tolist() == [[0, 3]]


# ---- whole generations


@pytest.fixture(scope="module")
def generated(folder):
    """Greedy generation by transformers with its own processors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompt, **how):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=2, **how
            )
        return out[0, len(prompt) :].tolist()

    return generate


def engine(folder, **settings):
    return Engine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            cpu_threads=1,
            max_running_requests=8,
            max_total_tokens=1024,
            skip_tokenizer=True,
            chunked_prefill_size=32,
            **settings,
        )
    )


async def answers(running, prompts, params):
    made = await asyncio.gather(*(running.complete(p, how) for p, how in zip(prompts, params, strict=True)))
    return [list(answer.token_ids) for answer in made]


@pytest.mark.parametrize("overlap", [True, False])
async def test_generations_with_processors_are_transformers(folder, generated, overlap):
    def never_twice(token_ids, logits):
        logits[token_ids[-1]] = float("-inf")
        return logits

    class NeverTwice(reference.LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, input_ids[0, -1]] = float("-inf")
            return scores

    plain = {"max_tokens": 20, "temperature": 0.0, "stop_token_ids": (2,)}
    params = [
        SamplingParams(**plain, repetition_penalty=1.4),
        SamplingParams(**plain, bad_words_ids=((9,), (7, 5))),
        SamplingParams(**plain, logit_bias={30: 4.0, 9: -8.0}, repetition_penalty=1.2),
        SamplingParams(**plain, logits_processors=(never_twice,)),
        SamplingParams(**plain, min_tokens=6, logit_bias={2: 60.0}),
        SamplingParams(**plain),
    ]
    theirs = [
        generated(PROMPT, repetition_penalty=1.4),
        generated(PROMPT, bad_words_ids=[[9], [7, 5]]),
        generated(PROMPT, sequence_bias=[[[30], 4.0], [[9], -8.0]], repetition_penalty=1.2),
        generated(PROMPT, logits_processor=transformers.LogitsProcessorList([NeverTwice()])),
        generated(PROMPT, min_new_tokens=6, sequence_bias=[[[2], 60.0]]),
        generated(PROMPT),
    ]
    assert len({tuple(ids) for ids in theirs}) >= 5, "the rules must matter"
    async with engine(folder, overlap=overlap) as running:
        assert await answers(running, [PROMPT] * 6, params) == theirs
    assert len(theirs[4]) == 7


async def test_only_allowed_ids_are_drawn_and_a_processor_that_raises_fails_alone(folder, generated):
    def breaks(token_ids, logits):
        if len(token_ids) > 8:
            raise ValueError("no more")
        return logits

    allowed = (3, 30, 31, 32, 64, 299)
    async with engine(folder) as running:
        some, broken, free = await asyncio.gather(
            running.complete(PROMPT, SamplingParams(max_tokens=20, allowed_token_ids=allowed, seed=1, ignore_eos=True)),
            running.complete(PROMPT, SamplingParams(max_tokens=20, logits_processors=(breaks,), ignore_eos=True)),
            running.complete(PROMPT, SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(2,))),
            return_exceptions=True,
        )
    assert set(some.token_ids) <= set(allowed)
    assert len(set(some.token_ids)) > 1
    assert isinstance(broken, StepFailed)
    assert list(free.token_ids) == generated(PROMPT)
