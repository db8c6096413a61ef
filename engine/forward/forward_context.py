"""What a model is handed besides its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..attention.backend import StepAttention
    from .forward_batch import ForwardBatch
    from .kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step: its batch, the pool it writes to, its prepared attention. Lifetime: the step."""

    batch: ForwardBatch
    kv_pool: KVPool
    attention: StepAttention
