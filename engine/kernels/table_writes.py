# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Page-table entries of a step, scattered on the device from one staged block, so that a graph can begin with it."""

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

_BLOCK = 256


@triton.jit(do_not_specialize=["capacity"])
def _table_writes_kernel(
    count_ptr, writes_ptr, table_ptr, capacity, table_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    there = at < tl.load(count_ptr)
    row = tl.load(writes_ptr + at, mask=there, other=0).to(tl.int64)
    column = tl.load(writes_ptr + capacity + at, mask=there, other=0)
    page = tl.load(writes_ptr + 2 * capacity + at, mask=there, other=0)
    tl.store(table_ptr + row * table_stride + column, page, mask=there)


def table_writes(count: torch.Tensor, writes: torch.Tensor, page_table: torch.Tensor) -> None:
    """`page_table[writes[0, i], writes[1, i]] = writes[2, i]` for the first `count` of them, each entry at most once.

    Shapes: count [1] int32 on the device; writes [3, capacity] int32, contiguous; page_table [R, max_pages] int32.
    """
    capacity = writes.shape[1]
    _table_writes_kernel[(triton.cdiv(capacity, _BLOCK),)](
        count, writes, page_table, capacity, page_table.stride(0), BLOCK=_BLOCK, PDL=DEPENDENT,
        num_warps=4, launch_pdl=DEPENDENT,
    )  # fmt: skip
