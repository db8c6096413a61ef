# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The first kernel of a decode step: everything the step needs, derived from the device state of its request rows."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Static inputs of one decode bucket of B rows, rewritten at every step by `step_prologue`.

    ids [B] int64; positions, seq_lens, slots [B] int32. A padded row has id 0, position 0, slot 0 (page 0 is nobody's)
    and seq_len 0, for which attention reads and writes nothing.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor


def empty_step_inputs(num_rows: int, device: torch.device | str) -> StepInputs:
    """Zeroed static inputs for a bucket of `num_rows` rows."""

    def column(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_rows, dtype=dtype, device=device)

    return StepInputs(
        ids=column(torch.int64),
        positions=column(torch.int32),
        seq_lens=column(torch.int32),
        slots=column(torch.int32),
    )


@triton.jit
def _step_prologue_kernel(
    rows_ptr, num_rows_ptr, next_ids_ptr, lengths_ptr, page_table_ptr, ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr,
    embedding_ptr, hidden_ptr, table_stride, hidden_stride,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EMBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    live = b < tl.load(num_rows_ptr).to(tl.int32)
    row = tl.load(rows_ptr + b, mask=live, other=0).to(tl.int64)
    position = tl.load(lengths_ptr + row, mask=live, other=0).to(tl.int32)
    token = tl.load(next_ids_ptr + row, mask=live, other=0).to(tl.int64)
    page = tl.load(page_table_ptr + row * table_stride + position // PAGE, mask=live, other=0).to(tl.int32)
    tl.store(ids_ptr + b, token)
    tl.store(positions_ptr + b, position)
    tl.store(seq_lens_ptr + b, position + live.to(tl.int32))
    tl.store(slots_ptr + b, page * PAGE + position % PAGE)
    tl.store(lengths_ptr + row, position + 1, mask=live)
    if EMBED:
        for start in tl.static_range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < WIDTH
            vector = tl.load(embedding_ptr + token * WIDTH + column, mask=inside, other=0.0)
            tl.store(hidden_ptr + b * hidden_stride + column, vector, mask=inside)


def step_prologue(
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    next_ids: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    inputs: StepInputs,
    *,
    embedding: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> None:
    """Fills `inputs` from the state of the rows, adds one to each live row's length, and looks its embedding up.

    Shapes: rows [B] int (request rows, distinct among the live ones); num_rows [1] int, how many of them are live (the
    rest is padding); next_ids [R] int; lengths [R] int, tokens whose KV is in the pool; page_table [R, max_pages] int,
    rows may be strided; embedding [V, H] contiguous with hidden [B, H], both or neither.
    One program a row, so the embedding costs no further kernel. A padded row's hidden is the embedding of id 0.
    """
    if (embedding is None) != (hidden is None):
        raise ValueError("embedding and hidden go together")
    table = next_ids if embedding is None else embedding
    target = next_ids if hidden is None else hidden
    width = 1 if embedding is None else embedding.shape[1]
    _step_prologue_kernel[(rows.shape[0],)](
        rows, num_rows, next_ids, lengths, page_table,
        inputs.ids, inputs.positions, inputs.seq_lens, inputs.slots, table, target,
        page_table.stride(0), target.stride(0), PAGE=page_size, WIDTH=width, BLOCK=1024,
        EMBED=embedding is not None, PDL=DEPENDENT, num_warps=4, launch_pdl=DEPENDENT,
    )  # fmt: skip
