"""RMSNorm, alone and after the residual add."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .fused import is_fused


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, accumulated in fp32.

    Shapes: x [..., size] ([T, size] in 16 bits on CUDA); weight [size].
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self._eps = torch.full((), eps, dtype=torch.float32, device=device)
        self._norm: Callable[..., torch.Tensor] | None = None
        if is_fused(device, dtype):
            from ..kernels.rmsnorm import rmsnorm

            self._norm = rmsnorm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._norm is not None:
            return self._norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self._eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """The norm in torch operations, rounded to the dtype of `x` before the weight as transformers does.

    By `vector_norm`, since torch's own rms_norm makes so many temporaries that it takes ten times as long on a CPU for
    512 tokens. Shapes: x [..., size], weight [size], eps [] fp32.
    """
    length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    normed = x * torch.addcmul(eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
    return (normed if normed.dtype == x.dtype else normed.to(x.dtype)).mul_(weight)
