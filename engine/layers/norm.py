"""RMSNorm, alone and after the residual add."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from .fused import is_fused


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, accumulated in fp32.

    Shapes: x [..., size] ([T, size] in 16 bits on CUDA); weight [size].
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self._shape = (size,)
        self._norm: Callable[..., torch.Tensor] | None = None
        self._add_norm: Callable[..., torch.Tensor] | None = None
        if is_fused(device, dtype):
            from ..kernels.rmsnorm import add_rmsnorm, rmsnorm

            self._norm, self._add_norm = rmsnorm, add_rmsnorm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._norm is not None:
            return self._norm(x, self.weight, self.eps)
        return functional.rms_norm(x, self._shape, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place and return the norm of the sum. Shapes: x, residual [T, size]. `x` is given up."""
        if self._add_norm is not None:
            return self._add_norm(x, residual, self.weight, self.eps, out=x)
        residual.add_(x)
        return functional.rms_norm(residual, self._shape, self.weight, self.eps)
