# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The rows of a step into the fixed slots that a captured forward attends by."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRows:
    """Slots of a captured forward. A padded slot has row 0, length 0 and no queries.

    Shapes, int32: decode_rows, decode_lens [D]; extend_rows, extend_lens [E]; query_start [E + 1], the extend rows'
    first tokens among all tokens of the step.
    """

    decode_rows: torch.Tensor
    decode_lens: torch.Tensor
    extend_rows: torch.Tensor
    extend_lens: torch.Tensor
    query_start: torch.Tensor

    @classmethod
    def make(cls, *, num_decode: int, num_extend: int, device: torch.device) -> "GraphRows":
        def column(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=device)

        return cls(
            decode_rows=column(num_decode),
            decode_lens=column(num_decode),
            extend_rows=column(num_extend),
            extend_lens=column(num_extend),
            query_start=column(num_extend + 1),
        )

    @property
    def num_bytes(self) -> int:
        return 4 * (2 * self.decode_rows.shape[0] + 3 * self.extend_rows.shape[0] + 1)


# Rows and lengths are slices: a variant for every alignment of theirs would be compiled in the middle of serving.
@triton.jit(
    do_not_specialize=["num_rows", "first_extend", "num_tokens"],
    do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr", "start_ptr"],
)
def _graph_rows_kernel(
    rows_ptr, seq_lens_ptr, start_ptr, decode_rows_ptr, decode_lens_ptr, extend_rows_ptr, extend_lens_ptr, query_start_ptr,
    num_rows, first_extend, num_tokens,
    D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    if D > 0:
        decodes = i < first_extend
        tl.store(decode_rows_ptr + i, tl.load(rows_ptr + i, mask=decodes, other=0), mask=i < D)
        tl.store(decode_lens_ptr + i, tl.load(seq_lens_ptr + i, mask=decodes, other=0), mask=i < D)
    at = first_extend + i
    extends = at < num_rows
    tl.store(extend_rows_ptr + i, tl.load(rows_ptr + at, mask=extends, other=0), mask=i < E)
    tl.store(extend_lens_ptr + i, tl.load(seq_lens_ptr + at, mask=extends, other=0), mask=i < E)
    start = tl.load(start_ptr + at, mask=at <= num_rows, other=0)
    tl.store(query_start_ptr + i, tl.where(at <= num_rows, start, num_tokens), mask=i <= E)


def graph_rows(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    first_extend: int,
    num_tokens: int,
    *,
    out: GraphRows,
) -> None:
    """Fills all slots of `out`. Shapes: rows, seq_lens [B] int32, `first_extend` decode rows first; query_start [B + 1]
    int32. Raises ValueError if there are more rows than slots.
    """
    num_rows = rows.shape[0]
    num_decode, num_extend = out.decode_rows.shape[0], out.extend_rows.shape[0]
    if first_extend > num_decode or num_rows - first_extend > num_extend:
        raise ValueError("more rows than the graph has slots")
    _graph_rows_kernel[(1,)](
        rows, seq_lens, query_start, out.decode_rows, out.decode_lens, out.extend_rows, out.extend_lens, out.query_start,
        num_rows, first_extend, num_tokens, D=num_decode, E=num_extend,
        BLOCK=triton.next_power_of_2(max(num_decode, num_extend + 1)), PDL=DEPENDENT, num_warps=4, launch_pdl=DEPENDENT,
    )  # fmt: skip
