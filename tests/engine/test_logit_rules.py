"""What a request's parameters change of its logits, from its exact history: at both depths, and after retraction."""

from __future__ import annotations

import asyncio
import pickle
from array import array
from unittest.mock import patch

import pytest

from slipstream import SamplingParams
from slipstream.engine.errors import RequestError, StepFailed
from slipstream.engine.logit_rules import MAX_SLOW_S, SLOW_TOKEN_S, LogitRules, both, mask_of, without
from slipstream.engine.scheduler import new_token_ratio
from slipstream.engine.scripted_worker import Script
from slipstream.engine.worker import SampleInputs

VOCAB = 31


def rules(num_prompt_tokens=3, bad=(), **params):
    return LogitRules(
        SamplingParams(**params), num_prompt_tokens=num_prompt_tokens, vocab_size=VOCAB, bad_sequences=bad
    )


def changes(edit):
    """By id: what is added, divided by, and taken off."""
    columns = (array("i", edit.ids), *(array("f", column) for column in edit[2:]))
    return {token: tuple(round(value, 5) for value in values) for token, *values in zip(*columns, strict=True)}


# ---- the changes themselves


def test_repetition_counts_prompt_and_output_and_the_other_penalties_only_the_output():
    made = rules(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)
    assert changes(made.edit(0, array("i", [4, 5, 4]))) == {4: (0, 1.5, 0), 5: (0, 1.5, 0)}
    after = changes(made.edit(0, array("i", [4, 5, 4, 5, 7, 7])))
    assert after == {4: (0, 1.5, 0), 5: (0, 1.5, 0.75), 7: (0, 1.5, 1.25)}


def test_a_history_that_grows_step_by_step_gives_what_the_whole_gives_at_once():
    history = array("i", [1, 2, 3, 2, 9, 9, 1, 30, 2])
    how = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.4, "logit_bias": {9: 2, 12: -1}}
    stepwise = rules(**how)
    for length in range(3, len(history) + 1):
        last = stepwise.edit(0, history[:length])
    assert changes(last) == changes(rules(**how).edit(0, history))
    assert changes(last)[12] == (-1, 1, 0)
    assert changes(last)[9] == (2, 1.2, pytest.approx(0.6 - 0.4))


def test_without_a_penalty_the_history_changes_nothing():
    made = rules(logit_bias={2: 1.0})
    assert changes(made.edit(0, array("i", [2, 2, 2, 2]))) == {2: (1, 1, 0)}
    assert rules(bad=[(1,)]).edit(0, array("i", [1, 2, 3])) is None


def test_a_bad_sequence_bans_its_last_id_only_behind_the_others():
    made = rules(bad=[(6,), (1, 2, 3), (2, 8)])
    assert made.bans(array("i", [1, 2])) == (6, 3, 8)
    assert made.bans(array("i", [2, 1])) == (6,)
    assert made.bans(array("i", [2])) == (6, 8)


class Grammar:
    """Allows everything, and takes its time."""

    is_over = False

    def __init__(self):
        self.clock_s = 0.0
        self.takes_s = [0.0]

    def fill(self):
        self.clock_s += self.takes_s.pop(0) if len(self.takes_s) > 1 else self.takes_s[0]

    def accept(self, token_id):
        return True


@pytest.mark.parametrize(
    ("takes_s", "num_taken"),
    [
        ([SLOW_TOKEN_S * 1.1] * 9, 4),  # the fifth is too many
        ([MAX_SLOW_S / 4 * 2**n for n in range(9)], 2),  # one that grows is stopped before it holds up anybody for long
        ([5.0, 0.0] * 5, 10),  # slow once, again and again
        ([SLOW_TOKEN_S * 0.9] * 50, 50),
    ],
)
def test_a_grammar_that_stays_slow_ends_its_request_and_one_slow_token_does_not(takes_s, num_taken):
    made = rules()
    made.grammar = grammar = Grammar()
    grammar.takes_s = list(takes_s)
    with patch("slipstream.engine.logit_rules.time.thread_time", lambda: grammar.clock_s):
        for number in range(len(takes_s)):
            made.mask()
            if number == num_taken:
                with pytest.raises(ValueError, match="ms a token, which holds up everybody"):
                    made.accept(1)
                break
            assert not made.accept(1)


def test_masks_are_bits_by_id():
    mask = mask_of([0, 31, 32, 40], 45)
    assert len(mask) == 8
    assert list(array("i", mask)) == [-(2**31) + 1, 1 + (1 << 8)]
    assert both(mask, mask_of([31, 40, 44], 45)) == mask_of([31, 40], 45)
    assert without(mask, [0, 40, 41], 45) == mask_of([31, 32], 45)


