# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What the tokens of a step with prompts are: id, position and KV slot of each, in one kernel."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a step, decode rows first. Shapes: rows, num_prior [B] int32; query_start [B + 1] int32; extend_ids [E]
    int32, the ids of the extend rows; next_ids [R] int64, those of decode rows, by request row; page_table [R, max] int32.
    """

    rows: torch.Tensor
    num_prior: torch.Tensor
    query_start: torch.Tensor
    extend_ids: torch.Tensor
    next_ids: torch.Tensor
    page_table: torch.Tensor
    num_decode: int


# Columns of a step are slices: a variant for every alignment of theirs would be compiled in the middle of serving.
@triton.jit(
    do_not_specialize=["num_rows", "num_decode", "num_tokens", "size"],
    do_not_specialize_on_alignment=["rows_ptr", "prior_ptr", "start_ptr", "extend_ids_ptr"],
)
def _step_tokens_kernel(
    rows_ptr, prior_ptr, start_ptr, extend_ids_ptr, next_ids_ptr, table_ptr, ids_ptr, positions_ptr, slots_ptr,
    num_rows, num_decode, num_tokens, size, table_stride,
    PAGE: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    live = token < num_tokens
    # The last row that starts at or before the token; rows without tokens start where the next one does.
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_rows
    for _ in tl.static_range(HALVINGS):
        middle = (low + high) // 2
        before = tl.load(start_ptr + middle) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    row = tl.load(rows_ptr + low, mask=live, other=0).to(tl.int64)
    position = tl.load(prior_ptr + low, mask=live, other=0) + token - tl.load(start_ptr + low)
    position = tl.where(live, position, 0)
    page = tl.load(table_ptr + row * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
    decodes = token < num_decode
    from_relay = tl.load(next_ids_ptr + row, mask=live & decodes, other=0)
    from_host = tl.load(extend_ids_ptr + token - num_decode, mask=live & (token >= num_decode), other=0)
    inside = token < size
    tl.store(ids_ptr + token, tl.where(decodes, from_relay, from_host.to(tl.int64)), mask=inside)
    tl.store(positions_ptr + token, position, mask=inside)
    tl.store(slots_ptr + token, tl.where(live, page * PAGE + position % PAGE, 0), mask=inside)


def step_tokens(
    step: StepRows,
    page_size: int,
    num_tokens: int,
    *,
    max_rows: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Fills the outputs for the first `num_tokens` tokens, and the rest of them as padding: id 0, position 0, slot 0.

    Shapes: ids, slots [n] int64; positions [n] int32, n >= num_tokens. `max_rows`: the most rows there will ever be.
    """
    size = ids.shape[0]
    _step_tokens_kernel[(triton.cdiv(size, _BLOCK),)](
        step.rows, step.num_prior, step.query_start, step.extend_ids, step.next_ids, step.page_table,
        ids, positions, slots, step.rows.shape[0], step.num_decode, num_tokens, size, step.page_table.stride(0),
        PAGE=page_size, HALVINGS=max_rows.bit_length(), BLOCK=_BLOCK, PDL=DEPENDENT, num_warps=4, launch_pdl=DEPENDENT,
    )  # fmt: skip
