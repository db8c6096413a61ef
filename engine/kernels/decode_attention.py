# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Paged split-KV decode attention for grouped queries, on a fixed grid that walks the device's own plan."""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .decode_plan import DecodeWorkspace
from .dependent_launch import DEPENDENT, prefetch_l2, release_dependents, wait_for_inputs
from .paged_decode import paged_decode

_AHEAD_TOKENS = 256


@triton.jit
def _softmax_step(q, k, scale, inside, best, weight):
    """Scores of one KV block, and what it makes of the running maximum and the running sum. Base-2 exponents."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    p = tl.exp2(scores - new_best[:, None])
    return p, shrink, new_best, weight * shrink + tl.sum(p, axis=1)


@triton.jit
def _attend_by_lookup(
    q, best, weight, acc, k_ptr, v_ptr, table_ptr, first, last, limit, scale, kv_stride,
    D: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """Online softmax over the KV blocks [first, last), each token's page looked up; positions from `limit` on are not there."""
    d = tl.arange(0, D)
    # The compiler splits its stages between the lookups and the loads that depend on them.
    for block in tl.range(first, last, num_stages=2 * IN_FLIGHT + 1):
        t = block * BT + tl.arange(0, BT)
        inside = t < limit
        page = tl.load(table_ptr + t // PAGE, mask=inside, other=0).to(tl.int64)
        at = (page * PAGE + t % PAGE)[:, None] * kv_stride + d[None, :]
        k = tl.load(k_ptr + at, mask=inside[:, None], other=0.0)
        p, shrink, best, weight = _softmax_step(q, k, scale, inside, best, weight)
        v = tl.load(v_ptr + at, mask=inside[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return best, weight, acc


@triton.jit
def _attend_by_page(
    q, best, weight, acc, k_ptr, v_ptr, table_ptr, first, last, limit, scale, kv_stride,
    D: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """The same where a block lies in one page or fills two: a third fewer instructions, for an address is a scalar's sum with
    what is the same in every block. Pages are looked up a block ahead of their loads.
    """
    row = tl.arange(0, BT)
    d = tl.arange(0, D)[None, :]
    page = tl.load(table_ptr + first * BT // PAGE, mask=first * BT < limit, other=0)
    second = page
    if BT > PAGE:
        second = tl.load(table_ptr + first * BT // PAGE + 1, mask=first * BT + PAGE < limit, other=0)
    for block in tl.range(first, last, num_stages=IN_FLIGHT + 1):
        start = block * BT
        if BT > PAGE:
            slot = tl.where(row < PAGE, page * PAGE, second * PAGE - PAGE) + row
        else:
            slot = page * PAGE + start % PAGE + row
        inside = row < limit - start
        at = (slot.to(tl.int64) * kv_stride)[:, None]
        k = tl.load(k_ptr + d + at)  # whatever stands behind the end: its scores are not taken
        p, shrink, best, weight = _softmax_step(q, k, scale, inside, best, weight)
        v = tl.load(v_ptr + d + at, mask=inside[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        following = start + BT
        page = tl.load(table_ptr + following // PAGE, mask=following < limit, other=0)
        if BT > PAGE:
            second = tl.load(table_ptr + following // PAGE + 1, mask=following + PAGE < limit, other=0)
    return best, weight, acc


@triton.jit
def _attend(
    q, best, weight, acc, k_ptr, v_ptr, table_ptr, first, last, limit, scale, kv_stride,
    D: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    if BT <= 2 * PAGE:
        best, weight, acc = _attend_by_page(q, best, weight, acc, k_ptr, v_ptr, table_ptr, first, last, limit, scale,
                                            kv_stride, D, PAGE, BT, IN_FLIGHT)  # fmt: skip
    else:
        best, weight, acc = _attend_by_lookup(q, best, weight, acc, k_ptr, v_ptr, table_ptr, first, last, limit, scale,
                                              kv_stride, D, PAGE, BT, IN_FLIGHT)  # fmt: skip
    return best, weight, acc


@triton.jit
def _prefetch_block(
    k_ptr, v_ptr, table_ptr, block, limit, head, kv_stride,
    D: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, wanted, PDL: tl.constexpr,
):  # fmt: skip
    """Sends for the lines of one KV block of one head, up to position `limit`."""
    if wanted:
        t = block * BT + tl.arange(0, BT)
        page = tl.load(table_ptr + t // PAGE, mask=t < limit, other=0).to(tl.int64)
        line = tl.arange(0, (D + 63) // 64) * 64
        at = (page * PAGE + t % PAGE)[:, None] * kv_stride + head * D + line[None, :]
        prefetch_l2(k_ptr + at, PDL)
        prefetch_l2(v_ptr + at, PDL)


@triton.jit
def _rotated(ptr, norm_ptr, cos_sin_ptr, position, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Rows of one head each, [N, D]: RMS-normed where asked, rotated by the angles of `position`, rounded."""
    half: tl.constexpr = D // 2
    d = tl.arange(0, D)[None, :]
    other = (d + half) % D
    x = tl.load(ptr + d, mask=inside, other=0.0)
    y = tl.load(ptr + other, mask=inside, other=0.0)
    a = x.to(tl.float32)
    b = y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a, axis=1) / D + eps)[:, None]
        a = (a * scale).to(x.dtype).to(tl.float32) * tl.load(norm_ptr + d).to(tl.float32)
        b = (b * scale).to(x.dtype).to(tl.float32) * tl.load(norm_ptr + other).to(tl.float32)
    cos = tl.load(cos_sin_ptr + position * D + d % half)
    sin = tl.load(cos_sin_ptr + position * D + half + d % half)
    return (a * cos + tl.where(d < half, -b, b) * sin).to(x.dtype)


@triton.jit
def _start_with_new_token(
    q, new_ptr, k_ptr, v_ptr, k_norm_ptr, cos_sin_ptr, table_ptr, position, ends, scale, eps, kv_stride,
    HK: tl.constexpr, GB: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The new token is not in the pool yet: whoever ends the sequence writes it there and starts the softmax with it."""
    d = tl.arange(0, D)[None, :]
    one = tl.zeros([1, 1], tl.int32)
    page = tl.load(table_ptr + position // PAGE, mask=ends, other=0).to(tl.int64)
    v_new = tl.load(new_ptr + one + HK * D + d, mask=ends, other=0.0)
    k_new = _rotated(new_ptr + one, k_norm_ptr, cos_sin_ptr, position, ends & (one == 0), eps, D, NORM)
    slot = (page * PAGE + position % PAGE) * kv_stride + one + d
    tl.store(k_ptr + slot, k_new, mask=ends)
    tl.store(v_ptr + slot, v_new, mask=ends)
    score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale
    best = tl.where(ends, score, -1e30)
    weight = tl.where(ends, 1.0, 0.0) + tl.zeros([GB], tl.float32)
    acc = tl.zeros([GB, D], tl.float32) + v_new.to(tl.float32)
    return best, weight, acc


@triton.jit
def _combine(
    partial_out_ptr, partial_stats_ptr, out_ptr, first_program, last_program, first_slot, num_slots,
    G: tl.constexpr, GB: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one (row, head) in the order of their programs and writes the output."""
    g = tl.arange(0, GB)
    d = tl.arange(0, D)
    best = tl.full([GB], -1e30, tl.float32)
    weight = tl.zeros([GB], tl.float32)
    acc = tl.zeros([GB, D], tl.float32)
    for start in range(first_program, last_program + 1, PARTS):
        # Unrolled, so that the loads of all these parts are in flight together.
        for part in tl.static_range(PARTS):
            program = start + part
            there = (g < G) & (program <= last_program)
            at = (program * 2 + tl.where(program == first_program, first_slot, 0)) * G + g
            part_best = tl.load(partial_stats_ptr + at, mask=there, other=-1e30, cache_modifier=".cg")
            part_weight = tl.load(partial_stats_ptr + num_slots * G + at, mask=there, other=0.0, cache_modifier=".cg")
            values = tl.load(partial_out_ptr + at[:, None] * D + d[None, :], mask=there[:, None], other=0.0,
                             cache_modifier=".cg")  # fmt: skip
            new_best = tl.maximum(best, part_best)
            shrink = tl.exp2(best - new_best)
            factor = tl.exp2(part_best - new_best)
            weight = weight * shrink + part_weight * factor
            acc = acc * shrink[:, None] + values * factor[:, None]
            best = new_best
    result = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]
    tl.store(out_ptr + g[:, None] * D + d[None, :], result, mask=(g < G)[:, None])


@triton.jit
def _finish(
    best, weight, acc, out_ptr, partial_out_ptr, partial_stats_ptr, arrivals_ptr,
    row, head, is_whole, start, num_blocks, slot, share, out_stride,
    HK: tl.constexpr, G: tl.constexpr, GB: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the output of a whole sequence, or one part of it; the last of the parts to arrive combines them all.

    `start` is the flat index of the sequence's first block.
    """
    g = tl.arange(0, GB)
    d = tl.arange(0, D)
    target = out_ptr + row.to(tl.int64) * out_stride + head * G * D
    if is_whole:
        result = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]
        tl.store(target + g[:, None] * D + d[None, :], result, mask=(g < G)[:, None])
    else:
        num_slots = tl.num_programs(0) * 2
        tl.store(partial_stats_ptr + slot * G + g, best, mask=g < G)
        tl.store(partial_stats_ptr + (num_slots + slot) * G + g, weight, mask=g < G)
        tl.store(partial_out_ptr + (slot * G + g[:, None]) * D + d[None, :], acc, mask=(g < G)[:, None])
        first_program = start // share
        last_program = (start + num_blocks - 1) // share
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + row * HK + head, 1) == last_program - first_program:
            first_slot = tl.where(start == first_program * share, 0, 1)
            _combine(partial_out_ptr, partial_stats_ptr, target, first_program, last_program, first_slot, num_slots,
                     G, GB, D, PARTS)  # fmt: skip
            tl.store(arrivals_ptr + row * HK + head, 0)


@triton.jit
def _read_ahead(
    k_ptr, v_ptr, table_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, head, block, left, seq_len, kv_stride,
    D: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, BLOCKS: tl.constexpr,
    ROPE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sends for what the program reads first and no kernel of this step writes."""
    for step in tl.static_range(BLOCKS):
        _prefetch_block(k_ptr, v_ptr, table_ptr, block + step, seq_len - 1, head, kv_stride, D, PAGE, BT,
                        step < left, PDL)  # fmt: skip
    if ROPE:
        prefetch_l2(cos_sin_ptr + tl.maximum(seq_len - 1, 0) * D + tl.arange(0, (D + 31) // 32) * 32, PDL)
    if NORM:
        line = tl.arange(0, (D + 63) // 64) * 64
        prefetch_l2(q_norm_ptr + line, PDL)
        prefetch_l2(k_norm_ptr + line, PDL)


# Rows and lengths are often slices: a variant for every alignment of theirs would be compiled in the middle of serving.
@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, rows_ptr, seq_lens_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr,
    plan_ptr, share_ptr, partial_out_ptr, partial_stats_ptr, arrivals_ptr, scale, eps, q_stride, out_stride, table_stride,
    HQ: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, GB: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BT: tl.constexpr, PARTS: tl.constexpr, IN_FLIGHT: tl.constexpr,
    ROPE: tl.constexpr, NORM: tl.constexpr, AHEAD: tl.constexpr, AHEAD_BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    kv_stride: tl.constexpr = HK * D
    if not AHEAD:
        wait_for_inputs(PDL)
    row = tl.load(plan_ptr + program * 4)
    head = tl.load(plan_ptr + program * 4 + 1)
    block = tl.load(plan_ptr + program * 4 + 2)
    left = tl.load(plan_ptr + program * 4 + 3)
    share = tl.load(share_ptr)
    seq_len = tl.load(seq_lens_ptr + row)
    request = tl.load(rows_ptr + row).to(tl.int64)
    if AHEAD:
        _read_ahead(k_ptr, v_ptr, table_ptr + request * table_stride, q_norm_ptr, k_norm_ptr, cos_sin_ptr, head, block,
                    left, seq_len, kv_stride, D, PAGE, BT, AHEAD_BLOCKS, ROPE, NORM, PDL)  # fmt: skip
        wait_for_inputs(PDL)
    release_dependents(PDL)
    flat = program * share
    slot = program * 2
    g = tl.arange(0, GB)
    d = tl.arange(0, D)[None, :]
    while left > 0:
        num_blocks = (seq_len + BT - 1) // BT
        last = tl.minimum(num_blocks, block + left)
        table = table_ptr + request * table_stride
        source = q_ptr + row.to(tl.int64) * q_stride
        query = source + (head * G + g)[:, None] * D
        if ROPE:
            limit = tl.maximum(seq_len - 1, 0)
            ends = (last == num_blocks) & (seq_len > 0)
            q = _rotated(query, q_norm_ptr, cos_sin_ptr, limit, (g < G)[:, None], eps, D, NORM)
            best, weight, acc = _start_with_new_token(
                q, source + (HQ + head) * D, k_ptr + head * D, v_ptr + head * D, k_norm_ptr, cos_sin_ptr, table, limit,
                ends, scale, eps, kv_stride, HK, GB, D, PAGE, NORM,
            )  # fmt: skip
        else:
            limit = seq_len
            q = tl.load(query + d, mask=(g < G)[:, None], other=0.0)
            best = tl.full([GB], -1e30, tl.float32)
            weight = tl.zeros([GB], tl.float32)
            acc = tl.zeros([GB, D], tl.float32)
        best, weight, acc = _attend(
            q, best, weight, acc, k_ptr + head * D, v_ptr + head * D, table, block, last, limit, scale, kv_stride,
            D, PAGE, BT, IN_FLIGHT,
        )  # fmt: skip
        _finish(best, weight, acc, out_ptr, partial_out_ptr, partial_stats_ptr, arrivals_ptr, row, head,
                (block == 0) & (last == num_blocks), flat - block, num_blocks, slot, share, out_stride,
                HK, G, GB, D, PARTS)  # fmt: skip
        left -= last - block
        flat += last - block
        block = block * 0
        slot = program * 2 + 1
        row = tl.where(head == HK - 1, row + 1, row)
        head = tl.where(head == HK - 1, 0, head + 1)
        seq_len = tl.load(seq_lens_ptr + row, mask=left > 0, other=0)
        request = tl.load(rows_ptr + row, mask=left > 0, other=0).to(tl.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeInputs:
    """What `decode_attention` needs to take the packed QKV projection instead of rotated queries.

    cos_sin [max_pos, D] fp32 as in `rope_kv_write`; q_norm, k_norm [D] or None; eps of those norms.
    """

    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float | None = None,
    rope: RopeInputs | None = None,
    ahead: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token a row over its pages, by the plan that `plan_decode` wrote for these `seq_lens`.

    Shapes: q [B, Hq, D], or with `rope` the packed projection [B, (Hq + 2 Hk) D]; k_cache, v_cache [pages, page_size, Hk,
    D], contiguous; page_table [R, max_pages] int, used through rows [B] int; seq_lens [B] int, the new token included;
    out [B, Hq, D], contiguous rows, made of zeros if not given. A row of seq_len 0 is not
    computed: what `out` holds of it stays, or becomes zeros.
    With `rope` the kernel also normalises and rotates the new token's q and k and writes its k and v into the slot that the
    page table names for position seq_len - 1: `rope_kv_write` is not called.
    `ahead` lets it read plan, seq_lens, rows and page table before its predecessor has finished: at least one other
    kernel of this package must run between whatever wrote those and this one.
    """
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = workspace.group
    if head_dim & (head_dim - 1) or head_dim < 16:
        raise ValueError(f"head_dim {head_dim}: the Triton decode kernel wants a power of two from 16 on")
    num_rows = seq_lens.shape[0]
    heads = group * num_kv_heads
    tiling = workspace.tiling(num_rows)
    if out is None:
        out = torch.zeros((num_rows, heads, head_dim), dtype=q.dtype, device=q.device)
    if workspace.is_paged(num_rows):
        return paged_decode(
            q, k_cache, v_cache, page_table, rows, seq_lens, workspace, scale=scale, rope=rope, ahead=ahead, out=out
        )
    group_block = triton.next_power_of_2(group)
    has_norm = rope is not None and rope.q_norm is not None
    cos_sin = workspace.partial_out if rope is None else rope.cos_sin
    q_norm = q if rope is None or rope.q_norm is None else rope.q_norm
    k_norm = q if rope is None or rope.k_norm is None else rope.k_norm
    _decode_kernel[(workspace.num_programs(num_rows),)](
        q, k_cache, v_cache, out, page_table, rows, seq_lens, q_norm, k_norm, cos_sin,
        workspace.plan, workspace.share, workspace.partial_out, workspace.partial_stats, workspace.arrivals,
        (head_dim**-0.5 if scale is None else scale) * math.log2(math.e), 0.0 if rope is None else rope.eps,
        q.stride(0), out.stride(0), page_table.stride(0),
        HQ=heads, HK=num_kv_heads, G=group, GB=group_block, D=head_dim, PAGE=page_size, BT=tiling.block_tokens,
        PARTS=max(2, min(16, 4096 // (group_block * head_dim))), IN_FLIGHT=tiling.blocks_in_flight,
        ROPE=rope is not None, NORM=has_norm, AHEAD=ahead and DEPENDENT,
        AHEAD_BLOCKS=max(1, _AHEAD_TOKENS // tiling.block_tokens),
        PDL=DEPENDENT, num_warps=tiling.num_warps, launch_pdl=DEPENDENT,
    )  # fmt: skip
    return out
