"""What the deferred sample adds to a step, packed like the step itself for one copy to the device."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..sampling.sample_needs import SampleNeeds
    from ..scheduler.schedule_batch import ScheduleBatch
    from ..worker import SampleInputs
    from .row_samplings import RowSamplings


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """Host side. `columns`: int32 bytes of the sampling rows to draw at random, and of the request
    rows whose relay entry is written. A column that says nothing new is
    empty; `all_random` tells the first one's two meanings apart.
    """

    columns: tuple[bytes, bytes]
    all_random: bool
    needs: SampleNeeds

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(len(column) // 4 for column in self.columns)

    @classmethod
    def make(cls, batch: ScheduleBatch, inputs: SampleInputs, samplings: RowSamplings) -> SampleBlock:
        """Turn positions in `batch.rows` into positions among the rows that sample; dead rows draw nothing and write
        row 0 of the relay.
        """
        sampling = batch.sample_indices
        rows = [batch.rows[index] for index in sampling]
        relay_rows: list[int] = []
        if inputs.dead:
            relay_rows = [0 if index in inputs.dead else batch.rows[index] for index in sampling]
        random, needs = samplings.random_among(relay_rows or rows)
        all_random = len(random) == len(rows)
        return cls(
            columns=(
                b"" if all_random else array("i", random).tobytes(),
                array("i", relay_rows).tobytes(),
            ),
            all_random=all_random,
            needs=needs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSample:
    """Device side, int64: random [n] as `SampleRequest` has it; relay_rows [S], None for the sampling rows themselves."""

    random: torch.Tensor | None
    relay_rows: torch.Tensor | None

    @classmethod
    def of(cls, block: torch.Tensor, staged: SampleBlock) -> StagedSample:
        """Cut `block`, the columns of `staged` as int32 on the device."""
        random, relay_rows = block.long().split_with_sizes(staged.widths)
        return cls(
            random=None if staged.all_random else random,
            relay_rows=relay_rows if relay_rows.numel() else None,
        )
