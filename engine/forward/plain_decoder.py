"""The decode forward of any model here, as its own eager layers compute it: what is captured where the fused kernels do
not serve, and in row-invariant mode, where a graph must compute exactly what an eager step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...streams.breakable_graph import GraphBreaks
from ..attention.backend import AttentionBackend, StepAttention
from ..forward_mode import ForwardMode
from ..kernels.step_prologue import StepInputs, step_prologue
from ..models.fused_decoder import DecodeRows
from .forward_batch import ForwardBatch
from .forward_context import ForwardContext
from .forward_output import ForwardOutput, TokenStates
from .kv_loc_plan import KVLocPlan

if TYPE_CHECKING:
    from ..models.llama import LlamaForCausalLM
    from .kv_pool import KVPool
    from .row_state import RowState


class PlainDecoder:
    """Runs `model` for rows with one token each, on static tensors. `attention` must be capturable whole, or, with
    `breaks`, is run eagerly between the captured segments.

    Home: the compute lane. Lifetime: as long as model, pool and row state.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        pool: KVPool,
        rows: RowState,
        attention: AttentionBackend,
        *,
        breaks: GraphBreaks | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._rows = rows
        self._attention = attention
        self._breaks = breaks

    def forward(self, step: DecodeRows, inputs: StepInputs) -> ForwardOutput:
        """Compute one step for the rows in `step`."""
        page_table = self._rows.page_table
        step_prologue(
            step.rows,
            step.num_rows,
            self._rows.relay.table,
            self._rows.lengths,
            page_table,
            self._pool.page_size,
            inputs,
        )
        num_rows = step.rows.shape[0]
        every_row = torch.arange(num_rows + 1, dtype=torch.int32, device=step.rows.device)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            num_decode=num_rows,
            rows=step.rows,
            input_ids=inputs.ids,
            positions=inputs.positions,
            seq_lens=inputs.seq_lens,
            prefix_lens=inputs.positions,
            query_start_loc=every_row,
            logits_indices=every_row[:num_rows],
            sample_rows=step.rows,
            sample_lens=inputs.seq_lens,
            kv_loc=KVLocPlan(slots=inputs.slots.long(), page_table=page_table, page_size=self._pool.page_size),
            # Captured attention plans on the device; nothing asks the host.
            prefix_lens_cpu=(),
            num_new_cpu=(),
        )
        plan = self._attention.prepare(batch, decode=True, extend=False)
        whole = StepAttention(num_decode=num_rows, decode_plan=plan, extend_plan=None)
        attention = whole if self._breaks is None else _BrokenOut(self._breaks.eager_on_graph(whole.forward))
        behind_attention = self._model(ForwardContext.of(batch, self._pool, attention))
        # Captured whole: the hidden states of a step that asks for them are the ones its logits were made of.
        states = TokenStates(residual=self._model.hidden(behind_attention, slice(None)))
        return ForwardOutput(logits=self._model.logits(states, batch.logits_indices), states=states)


@dataclass(frozen=True, slots=True)
class _BrokenOut:
    """Attention that ends the captured segment before it."""

    run: Callable[[torch.Tensor, int], torch.Tensor]

    def forward(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self.run(q, layer)
