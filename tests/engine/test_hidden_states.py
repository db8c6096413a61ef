"""Hidden states without tensors. The scripted worker's state of a position: its token, the position, a hash of the history."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from unittest.mock import patch

import pytest

from slipstream import SamplingParams
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.errors import ConfigError, MisuseError, RequestError
from slipstream.engine.hidden_mode import HIDDEN_MODES, HiddenMode, is_above
from slipstream.engine.outputs import Completion, HiddenStates
from slipstream.engine.scheduler import new_token_ratio
from slipstream.engine.scripted_worker import Script

PROMPT = [(7 * position) % 31 for position in range(22)]


def asking(mode: HiddenMode, **more: object) -> SamplingParams:
    return SamplingParams(**{"hidden_states": mode, "max_tokens": 5, "seed": 1, **more})  # type: ignore[arg-type]


def shown(states: HiddenStates | None) -> list[tuple[float, ...]]:
    """The states of a scripted worker, a tuple a position."""
    assert states is not None
    values = array("f", states.values)
    return [tuple(values[at : at + states.size]) for at in range(0, len(values), states.size)]


def check(answer: Completion, prompt: list[int], mode: HiddenMode) -> None:
    """Every position that `mode` means is there once, in order, with the token that stands there."""
    ids = [*prompt, *answer.token_ids]
    first = 0 if mode == "full" else len(prompt) - 1
    end = max(len(ids) - 1, len(prompt))
    assert answer.hidden_states is not None
    assert (answer.hidden_states.first, answer.hidden_states.end) == (first, end)
    states = shown(answer.hidden_states)
    assert [state[:2] for state in states] == [(float(ids[at]), float(at)) for at in range(first, end)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["last", "full"])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_each_position_has_its_state_however_the_prompt_is_cut_or_cached(
    scripted: Callable[..., Engine], mode: HiddenMode, max_tokens: int, overlap: bool
) -> None:
    async with scripted(overlap=overlap, chunked_prefill_size=8) as engine:
        first = await engine.complete(PROMPT, asking(mode, max_tokens=max_tokens))
        again = await engine.complete(PROMPT, asking(mode, max_tokens=max_tokens))
        await engine.complete(PROMPT, SamplingParams(max_tokens=1))
        longer = await engine.complete([*PROMPT, 3, 4], asking(mode, max_tokens=max_tokens))
    check(first, PROMPT, mode)
    check(longer, [*PROMPT, 3, 4], mode)
    assert first.hidden_states == again.hidden_states
    assert again.usage.cached_tokens == (0 if mode == "full" else 20), "what is shown is computed, and only that"


async def test_rows_that_ask_for_none_carry_none_and_pay_nothing(scripted: Callable[..., Engine]) -> None:
    script = Script(records=True)
    async with scripted(script) as engine:
        answers = await asyncio.gather(*(engine.complete(PROMPT[at:], SamplingParams(max_tokens=6)) for at in range(4)))
        assert not any(batch.shown for batch in script.launched)
        assert [batch.hidden_mode for batch in script.launched] == ["none"] * len(script.launched)
        script.launched.clear()
        one, *others = await asyncio.gather(
            engine.complete(PROMPT, asking("last")),
            *(engine.complete(PROMPT[at:], SamplingParams(max_tokens=30)) for at in range(1, 4)),
        )
    assert all(answer.hidden_states is None for answer in (*answers, *others))
    check(one, PROMPT, "last")
    assert all(len(batch.shown) <= 1 for batch in script.launched)
    assert not any(batch.shown for batch in script.launched[-20:]), "a row that has left takes its cost with it"


async def test_a_delta_has_a_state_for_each_of_its_tokens_and_the_first_one_the_prompt_s(
    scripted: Callable[..., Engine],
) -> None:
    async with scripted(chunked_prefill_size=8) as engine:
        deltas = [delta async for delta in engine.generate(PROMPT, asking("full"))]
    ends = []
    for delta in deltas:
        assert delta.hidden_states is not None
        ends.append(delta.hidden_states.end)
    num_tokens = 0
    for delta, end in zip(deltas, ends, strict=True):
        num_tokens += len(delta.token_ids)
        assert end == len(PROMPT) + num_tokens - 1
    check(Completion.of(deltas), PROMPT, "full")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["last", "full"])
async def test_what_is_sent_back_shows_no_position_twice(
    scripted: Callable[..., Engine], mode: HiddenMode, overlap: bool
) -> None:
    prompts = [PROMPT[at:] for at in range(4)]
    params = [asking(mode, max_tokens=30, seed=at) for at in range(4)]
    with patch.object(new_token_ratio, "INITIAL", 0.0), patch.object(new_token_ratio, "LOWEST", 0.0):
        async with scripted(num_pages=26, overlap=overlap, chunked_prefill_size=8) as engine:
            answers = await asyncio.gather(*map(engine.complete, prompts, params))
            assert engine.stats.num_retractions > 0
    for answer, prompt in zip(answers, prompts, strict=True):
        assert len(answer.token_ids) == 30
        check(answer, prompt, mode)


async def test_choices_of_one_prompt_have_states_of_their_own(scripted: Callable[..., Engine]) -> None:
    async with scripted() as engine:
        answers = await asyncio.gather(*(engine.complete(PROMPT, asking("full", seed=seed)) for seed in range(3)))
    assert len({answer.token_ids for answer in answers}) == 3
    for answer in answers:
        check(answer, PROMPT, "full")


@pytest.mark.parametrize(
    ("setting", "mode", "num_eager"),
    [("none", "none", 0), ("none", "last", 5), ("none", "full", 7), ("last", "last", 0), ("last", "full", 3),
     ("full", "last", 0), ("full", "full", 0)],
)  # fmt: skip
async def test_only_steps_that_give_more_than_the_setting_are_counted(
    scripted: Callable[..., Engine], setting: str, mode: HiddenMode, num_eager: int
) -> None:
    """22 tokens in pieces of 8: three steps for the prompt, the last of which draws, and four more."""
    async with scripted(hidden_states=setting, chunked_prefill_size=8) as engine:
        await engine.complete(PROMPT, asking(mode))
        assert engine.stats.num_steps == 7
        assert engine.stats.num_eager_for_hidden == num_eager


def test_modes_are_ordered() -> None:
    assert [[is_above(wanted, setting) for setting in HIDDEN_MODES] for wanted in HIDDEN_MODES] == [
        [False, False, False],
        [True, False, False],
        [True, True, False],
    ]


@pytest.mark.parametrize("value", ["all", "", None, True, 1, ["last"]])
def test_other_modes_are_refused_by_name(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(hidden_states=value)  # type: ignore[arg-type]
    assert caught.value.param == "hidden_states"
    with pytest.raises(ConfigError) as refused:
        EngineConfig(model="x", hidden_states=value)  # type: ignore[arg-type]
    assert refused.value.field == "hidden_states"


def test_parts_join_where_they_follow_each_other_only() -> None:
    one, two = HiddenStates(3, 2, bytes(16)), HiddenStates(5, 2, bytes(8))
    assert HiddenStates.joined([one, two]) == HiddenStates(3, 2, bytes(24))
    assert HiddenStates.joined([]) is None
    with pytest.raises(MisuseError, match="gap"):
        HiddenStates.joined([two, one])
