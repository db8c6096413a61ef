"""The gated feed-forward block of Llama-like models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from ..loader.weight_target import WeightTarget
from .fused import is_fused
from .linear import Linear


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`. Shapes: gate_up [T, 2 F] → [T, F]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` with gate and up in one product."""

    def __init__(self, hidden: int, inner: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self.gate_up = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, device=device)
        self.down = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)
        self._silu_mul: Callable[[torch.Tensor], torch.Tensor] = silu_mul
        self._gated_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        if is_fused(device, dtype):
            from ..kernels.linear import gated_product
            from ..kernels.silu_mul import silu_mul as fused_silu_mul

            self._silu_mul = fused_silu_mul
            self._gated_product = None if bias else gated_product

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """Checkpoint names below the block's prefix."""
        targets: dict[str, WeightTarget] = {}
        for leaf in ("weight", "bias"):
            merged, down = getattr(self.gate_up, leaf), getattr(self.down, leaf)
            if merged is None:
                continue
            targets[f"gate_proj.{leaf}"] = WeightTarget(param=merged, row_start=0, num_rows=self.inner)
            targets[f"up_proj.{leaf}"] = WeightTarget(param=merged, row_start=self.inner, num_rows=self.inner)
            targets[f"down_proj.{leaf}"] = WeightTarget(param=down)
        return targets

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add what the block makes of `x` to `residual` in place. Shapes: both [T, hidden]."""
        if self._gated_product is None or self.gate_up.is_bucketed:
            activated = self._silu_mul(self.gate_up(x))
        else:
            activated = self._gated_product(x, self.gate_up.weight)
        self.down.add_product(activated, residual)
