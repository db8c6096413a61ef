"""RMSNorm, alone and after the residual add."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, accumulated in fp32.

    Shapes: x [..., size]; weight [size].
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self._shape = (size,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self._shape, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place and return the norm of the sum. Shapes: x, residual [T, size]."""
        residual.add_(x)
        return functional.rms_norm(residual, self._shape, self.weight, self.eps)
