# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""`x @ W.T` on the tensor cores for few rows and small matrices: W is in registers before the input is ready.

A pipelined loop first fills its pipeline, which costs more than all the rest where the inner side is a few thousand. Here
a program loads its whole rows of W at once, ahead of its wait, and its warps share the inner side between them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

MAX_ROWS = 32
MAX_WIDTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentConfig:
    """A program computes `block_n` features (8 or a multiple of 16), its inner side split over `num_warps` warps."""

    block_n: int
    num_warps: int = 4


@triton.jit(do_not_specialize=["rows"])
def _resident_gemm_kernel(
    x_ptr, norm_ptr, weight_ptr, out_ptr, rows, x_stride, out_stride, eps,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = (tl.arange(0, PARTS) * BK)[:, None, None] + tl.arange(0, BK)[None, None, :]
    at = n.to(tl.int64)[None, :, None] * K + k
    there = k < K if N % BN == 0 else (k < K) & (n < N)[None, :, None]
    weight = tl.load(weight_ptr + at, mask=there, other=0.0)
    if SILU:
        up_weight = tl.load(weight_ptr + N * K + at, mask=there, other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    x = tl.load(x_ptr + m[None, :, None] * x_stride + k, mask=(m < rows)[None, :, None] & (k < K), other=0.0)
    if NORM:
        v = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(v * v, axis=2), axis=0) / K + eps)
        x = ((v * scale[None, :, None]).to(x.dtype).to(tl.float32) * norm).to(x.dtype)
    y = _product(x, weight, BN)
    if SILU:
        y = (y / (1.0 + tl.exp(-y))).to(x.dtype).to(tl.float32) * _product(x, up_weight, BN)
    if BN < 16:
        target = out_ptr + m[:, None] * out_stride + n[None, :]
        inside = (m < rows)[:, None] & (n < N)[None, :]
    else:
        target = out_ptr + m[None, :] * out_stride + n[:, None]
        inside = (m < rows)[None, :] & (n < N)[:, None]
    if ADD:
        y += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, y, mask=inside)


@triton.jit
def _product(x, weight, BN: tl.constexpr):
    """Sums over the parts: [BN, BM], or [BM, BN] where there are fewer features than a tensor core has rows."""
    if BN < 16:
        y = tl.dot(x, tl.permute(weight, (0, 2, 1)), input_precision="ieee")
    else:
        y = tl.dot(weight, tl.permute(x, (0, 2, 1)), input_precision="ieee")
    return tl.sum(y, axis=0)


def resident_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: ResidentConfig,
    *,
    out: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    silu_mul: bool = False,
    add: bool = False,
) -> torch.Tensor:
    """`y = x @ weight.T`, with what surrounds it in a decoder layer fused in. One kernel, one graph node.

    Shapes: x [B, K] with B up to 32 and K up to 4096 (rows may be strided); weight [N, K] contiguous, or with `silu_mul`
    [2 N, K] with the gate half first; out [B, N] (rows may be strided); norm [K].
    `norm`: x is RMS-normed first. `silu_mul`: y = silu(x @ gate.T) * (x @ up.T). `add`: out += y (out is required).
    """
    rows, width = x.shape
    features = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    if not 1 <= rows <= MAX_ROWS or width > MAX_WIDTH:
        raise ValueError(f"resident_gemm takes 1 to {MAX_ROWS} rows of up to {MAX_WIDTH}, got {rows} of {width}")
    if out is None:
        if add:
            raise ValueError("add needs the tensor to add to")
        out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    parts = config.num_warps
    least = 16 if config.block_n < 16 else 8
    _resident_gemm_kernel[(triton.cdiv(features, config.block_n),)](
        x, weight if norm is None else norm, weight, out, rows, x.stride(0), out.stride(0), eps,
        N=features, K=width, BM=max(least, triton.next_power_of_2(rows)), BN=config.block_n,
        PARTS=parts, BK=max(16, triton.next_power_of_2(triton.cdiv(width, parts))),
        NORM=norm is not None, SILU=silu_mul, ADD=add, PDL=DEPENDENT, num_warps=config.num_warps, launch_pdl=DEPENDENT,
    )  # fmt: skip
    return out
