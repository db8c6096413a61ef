"""Whether kernels in CUDA C++ serve: they are for Hopper GPUs, and need what compiles them."""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_cuda_cpp(device: torch.device) -> bool:
    """Whether `device` is a Hopper, and CUDA C++ can be compiled for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from .nvrtc_kernel import is_usable
    except ImportError:
        return False
    with torch.cuda.device(device):
        return is_usable()
