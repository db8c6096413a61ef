"""A tiny Llama GGUF file, written as llama.cpp's converter writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> Mapping[str, Any]:
    return dict(TINY)


@pytest.fixture
def vocabulary() -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]


def _pairs_together(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k, written from its definition: row by row."""
    half = weight.shape[0] // num_heads // 2
    rows = []
    for head in range(num_heads):
        for i in range(half):
            rows += [weight[head * 2 * half + i], weight[head * 2 * half + half + i]]
    return np.stack(rows)


def gguf_name(name: str) -> str:
    outer = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    inner = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{inner[module]}.weight"


@pytest.fixture
def write_gguf(tmp_path: Path, vocabulary: list[str]) -> Callable[..., Path]:
    """`write_gguf(weights, ...)` -> path. `weights` are Hugging Face names and fp32 arrays."""

    def write(
        weights: Mapping[str, np.ndarray],
        *,
        arch: str = "llama",
        tokenizer: str = "gpt2",
        pre: str | None = "smollm",
        kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
        raw: Mapping[str, np.ndarray] | None = None,
        extra: Callable[[gguf.GGUFWriter], None] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(TINY["num_hidden_layers"])
        writer.add_context_length(TINY["max_position_embeddings"])
        writer.add_embedding_length(TINY["hidden_size"])
        writer.add_feed_forward_length(TINY["intermediate_size"])
        writer.add_head_count(TINY["num_attention_heads"])
        writer.add_head_count_kv(TINY["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(TINY["rms_norm_eps"])
        writer.add_rope_freq_base(100000.0)
        writer.add_tokenizer_model(tokenizer)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary])
        writer.add_token_merges(list(MERGES))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_chat_template("{{ messages }}")
        if extra is not None:
            extra(writer)
        for hf_name, weight in weights.items():
            key = gguf_name(hf_name)
            if ".q_proj." in hf_name:
                weight = _pairs_together(weight, TINY["num_attention_heads"])
            elif ".k_proj." in hf_name:
                weight = _pairs_together(weight, TINY["num_key_value_heads"])
            kind = (kinds or {}).get(hf_name)
            if kind is None:
                writer.add_tensor(key, weight)
            else:
                writer.add_tensor(key, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        for key, value in (raw or {}).items():
            writer.add_tensor(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
