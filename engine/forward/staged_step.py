"""One step's host integers as one block of int32, so that one copy takes them to the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..scheduler.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedStep:
    """The columns of a step: views of one block, on the host or on the device.

    Shapes, int32 unless said: rows, num_prior, num_new, seq_lens [B]; query_start_loc [B + 1]; sample_rows,
    sample_lens [S]; logits_indices [S or more]; extend_ids [E]; table_rows, table_columns, table_pages [N]; start_rows,
    start_top_k [K]; start_temperature, start_top_p, start_min_p [K] fp32; start_seed [K] int64. Lifetime: on the host
    that of the step's staging slot, on the device that of the step.
    """

    num_starts: int
    num_table_writes: int
    rows: torch.Tensor
    num_prior: torch.Tensor
    num_new: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    sample_rows: torch.Tensor
    sample_lens: torch.Tensor
    logits_indices: torch.Tensor
    extend_ids: torch.Tensor
    table_rows: torch.Tensor
    table_columns: torch.Tensor
    table_pages: torch.Tensor
    start_rows: torch.Tensor
    start_top_k: torch.Tensor
    start_temperature: torch.Tensor
    start_top_p: torch.Tensor
    start_min_p: torch.Tensor
    start_seed: torch.Tensor

    @classmethod
    def of(cls, block: torch.Tensor, widths: tuple[int, ...]) -> StagedStep:
        """Cut `block` [sum of widths] int32 into columns."""
        (
            seed, rows, num_prior, num_new, seq_lens, query_start_loc, sample_rows, sample_lens, logits_indices, extend_ids,
            table_rows, table_columns, table_pages, start_rows, start_top_k, temperature, top_p, min_p,
        ) = block.split_with_sizes(widths)  # fmt: skip
        return cls(
            num_starts=start_rows.shape[0],
            num_table_writes=table_rows.shape[0],
            rows=rows,
            num_prior=num_prior,
            num_new=num_new,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            sample_rows=sample_rows,
            sample_lens=sample_lens,
            logits_indices=logits_indices,
            extend_ids=extend_ids,
            table_rows=table_rows,
            table_columns=table_columns,
            table_pages=table_pages,
            start_rows=start_rows,
            start_top_k=start_top_k,
            start_temperature=temperature.view(torch.float32),
            start_top_p=top_p.view(torch.float32),
            start_min_p=min_p.view(torch.float32),
            start_seed=seed.view(torch.int64),
        )


def pack(batch: ScheduleBatch, *, num_logits: int = 0) -> tuple[bytearray, tuple[int, ...]]:
    """The columns of `batch` in the order of `StagedStep.of`, and their widths in int32. Host only; a few µs, plus
    what the rows take. `num_logits`: so many rows of logits are to be computed, or as many as sample if those are more.
    """
    seq_lens = tuple(map(int.__add__, batch.num_prior, batch.num_new))
    ends = tuple(accumulate(batch.num_new))
    sampling = batch.sample_indices
    starts = batch.starts
    columns: tuple[bytes, ...] = (
        # 64-bit seeds first, so that they are aligned.
        array("q", [start.sampling.seed for start in starts]).tobytes(),
        _ints(batch.rows),
        _ints(batch.num_prior),
        _ints(batch.num_new),
        _ints(seq_lens),
        _ints((0, *ends)),
        _ints(batch.rows[i] for i in sampling),
        _ints(seq_lens[i] for i in sampling),
        _ints(ends[i] - 1 for i in sampling) + bytes(4 * max(0, num_logits - len(sampling))),
        batch.extend_ids,
        batch.table_rows,
        batch.table_columns,
        batch.table_pages,
        _ints(start.row for start in starts),
        _ints(start.sampling.top_k for start in starts),
        _floats([start.sampling.temperature for start in starts]),
        _floats([start.sampling.top_p for start in starts]),
        _floats([start.sampling.min_p for start in starts]),
    )
    return bytearray(b"".join(columns)), tuple(len(column) // 4 for column in columns)


def _ints(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()


def _floats(values: Sequence[float]) -> bytes:
    return array("f", values).tobytes()
