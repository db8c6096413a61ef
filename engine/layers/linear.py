"""Matrix products with weights, laid out for the device and cut into row buckets where results must not depend on the
batch.
"""

from __future__ import annotations

import platform

import torch
from torch import nn
from torch.nn import functional

# oneDNN picks the layout of a packed weight by an expected number of rows; one for a few rows serves all of them
# equally well.
_PACK_FOR_ROWS = 32


class Linear(nn.Module):
    """`x @ weight.T + bias`. Merged projections are one Linear whose checkpoint tensors are row blocks of `weight`.

    The parameters are uninitialised until a loader fills them. `finish` must follow the loading and precede the first
    `forward`.

    Shapes: x [T, in_features] → [T, out_features]; weight [out_features, in_features], bias [out_features].
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None
        )
        self._packed: torch.Tensor | None = None
        self._row_bucket: int | None = None

    @classmethod
    def tied_to(cls, weight: nn.Parameter) -> Linear:
        """A projection that shares `weight` with an embedding, which goes on reading it."""
        made = cls(0, 0, bias=False, dtype=weight.dtype, device=weight.device)
        made.weight = weight
        return made

    def finish(self, *, row_bucket: int | None = None, keep_weight: bool = False) -> None:
        """Lay the loaded weight out for this device.

        On an x86 CPU oneDNN's packed layout is twice as fast as the plain one for a few rows; it replaces the plain
        weight, which is let go unless `keep_weight`. With `row_bucket` every product is computed in blocks of exactly
        that many rows, the last one padded, so that a row's result does not depend on how many rows share its step.
        """
        self._row_bucket = row_bucket
        weight = self.weight.detach()
        if not packs(weight.device, weight.dtype):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, row_bucket or _PACK_FOR_ROWS)
        if not keep_weight:
            self.weight.data = weight.new_empty((0, weight.shape[1]))

    @property
    def is_bucketed(self) -> bool:
        """Whether products are cut into row buckets."""
        return self._row_bucket is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._row_bucket is not None:
            return self._forward_in_buckets(x, self._row_bucket)
        return self._multiply(x)

    def add_product(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add `x @ weight.T + bias` to `residual` in place. Shapes: x [T, in_features], residual [T, out_features].

        In one product where the library can: it reads and writes the residual while it computes.
        """
        if self.bias is None and self._packed is None and self._row_bucket is None:
            residual.addmm_(x, self.weight.t())
        else:
            residual.add_(self(x))

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            product: torch.Tensor = _linear_packed(x, self._packed, self.bias, "none", [], "")
            return product
        return functional.linear(x, self.weight, self.bias)

    def _forward_in_buckets(self, x: torch.Tensor, bucket: int) -> torch.Tensor:
        num_rows = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -num_rows % bucket))
        blocks = [self._multiply(block) for block in padded.split(bucket)]
        return torch.cat(blocks)[:num_rows] if blocks else self._multiply(x)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of this kind are packed by oneDNN."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


_linear_packed = torch.ops.mkldnn._linear_pointwise.default
