"""What a prompt may be, and how long."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.errors import RequestError
from slipstream.engine.outputs import Finished
from slipstream.engine.request_builder import LENGTH_CODE, RequestBuilder
from slipstream.engine.worker import WorkerLimits

CONTEXT = 40
VOCAB = 31
LIMITS = WorkerLimits(num_pages=64, page_size=4, num_rows=8, max_model_len=CONTEXT, vocab_size=VOCAB)


def build(prompt: object, *, request_id: object = None, salt: object = None, limits: WorkerLimits = LIMITS, **params):
    builder = RequestBuilder(limits, None)
    return builder.build(prompt, SamplingParams(**params), None, request_id=request_id, salt=salt)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 2 * CONTEXT])
async def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(scripted, recorder, length: int) -> None:
    async with scripted(max_model_len=CONTEXT) as engine:
        for max_tokens in (None, 1, 9):
            with pytest.raises(RequestError, match=f"{length} tokens.*{CONTEXT}") as caught:
                engine.submit([1] * length, SamplingParams(max_tokens=max_tokens), recorder())
            assert (caught.value.param, caught.value.code) == ("prompt", LENGTH_CODE)
        assert engine.stats.num_waiting == 0
        assert len((await engine.complete([1, 2], SamplingParams(max_tokens=3))).token_ids) == 3


class Unreadable(Sequence[int]):
    """Ids that nobody may look at."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, place: object) -> NoReturn:
        raise AssertionError("an id was looked at")


def test_a_prompt_that_is_too_long_is_refused_before_its_ids_are_walked() -> None:
    """A megabyte of text is 250,000 ids, and walking them holds the loop for longer than many a step takes."""
    with pytest.raises(RequestError, match="tokens; prompt and output together") as caught:
        build(Unreadable())
    assert caught.value.code == LENGTH_CODE


@pytest.mark.parametrize(("length", "num_outputs"), [(CONTEXT - 2, 2), (CONTEXT - 1, 1)])
@pytest.mark.parametrize("overlap", [False, True])
async def test_a_prompt_just_under_the_context_fills_it(scripted, length: int, num_outputs: int, overlap: bool) -> None:
    async with scripted(max_model_len=CONTEXT, overlap=overlap) as engine:
        whole = await engine.complete([1] * length, SamplingParams())
        assert len(whole.token_ids) == num_outputs
        assert whole.finish_reason == "length"
        assert whole.usage.prompt_tokens == length


async def test_prompt_and_max_tokens_one_over_the_limit_is_refused_and_the_next_request_is_fine(scripted) -> None:
    async with scripted(max_model_len=CONTEXT) as engine:
        with pytest.raises(RequestError, match=r"20 prompt tokens and max_tokens 21.*40") as caught:
            await engine.complete([1] * 20, SamplingParams(max_tokens=21))
        assert (caught.value.param, caught.value.code) == ("max_tokens", LENGTH_CODE)
        assert len((await engine.complete([1] * 20, SamplingParams(max_tokens=20))).token_ids) == 20


async def test_a_pool_smaller_than_the_context_is_the_limit(scripted) -> None:
    async with scripted(num_pages=4, page_size=4, max_model_len=1000) as engine:
        with pytest.raises(RequestError, match="16"):
            await engine.complete([1] * 16)
        assert len((await engine.complete([1] * 15)).token_ids) == 1


def test_a_whole_context_may_be_scored() -> None:
    assert build([1] * CONTEXT, max_tokens=0).max_total_tokens == CONTEXT
    with pytest.raises(RequestError, match="41 tokens"):
        build([1] * (CONTEXT + 1), max_tokens=0)


@pytest.mark.parametrize(
    "prompt",
    [
        None, 5, 1.5, "ab", b"\1\0\0\0", bytearray(8), {1: 2}, {1, 2}, frozenset({3}), [1, "a"], [1.0], [None], [[1]],
        np.array([1.0, 2.0]), np.array([[1, 2]]), object(),
    ],
)  # fmt: skip
def test_what_is_no_list_of_ids_is_refused(prompt: object) -> None:
    with pytest.raises(RequestError, match="prompt") as caught:
        build(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [[], (), np.array([], dtype=np.int64), range(0)])
def test_an_empty_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(RequestError, match="at least one token"):
        build(prompt)


