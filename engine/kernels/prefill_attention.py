# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Paged causal attention for prompts of any lengths, with or without a cached prefix."""

import math

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

LONG_TOKENS = 1024
FEW_ROWS = 16


@triton.jit
def _attend_causal(
    q, best, weight, acc, k_ptr, v_ptr, table_ptr, first, last, seq_len, position, scale, kv_stride,
    D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [first, last) in blocks; unmasked where all of them precede every query."""
    d = tl.arange(0, D)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        t = start + tl.arange(0, BN)
        if MASKED:
            inside = t < seq_len
            page = tl.load(table_ptr + t // PAGE, mask=inside, other=0).to(tl.int64)
            at = (page * PAGE + t % PAGE)[:, None] * kv_stride + d[None, :]
            k = tl.load(k_ptr + at, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + at, mask=inside[:, None], other=0.0)
        else:
            page = tl.load(table_ptr + t // PAGE).to(tl.int64)
            at = (page * PAGE + t % PAGE)[:, None] * kv_stride + d[None, :]
            k = tl.load(k_ptr + at)
            v = tl.load(v_ptr + at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(t[None, :] <= position[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        p = tl.exp2(scores - new_best[:, None])
        weight = weight * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = new_best
    return best, weight, acc


# Rows and lengths are often slices: a variant for every alignment of theirs would be compiled in the middle of serving.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["rows_ptr", "query_start_ptr", "seq_lens_ptr"],
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, rows_ptr, query_start_ptr, seq_lens_ptr,
    num_rows, scale, q_stride, out_stride, table_stride,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, UNMASKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    kv_head = head // G
    kv_stride: tl.constexpr = HK * D
    wait_for_inputs(PDL)
    release_dependents(PDL)
    b = tl.arange(0, ROWS)
    starts = tl.load(query_start_ptr + b, mask=b < num_rows, other=0)
    ends = tl.load(query_start_ptr + b + 1, mask=b < num_rows, other=0)
    tiles = tl.cumsum((ends - starts + BM - 1) // BM, axis=0)
    total = tl.max(tiles, axis=0)
    if tl.program_id(0) < total:
        # The last tiles of a prompt have the most keys: they start first.
        tile = total - 1 - tl.program_id(0)
        owner = tl.sum((tiles <= tile).to(tl.int32), axis=0)
        tile -= tl.max(tl.where(b < owner, tiles, 0), axis=0)
        query_start = tl.load(query_start_ptr + owner)
        query_end = tl.load(query_start_ptr + owner + 1)
        seq_len = tl.load(seq_lens_ptr + owner)
        table = table_ptr + tl.load(rows_ptr + owner).to(tl.int64) * table_stride
        token = query_start + tile * BM + tl.arange(0, BM)
        shift = seq_len - query_end
        position = token + shift
        inside = (token < query_end)[:, None]
        d = tl.arange(0, D)[None, :]
        q = tl.load(q_ptr + token.to(tl.int64)[:, None] * q_stride + head * D + d, mask=inside, other=0.0)
        best = tl.full([BM], -1e30, tl.float32)
        weight = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, D], tl.float32)
        first_position = query_start + tile * BM + shift
        # What is masked is compiled otherwise: in row-invariant mode every block goes the same way, wherever a tile begins.
        free = (first_position + 1) // BN * BN if UNMASKED else 0
        last = tl.minimum(seq_len, first_position + BM)
        k_head = k_ptr + kv_head * D
        v_head = v_ptr + kv_head * D
        best, weight, acc = _attend_causal(
            q, best, weight, acc, k_head, v_head, table, 0, free, seq_len, position, scale, kv_stride,
            D, PAGE, BN, False, STAGES,
        )  # fmt: skip
        best, weight, acc = _attend_causal(
            q, best, weight, acc, k_head, v_head, table, free, last, seq_len, position, scale, kv_stride,
            D, PAGE, BN, True, STAGES,
        )  # fmt: skip
        result = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]
        tl.store(out_ptr + token.to(tl.int64)[:, None] * out_stride + head * D + d, result, mask=inside)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    max_rows: int | None = None,
    row_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over their request's pages, which hold the new tokens' k and v already.

    Shapes: q [T, Hq, D], requests one after the other; k_cache, v_cache [pages, page_size, Hk, D], contiguous; page_table
    [R, max_pages] int, used through rows [B] int; query_start [B + 1] int32, ascending; seq_lens [B] int, prefix and new
    tokens; out [T, Hq, D].
    The grid depends on T and B only: requests without new tokens and tokens after query_start[B] are padding, and the
    rows of `out` that belong to them are not written. `max_rows`: the most there will ever be, so that the kernel is
    compiled for few and for many rows, instead of for every power of two. `row_invariant`: one tiling and
    one order of operations whatever the step is, so that a token's result does not depend on it.
    """
    tokens, heads, head_dim = q.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    if head_dim & (head_dim - 1) or head_dim < 16:
        raise ValueError(f"head_dim {head_dim}: the Triton prefill kernel wants a power of two from 16 on")
    if out is None:
        out = torch.empty_like(q)
    num_rows = rows.shape[0]
    row_block = triton.next_power_of_2(num_rows)
    if max_rows is not None:
        row_block = FEW_ROWS if num_rows <= FEW_ROWS else triton.next_power_of_2(max_rows)
    block_m, num_warps = (128, 8) if tokens >= LONG_TOKENS and not row_invariant else (64, 4)
    if tokens:
        _prefill_kernel[(triton.cdiv(tokens, block_m) + num_rows - 1, heads)](
            q, k_cache, v_cache, out, page_table, rows, query_start, seq_lens, num_rows,
            (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
            q.stride(0), out.stride(0), page_table.stride(0),
            HK=num_kv_heads, G=heads // num_kv_heads, D=head_dim, PAGE=page_size, ROWS=row_block,
            BM=block_m, BN=64, STAGES=5, UNMASKED=not row_invariant, PDL=DEPENDENT, num_warps=num_warps, launch_pdl=DEPENDENT,
        )  # fmt: skip
    return out
