# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""`x @ W.T` for one to eight rows: every program holds whole rows of W in registers before its input is ready."""

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

MAX_ROWS = 8


@triton.jit
def _gemv_kernel(
    x_ptr, norm_ptr, weight_ptr, out_ptr, x_stride, out_stride, eps,
    B: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    k = tl.arange(0, BK)[None, :]
    at = n.to(tl.int64) * K + k
    if N % BN == 0:
        inside = k < K
    else:
        inside = (n < N) & (k < K)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if SILU:
        up_weight = tl.load(weight_ptr + N * K + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if NORM:
        norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    for b in tl.static_range(B):
        x = tl.load(x_ptr + b * x_stride + k, mask=k < K, other=0.0)
        v = x.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(v * v, axis=1) / K + eps)[:, None]
            v = (v * scale).to(x.dtype).to(tl.float32) * norm
            v = v.to(x.dtype).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * v, axis=1)[:, None]
        if SILU:
            up = tl.sum(up_weight.to(tl.float32) * v, axis=1)[:, None]
            y = (y / (1.0 + tl.exp(-y))).to(x.dtype).to(tl.float32) * up
        target = out_ptr + b * out_stride + n
        if ADD:
            y += tl.load(target, mask=n < N, other=0.0).to(tl.float32)
        tl.store(target, y, mask=n < N)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    silu_mul: bool = False,
    add: bool = False,
    rows_per_program: int | None = None,
    num_warps: int = 4,
) -> torch.Tensor:
    """`y = x @ weight.T`, with what surrounds it in a decoder layer fused in. One kernel, one graph node.

    Shapes: x [B, K] with B from 1 to 8 (rows may be strided); weight [N, K] contiguous, or with `silu_mul` [2 N, K] with
    the gate half first; out [B, N] (rows may be strided); norm [K].
    `norm`: x is RMS-normed first. `silu_mul`: y = silu(x @ gate.T) * (x @ up.T). `add`: out += y (out is required).
    """
    rows, width = x.shape
    features = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"gemv takes 1 to {MAX_ROWS} rows, got {rows}")
    if out is None:
        if add:
            raise ValueError("add needs the tensor to add to")
        out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    block_k = triton.next_power_of_2(width)
    if rows_per_program is None:
        rows_per_program = max(1, 16384 // block_k // (2 if silu_mul else 1))
    _gemv_kernel[(triton.cdiv(features, rows_per_program),)](
        x, weight if norm is None else norm, weight, out, x.stride(0), out.stride(0), eps,
        B=rows, N=features, K=width, BN=rows_per_program, BK=block_k,
        NORM=norm is not None, SILU=silu_mul, ADD=add, PDL=DEPENDENT, num_warps=num_warps, launch_pdl=DEPENDENT,
    )  # fmt: skip
    return out
