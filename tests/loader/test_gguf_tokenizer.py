"""Tokenizers rebuilt from GGUF metadata: splits, specials, and the way back to bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from slipstream.engine.errors import ConfigError
from slipstream.engine.loader.gguf_tokenizer import check_tokenizer, write_tokenizer


@pytest.fixture
def metadata(vocabulary):
    def build(pre="smollm", **more):
        found = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": vocabulary,
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(vocabulary) - 3),
            "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": "{{ messages[0]['content'] }}!",
        }
        return found | {f"tokenizer.{key}": value for key, value in more.items()}

    return build


@pytest.fixture
def tokenizer(metadata, tmp_path):
    def build(pre="smollm", **more):
        write_tokenizer(metadata(pre, **more), tmp_path, context_length=512)
        return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    return build


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["I", "'ll", "Ġpay", "ĠĠ", "1", "2", "3", "4", ".", "5", "Ġok", "!?", "Ċ"]),
        ("gpt-2", ["I", "'ll", "Ġpay", "Ġ", "Ġ1234", ".", "5", "Ġok", "!?", "Ċ"]),
        ("default", ["I", "'", "ll", "Ġpay", "Ġ", "Ġ", "123", "4", ".", "5", "Ġok", "!?", "Ċ"]),
        ("llama-bpe", ["I", "'ll", "Ġpay", "Ġ", "Ġ", "123", "4", ".", "5", "Ġok", "!?Ċ"]),
        ("qwen2", ["I", "'ll", "Ġpay", "Ġ", "Ġ", "1", "2", "3", "4", ".", "5", "Ġok", "!?Ċ"]),
    ],
)
def test_each_pre_tokenizer_splits_as_its_models_were_trained(tokenizer, pre, pieces):
    found = tokenizer(pre).pre_tokenizer.pre_tokenize_str("I'll pay  1234.5 ok!?\n")
    assert [piece for piece, _ in found] == pieces


def test_merges_are_applied_and_stop_at_digits(tokenizer):
    smollm = tokenizer("smollm")
    assert smollm.encode("hello w123").tokens == ["hello", "Ġw", "1", "2", "3"]
    assert tokenizer("gpt-2").encode("hello w 123").tokens == ["hello", "Ġw", "Ġ", "123"]


def test_special_tokens_keep_their_ids_and_vanish_when_asked(tokenizer):
    smollm = tokenizer()
    ids = smollm.encode("<|im_start|>hello<|im_end|>").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert smollm.decode(ids) == "hello"
    assert smollm.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40), pre=st.sampled_from(["smollm", "default", "llama-bpe"]))
def test_every_text_survives_the_way_there_and_back(tokenizer, text, pre):
    found = tokenizer(pre)
    assert found.decode(found.encode(text).ids) == text


def test_bos_is_added_where_the_file_or_the_family_says_so(tokenizer):
    assert tokenizer("llama-bpe").encode("hello").ids[0] == 1
    assert len(tokenizer("llama-bpe", **{"ggml.add_bos_token": False}).encode("hello").ids) == 1
    assert tokenizer("smollm", **{"ggml.add_bos_token": True}).encode("hello").ids[0] == 1
    assert len(tokenizer("smollm").encode("hello").ids) == 1
    both = tokenizer("smollm", **{"ggml.add_bos_token": True, "ggml.add_eos_token": True})
    assert both.encode("hello", "w").tokens == [
        *("<|im_start|>", "hello", "<|im_end|>"),
        *("<|im_start|>", "w", "<|im_end|>"),
    ]


def test_transformers_loads_the_folder_with_its_template_and_its_end(tokenizer, tmp_path):
    tokenizer()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    messages = [{"role": "user", "content": "hello"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "hello!"
    assert loaded("w 123").input_ids == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("w 123").ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.tokens": ["a", "a"], "ggml.token_type": [1, 1]}, "twice"),
        ({"ggml.token_type": [1]}, "lacks its vocabulary"),
        ({"ggml.model": "llama"}, "'gpt2'"),
        ({"ggml.pre": "dbrx"}, "'dbrx'; supported: smollm, gpt-2, default, llama-bpe, qwen2"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(metadata, change, message):
    with pytest.raises(ConfigError, match=message):
        check_tokenizer(metadata(**change))
