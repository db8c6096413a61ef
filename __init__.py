"""Slipstream: an asyncio-native LLM inference engine. One process, one event loop, one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine.config import EngineConfig
    from .engine.engine import Engine
    from .engine.outputs import Completion, Delta
    from .engine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Completion", "Delta", "Engine", "EngineConfig", "SamplingParams", "__version__"]

_HOME = {
    "Completion": "engine.outputs",
    "Delta": "engine.outputs",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "SamplingParams": "engine.sampling_params",
}


def __getattr__(name: str) -> object:
    """Resolve the public names on first use, so that `import slipstream` costs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
