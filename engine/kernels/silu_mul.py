# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""SiLU of the gate half times the up half of a merged gate-up projection."""

import torch
import triton
import triton.language as tl

from .dependent_launch import DEPENDENT, release_dependents, wait_for_inputs

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, x_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait_for_inputs(PDL)
    release_dependents(PDL)
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, activated * up, mask=inside)


def silu_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(x[:, :F]) * x[:, F:]`, the activation rounded to the dtype before the product as transformers does.

    Shapes: x [T, 2F] (rows may be strided), out [T, F]; returns out.
    """
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _silu_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
            x, out, x.stride(0), out.stride(0), WIDTH=width, BLOCK=_BLOCK, PDL=DEPENDENT,
            num_warps=4, launch_pdl=DEPENDENT,
        )  # fmt: skip
    return out
