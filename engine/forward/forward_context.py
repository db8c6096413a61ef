"""What a model is handed besides its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ..attention.fresh_prompt import FreshKV
    from .forward_batch import ForwardBatch
    from .kv_pool import KVPool


class LayerAttention(Protocol):
    """The attention of one forward."""

    def forward(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of all tokens. Shapes: q [T, Hq, D] → [T, Hq, D] contiguous."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One forward: its tokens, the pool it writes to, its prepared attention. Lifetime: the step, or in a captured
    forward that of the graph, whose static tensors it then holds.

    Shapes: input_ids [T] int64; positions [T] int32; slots [T] int64. `queries` [T, Hq, D] and `hidden` [T, hidden]:
    where to leave the rotated queries and the residual stream; None for tensors of their own. `fresh`: where each layer
    leaves its keys and values beside the pool.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_pool: KVPool
    attention: LayerAttention
    queries: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    fresh: FreshKV | None = None

    @classmethod
    def of(cls, batch: ForwardBatch, kv_pool: KVPool, attention: LayerAttention) -> ForwardContext:
        """The context of an eager step."""
        return cls(
            input_ids=batch.input_ids,
            positions=batch.positions,
            slots=batch.kv_loc.slots,
            kv_pool=kv_pool,
            attention=attention,
        )
