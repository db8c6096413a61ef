"""Whatever is put into SamplingParams, it is taken or refused with a RequestError that names the field."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.engine.errors import RequestError
from slipstream.engine.sampling_params import MAX_SEED, MAX_STOP_CHARS, MAX_STOPS

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
NAN, INF = float("nan"), float("inf")


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


class Level(enum.IntEnum):
    ONE = 1


odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**6000), 10**6000),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
    st.decimals(),
    st.lists(st.integers(-3, 40) | st.text(max_size=3) | st.none(), max_size=70),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=3),
    st.sampled_from(
        [np.int64(3), np.int32(-1), np.float64(0.5), np.float32(0.5), np.bool_(True), np.arange(3), np.array(1.5)]
    ),
    st.sampled_from([10**5000, -(10**5000), object(), Unshowable(), Level.ONE, int, iter([1]), range(3), {1, 2}]),
)


@given(st.dictionaries(st.sampled_from(FIELDS), odd_values, min_size=1, max_size=3))
def test_nothing_but_a_request_error_that_names_a_given_field_ever_comes_out(given_fields: dict[str, object]) -> None:
    try:
        params = SamplingParams(**given_fields)  # type: ignore[arg-type]
    except RequestError as error:
        named = error.param if str(error.param) in str(error) else None
    else:
        named = next(iter(given_fields))
        assert params.max_tokens is None or params.max_tokens >= params.min_tokens
        assert 0 <= params.temperature <= 100
        assert pickle.loads(pickle.dumps(params)) == params
        hash(params)
    assert named in given_fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1), ("max_tokens", True), ("max_tokens", 1.0), ("max_tokens", np.int64(4)), ("max_tokens", "4"),
        ("min_tokens", -1), ("min_tokens", None), ("min_tokens", False),
        pytest.param("min_tokens", -(10**5000), id="min_tokens-huge"),
        ("temperature", NAN), ("temperature", INF), ("temperature", -0.1), ("temperature", 100.1), ("temperature", True),
        ("temperature", None), ("temperature", 10**400), ("temperature", decimal.Decimal(1)), ("temperature", "1"),
        ("top_p", 0), ("top_p", -1.0), ("top_p", 1.0001), ("top_p", NAN),
        ("top_k", -2), ("top_k", 1.5), ("top_k", True),
        ("min_p", -0.01), ("min_p", 1.01), ("min_p", NAN),
        ("seed", MAX_SEED + 1), ("seed", -MAX_SEED - 2), ("seed", 1.0), ("seed", True),
        pytest.param("seed", 10**5000, id="seed-huge"),
        ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5), ("stop", None), ("stop", b"x"),
        ("stop", ["a"] * (MAX_STOPS + 1)), ("stop", "x" * (MAX_STOP_CHARS + 1)), ("stop", [Unshowable()]),
        ("stop_token_ids", 5), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", [True]),
        ("stop_token_ids", "12"), ("stop_token_ids", None), ("stop_token_ids", list(range(MAX_STOPS + 1))),
        ("ignore_eos", "false"), ("ignore_eos", 1), ("include_stop_str_in_output", None), ("skip_special_tokens", 0),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_under_its_own_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", None), ("max_tokens", 10**12), ("temperature", 0), ("temperature", 100),
        ("top_p", 1), ("top_p", 1e-9), ("top_k", -1), ("top_k", 0), ("top_k", 2**40), ("min_p", 0), ("min_p", 1),
        ("seed", MAX_SEED), ("seed", -MAX_SEED - 1), ("seed", 0), ("stop", ()), ("stop", ["a"] * MAX_STOPS),
        ("stop", ["x" * MAX_STOP_CHARS]), ("stop_token_ids", [0]), ("temperature", np.float64(0.5)), ("top_k", Level.ONE),
    ],
)  # fmt: skip
def test_the_edges_are_inside(name: str, value: object) -> None:
    SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens") as caught:
        SamplingParams(max_tokens=3, min_tokens=4)
    assert caught.value.param == "min_tokens"
    SamplingParams(max_tokens=3, min_tokens=3)


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=9e-6), True),
        (SamplingParams(temperature=1e-5), False),
        (SamplingParams(top_k=1), True),
        (SamplingParams(), False),
    ],
)
def test_no_temperature_or_one_candidate_means_greedy(params: SamplingParams, is_greedy: bool) -> None:
    assert params.is_greedy is is_greedy


def test_an_empty_list_of_allowed_ids_is_refused_and_none_allows_all() -> None:
    with pytest.raises(RequestError, match="allowed_token_ids allows nothing") as caught:
        SamplingParams(allowed_token_ids=())
    assert caught.value.param == "allowed_token_ids"
    assert SamplingParams(allowed_token_ids=None) == SamplingParams()