def test_sample_inputs_can_be_sent_to_another_rank():
    edit = rules(repetition_penalty=2.0).edit(1, array("i", [1, 2, 3]))
    inputs = SampleInputs(edits=(edit,), masks=((0, mask_of([1], VOCAB)),), logprobs=((1, 2),))
    assert pickle.loads(pickle.dumps(inputs)) == inputs


# ---- through the engine


def forbid_repeating(token_ids, logits):
    """A processor that sees the exact history: the newest token never comes twice in a row."""
    logits[token_ids[-1]] = float("-inf")
    return logits


REQUESTS = (
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"logit_bias": {3: 5.0, 4: -100}, "frequency_penalty": 1.5},
    {"bad_words_ids": ((3,), (5, 6), (7, 7))},
    {"allowed_token_ids": (1, 2, 3, 5, 8, 13, 21)},
    {"logits_processors": (forbid_repeating,)},
    {"min_tokens": 9, "stop_token_ids": tuple(range(20)), "repetition_penalty": 1.1},
    {},
)


async def outputs(scripted, *, overlap, num_pages=64, alone=None):
    """The tokens of all requests, each drawing from a row that likes few ids: penalties matter."""
    script = Script(token_of=lambda seed, history: (sum(history) * 7 + seed) % 9)
    engine = scripted(script, num_pages=num_pages, overlap=overlap, max_model_len=48)
    async with engine:
        answers = await asyncio.gather(*(
            engine.complete([number + 1, 5, 6], SamplingParams(max_tokens=30, seed=number, **how))
            for number, how in enumerate(REQUESTS)
            if alone is None or alone == number
        ))  # fmt: skip
    return [answer.token_ids for answer in answers], engine


async def test_the_same_tokens_at_depth_0_and_1_alone_and_after_retraction(scripted):
    at_0, _ = await outputs(scripted, overlap=False)
    assert (await outputs(scripted, overlap=True))[0] == at_0
    with patch.object(new_token_ratio, "INITIAL", 0.0):
        pressed, engine = await outputs(scripted, overlap=True, num_pages=24)
    assert engine.stats.num_retractions > 0
    assert pressed == at_0
    for number in range(len(REQUESTS)):
        assert (await outputs(scripted, overlap=True, alone=number))[0] == [at_0[number]]


async def test_each_rule_has_its_effect(scripted):
    tokens, _ = await outputs(scripted, overlap=True)
    assert len(set(tokens[0])) > len(set(tokens[7]))
    assert 4 not in tokens[2]
    assert 3 not in tokens[3]
    assert (5, 6) not in zip((6, *tokens[3]), tokens[3], strict=False)
    assert set(tokens[4]) <= {1, 2, 3, 5, 8, 13, 21}
    assert all(one != other for one, other in zip(tokens[5], tokens[5][1:], strict=False))
    assert len(tokens[6]) >= 9


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_processor_that_raises_fails_its_own_request_only(scripted, overlap):
    def breaks(token_ids, logits):
        if len(token_ids) == 5:
            raise ValueError("out of ideas")
        return logits

    async with scripted(overlap=overlap) as engine:
        bad, good = await asyncio.gather(
            engine.complete([1, 2, 3], SamplingParams(max_tokens=8, logits_processors=(breaks,))),
            engine.complete([1, 2, 4], SamplingParams(max_tokens=8, seed=1)),
            return_exceptions=True,
        )
    assert isinstance(bad, StepFailed)
    assert "out of ideas" in str(bad)
    assert len(good.token_ids) == 8


async def test_rules_that_leave_nothing_fail_their_request(scripted):
    async with scripted() as engine:
        params = SamplingParams(max_tokens=4, allowed_token_ids=(3,), bad_words_ids=((3,),))
        with pytest.raises(RequestError, match="leave none of allowed_token_ids") as caught:
            await engine.complete([1, 2], params)
        assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    ("how", "param"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (0, VOCAB)}, "allowed_token_ids"),
        ({"bad_words_ids": ((1, VOCAB),)}, "bad_words_ids"),
        ({"bad_words": ("x",)}, "bad_words"),
    ],
)
async def test_ids_beyond_the_vocabulary_are_refused_before_any_compute(scripted, how, param):
    async with scripted() as engine:
        with pytest.raises(RequestError) as caught:
            await engine.complete([1], SamplingParams(max_tokens=2, **how))
        assert caught.value.param == param
        assert engine.stats.num_steps == 0


@pytest.mark.parametrize(
    ("how", "param"),
    [
        ({"logit_bias": {-1: 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(3000), 1)}, "logit_bias"),
        ({"logit_bias": 3}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words_ids": ((),)}, "bad_words_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"logits_processors": (3,)}, "logits_processors"),
        ({"structured_output": "json"}, "structured_output"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"logprob_start": -1}, "logprob_start"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(how, param):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**how)
    assert caught.value.param == param
