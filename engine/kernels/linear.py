"""One matrix product of a decode step with the small operations around it, in as few kernels as pay."""

import torch

from .gemv import gemv
from .hopper import has_cuda_cpp
from .matrix_choice import Gemv, Library, Resident, Wgmma, choose
from .resident_gemm import resident_gemm
from .rmsnorm import rmsnorm
from .silu_mul import silu_mul
from .small_gemm import SplitWorkspace, small_gemm
from .wgmma_tiles import choose_tile


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: SplitWorkspace,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y = norm(x) @ weight.T`, returned, or added to `add_to` in place and that returned.

    Shapes: x [B, K]; weight [N, K] contiguous, or with `gated` [2 N, K], the gate half first, and then
    y = silu(gate) * up; y [B, N]; norm [K], the weight of an RMSNorm of x, or None; add_to [B, N], not with `gated`.
    `workspace` is for at least N features wherever N is at most 4096.
    """
    rows, width = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    splittable = workspace.partial.numel() >= 4 * 64 * features
    choice = choose(features, width, rows, gated=gated, splittable=splittable, has_wgmma=has_cuda_cpp(x.device))
    adds = add_to is not None
    if isinstance(choice, Gemv):
        return gemv(x, weight, out=add_to, norm=norm, eps=eps, silu_mul=gated, add=adds, num_warps=choice.num_warps)
    fused_norm = norm if isinstance(choice, Resident) and choice.fuses_norm else None
    if norm is not None and fused_norm is None:
        x = rmsnorm(x, norm, eps)
    if isinstance(choice, Resident):
        return resident_gemm(x, weight, choice.config, out=add_to, norm=fused_norm, eps=eps, silu_mul=gated, add=adds)
    if isinstance(choice, Wgmma):
        from .wgmma_gemm import wgmma_gemm  # it needs a library that machines without CUDA lack

        return wgmma_gemm(x, weight, choice.config, out=add_to, silu_mul=gated, add=adds)
    if not isinstance(choice, Library):
        return small_gemm(x, weight, choice.config, workspace=workspace, out=add_to, silu_mul=gated, add=adds)
    if gated:
        return silu_mul(torch.mm(x, weight.t()))
    return torch.mm(x, weight.t()) if add_to is None else add_to.addmm_(x, weight.t())


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)` for any number of tokens.

    Shapes: x [T, K]; weight [2 F, K], the gate half first → [T, F].
    """
    features = weight.shape[0] // 2
    tile = choose_tile(features, x.shape[1], x.shape[0], gated=True) if has_cuda_cpp(x.device) else None
    if tile is None:
        return silu_mul(torch.mm(x, weight.t()))
    from .wgmma_gemm import wgmma_gemm

    return wgmma_gemm(x, weight, tile, silu_mul=True)
