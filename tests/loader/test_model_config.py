"""ModelConfig against the files that transformers writes and the files found in the wild."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from slipstream.engine.errors import ConfigError
from slipstream.engine.loader.model_config import SUPPORTED_ARCHITECTURES, ModelConfig

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.fixture
def saved(tmp_path):
    def save(config, architecture):
        config.architectures = [architecture]
        config.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize(
    ("kind", "architecture", "expected"),
    [
        (LlamaConfig, "LlamaForCausalLM", (False, False, False)),
        (MistralConfig, "MistralForCausalLM", (False, False, False)),
        (Qwen2Config, "Qwen2ForCausalLM", (True, False, False)),
        (Qwen3Config, "Qwen3ForCausalLM", (False, False, True)),
    ],
)
def test_what_transformers_saves_is_read_back(saved, kind, architecture, expected):
    more = {"sliding_window": None} if kind is MistralConfig else {}
    config = kind(**SIZES, **more, head_dim=32, tie_word_embeddings=True, eos_token_id=[5, 3])
    ours = ModelConfig.from_folder(saved(config, architecture))
    assert ours.architecture == architecture
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (512, 64, 128)
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (2, 4, 2)
    assert (ours.head_dim, ours.max_position, ours.tie_word_embeddings) == (32, 1024, True)
    assert (ours.attention_bias, ours.attention_output_bias, ours.qk_norm) == expected
    assert (ours.rms_norm_eps, ours.rope.theta, ours.eos_ids) == (1e-6, 10000.0, (3, 5))


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_the_attention_bias_flag_means_all_four_projections(saved, kind):
    name = "LlamaForCausalLM" if kind is LlamaConfig else "Qwen3ForCausalLM"
    ours = ModelConfig.from_folder(saved(kind(**SIZES, attention_bias=True), name))
    assert (ours.attention_bias, ours.attention_output_bias) == (True, True)


def test_mlp_bias_is_read_for_llama():
    assert ModelConfig.from_dict(LLAMA | {"mlp_bias": True}).mlp_bias is True
    assert ModelConfig.from_dict(LLAMA).mlp_bias is False


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "x", "rope_type": "llama3", **LLAMA3_ROPE}},
    ],
)
def test_every_spelling_of_rope_scaling_means_the_same(spelling):
    rope = ModelConfig.from_dict(LLAMA | spelling).rope
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 5e5, 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert rope.original_max_position == 512


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn"])
def test_rope_kinds_that_transformers_saves_are_read(saved, rope_type):
    parameters = {"rope_type": rope_type, "rope_theta": 7e4}
    if rope_type != "default":
        parameters["factor"] = 4.0
    if rope_type == "yarn":
        parameters |= {"original_max_position_embeddings": 256, "beta_fast": 16.0, "mscale": 0.7}
    rope = ModelConfig.from_folder(saved(LlamaConfig(**SIZES, rope_parameters=parameters), "LlamaForCausalLM")).rope
    assert (rope.kind, rope.theta) == (rope_type, 7e4)
    assert rope.factor == (1.0 if rope_type == "default" else 4.0)
    if rope_type == "yarn":
        assert (rope.original_max_position, rope.beta_fast, rope.mscale) == (256, 16.0, 0.7)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'; supported: default"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "'factor' must be a positive"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by layer type"),
    ],
)
def test_rope_that_would_be_computed_wrongly_is_refused(rope, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(LLAMA | rope)


def test_an_explicit_head_dim_wins_over_the_derived_one():
    assert ModelConfig.from_dict(LLAMA | {"head_dim": 128}).head_dim == 128
    assert ModelConfig.from_dict(LLAMA | {"head_dim": None}).head_dim == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel .*Supported: LlamaForCausalLM"),
        ({"architectures": None}, "architecture: none"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": 63}, "no head_dim"),
        ({"hidden_act": "gelu"}, "'gelu'; supported: silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_its_reason(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(LLAMA | change)


def test_the_refusal_of_an_architecture_lists_all_that_are_supported():
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(LLAMA | {"architectures": ["X"]})
    assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 256}


@pytest.mark.parametrize(
    ("raw", "max_model_len"),
    [
        (MISTRAL | {"sliding_window": 256}, None),
        (MISTRAL | {"max_position_embeddings": 8192}, None),
        (MISTRAL | {"sliding_window": 256}, 257),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, None),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, None),
    ],
)
def test_a_sliding_window_that_would_slide_is_refused(raw, max_model_len):
    with pytest.raises(ConfigError, match="sliding window") as caught:
        ModelConfig.from_dict(raw, max_model_len=max_model_len)
    assert caught.value.field == "max_model_len"


@pytest.mark.parametrize(
    ("raw", "max_model_len"),
    [
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 256}, 256),
        (MISTRAL, None),
        (QWEN2, None),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 2}, None),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
        (LLAMA | {"sliding_window": 16}, None),
    ],
)
def test_a_sliding_window_that_never_slides_is_accepted(raw, max_model_len):
    assert ModelConfig.from_dict(raw, max_model_len=max_model_len).num_layers == 2


def test_ends_of_text_are_the_union_of_all_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<end>"},
                "added_tokens_decoder": {"11": {"content": "<end>"}, "12": {"content": "<x>"}},
            }
        )
    )
    assert ModelConfig.from_folder(tmp_path).eos_ids == (7, 9, 11)


def test_the_tokenizers_end_is_found_in_tokenizer_json_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 4, "content": "<end>"}, {"id": 5, "content": "<x>"}]})
    )
    assert ModelConfig.from_folder(tmp_path).eos_ids == (4,)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_checkpoints_dtype_is_read_in_either_spelling(changes, expected):
    assert ModelConfig.from_dict(LLAMA | changes).dtype == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("{", "not valid JSON"), ("[]", "JSON object")],
)
def test_an_unreadable_config_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_names_sources_configs_and_conversion_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import slipstream.engine.loader.model_config, slipstream.engine.loader.model_source\n"
        "import slipstream.engine.loader.demo_model, slipstream.engine.loader.gguf_loader\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
