"""The Llama family: Llama 2 and 3, Mistral, Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k).

One decoder computes them all: what differs is in the `ModelConfig`, read once from the checkpoint's config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from re import Pattern
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from ..forward.forward_output import TokenStates
from ..layers.attention import Attention
from ..layers.linear import Linear
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..loader.weight_target import WeightTarget

if TYPE_CHECKING:
    from ..forward.forward_context import ForwardContext
    from ..layers.rotary import Rotation
    from ..loader.model_config import ModelConfig

_IGNORABLE = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """Checkpoint names below the layer's prefix."""
        return {
            "input_layernorm.weight": WeightTarget(param=self.input_norm.weight),
            **{f"self_attn.{name}": target for name, target in self.attention.weight_targets().items()},
            "post_attention_layernorm.weight": WeightTarget(param=self.mlp_norm.weight),
            **{f"mlp.{name}": target for name, target in self.mlp.weight_targets().items()},
        }

    def forward(self, residual: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> None:
        """Update `residual` [T, hidden] in place."""
        self.finish(self.attend(residual, rotation, ctx), residual)

    def attend(self, residual: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """The part that needs all tokens. Shapes: → [T, Hq, D]."""
        return self.attention.attend(self.input_norm(residual), rotation, ctx)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """The part that computes a token by itself."""
        self.attention.project(attended, residual)
        self.mlp(self.mlp_norm(residual), residual)


class LlamaForCausalLM(nn.Module):
    """Decoder with an LM head. Parameters are created uninitialised on `device`; a loader fills them, then `finish`
    is called once.

    `max_position`: the longest sequence that will be served, in tokens.
    """

    def __init__(self, config: ModelConfig, *, max_position: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.stack: tuple[DecoderLayer, ...] = tuple(self.layers)  # type: ignore[arg-type]  # ModuleList forgets its element type
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head = Linear.tied_to(self.embedding)
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(
            config.rope, head_dim=config.head_dim, max_position=max_position, dtype=dtype, device=device
        )

    @property
    def ignorable(self) -> Pattern[str]:
        """Checkpoint names that need no place: buffers that old versions of transformers saved."""
        return _IGNORABLE

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """Every checkpoint name and its place."""
        targets = {"model.embed_tokens.weight": WeightTarget(param=self.embedding)}
        for index, layer in enumerate(self.stack):
            for name, target in layer.weight_targets().items():
                targets[f"model.layers.{index}.{name}"] = target
        targets["model.norm.weight"] = WeightTarget(param=self.norm.weight)
        targets["lm_head.weight"] = WeightTarget(param=self.lm_head.weight)
        return targets

    def finish(self, *, row_bucket: int | None = None) -> None:
        """Lay the loaded weights out for the device; see `Linear.finish`."""
        for module in self.modules():
            if isinstance(module, Linear):
                tied = module.weight is self.embedding
                module.finish(row_bucket=row_bucket, keep_weight=tied)

    def forward(self, ctx: ForwardContext) -> TokenStates:
        """Compute one step as far as its tokens need each other: write its KV, stop behind the last attention."""
        residual = self._embed(ctx)
        rotation = self.rotary.at(ctx.positions)
        for layer in self.stack[:-1]:
            layer(residual, rotation, ctx)
        return TokenStates(residual=residual, attended=self.stack[-1].attend(residual, rotation, ctx))

    def hidden(self, states: TokenStates, indices: torch.Tensor | slice) -> torch.Tensor:
        """The residual stream of some tokens of a step before the last norm, on its own. Shapes: indices [S] int, or a slice
        of S → [S, hidden].
        """
        residual = _rows_of(states.residual, indices)
        if states.attended is not None:
            self.stack[-1].finish(_rows_of(states.attended, indices), residual)
        return residual

    def logits(self, states: TokenStates, indices: torch.Tensor) -> torch.Tensor:
        """Logits of some tokens of a step. Shapes: indices [S] int → [S, vocab] of the model's dtype."""
        if indices.shape[0] == 0:
            return states.residual.new_empty((0, self.config.vocab_size))
        logits: torch.Tensor = self.lm_head(self.norm(self.hidden(states, indices)))
        return logits

    def _embed(self, ctx: ForwardContext) -> torch.Tensor:
        if ctx.hidden is None:
            return functional.embedding(ctx.input_ids, self.embedding)
        return torch.index_select(self.embedding, 0, ctx.input_ids, out=ctx.hidden)


def _rows_of(x: torch.Tensor, indices: torch.Tensor | slice) -> torch.Tensor:
    """A copy of some rows."""
    return x[indices].clone() if isinstance(indices, slice) else x.index_select(0, indices)
