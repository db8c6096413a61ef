# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The pages of several requests as one list, as attention libraries want them."""

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

_BLOCK = 256


# Rows and lengths are often slices: a variant for every alignment of theirs would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr"])
def _page_lists_kernel(
    table_ptr, rows_ptr, seq_lens_ptr, out_ptr, num_rows, table_stride,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    other = tl.arange(0, ROWS)
    pages = (tl.load(seq_lens_ptr + other, mask=(other < num_rows) & (other <= b), other=0) + PAGE - 1) // PAGE
    start = tl.sum(tl.where(other < b, pages, 0), axis=0)
    num_pages = tl.sum(tl.where(other == b, pages, 0), axis=0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_pages
    row = tl.load(rows_ptr + b).to(tl.int64)
    page = tl.load(table_ptr + row * table_stride + column, mask=inside, other=0)
    tl.store(out_ptr + start + column, page, mask=inside)


def page_lists(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    out: torch.Tensor,
    *,
    max_pages: int,
    max_rows: int,
) -> None:
    """Writes the pages of each row, those that hold its first `seq_lens` tokens, one row after the other.

    Shapes: page_table [R, max] int32, used through rows [B] int; seq_lens [B] int; out [total pages] int32. `max_pages`
    is at least the most pages a row has, `max_rows` the most rows there will ever be.
    """
    num_rows = rows.shape[0]
    _page_lists_kernel[(num_rows, triton.cdiv(max_pages, _BLOCK))](
        page_table, rows, seq_lens, out, num_rows, page_table.stride(0),
        PAGE=page_size, ROWS=triton.next_power_of_2(max_rows), BLOCK=_BLOCK, PDL=DEPENDENT,
        num_warps=4, launch_pdl=DEPENDENT,
    )  # fmt: skip
