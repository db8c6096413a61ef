"""EngineConfig is checked field by field, before anything is loaded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.errors import ConfigError

FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**6000), 10**6000),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.sampled_from(
        ["auto", "cpu", "full", "dummy", np.int64(16), np.float64(0.5), np.arange(3), np.array(["auto"]), {}, object()]
    ),
)


@given(st.dictionaries(st.sampled_from(FIELDS), odd_values, min_size=1, max_size=3))
def test_nothing_but_a_config_error_that_names_a_field_ever_comes_out(settings: dict[str, object]) -> None:
    try:
        config = EngineConfig.from_settings({"model": "m", **settings})
    except ConfigError as error:
        # A setting may be refused because of how it stands to another one, which is named too.
        named = [name for name in settings if name in str(error) and error.field in FIELDS]
    else:
        named = list(settings)
        assert config.chunked_prefill_size % config.page_size == 0
    assert named


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""), ("model", 5), ("model", None), ("model", np.array(["a", "b"])),
        ("device", "gpu"), ("device", None), ("device", np.array(["cpu", "cuda"])), ("dtype", "fp8"),
        ("load_format", "pt"), ("decode_attention", "xformers"), ("prefill_graph", True),
        ("page_size", 0), ("page_size", 3), ("page_size", 16.0), ("page_size", True), ("page_size", None),
        ("max_running_requests", 0), ("max_running_requests", None), ("max_queued_requests", "7"),
        ("max_queued_tokens", 0), ("max_total_tokens", -1), ("max_model_len", False), ("cpu_threads", 1.5),
        ("chunked_prefill_size", 17), pytest.param("page_size", 10**5000, id="page_size-huge"), ("max_prefill_tokens", 8),
        ("kv_memory_fraction", 0), ("kv_memory_fraction", 1.01), ("kv_memory_fraction", float("nan")),
        ("kv_memory_fraction", True), ("kv_memory_fraction", "0.9"), ("kv_memory_fraction", None),
        ("overlap", "no"), ("overlap", 1), ("prefix_cache", None), ("row_invariant", 0), ("skip_tokenizer", "x"),
        ("policy_window", 0), ("priority_preemption", True), ("priority_preemption", 1), ("eviction_policy", "mru"),
        ("itl_budget_ms", 0), ("itl_budget_ms", float("nan")), ("itl_budget_ms", True), ("itl_budget_ms", "20"),
        ("step_timeout_s", None), ("step_timeout_s", -1.0), ("step_timeout_s", float("inf")), ("debug_canary", "yes"),
        pytest.param("itl_budget_ms", 10**5000, id="itl_budget_ms-huge"),
        ("debug_cuda_graph", 1), ("chat_template", 5), ("chat_template", b"x"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_under_its_own_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig(**{"model": "m", name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "name", ["max_model_len", "max_total_tokens", "max_queued_tokens", "itl_budget_ms", "cpu_threads", "chat_template"]
)
def test_what_is_derived_at_start_may_be_left_open(name: str) -> None:
    assert getattr(EngineConfig(model="m", **{name: None}), name) is None  # type: ignore[arg-type]


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="page_size") as caught:
        EngineConfig.from_settings({"model": "m", "pagesize": 16})
    assert caught.value.field == "pagesize"
    with pytest.raises(ConfigError, match="required") as caught:
        EngineConfig.from_settings({"page_size": 16})
    assert caught.value.field == "model"


def test_an_engine_takes_a_config_or_settings_but_not_both() -> None:
    config = EngineConfig(model="m", page_size=32)
    assert Engine(config).config is config
    assert Engine(model="m", page_size=32).config == config
    with pytest.raises(ConfigError, match="not both"):
        Engine(config, page_size=16)
    with pytest.raises(ConfigError, match="model=") as caught:
        Engine("m")  # type: ignore[arg-type]
    assert caught.value.field == "config"
