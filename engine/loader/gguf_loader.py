"""Convert a GGUF file of the Llama family into a Hugging Face folder. Needs no torch.

Weights are dequantised by gguf's own routines in float32, then rounded once to the wanted dtype.
The result is written tensor by tensor, a block of rows at a time, so memory stays flat.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from ..errors import ConfigError
from .gguf_file import GgufFile, GgufTensor, read_gguf
from .gguf_tokenizer import check_tokenizer, read_special_ids, write_tokenizer

StoredDtype = Literal["bfloat16", "float16", "float32"]
# Raised when the same file would be converted differently than before; caches are keyed by it.
CONVERSION_VERSION: Final = 1

_ROWS_IN_BLOCK: Final = 1024
_SAFETENSORS_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
}
_OUTER_NAMES: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_ROPE_FACTORS: Final = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The numbers of the metadata that the conversion itself needs."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    head_dim: int
    intermediate_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float


def convert_gguf(source: Path, folder: Path, *, dtype: StoredDtype = "bfloat16") -> None:
    """Write config, tokenizer and weights of `source` into the existing, empty `folder`.

    The caller makes the result appear whole (build in a temporary folder, then rename). Raises
    ConfigError for another architecture or tokenizer, for tensors without a place, for rope
    settings that cannot be expressed, and for weights that overflow `dtype`.
    """
    if dtype not in get_args(StoredDtype):
        raise ConfigError(f"cannot store weights as {dtype!r}", field="dtype")
    file = read_gguf(source)
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(
            f"unsupported GGUF architecture {architecture!r}; supported: 'llama'. "
            "Use the model's Hugging Face folder instead",
            field="model",
        )
    check_tokenizer(file.metadata)
    shape = _read_shape(file.metadata)
    names = {tensor.name: _hf_name(tensor.name) for tensor in file.tensors}
    config = _config(file, shape, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    special = read_special_ids(file.metadata)
    generation = {"bos_token_id": special.bos, "eos_token_id": _one_or_many(special.ends)}
    if special.pad is not None:
        generation["pad_token_id"] = special.pad
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    write_tokenizer(file.metadata, folder, context_length=shape.context_length)
    kept = [(name, tensor) for tensor in file.tensors if (name := names[tensor.name]) is not None]
    with (folder / "model.safetensors").open("wb") as out:
        _write_weights(out, kept, shape, dtype)


def _read_shape(metadata: Mapping[str, Any]) -> _Shape:
    num_heads = _count(metadata, "llama.attention.head_count")
    hidden_size = _count(metadata, "llama.embedding_length")
    head_dim = _count(metadata, "llama.attention.key_length", default=hidden_size // num_heads)
    rotated = _count(metadata, "llama.rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        raise ConfigError(
            f"GGUF rotates {rotated} of {head_dim} dimensions, which is not supported",
            field="model",
        )
    return _Shape(
        num_layers=_count(metadata, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_count(metadata, "llama.attention.head_count_kv", default=num_heads),
        hidden_size=hidden_size,
        head_dim=head_dim,
        intermediate_size=_count(metadata, "llama.feed_forward_length"),
        context_length=_count(metadata, "llama.context_length"),
        rms_norm_eps=_real(metadata, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_real(metadata, "llama.rope.freq_base", default=10000.0),
    )


def _count(metadata: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"GGUF metadata {key} must be one positive integer, got {value!r}", field="model")
    return value


def _real(metadata: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = metadata.get(key, default)
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"GGUF metadata {key} must be a positive number, got {value!r}", field="model")
    # Stored as float32: its shortest decimal is what the model's author wrote (1e-05, not
    # 9.999999747378752e-06), and what the original config.json says.
    return float(str(np.float32(value)))


def _hf_name(name: str) -> str | None:
    """The checkpoint name of a GGUF tensor; None for the rope factors, which become config."""
    if name == _ROPE_FACTORS:
        return None
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ConfigError(f"GGUF tensor {name} has no place in a Llama model", field="model")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _config(file: GgufFile, shape: _Shape, dtype: StoredDtype) -> dict[str, Any]:
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{file.path} holds no token_embd.weight", field="model")
    special = read_special_ids(file.metadata)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        # Rows and not tokens: an embedding may be padded beyond the vocabulary.
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {
            "rope_theta": shape.rope_theta,
            **_rope_scaling(file.metadata, tensors.get(_ROPE_FACTORS), shape),
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": special.bos,
        "eos_token_id": _one_or_many(special.ends),
        "pad_token_id": special.pad,
        "use_cache": True,
        "dtype": dtype,
    }


def _one_or_many(ids: Sequence[int]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else ids[0] if ids else None


def _rope_scaling(metadata: Mapping[str, Any], factors: GgufTensor | None, shape: _Shape) -> dict[str, Any]:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if factors is not None and kind == "none":
        return _llama3_scaling(dequantize(factors.raw, factors.kind).reshape(-1), shape)
    if factors is None and kind == "none":
        return {"rope_type": "default"}
    if factors is None and kind == "linear":
        return {"rope_type": "linear", "factor": _real(metadata, "llama.rope.scaling.factor")}
    raise ConfigError(f"unsupported GGUF rope scaling {kind!r}; supported: none, linear, llama3", field="model")


def _llama3_scaling(factors: npt.NDArray[np.float32], shape: _Shape) -> dict[str, Any]:
    """Recover the llama3 parameters, which GGUF keeps only as one divisor per frequency.

    All published Llama 3.x models share everything but `factor`, which is the largest divisor; the
    divisors that follow must equal the file's, or the model is refused.
    """
    low, high, original = 1.0, 4.0, 8192
    largest = float(factors.max())
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    turns = original / (2 * math.pi * shape.rope_theta**exponents)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / largest + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError(
            "the GGUF file scales its rope frequencies in a way that is not llama3's",
            field="model",
        )
    return {
        "rope_type": "llama3",
        "factor": round(largest, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write_weights(out: BinaryIO, named: Sequence[tuple[str, GgufTensor]], shape: _Shape, dtype: StoredDtype) -> None:
    """Write the safetensors layout: header length, JSON header, then the bytes in header order."""
    code, item_bytes = _SAFETENSORS_DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in named:
        end = offset + math.prod(tensor.shape) * item_bytes
        header[name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    out.write(struct.pack("<Q", len(encoded)))
    out.write(encoded)
    for name, tensor in named:
        for block in _float_blocks(name, tensor, shape):
            out.write(_stored(block, dtype, name).data)


def _float_blocks(name: str, tensor: GgufTensor, shape: _Shape) -> Iterator[npt.NDArray[np.float32]]:
    """Dequantise `tensor` in Hugging Face's row order, a few rows at a time."""
    raw = tensor.raw if tensor.raw.ndim > 1 else tensor.raw.reshape(1, -1)
    if name.endswith("q_proj.weight"):
        raw = _halves_apart(raw, shape.num_heads)
    elif name.endswith("k_proj.weight"):
        raw = _halves_apart(raw, shape.num_kv_heads)
    for start in range(0, raw.shape[0], _ROWS_IN_BLOCK):
        try:
            yield dequantize(raw[start : start + _ROWS_IN_BLOCK], tensor.kind)
        except NotImplementedError as error:
            raise ConfigError(
                f"GGUF tensor {tensor.name} is stored as {tensor.kind.name}, which is not supported",
                field="model",
            ) from error


def _halves_apart(raw: npt.NDArray[np.uint8], num_heads: int) -> npt.NDArray[np.uint8]:
    """Undo llama.cpp's row order of q and k: rotated pairs side by side, per head.

    Hugging Face rotates row i of a head with row i + head_dim/2. Whole rows move, so this works on
    the still quantised bytes.
    """
    num_rows = raw.shape[0]
    if num_rows % (2 * num_heads):
        raise ConfigError(f"GGUF q or k has {num_rows} rows for {num_heads} heads", field="model")
    order = np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return raw[order]


def _stored(values: npt.NDArray[np.float32], dtype: StoredDtype, name: str) -> npt.NDArray[Any]:
    if dtype == "float32":
        return np.ascontiguousarray(values)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if not np.isfinite(halves).all():
            raise ConfigError(f"{name} holds values that float16 cannot", field="dtype")
        return halves
    # Round to nearest even by integer arithmetic, as numpy has no bfloat16. A NaN would carry into
    # the exponent and become another number, so it is refused with the infinities.
    if not np.isfinite(values).all():
        raise ConfigError(f"{name} holds values that are not finite", field="model")
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded.astype(np.uint16)
