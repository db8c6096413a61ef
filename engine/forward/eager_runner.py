"""Runs a forward as it stands: no graph, any shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..attention.backend import AttentionBackend, prepare_step
from .forward_context import ForwardContext
from .forward_output import ForwardOutput

if TYPE_CHECKING:
    from ..models.llama import LlamaForCausalLM
    from .forward_batch import ForwardBatch
    from .kv_pool import KVPool


class EagerRunner:
    """The runner of last resort: it can run everything."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_pool: KVPool,
        *,
        decode_attention: AttentionBackend,
        extend_attention: AttentionBackend,
    ) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._decode_attention = decode_attention
        self._extend_attention = extend_attention

    def can_run(self, batch: ForwardBatch) -> bool:
        return True

    def execute(self, batch: ForwardBatch) -> ForwardOutput:
        """Compute the step on the compute lane. The output is its own."""
        attention = prepare_step(self._decode_attention, self._extend_attention, batch)
        states = self._model(ForwardContext.of(batch, self._kv_pool, attention))
        return ForwardOutput(logits=self._model.logits(states, batch.logits_indices), states=states)
