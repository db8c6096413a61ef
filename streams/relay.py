"""Token ids on their way from one step to the next, without the host."""

from __future__ import annotations

import torch


class Relay:
    """One id per request row on the device: what the row's last sample was, and what its next forward reads.

    Row 0 is padding: padded rows of a batch write there and read there, and what they read is some id written before,
    or 0. Home: the compute lane, which both writes and reads it, in launch order; so no fence is needed.

    `num_rows` counts row 0.
    """

    __slots__ = ("table",)

    def __init__(self, num_rows: int, device: torch.device, *, dtype: torch.dtype = torch.int64) -> None:
        self.table = torch.zeros(num_rows, dtype=dtype, device=device)

    def gather(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The ids of `rows`. Shapes: `rows: [n]` int32 or int64 → `[n]` of the table's dtype, written to `out` if given."""
        if out is None:
            return torch.index_select(self.table, 0, rows)
        return torch.index_select(self.table, 0, rows, out=out)

    def scatter(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Store `ids` for `rows`. Shapes: `rows: [n]` int64, no row but 0 twice; `ids: [n]`, cast to the table's dtype."""
        self.table.index_copy_(0, rows, ids.to(self.table.dtype))
