"""Where the model runs and in which precision, decided once from the settings, the checkpoint and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...streams.cores import usable_cores
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..loader.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`num_threads`: intra-op threads on the CPU."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int

    @classmethod
    def resolve(cls, config: EngineConfig, model: ModelConfig) -> Placement:
        """Raises ConfigError for a device that is not there."""
        device = _device(config)
        return cls(
            device=device,
            dtype=_dtype(config, model, device),
            num_threads=config.cpu_threads or max(1, usable_cores() - 1),
        )


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device 'cuda' was asked for, but torch finds no CUDA device", field="device")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype asked for, else the checkpoint's; on a CPU that lacks fast half precision, float32 instead."""
    name = model.dtype if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    if config.dtype == "auto" and device.type == "cpu" and not has_fast_half(dtype):
        return torch.float32
    return dtype


def has_fast_half(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` at least as fast as of float32."""
    if dtype == torch.bfloat16:
        return _cpu_has("_is_avx512_bf16_supported")
    if dtype == torch.float16:
        return _cpu_has("_is_amx_fp16_supported")
    return True


def _cpu_has(query: str) -> bool:
    # torch has no public question for these; a version without the private one counts as a no.
    ask = getattr(torch.cpu, query, None)
    return bool(ask()) if ask is not None else False
