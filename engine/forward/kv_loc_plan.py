"""Where the tokens of one step live in the KV pool: worked out once, for every layer and every forward of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLocPlan:
    """The page translation of one step and its write window, made once with the step's ForwardBatch and shared by all that
    the step computes. There is one pool, so one translation; a second pool would be a second pair of slots and table here.

    Shapes: slots [T] int64, the write window: where each token's key and value go, in every layer; page_table [R,
    max_pages] int32, leased from the row state: row r of it lists the pages of request row r, stale beyond the row's
    length.
    """

    slots: torch.Tensor
    page_table: torch.Tensor
    page_size: int

    @classmethod
    def make(
        cls, page_table: torch.Tensor, page_size: int, *, token_rows: torch.Tensor, positions: torch.Tensor
    ) -> KVLocPlan:
        """Translate. Shapes: token_rows, positions [T] int32: the request row and the position of each token."""
        shift = page_size.bit_length() - 1  # page sizes are powers of two
        entries = token_rows.long() * page_table.shape[1] + (positions >> shift)
        pages = page_table.view(-1).index_select(0, entries)
        return cls(
            slots=(pages.long() << shift) + (positions & (page_size - 1)),
            page_table=page_table,
            page_size=page_size,
        )

    def pages_of(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The pages that cover the first `num_tokens` tokens of each row. Shapes: rows [n] → [n, ceil(num_tokens /
        page_size)] int32.
        """
        num_pages = -(-num_tokens // self.page_size)
        return self.page_table[:, :num_pages].index_select(0, rows)
