# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""`x @ W.T` on the tensor cores for a batch of rows: W streams through shared memory, the rows are the narrow side."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, prefetch_l2, release_dependents, wait_for_inputs

MAX_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """Tile of one program: up to `block_m` rows by `block_n` features, `block_k` of the inner side at a time; `split_k`
    programs share a tile's sum; `ahead` steps of W are sent for before the input is ready.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    block_m: int = 128
    ahead: int = 4
    num_stages: int = 4
    num_warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWorkspace:
    """Scratch of split sums: partial [elements] fp32; arrivals [tiles] int32, zero between kernels."""

    partial: torch.Tensor
    arrivals: torch.Tensor


def make_split_workspace(
    *, max_features: int, device: torch.device | str, max_rows: int = MAX_ROWS, max_split: int = 4
) -> SplitWorkspace:
    """Scratch for up to `max_rows` rows of `max_features` outputs, each summed by up to `max_split` programs."""
    row_blocks = triton.cdiv(max_rows, 32)
    return SplitWorkspace(
        partial=torch.zeros(triton.next_power_of_2(max_rows) * max_features * max_split, device=device),
        arrivals=torch.zeros(triton.cdiv(max_features, 16) * row_blocks, dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["rows"])
def _small_gemm_kernel(
    x_ptr, weight_ptr, out_ptr, partial_ptr, arrivals_ptr, rows, x_stride, out_stride,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row_block = tl.program_id(2)
    n = tile * BN + tl.arange(0, BN)
    m = row_block * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    steps: tl.constexpr = (K + SPLIT * BK - 1) // (SPLIT * BK)
    first = part * steps * BK
    EVEN_K: tl.constexpr = K % (SPLIT * BK) == 0
    EVEN_N: tl.constexpr = N % BN == 0
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * K
    x_rows = x_ptr + m[:, None] * x_stride
    n_inside = (n < N)[:, None]
    m_inside = (m < rows)[:, None]
    if PDL:
        # The first tiles travel to L2 while the kernel before this one still computes the input.
        ahead = first + tl.arange(0, BK // 64) * 64
        for step in tl.static_range(min(AHEAD, steps)):
            line = weight_rows + (ahead + step * BK)[None, :]
            prefetch_l2(line, PDL)
            if SILU:
                prefetch_l2(line + N * K, PDL)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    acc = tl.zeros([BN, BM], tl.float32)
    up_acc = tl.zeros([BN, BM], tl.float32)
    for start in tl.range(first, first + steps * BK, BK, num_stages=STAGES):
        column = (start + k)[None, :]
        # No mask where none is needed: one that the compiler cannot see through costs the wide asynchronous loads.
        x_inside = m_inside if EVEN_K else m_inside & (column < K)
        x = tl.load(x_rows + column, mask=x_inside, other=0.0)
        inside = n_inside if EVEN_K else n_inside & (column < K)
        if EVEN_K and EVEN_N:
            weight = tl.load(weight_rows + column)
        else:
            weight = tl.load(weight_rows + column, mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        if SILU:
            if EVEN_K and EVEN_N:
                up_weight = tl.load(weight_rows + N * K + column)
            else:
                up_weight = tl.load(weight_rows + N * K + column, mask=inside, other=0.0)
            up_acc = tl.dot(up_weight, tl.trans(x), up_acc, input_precision="ieee")
    if SILU:
        acc = (acc / (1.0 + tl.exp(-acc))).to(out_ptr.dtype.element_ty).to(tl.float32) * up_acc
    target = out_ptr + m[None, :] * out_stride + n[:, None]
    target_inside = n_inside & (m < rows)[None, :]
    if SPLIT == 1:
        if ADD:
            acc += tl.load(target, mask=target_inside, other=0.0).to(tl.float32)
        tl.store(target, acc, mask=target_inside)
    else:
        plane = tl.num_programs(2) * N * BM
        slot = partial_ptr + (row_block * N + n[:, None]) * BM + tl.arange(0, BM)[None, :]
        tl.store(slot + part * plane, acc, mask=n_inside)
        tl.debug_barrier()
        arrival = arrivals_ptr + row_block * tl.num_programs(0) + tile
        if tl.atomic_add(arrival, 1) == SPLIT - 1:
            # The last to arrive adds all the parts in their order, so the sum does not depend on who was last.
            total = tl.zeros([BN, BM], tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(slot + other * plane, mask=n_inside, other=0.0, cache_modifier=".cg")
            if ADD:
                total += tl.load(target, mask=target_inside, other=0.0).to(tl.float32)
            tl.store(target, total, mask=target_inside)
            tl.store(arrival, 0)


def small_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig,
    *,
    workspace: SplitWorkspace | None = None,
    out: torch.Tensor | None = None,
    silu_mul: bool = False,
    add: bool = False,
) -> torch.Tensor:
    """`y = x @ weight.T`, SiLU·mul or the residual add fused in. One kernel, one graph node.

    Shapes: x [B, K] with B up to 256 (rows may be strided); weight [N, K] contiguous, or with `silu_mul` [2 N, K] with the
    gate half first; out [B, N] (rows may be strided).
    `silu_mul`: y = silu(x @ gate.T) * (x @ up.T). `add`: out += y (out is required).
    A split sum (`config.split_k` > 1) needs the workspace and excludes `silu_mul`; it is deterministic.
    """
    rows, width = x.shape
    features = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"small_gemm takes 1 to {MAX_ROWS} rows, got {rows}")
    split = config.split_k
    block_m = min(config.block_m, max(8, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(features, config.block_n), split, triton.cdiv(rows, block_m))
    if split > 1:
        if silu_mul or workspace is None:
            raise ValueError("a split sum needs a workspace, and no silu_mul")
        if split * grid[2] * block_m * features > workspace.partial.numel() or grid[0] * grid[2] > len(
            workspace.arrivals
        ):
            raise ValueError(f"the workspace is too small for {rows} rows of {features} features in {split} parts")
    if out is None:
        if add:
            raise ValueError("add needs the tensor to add to")
        out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    partial, arrivals = (x, x) if workspace is None else (workspace.partial, workspace.arrivals)
    _small_gemm_kernel[grid](
        x, weight, out, partial, arrivals, rows, x.stride(0), out.stride(0),
        N=features, K=width, BM=block_m, BN=config.block_n, BK=config.block_k, SPLIT=split,
        STAGES=config.num_stages, AHEAD=config.ahead, SILU=silu_mul, ADD=add, PDL=DEPENDENT,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=DEPENDENT,
    )  # fmt: skip
    return out
