# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""From the packed QKV projection to rotated queries and written KV slots, in one kernel."""

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs


@triton.jit
def _rope_kv_write_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr,
    k_fresh_ptr, v_fresh_ptr, qkv_stride, q_out_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, FRESH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = D // 2
    inside = (head < HQ + 2 * HK) & (d < half)
    is_q = head < HQ
    is_k = (head >= HQ) & (head < HQ + HK)
    is_v = head >= HQ + HK
    wait_for_inputs(PDL)
    release_dependents(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    source = qkv_ptr + token * qkv_stride + head * D + d
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + half, mask=inside, other=0.0)
    v_out = v_cache_ptr + (slot * HK + head - HQ - HK) * D + d
    tl.store(v_out, low, mask=inside & is_v)
    tl.store(v_out + half, high, mask=inside & is_v)
    if FRESH:
        v_fresh = v_fresh_ptr + (token * HK + head - HQ - HK) * D + d
        tl.store(v_fresh, low, mask=inside & is_v)
        tl.store(v_fresh + half, high, mask=inside & is_v)
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)[:, None]
        rotates = (d < half) & (head < HQ + HK)
        norm_a = tl.where(is_q, tl.load(q_norm_ptr + d, mask=rotates & is_q, other=0.0),
                          tl.load(k_norm_ptr + d, mask=rotates & is_k, other=0.0))  # fmt: skip
        norm_b = tl.where(is_q, tl.load(q_norm_ptr + half + d, mask=rotates & is_q, other=0.0),
                          tl.load(k_norm_ptr + half + d, mask=rotates & is_k, other=0.0))  # fmt: skip
        a = (a * scale).to(low.dtype).to(tl.float32) * norm_a.to(tl.float32)
        b = (b * scale).to(low.dtype).to(tl.float32) * norm_b.to(tl.float32)
    cos = tl.load(cos_sin_ptr + position * D + d, mask=d < half, other=0.0)
    sin = tl.load(cos_sin_ptr + position * D + half + d, mask=d < half, other=0.0)
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    q_out = q_out_ptr + token * q_out_stride + head * D + d
    tl.store(q_out, rotated_a, mask=inside & is_q)
    tl.store(q_out + half, rotated_b, mask=inside & is_q)
    k_out = k_cache_ptr + (slot * HK + head - HQ) * D + d
    tl.store(k_out, rotated_a, mask=inside & is_k)
    tl.store(k_out + half, rotated_b, mask=inside & is_k)
    if FRESH:
        k_fresh = k_fresh_ptr + (token * HK + head - HQ) * D + d
        tl.store(k_fresh, rotated_a, mask=inside & is_k)
        tl.store(k_fresh + half, rotated_b, mask=inside & is_k)


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_q_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Rotates q and k (after their RMSNorms where given), writes k and v into their slots, returns q.

    Shapes: qkv [T, (Hq + 2 Hk) D] (rows may be strided); positions, slots [T] int; cos_sin [max_pos, D] fp32, contiguous,
    cosines in the first half of the columns and sines in the second; k_cache, v_cache [num_pages, page_size, Hk, D] or
    [num_slots, Hk, D], contiguous; q_norm, k_norm [D]; out [T, Hq, D]; fresh [T, Hk, D] each, contiguous: where to leave k
    and v once more, one token after the other.
    Rotation pairs d with d + D/2. A padded token carries a slot of page 0, which is nobody's.
    """
    tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[-2:]
    if out is None:
        out = torch.empty((tokens, num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    heads = num_q_heads + 2 * num_kv_heads
    block = min(8, triton.next_power_of_2(heads))
    _rope_kv_write_kernel[(tokens, triton.cdiv(heads, block))](
        qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos_sin, positions, slots,
        out, k_cache, v_cache, *(fresh or (k_cache, v_cache)), qkv.stride(0), out.stride(0), eps,
        HQ=num_q_heads, HK=num_kv_heads, D=head_dim, HALF=triton.next_power_of_2(head_dim // 2), HEADS=block,
        NORM=q_norm is not None, FRESH=fresh is not None, PDL=DEPENDENT, num_warps=4, launch_pdl=DEPENDENT,
    )  # fmt: skip
    return out
