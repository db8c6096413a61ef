"""What penalties count, kept on the device, so that a drawn id is counted without the host ever knowing it.

The host says once, with the row's start, what its history is. From then on each draw finds the one before it in the
relay, and counts it. A row that leaves needs no clearing: its next owner's start does that.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ..kernels.penalties import PenaltyColumns, count_history, penalise

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import RowPenalties, RowStart, ScheduleBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CountStarts:
    """Rows with penalties that start, made on the host by `packed` as one block of int32.

    Columns: frequency, presence [n] fp64; repetition [n] fp32; rows, num_counted, num_prompt [n]; bounds [n + 1]; ids.
    """

    block: bytes
    widths: tuple[int, ...]
    longest: int  # history, in ids

    @classmethod
    def packed(cls, starts: Sequence[tuple[int, RowPenalties]]) -> CountStarts:
        """Of request rows and their penalties; a few µs, and copies of the histories."""
        asked = [penalties for _, penalties in starts]
        lengths = [len(each.history) // 4 for each in asked]
        columns = (
            # Doubles first, so that they are aligned.
            array("d", [each.frequency for each in asked]).tobytes(),
            array("d", [each.presence for each in asked]).tobytes(),
            array("f", [each.repetition for each in asked]).tobytes(),
            array("i", [row for row, _ in starts]).tobytes(),
            array("i", [each.num_tokens for each in asked]).tobytes(),
            array("i", [each.num_prompt for each in asked]).tobytes(),
            array("i", [0, *accumulate(lengths)]).tobytes(),
            *(each.history for each in asked),
        )
        widths = (*(len(column) // 4 for column in columns[:7]), sum(lengths))
        return cls(block=b"".join(columns), widths=widths, longest=max(lengths))


class PenalisedRows:
    """The host's part: which request rows have penalties. Loop thread only."""

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._placed: tuple[tuple[int, ...], tuple[bool, ...]] | None = None
        self._places = b""

    def apply(self, starts: Iterable[RowStart]) -> CountStarts | None:
        """Take what a step's starts say; what the device has to be told of it, if anything."""
        self._placed = None
        counted = []
        for start in starts:
            self._rows.discard(start.row)
            if start.penalties is not None:
                self._rows.add(start.row)
                counted.append((start.row, start.penalties))
        return CountStarts.packed(counted) if counted else None

    def places(self, batch: ScheduleBatch, dead: frozenset[int]) -> bytes:
        """Where among the rows that sample those are that have penalties and have not ended, as packed int32.

        O(1) while no row has any; O(B) when the rows of the step are others than before.
        """
        rows, samples = batch.rows, batch.samples
        if not self._rows or self._rows.isdisjoint(rows):
            return b""
        if dead or self._placed != (rows, samples):
            mine = self._rows
            found = [k for k, at in enumerate(batch.sample_indices) if rows[at] in mine and at not in dead]
            self._placed = None if dead else (rows, samples)
            self._places = array("i", found).tobytes()
        return self._places


class TokenCounts:
    """The counts of every request row, row 0 being padding, and the host's `rows` beside them. Home: the compute lane.

    4 bytes an id of the vocabulary and row, taken at once: nothing is allocated for the first request that asks.
    `num_rows` does not count row 0; `next_ids`: the relay.
    """

    def __init__(self, *, num_rows: int, vocab_size: int, next_ids: torch.Tensor, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows + 1, dtype=dtype, device=device)

        self.rows = PenalisedRows()
        self._next_ids = next_ids
        self._columns = PenaltyColumns(
            words=torch.zeros((num_rows + 1, vocab_size), dtype=torch.int32, device=device),
            num_counted=column(torch.int32),
            repetition=column(torch.float32),
            frequency=column(torch.float64),
            presence=column(torch.float64),
        )

    def start(self, starts: CountStarts, block: torch.Tensor) -> None:
        """Forget what these rows held, and count their histories. `block`: that of `starts`, int32 on the device."""
        frequency, presence, repetition, rows, num_counted, num_prompt, bounds, ids = block.split_with_sizes(
            starts.widths
        )
        columns, at = self._columns, rows.long()
        columns.frequency.index_copy_(0, at, frequency.view(torch.float64))
        columns.presence.index_copy_(0, at, presence.view(torch.float64))
        columns.repetition.index_copy_(0, at, repetition.view(torch.float32))
        columns.num_counted.index_copy_(0, at, num_counted)
        columns.words.index_fill_(0, at, 0)
        count_history(rows, bounds, num_prompt, ids, columns.words, longest=starts.longest)

    def penalise(self, logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """As the kernel of this name has it; once a draw of each row, before the draw."""
        penalise(logits, places, rows, lengths, self._next_ids, self._columns)