@pytest.mark.parametrize(
    ("prompt", "bad"),
    [([1, VOCAB], VOCAB), ([-1, 2], -1), ([VOCAB + 5, -2], VOCAB + 5), ([2**31], 2**31), ([3, -(2**40)], -(2**40))],
)
def test_an_id_outside_the_vocabulary_is_named(prompt: list[int], bad: int) -> None:
    with pytest.raises(RequestError, match=rf"token id {bad} .*0…{VOCAB - 1}") as caught:
        build(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda ids: array.array("q", ids), lambda ids: np.array(ids, np.uint8)]
)
def test_any_sequence_of_integers_will_do(make: Callable[[list[int]], object]) -> None:
    assert build(make([0, 1, VOCAB - 1])).ids.tolist() == [0, 1, VOCAB - 1]


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@given(prompt=odd, request_id=odd, salt=odd)
def test_nothing_but_a_request_error_that_names_its_field_comes_out(prompt, request_id, salt) -> None:
    try:
        request = build(prompt, request_id=request_id, salt=salt)
    except RequestError as error:
        named = error.param
    else:
        named = "prompt"
        assert all(0 <= token_id < VOCAB for token_id in request.ids)
        hash(request.salt)
    assert named in ("prompt", "request_id", "salt")


def test_parameters_of_another_kind_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        RequestBuilder(LIMITS, None).build([1], {"max_tokens": 3}, None, request_id=None, salt=None)  # type: ignore[arg-type]
    assert caught.value.param == "params"


def test_stop_ids_must_be_in_the_vocabulary_and_leave_something_to_draw() -> None:
    with pytest.raises(RequestError) as caught:
        build([1], stop_token_ids=(VOCAB,))
    assert caught.value.param == "stop_token_ids"
    everything = tuple(range(VOCAB))
    with pytest.raises(RequestError) as caught:
        build([1], stop_token_ids=everything, min_tokens=1)
    assert caught.value.param == "min_tokens"
    assert build([1], stop_token_ids=everything).stop_ids == frozenset(everything)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError) as caught:
        build([1], stop="x")
    assert caught.value.param == "stop"


@pytest.mark.parametrize(("top_k", "drawn"), [(-1, 0), (0, 0), (5, 5), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (2**40, 0)])
def test_a_top_k_that_excludes_nothing_is_off(top_k: int, drawn: int) -> None:
    assert build([1], top_k=top_k).sampling.top_k == drawn


def test_requests_without_a_seed_draw_from_different_ones() -> None:
    builder = RequestBuilder(LIMITS, None)
    seeds = {
        builder.build([1], SamplingParams(), None, request_id=None, salt=None).sampling.seed  # type: ignore[arg-type]
        for _ in range(50)
    }
    assert len(seeds) == 50
    assert build([1], seed=7).sampling.seed == 7


async def test_a_seed_decides_the_tokens_and_neighbours_do_not(scripted: Callable[..., Engine], recorder) -> None:
    async with scripted() as engine:
        alone = await engine.complete([1, 2, 3], SamplingParams(max_tokens=9, seed=4))
        for number in range(3):
            engine.submit([5] * (number + 1), SamplingParams(max_tokens=20, seed=number), recorder())
        crowded = await engine.complete([1, 2, 3], SamplingParams(max_tokens=9, seed=4))
        other = await engine.complete([1, 2, 3], SamplingParams(max_tokens=9, seed=5))
    assert alone.token_ids == crowded.token_ids != other.token_ids


async def test_an_id_is_made_for_who_gives_none(scripted, recorder) -> None:
    async with scripted() as engine:
        sink = recorder()
        made = [engine.submit([1], SamplingParams(max_tokens=1), sink_).request_id for sink_ in (sink, recorder())]
        assert len(set(made)) == 2
        assert engine.submit([1], SamplingParams(max_tokens=1), recorder(), request_id="mine").request_id == "mine"
        await sink.has_end.wait()
        assert isinstance(sink.ends[0], Finished)


async def test_parameters_of_another_type_are_refused_by_name(scripted) -> None:
    async with scripted() as engine:
        with pytest.raises(RequestError, match="params must be SamplingParams") as caught:
            await engine.complete([1], {"max_tokens": 3})
        assert caught.value.param == "params"
        answer = await engine.complete([1], SamplingParams(max_tokens=2), priority=3, deadline_s=5.0)
        assert answer.finish_reason == "length"
