"""Where layers use this package's kernels instead of torch's operators."""

from __future__ import annotations

import torch


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers with such weights run fused: 16-bit on CUDA. Asked once, when a layer is made."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
