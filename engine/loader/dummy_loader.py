"""Deterministic small random weights, made on the device: for speed runs without a checkpoint."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import nn

_STD: Final = 0.02


def fill_dummy_weights(model: nn.Module, *, seed: int = 0) -> None:
    """Fill every parameter in place: norm scales with 1, all else from N(0, 0.02).

    A parameter's values depend on seed, name, shape, dtype and device type only, so adding a layer
    does not move the others. Never holds more than the parameters themselves.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            if _is_norm_scale(name):
                param.fill_(1.0)
                continue
            generator = torch.Generator(device=param.device)
            # crc32 and not hash(): the latter differs from process to process.
            generator.manual_seed(seed ^ zlib.crc32(name.encode()))
            param.normal_(0.0, _STD, generator=generator)


def _is_norm_scale(name: str) -> bool:
    *_, module, leaf = ("", *name.split("."))
    return leaf == "weight" and "norm" in module
