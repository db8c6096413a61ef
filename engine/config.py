"""The engine's settings: frozen, checked before anything is loaded, unknown names refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from .cache.radix_node import EvictionPolicy
from .errors import ConfigError, shown
from .hidden_mode import HIDDEN_MODES, HiddenMode

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
GraphMode = Literal["auto", "full", "breakable", "off"]
AttentionBackendName = Literal["auto", "torch", "triton", "flashinfer"]
LoadFormat = Literal["auto", "dummy"]
GrammarBackendName = Literal["auto", "xgrammar", "llguidance"]
SchedulePolicy = Literal["fcfs", "lpm", "shortest-prefill", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an Engine can be told. `None` means: derive it from the model and the machine at start.

    Raises: ConfigError naming the field.
    """

    model: str
    device: Device = "auto"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    max_model_len: int | None = None  # tokens, prompt and output together
    kv_memory_fraction: float = 0.9  # of the memory that is free for it: weights, graphs and KV together stay below
    max_total_tokens: int | None = None  # size of the KV pool in tokens, instead of the fraction
    page_size: int = 16  # tokens a KV page
    max_running_requests: int = 256
    max_queued_requests: int = 10_000
    max_queued_tokens: int | None = None  # tokens of all waiting requests together; None: no limit of its own
    schedule_policy: SchedulePolicy = "fcfs"  # who of the waiting goes first
    policy_window: int = 128  # so many of the oldest waiting requests are ranked by lpm and shortest-prefill
    priority_preemption: bool = False  # under the priority policy: send lower ones back where a higher one lacks room
    itl_budget_ms: float | None = None  # between two tokens of a request, where prompts share its steps; None: no limit
    chunked_prefill_size: int = 2048  # prompt tokens computed in one step, at most: longer prompts are cut
    max_prefill_tokens: int = 16_384  # tokens of one step, decode rows included, at most
    prefix_cache: bool = True
    eviction_policy: EvictionPolicy = "lru"  # which cached prefix goes first
    overlap: bool = True  # plan the next step while the GPU computes this one
    step_timeout_s: float = 600.0  # a step that has not come back by then is stuck, and the engine dead
    decode_attention: AttentionBackendName = "auto"
    prefill_attention: AttentionBackendName = "auto"
    decode_graph: GraphMode = "auto"
    prefill_graph: GraphMode = "auto"
    hidden_states: HiddenMode = "none"  # what graphs are captured for; a step that has to give more runs eagerly
    debug_canary: bool = False  # poison freed KV pages, so that whoever reads one shows it; slow
    debug_cuda_graph: bool = False  # the whole forward as one eager break of a breakable graph
    row_invariant: bool = False  # same arithmetic for a row whatever shares its batch; slower
    cpu_threads: int | None = None  # intra-op threads on the CPU; None: cores - 1
    grammar_backend: GrammarBackendName = "auto"  # automata, and for what these do not read a library that is installed
    skip_tokenizer: bool = False  # ids in, ids out; the model's end ids still end
    chat_template: str | None = None  # a file with a Jinja template instead of the model's own

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model must be a name, a folder or a .gguf file, as a string", field="model")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ConfigError("chat_template must be the path of a file, as a string", field="chat_template")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}", field=name)
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {shown(value)}", field=name)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {shown(getattr(self, name))}", field=name)
        self._check_together()

    def _check_together(self) -> None:
        fraction = self.kv_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ConfigError(
                f"kv_memory_fraction must be above 0 and at most 1, not {shown(fraction)}", field="kv_memory_fraction"
            )
        for name in _DURATIONS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LONGEST_DURATION:
                raise ConfigError(f"{name} must be a positive number, not {shown(value)}", field=name)
        if self.priority_preemption and self.schedule_policy != "priority":
            raise ConfigError("priority_preemption needs schedule_policy priority", field="priority_preemption")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, not {shown(self.page_size)}", field="page_size")
        if self.chunked_prefill_size % self.page_size:
            raise ConfigError(
                f"chunked_prefill_size ({shown(self.chunked_prefill_size)}) must be a multiple of page_size"
                f" ({shown(self.page_size)})",
                field="chunked_prefill_size",
            )
        if self.max_prefill_tokens < self.page_size:
            raise ConfigError("max_prefill_tokens must hold at least one page", field="max_prefill_tokens")

    @classmethod
    def given(cls, config: EngineConfig | None, settings: Mapping[str, object]) -> EngineConfig:
        """One of the two, the other being left out. Raises: ConfigError."""
        if config is None:
            return cls.from_settings(settings)
        if not isinstance(config, EngineConfig):
            raise ConfigError("config must be an EngineConfig; a model is named by Engine(model=…)", field="config")
        if settings:
            raise ConfigError(f"give a config or settings, not both: {', '.join(settings)}")
        return config

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> EngineConfig:
        """Build from plain names and values. Raises ConfigError for a name that does not exist."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in settings:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}; known: {', '.join(sorted(known))}", field=str(name))
        if "model" not in settings:
            raise ConfigError("model is required", field="model")
        return cls(**settings)  # type: ignore[arg-type]  # values are checked in __post_init__


_CHOICES: dict[str, tuple[str, ...]] = {
    "device": get_args(Device),
    "dtype": get_args(Dtype),
    "load_format": get_args(LoadFormat),
    "grammar_backend": get_args(GrammarBackendName),
    "schedule_policy": get_args(SchedulePolicy),
    "eviction_policy": get_args(EvictionPolicy),
    "decode_attention": get_args(AttentionBackendName),
    "prefill_attention": get_args(AttentionBackendName),
    "decode_graph": get_args(GraphMode),
    "prefill_graph": get_args(GraphMode),
    "hidden_states": HIDDEN_MODES,
}
_POSITIVE = (
    "max_model_len",
    "max_total_tokens",
    "page_size",
    "max_running_requests",
    "max_queued_requests",
    "max_queued_tokens",
    "policy_window",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "cpu_threads",
)
_DURATIONS = ("itl_budget_ms", "step_timeout_s")
LONGEST_DURATION = 1e9
_OPTIONAL = ("max_model_len", "max_total_tokens", "max_queued_tokens", "itl_budget_ms", "cpu_threads")
_SWITCHES = (
    "prefix_cache", "overlap", "priority_preemption", "debug_canary", "debug_cuda_graph", "row_invariant", "skip_tokenizer",
)  # fmt: skip
