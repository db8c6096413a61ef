# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""RMSNorm by row."""

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs


@triton.jit
def _rmsnorm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, out_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    release_dependents(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, normed * weight, mask=inside)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x / rms(x) * weight` by row, in fp32, rounded to the dtype of `out` before the weight as transformers does.

    Shapes: x [T, H] (rows may be strided), weight [H], out [T, H]; returns out.
    """
    rows, width = x.shape
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    _rmsnorm_kernel[(rows,)](
        x, weight, out, x.stride(0), out.stride(0), eps, WIDTH=width, BLOCK=block, PDL=DEPENDENT,
        num_warps=min(8, max(1, block // 512)), launch_pdl=DEPENDENT,
    )  # fmt: skip
    return out
