"""What the device is fed for one step: the second of the three shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..forward_mode import ForwardMode
from .kv_loc_plan import KVLocPlan
from .token_inputs import TokenInputs

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import ScheduleBatch
    from .row_state import RowState
    from .staged_step import StagedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Tensors of one step on the compute lane. Decode rows come first; the tokens of a row are contiguous, in the
    order of the rows.

    Shapes, int32 unless said: rows, seq_lens (tokens after this step), prefix_lens (tokens before it) [B];
    query_start_loc [B + 1]; input_ids [T] int64; positions [T]; sample_rows, sample_lens [S]: of the rows that sample,
    the request row, and the tokens after this step; logits_indices [S or more]: their last tokens' indices, and on CUDA
    padding, for which logits are computed that nobody draws from. `…_cpu` are the same numbers on the host, for backends
    that plan there. Lifetime: the step. Nothing below writes into it; the page table in `kv_loc` is leased.
    """

    mode: ForwardMode
    num_decode: int
    rows: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    query_start_loc: torch.Tensor
    logits_indices: torch.Tensor
    sample_rows: torch.Tensor
    sample_lens: torch.Tensor
    kv_loc: KVLocPlan
    prefix_lens_cpu: tuple[int, ...]
    num_new_cpu: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_samples(self) -> int:
        return self.sample_rows.shape[0]

    @classmethod
    def init_new(
        cls,
        batch: ScheduleBatch,
        staged: StagedStep,
        row_state: RowState,
        *,
        page_size: int,
        tokens: TokenInputs | None = None,
    ) -> ForwardBatch:
        """Derive the step from its staged integers and the row state, which must already hold the step's writes.

        Ids of decode rows come from the relay, those of extend rows from the host. Runs on the compute lane and asks
        nothing of the device. `tokens`: on CUDA, where the tokens are leased from.
        """
        if tokens is None:
            derived = _derive_tokens(batch, staged, row_state, page_size)
        else:
            derived = tokens.derive(batch, staged, row_state, page_size=page_size)
        return cls(
            mode=batch.mode,
            num_decode=batch.num_decode,
            rows=staged.rows,
            input_ids=derived.ids,
            positions=derived.positions,
            seq_lens=staged.seq_lens,
            prefix_lens=staged.num_prior,
            query_start_loc=staged.query_start_loc,
            logits_indices=staged.logits_indices,
            sample_rows=staged.sample_rows,
            sample_lens=staged.sample_lens,
            kv_loc=KVLocPlan(slots=derived.slots, page_table=row_state.page_table, page_size=page_size),
            prefix_lens_cpu=batch.num_prior,
            num_new_cpu=batch.num_new,
        )


def _derive_tokens(batch: ScheduleBatch, staged: StagedStep, row_state: RowState, page_size: int) -> TokenInputs:
    """The same by torch's operators."""
    num_decode = batch.num_decode
    ids = staged.extend_ids.long()
    if num_decode:
        relayed = row_state.relay.gather(staged.rows[:num_decode])
        ids = torch.cat((relayed, ids)) if batch.mode.has_extend else relayed
    if batch.mode.has_extend:
        num_tokens = batch.num_tokens
        shifts = staged.num_prior - staged.query_start_loc[:-1]
        per_row = torch.stack((staged.rows, shifts))
        token_rows, token_shifts = per_row.repeat_interleave(staged.num_new, dim=1, output_size=num_tokens)
        positions = token_shifts + torch.arange(num_tokens, dtype=torch.int32, device=token_shifts.device)
    else:
        token_rows, positions = staged.rows, staged.num_prior
    plan = KVLocPlan.make(row_state.page_table, page_size, token_rows=token_rows, positions=positions)
    return TokenInputs(ids=ids, positions=positions, slots=plan.slots)
