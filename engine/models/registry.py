"""Which class computes which architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..errors import ConfigError
from .llama import LlamaForCausalLM

if TYPE_CHECKING:
    import torch

    from ..loader.model_config import ModelConfig

# By the name in the checkpoint's config.json.
ARCHITECTURES: Final[dict[str, type[LlamaForCausalLM]]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
}


def build_model(
    config: ModelConfig, *, max_position: int, dtype: torch.dtype, device: torch.device
) -> LlamaForCausalLM:
    """The model of `config` with uninitialised parameters. Raises ConfigError for an architecture that has no class."""
    model = ARCHITECTURES.get(config.architecture)
    if model is None:
        raise ConfigError(
            f"no model for architecture {config.architecture!r}; known: {', '.join(ARCHITECTURES)}", field="model"
        )
    return model(config, max_position=max_position, dtype=dtype, device=device)
