"""Hidden states against transformers: last and full, in chunks, cached, under pressure, among requests that ask for none."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from unittest.mock import patch

import pytest
import torch
import transformers

from slipstream.engine.forward.model_runner import ModelRunner
from slipstream.engine.forward.step_hidden import HiddenCut
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import new_token_ratio
from slipstream.engine.scheduler.schedule_batch import ScheduleBatch, ShownRow

PROMPTS = [[(7 * place + start) % 290 + 5 for place in range(length)] for start, length in ((0, 70), (3, 1), (9, 33))]


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference(model):
    """Hidden states behind the last norm. Shapes: → [T, hidden size]."""

    def states(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]

    return states


def asking(mode, **more):
    return SamplingParams(**{"hidden_states": mode, "max_tokens": 9, "temperature": 0.0, "ignore_eos": True, **more})


def tensor_of(states):
    return torch.frombuffer(bytearray(states.values), dtype=torch.float32).view(-1, states.size)


def check(answer, prompt, mode, reference):
    ids = [*prompt, *answer.token_ids]
    first, end = 0 if mode == "full" else len(prompt) - 1, max(len(ids) - 1, len(prompt))
    got = tensor_of(answer.hidden_states)
    assert (answer.hidden_states.first, got.shape) == (first, (end - first, 64))
    assert torch.allclose(got, reference(ids)[first:end], atol=2e-4)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 9])
async def test_states_are_those_of_transformers_whatever_the_others_ask(engine, reference, overlap, max_tokens):
    asked = [(prompt, mode) for prompt in PROMPTS for mode in ("last", "full")]
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    async with engine(overlap=overlap) as running:
        for _ in range(2):  # the second time the prompts are cached
            jobs = [running.complete(prompt, asking(mode, max_tokens=max_tokens)) for prompt, mode in asked]
            *found, plain = await asyncio.gather(*jobs, running.complete(PROMPTS[0], free))
            assert plain.hidden_states is None
            for answer, (prompt, mode) in zip(found, asked, strict=True):
                assert len(answer.token_ids) == max_tokens
                check(answer, prompt, mode, reference)
    assert found[0].usage.cached_tokens == 68
    assert found[1].usage.cached_tokens == 0, "every position of the prompt has to be computed"


async def test_a_state_is_what_its_token_is_drawn_from(engine, model):
    """With the model's own head, the likeliest token of each state is the token that follows."""
    head = model.lm_head.weight.detach()
    async with engine() as running:
        answer = await running.complete(PROMPTS[0], asking("last"))
    drawn = (tensor_of(answer.hidden_states) @ head.T).argmax(-1)
    assert tuple(drawn.tolist()) == answer.token_ids


@pytest.mark.parametrize("mode", ["last", "full"])
async def test_depth_and_company_change_no_bit_of_a_state_in_row_invariant_mode(engine, mode):
    states = []
    for overlap in (True, False):
        async with engine(overlap=overlap, row_invariant=True) as running:
            alone = await running.complete(PROMPTS[2], asking(mode))
            together = await asyncio.gather(*(running.complete(prompt, asking(mode)) for prompt in PROMPTS[::-1]))
            states += [alone.hidden_states, together[0].hidden_states]
    assert all(each == states[0] for each in states)


async def test_under_pressure_each_position_comes_once(engine, reference):
    prompts = [PROMPTS[0][k:40] for k in range(4)]
    with patch.object(new_token_ratio, "INITIAL", 0.0), patch.object(new_token_ratio, "LOWEST", 0.0):
        async with engine(max_total_tokens=132) as running:
            jobs = [running.complete(prompt, asking("full", max_tokens=40, ignore_eos=False)) for prompt in prompts]
            answers = await asyncio.gather(*jobs)
            assert running.stats.num_retractions > 0
    for answer, prompt in zip(answers, prompts, strict=True):
        check(answer, prompt, "full", reference)


class Stand:
    """A runner that would take everything, before the one that must: it stands for graphs."""

    def __init__(self, runner):
        self._runner = runner
        self.num_steps = 0

    def can_run(self, batch):
        return True

    def execute(self, batch):
        self.num_steps += 1
        return self._runner.execute(batch)


@pytest.mark.parametrize(
    ("setting", "mode", "num_eager"),
    # The prompt in three pieces, the last of which draws, and four more.
    [("none", "none", 0), ("none", "last", 5), ("none", "full", 7), ("last", "last", 0), ("last", "full", 3),
     ("full", "full", 0)],
)  # fmt: skip
async def test_a_step_above_the_setting_goes_past_the_graphs(engine, monkeypatch, setting, mode, num_eager):
    build, graphs = ModelRunner.build_blocking, []

    def with_graphs(*args):
        runner = build(*args)
        graphs.append(Stand(runner.runners[0]))
        return dataclasses.replace(runner, runners=(graphs[0], *runner.runners))

    monkeypatch.setattr(ModelRunner, "build_blocking", with_graphs)
    async with engine(hidden_states=setting, chunked_prefill_size=32) as running:
        graphs[0].num_steps = 0  # the warm-up's
        answer = await running.complete(PROMPTS[0], asking(mode, max_tokens=5))
        assert len(answer.token_ids) == 5
        assert running.stats.num_eager_for_hidden == num_eager
        assert graphs[0].num_steps == 7 - num_eager


def test_a_cut_names_tokens_of_the_step_and_positions_of_the_sequence():
    batch = ScheduleBatch(
        step=0, num_decode=2, rows=(4, 2, 7, 1), num_prior=(9, 3, 0, 16), num_new=(1, 1, 4, 3), samples=(True,) * 4,
        extend_ids=bytes(28), table_rows=b"", table_columns=b"", table_pages=b"", starts=(),
        shown=(ShownRow(1, 0), ShownRow(2, 3), ShownRow(3, 1)),
    )  # fmt: skip
    assert batch.hidden_mode == "full"
    cut = HiddenCut.of(batch)
    assert array("i", cut.packed).tolist() == [1, 5, 7, 8]
    found = cut.read(torch.arange(8.0).to(torch.bfloat16).view(4, 2))
    assert {place: (states.first, tensor_of(states).tolist()) for place, states in found.items()} == {
        1: (3, [[0.0, 1.0]]),
        2: (3, [[2.0, 3.0]]),
        3: (17, [[4.0, 5.0], [6.0, 7.0]]),
    }
