"""What the device remembers of each request row from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...streams.relay import Relay
from ..sampling.sampling_table import SamplingTable

if TYPE_CHECKING:
    from .staged_step import StagedStep


class RowState:
    """Page table, next ids and sampling parameters by request row; row 0 is padding.

    Home: the compute lane, which alone writes it, in launch order. A step ships only what changed: the parameters of
    rows that start, and the page table entries that are new. Tensors never move.

    `num_rows` does not count row 0. Shapes: page_table [num_rows + 1, max_pages] int32; lengths [num_rows + 1] int32,
    tokens whose KV is in the pool once the steps launched so far have run: decode graphs count on from it.
    """

    def __init__(self, *, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.page_table = torch.zeros(num_rows + 1, max_pages, dtype=torch.int32, device=device)
        self.relay = Relay(num_rows + 1, device)
        self.lengths = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(num_rows + 1, device)

    def apply(self, staged: StagedStep) -> None:
        """Write what `staged` says, before its forward reads it. No two writes of a step may concern one entry. Lengths are
        for decode graphs: only CUDA keeps them.
        """
        if self.lengths.device.type == "cuda":
            self._apply_at_once(staged)
            return
        if staged.num_starts:
            self.sampling.write(
                staged.start_rows.long(),
                temperature=staged.start_temperature,
                top_k=staged.start_top_k,
                top_p=staged.start_top_p,
                min_p=staged.start_min_p,
                seed=staged.start_seed,
            )
        if staged.num_table_writes:
            entries = staged.table_rows.long() * self.page_table.shape[1] + staged.table_columns
            self.page_table.view(-1).index_copy_(0, entries, staged.table_pages)

    def _apply_at_once(self, staged: StagedStep) -> None:
        """In one kernel: the operators above cost the host a quarter of a millisecond."""
        from ..kernels.row_writes import RowWrites, row_writes

        step = RowWrites(
            rows=staged.rows,
            seq_lens=staged.seq_lens,
            table_rows=staged.table_rows,
            table_columns=staged.table_columns,
            table_pages=staged.table_pages,
            start_rows=staged.start_rows,
            temperature=staged.start_temperature,
            top_k=staged.start_top_k,
            top_p=staged.start_top_p,
            min_p=staged.start_min_p,
            seed=staged.start_seed,
        )
        row_writes(step, lengths=self.lengths, page_table=self.page_table, sampling=self.sampling)
