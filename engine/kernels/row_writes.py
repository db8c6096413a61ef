# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What a step outside the decode graphs changes in the row state, in one kernel: page-table entries, the parameters of rows
that start, and every row's length.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..sampling.sampling_table import SamplingTable
from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWrites:
    """Columns of a step, slices of one block. Shapes: rows, seq_lens [B] int32; table_rows, table_columns, table_pages [N]
    int32; start_rows, top_k [K] int32; temperature, top_p, min_p [K] fp32; seed [K] int64.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    table_rows: torch.Tensor
    table_columns: torch.Tensor
    table_pages: torch.Tensor
    start_rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor


_SLICES = [
    "rows_ptr", "seq_lens_ptr", "table_rows_ptr", "table_columns_ptr", "table_pages_ptr", "start_rows_ptr",
    "temperature_from", "top_k_from", "top_p_from", "min_p_from", "seed_from",
]  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_writes", "num_starts"], do_not_specialize_on_alignment=_SLICES)
def _row_writes_kernel(
    rows_ptr, seq_lens_ptr, table_rows_ptr, table_columns_ptr, table_pages_ptr, start_rows_ptr,
    temperature_from, top_k_from, top_p_from, min_p_from, seed_from,
    lengths_ptr, table_ptr, temperature_to, top_k_to, top_p_to, min_p_to, seed_to,
    num_rows, num_writes, num_starts, table_stride, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    there = at < num_rows
    row = tl.load(rows_ptr + at, mask=there, other=0)
    tl.store(lengths_ptr + row, tl.load(seq_lens_ptr + at, mask=there, other=0), mask=there)
    there = at < num_writes
    row = tl.load(table_rows_ptr + at, mask=there, other=0).to(tl.int64)
    column = tl.load(table_columns_ptr + at, mask=there, other=0)
    page = tl.load(table_pages_ptr + at, mask=there, other=0)
    tl.store(table_ptr + row * table_stride + column, page, mask=there)
    there = at < num_starts
    row = tl.load(start_rows_ptr + at, mask=there, other=0)
    tl.store(temperature_to + row, tl.load(temperature_from + at, mask=there, other=0.0), mask=there)
    tl.store(top_k_to + row, tl.load(top_k_from + at, mask=there, other=0), mask=there)
    tl.store(top_p_to + row, tl.load(top_p_from + at, mask=there, other=0.0), mask=there)
    tl.store(min_p_to + row, tl.load(min_p_from + at, mask=there, other=0.0), mask=there)
    tl.store(seed_to + row, tl.load(seed_from + at, mask=there, other=0), mask=there)


def row_writes(step: RowWrites, *, lengths: torch.Tensor, page_table: torch.Tensor, sampling: SamplingTable) -> None:
    """`lengths[rows] = seq_lens`, `page_table[table_rows, table_columns] = table_pages`, and the parameters of `start_rows`;
    no entry is named twice.

    Shapes: lengths [R] int32; page_table [R, max_pages] int32.
    """
    counts = step.rows.shape[0], step.table_rows.shape[0], step.start_rows.shape[0]
    _row_writes_kernel[(triton.cdiv(max(counts), _BLOCK),)](
        step.rows, step.seq_lens, step.table_rows, step.table_columns, step.table_pages, step.start_rows,
        step.temperature, step.top_k, step.top_p, step.min_p, step.seed,
        lengths, page_table, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed,
        *counts, page_table.stride(0), BLOCK=_BLOCK, PDL=DEPENDENT, num_warps=4, launch_pdl=DEPENDENT,
    )  # fmt: skip
