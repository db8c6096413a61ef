"""Rotary embedding parameters, read from either spelling that checkpoints use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from ..errors import ConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How position enters q and k. Fields that a kind does not use keep their defaults.

    `original_max_position` is the context length (tokens) before scaling. `attention_factor`,
    `mscale` and `mscale_all_dim` belong to yarn; None means "derive from factor".
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope_config(raw: Mapping[str, Any], *, max_position: int) -> RopeConfig:
    """Read `rope_parameters`, else `rope_theta` and `rope_scaling`, of a parsed config.json.

    Raises ConfigError for a kind this engine does not compute, for a parameter that the kind needs
    and the file lacks, and for partial or per-layer rotary embeddings.
    """
    found = _parameters(raw)
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise ConfigError(
            f"unsupported rope scaling {kind!r}; supported: {', '.join(get_args(RopeKind))}",
            field="model",
        )
    for key in _REQUIRED[kind]:
        if found.get(key) is None:
            raise ConfigError(f"rope scaling {kind!r} needs {key!r} in config.json", field="model")
    partial = found.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"unsupported partial_rotary_factor {partial}", field="model")
    original = found.get("original_max_position_embeddings")
    if original is None and kind == "yarn":
        original = max_position
    theta = found.get("rope_theta", raw.get("rope_theta"))
    return RopeConfig(
        kind=cast(RopeKind, kind),
        theta=_number("rope_theta", 10000.0 if theta is None else theta),
        factor=_number("factor", found.get("factor") or 1.0),
        low_freq_factor=_number("low_freq_factor", found.get("low_freq_factor") or 1.0),
        high_freq_factor=_number("high_freq_factor", found.get("high_freq_factor") or 4.0),
        original_max_position=None if original is None else int(_number("original", original)),
        beta_fast=_number("beta_fast", found.get("beta_fast") or 32.0),
        beta_slow=_number("beta_slow", found.get("beta_slow") or 1.0),
        attention_factor=_optional_number("attention_factor", found),
        mscale=_optional_number("mscale", found),
        mscale_all_dim=_optional_number("mscale_all_dim", found),
        truncate=bool(found.get("truncate", True)),
    )


def _parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"rope parameters must be an object, got {found!r}", field="model")
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ConfigError("rope parameters that differ by layer type are unsupported", field="model")
    return found


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(
            f"rope parameter {key!r} must be a positive number, got {value!r}",
            field="model",
        )
    return float(value)


def _optional_number(key: str, found: Mapping[str, Any]) -> float | None:
    value = found.get(key)
    return None if value is None else _number(key, value)
