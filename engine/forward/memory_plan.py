"""How many tokens the KV pool holds, and how long a sequence may be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..loader.model_config import ModelConfig

_MAX_CPU_POOL_BYTES: Final = 4 << 30  # the machine is shared with other programs; more must be asked for
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """`used_bytes` counts everything that is not free, whoever holds it. `limit_bytes`: of what may be taken unasked."""

    total_bytes: int
    used_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Units: pages without page 0; `max_model_len` in tokens, prompt and output together."""

    num_pages: int
    page_size: int
    max_model_len: int
    bytes_per_token: int

    @property
    def pool_bytes(self) -> int:
        return (self.num_pages + 1) * self.page_size * self.bytes_per_token

    @property
    def max_pages_per_row(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @classmethod
    def make(
        cls, config: EngineConfig, model: ModelConfig, *, bytes_per_token: int, memory: DeviceMemory
    ) -> MemoryPlan:
        """Size the pool from `max_total_tokens`, else from the fraction of `memory` that is to be used in all, less what
        is used already, and never beyond what all rows at their longest could use.

        Raises ConfigError if the pool cannot hold one sequence of the length asked for, or not even a page.
        """
        wanted_len = longest_sequence(config, model)
        page_size = config.page_size
        if config.max_total_tokens is not None:
            num_tokens = config.max_total_tokens
        else:
            budget = int(memory.total_bytes * config.kv_memory_fraction) - memory.used_bytes
            if memory.limit_bytes is not None:
                budget = min(budget, memory.limit_bytes)
            longest_pages = -(-wanted_len // page_size)
            useful_tokens = config.max_running_requests * longest_pages * page_size
            num_tokens = min(budget // bytes_per_token - page_size, useful_tokens)
        num_pages = num_tokens // page_size
        if num_pages < 1:
            _refuse_tiny(config, bytes_per_token, memory)
        capacity = num_pages * page_size
        if capacity < wanted_len and config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {wanted_len} does not fit the KV pool of {capacity} tokens "
                f"({bytes_per_token * wanted_len / _MIB:.0f} MiB are needed)",
                field="max_model_len",
            )
        return cls(
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=min(wanted_len, capacity),
            bytes_per_token=bytes_per_token,
        )


def longest_sequence(config: EngineConfig, model: ModelConfig) -> int:
    """`max_model_len` as asked for, else what the model was made for. Raises ConfigError beyond the latter."""
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's {model.max_position}", field="max_model_len"
        )
    return config.max_model_len


def device_memory(device: torch.device) -> DeviceMemory:
    """What the device has now. On the CPU only what is available counts: the machine is shared."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes=total, used_bytes=total - free, limit_bytes=None)
    return DeviceMemory(total_bytes=_available_ram(), used_bytes=0, limit_bytes=_MAX_CPU_POOL_BYTES)


def _available_ram() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _refuse_tiny(config: EngineConfig, bytes_per_token: int, memory: DeviceMemory) -> None:
    if config.max_total_tokens is not None:
        raise ConfigError(
            f"max_total_tokens {config.max_total_tokens} is less than a page of {config.page_size}",
            field="max_total_tokens",
        )
    page_bytes = bytes_per_token * config.page_size
    works = (memory.used_bytes + 2 * page_bytes) / max(memory.total_bytes, 1)
    advice = f"{works:.2f} would do" if works <= 1 else "no fraction would do"
    raise ConfigError(
        f"no room for a KV page of {page_bytes / _MIB:.1f} MiB: {memory.used_bytes / _MIB:.0f} of "
        f"{memory.total_bytes / _MIB:.0f} MiB are used, and kv_memory_fraction is {config.kv_memory_fraction}; {advice}",
        field="kv_memory_fraction",
    )
