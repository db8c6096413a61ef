"""What the engine needs to know of a model, read from its `config.json` and checked once.

Torch-free: the scheduler's half reads it too. Every field of the file that would change the
computation is either represented here or refused by name; nothing is ignored in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import ConfigError
from .eos_ids import config_eos_ids, read_eos_ids
from .rope_config import RopeConfig, read_rope_config

SUPPORTED_ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_DTYPES: Final = ("bfloat16", "float16", "float32")
# Mistral's config class means a window of 4096 when the key is absent, and none when it is null.
_MISTRAL_DEFAULT_WINDOW: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and the constants of one decoder-only model.

    Units: `max_position` in tokens. `dtype` is the name of the checkpoint's dtype as torch spells
    it. `eos_ids` is the union of what config, generation config and tokenizer call an end.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path, *, max_model_len: int | None = None) -> ModelConfig:
        """Read `folder/config.json` (and the files beside it that name end tokens).

        `max_model_len` is the longest sequence that will be served: a sliding window at least that
        long never slides, and is accepted. Raises ConfigError for what this engine cannot compute.
        """
        raw = _read_object(folder / "config.json")
        return cls.from_dict(raw, eos_ids=read_eos_ids(folder, raw), max_model_len=max_model_len)

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        *,
        eos_ids: tuple[int, ...] | None = None,
        max_model_len: int | None = None,
    ) -> ModelConfig:
        """Build from a parsed `config.json` alone, whose own end ids hold unless `eos_ids` is given.

        Raises ConfigError as `from_folder` does.
        """
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        num_heads = _positive(raw, "num_attention_heads")
        num_kv_heads = _positive(raw, "num_key_value_heads", default=num_heads)
        hidden_size = _positive(raw, "hidden_size")
        max_position = _positive(raw, "max_position_embeddings")
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
                field="model",
            )
        if raw.get("head_dim") is None and hidden_size % num_heads:
            raise ConfigError(
                f"config.json gives no head_dim and hidden_size {hidden_size} is not a multiple of "
                f"num_attention_heads {num_heads}",
                field="model",
            )
        num_layers = _positive(raw, "num_hidden_layers")
        _refuse_active_window(raw, architecture, num_layers, max_model_len or max_position)
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        attention_bias = _flag(raw, "attention_bias") and architecture != "MistralForCausalLM"
        return cls(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_positive(raw, "head_dim", default=hidden_size // num_heads),
            rms_norm_eps=_epsilon(raw),
            rope=read_rope_config(raw, max_position=max_position),
            max_position=max_position,
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            # Qwen2 has a bias on q, k and v by construction, without a key that says so.
            attention_bias=is_qwen2 or attention_bias,
            attention_output_bias=attention_bias and not is_qwen2,
            mlp_bias=architecture == "LlamaForCausalLM" and _flag(raw, "mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=_dtype(raw),
            bos_id=_optional_id(raw, "bos_token_id"),
            eos_ids=config_eos_ids(raw) if eos_ids is None else eos_ids,
        )


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", field="model") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", field="model") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object", field="model")
    return raw


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if isinstance(names, list):
        for name in names:
            if name in SUPPORTED_ARCHITECTURES:
                return str(name)
    found = ", ".join(map(str, names)) if isinstance(names, list) and names else "none"
    raise ConfigError(
        f"unsupported model architecture: {found} (model_type {raw.get('model_type')!r}). "
        f"Supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
        field="model",
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        name = method.get("quant_method") if isinstance(method, dict) else method
        raise ConfigError(f"quantised checkpoints are not supported ({name})", field="model")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"unsupported hidden_act {activation!r}; supported: silu", field="model")


def _refuse_active_window(raw: Mapping[str, Any], architecture: str, num_layers: int, longest_tokens: int) -> None:
    """Refuse a sliding window that some layer would apply to a sequence that can be served."""
    window: object = None
    if architecture == "MistralForCausalLM":
        window = raw.get("sliding_window", _MISTRAL_DEFAULT_WINDOW)
    elif architecture != "LlamaForCausalLM" and _flag(raw, "use_sliding_window"):
        kinds = raw.get("layer_types")
        if kinds is None:
            slides = int(raw.get("max_window_layers", num_layers)) < num_layers
        else:
            slides = "sliding_attention" in kinds
        window = raw.get("sliding_window") if slides else None
    if isinstance(window, int) and 0 < window < longest_tokens:
        raise ConfigError(
            f"this model attends within a sliding window of {window} tokens, which is not "
            f"supported; it can be served with max_model_len <= {window}",
            field="max_model_len",
        )


def _positive(raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(
            f"config.json: {key} must be a positive integer, got {value!r}",
            field="model",
        )
    return value


def _epsilon(raw: Mapping[str, Any]) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ConfigError(
            f"config.json: rms_norm_eps must lie between 0 and 1, got {value!r}",
            field="model",
        )
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} must be true or false, got {value!r}", field="model")
    return bool(value)


def _optional_id(raw: Mapping[str, Any], key: str) -> int | None:
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _dtype(raw: Mapping[str, Any]) -> str:
    # transformers 5 writes `dtype`, 4 wrote `torch_dtype`; a file without either meant float32.
    value = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if value not in _DTYPES:
        raise ConfigError(
            f"unsupported checkpoint dtype {value!r}; supported: {', '.join(_DTYPES)}",
            field="model",
        )
    return value
