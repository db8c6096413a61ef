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
        """Write what `staged` says, before its forward reads it. No two writes of a step may concern one entry."""
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
