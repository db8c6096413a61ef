"""Weights and config that come out of a GGUF file, against transformers' own model."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.engine.errors import ConfigError
from slipstream.engine.loader.gguf_loader import convert_gguf
from slipstream.engine.loader.model_config import ModelConfig


@pytest.fixture
def llama(tiny, vocabulary):
    def build(*, tied=True):
        torch.manual_seed(7)
        config = LlamaConfig(**tiny, vocab_size=len(vocabulary), tie_word_embeddings=tied, rope_theta=100000.0)
        return LlamaForCausalLM(config).eval()

    return build


def arrays(model, *, tied=True):
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    return weights


def convert(source, tmp_path, dtype="float32"):
    folder = tmp_path / f"converted-{dtype}"
    folder.mkdir()
    convert_gguf(source, folder, dtype=dtype)
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_the_logits_of_the_original(llama, write_gguf, tmp_path, tied):
    original = llama(tied=tied)
    folder = convert(write_gguf(arrays(original, tied=tied)), tmp_path)
    converted = LlamaForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[3, 50, 9, 200, 7, 7, 31]])
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.config.tie_word_embeddings is tied
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_quantised_rows_are_dequantised_then_reordered_bit_for_bit(llama, write_gguf, tmp_path, kind):
    weights = arrays(llama())
    matrices = {name: kind for name, weight in weights.items() if weight.ndim == 2}
    found = load_file(convert(write_gguf(weights, kinds=matrices), tmp_path) / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        if name in matrices:
            weight = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        assert np.array_equal(found[name].numpy(), weight), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_dtypes_round_as_torch_rounds(llama, write_gguf, tmp_path, dtype):
    weights = arrays(llama())
    # Ties between two neighbours, signed zeros, subnormals and large values.
    edges = np.array([1.00390625, 1.01171875, -0.0, 1e-40, 6e4, -1.5, 3e-8, 2.0], np.float32)
    weights["model.norm.weight"] = np.resize(edges, 64)
    folder = convert(write_gguf(weights), tmp_path, dtype)
    found = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        expected = torch.from_numpy(weight).to(getattr(torch, dtype))
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name].view(torch.int16), expected.view(torch.int16)), name
    assert ModelConfig.from_folder(folder).dtype == dtype


def test_the_config_says_what_the_metadata_says(llama, write_gguf, tmp_path, tiny):
    folder = convert(write_gguf(arrays(llama())), tmp_path)
    config = LlamaConfig.from_pretrained(folder)
    assert {key: getattr(config, key) for key in tiny} == tiny
    ours = ModelConfig.from_folder(folder)
    assert (ours.rms_norm_eps, ours.rope.theta, ours.rope.kind) == (1e-5, 100000.0, "default")
    assert (ours.bos_id, ours.eos_ids, ours.head_dim) == (1, (2,), 16)


def test_an_end_of_turn_token_is_an_end_besides_eos(llama, write_gguf, tmp_path):
    source = write_gguf(arrays(llama()), extra=lambda writer: writer.add_eot_token_id(0))
    folder = convert(source, tmp_path)
    assert ModelConfig.from_folder(folder).eos_ids == (0, 2)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def llama3_divisors(theta, head_dim, factor):
    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / scaled.double()).float().numpy()


def test_llama3_rope_is_recovered_from_its_divisors(llama, write_gguf, tmp_path):
    divisors = llama3_divisors(100000.0, 16, 32.0)
    source = write_gguf(arrays(llama()), raw={"rope_freqs.weight": divisors})
    rope = ModelConfig.from_folder(convert(source, tmp_path)).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


def test_rope_divisors_of_no_known_kind_are_refused(llama, write_gguf, tmp_path):
    divisors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    source = write_gguf(arrays(llama()), raw={"rope_freqs.weight": divisors})
    with pytest.raises(ConfigError, match="not llama3's"):
        convert(source, tmp_path)


def test_linear_rope_scaling_is_kept_and_yarn_refused(llama, write_gguf, tmp_path):
    def scaling(kind):
        def add(writer):
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(2.0)

        return add

    weights = arrays(llama())
    linear = write_gguf(weights, extra=scaling(gguf.RopeScalingType.LINEAR))
    rope = ModelConfig.from_folder(convert(linear, tmp_path)).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)
    yarn = write_gguf(weights, extra=scaling(gguf.RopeScalingType.YARN), name="yarn.gguf")
    with pytest.raises(ConfigError, match="yarn"):
        convert(yarn, tmp_path, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma3"}, "architecture 'gemma3'; supported: 'llama'"),
        ({"tokenizer": "llama"}, "tokenizer 'llama'; supported: 'gpt2'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'; supported: smollm"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"raw": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "blk.0.attn_q.bias has no place"),
        ({"raw": {"blk.2.ffn_up.weight": np.zeros((96, 64))}}, "F64, which is not supported"),
        ({"extra": lambda writer: writer.add_rope_dimension_count(8)}, "rotates 8 of 16"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused_by_name(llama, write_gguf, tmp_path, changes, message):
    source = write_gguf(arrays(llama()), **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        convert(source, tmp_path)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("value", "dtype"), [(1e5, "float16"), (np.nan, "bfloat16")])
def test_weights_that_the_dtype_cannot_hold_are_refused(llama, write_gguf, tmp_path, value, dtype):
    weights = arrays(llama())
    weights["model.norm.weight"] = np.full(64, value, np.float32)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        convert(write_gguf(weights), tmp_path, dtype)


@pytest.mark.parametrize("kept_bytes", [3, 20, 300, 5000, -4])
def test_a_file_cut_short_anywhere_is_refused(llama, write_gguf, tmp_path, kept_bytes):
    source = write_gguf(arrays(llama()))
    source.write_bytes(source.read_bytes()[:kept_bytes])
    with pytest.raises(ConfigError, match=r"tiny\.gguf"):
        convert(source, tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    source = tmp_path / "page.gguf"
    source.write_text("<!doctype html>")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        convert(source, tmp_path)
