"""Ids, positions and slots of a step's tokens: derived on CUDA by one kernel, into fixed places that graphs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import ScheduleBatch
    from .row_state import RowState
    from .staged_step import StagedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """Shapes: ids, slots [T] int64; positions [T] int32. Home: the compute lane, which alone writes them, in launch
    order.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def make(cls, num_tokens: int, device: torch.device) -> TokenInputs:
        return cls(
            ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(num_tokens, dtype=torch.int32, device=device),
            slots=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        )

    @property
    def capacity(self) -> int:
        return self.ids.shape[0]

    @property
    def num_bytes(self) -> int:
        return 20 * self.capacity

    def first(self, num_tokens: int) -> TokenInputs:
        """The same places, of the first tokens only."""
        return TokenInputs(
            ids=self.ids[:num_tokens], positions=self.positions[:num_tokens], slots=self.slots[:num_tokens]
        )

    def holds(self, ids: torch.Tensor) -> bool:
        """Whether `ids` are the first of these."""
        return ids.data_ptr() == self.ids.data_ptr()

    def derive(self, batch: ScheduleBatch, staged: StagedStep, row_state: RowState, *, page_size: int) -> TokenInputs:
        """The tokens of `batch`, in these places if they hold them, else in new ones. On CUDA.

        As many again become padding, or all that is left: no graph pads by more.
        """
        from ..kernels.step_tokens import StepRows, step_tokens

        num_tokens = batch.num_tokens
        if num_tokens <= self.capacity:
            written = self.first(min(2 * num_tokens, self.capacity))
        else:
            written = TokenInputs.make(num_tokens, self.ids.device)
        step_tokens(
            StepRows(
                rows=staged.rows,
                num_prior=staged.num_prior,
                query_start=staged.query_start_loc,
                extend_ids=staged.extend_ids,
                next_ids=row_state.relay.table,
                page_table=row_state.page_table,
                num_decode=batch.num_decode,
            ),
            page_size,
            num_tokens,
            max_rows=row_state.page_table.shape[0],
            ids=written.ids,
            positions=written.positions,
            slots=written.slots,
        )
        return written.first(num_tokens)
