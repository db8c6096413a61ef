"""Rotary position embedding: one table a model, one rotation a step, shared by every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..loader.rope_config import RopeConfig
from .fused import is_fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rotation of one step's tokens.

    Shapes: positions [T] int32; table [max_position, D] fp32, cosines in the first half of the columns, sines in the
    second.
    """

    positions: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRotation(Rotation):
    """A rotation that torch's operators compute.

    Shapes: cos, sin [T, 1, D] fp32: each half of D holds the same cosines, and the sines, negated in the first half.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (d, d + D/2). Shapes: x [T, heads, D] → the same; computed in fp32."""
        wide = x.float()
        rotated = torch.addcmul(wide * self.cos, wide.roll(wide.shape[-1] // 2, -1), self.sin)
        return rotated.to(x.dtype)


class RotaryEmbedding:
    """Holds the fp32 table [max_position, head_dim] on the device. `max_position`: the longest sequence served, in
    tokens. `dtype`: of what is rotated.
    """

    def __init__(
        self, rope: RopeConfig, *, head_dim: int, max_position: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies, factor = inverse_frequencies(rope, head_dim)
        # In fp32 throughout, as transformers does and as models were trained: exact angles would differ from theirs
        # at large positions.
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), -1) * factor
        self.table = table.to(device=device, dtype=torch.float32)
        self._is_fused = is_fused(device, dtype)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation for tokens at `positions` [T] int32."""
        if self._is_fused:
            return Rotation(positions=positions, table=self.table)
        cos, sin = self.table.index_select(0, positions).unsqueeze(1).chunk(2, -1)
        return TorchRotation(
            positions=positions,
            table=self.table,
            cos=torch.cat((cos, cos), -1),
            sin=torch.cat((-sin, sin), -1),
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """The angle a position advances each pair of dimensions by, and the factor on cosines and sines.

    Shapes: [head_dim / 2] fp32, radians a token. Source: transformers' `modeling_rope_utils`, which names the kinds.
    """
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), _yarn_factor(rope)
    return base, 1.0


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    original = float(rope.original_max_position or 0)
    wavelengths = 2 * math.pi / base
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """As `_llama3`, but the blend is linear in the dimension's index. Source: arXiv 2309.00071."""
    original = float(rope.original_max_position or 0)

    def dimension(num_rotations: float) -> float:
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return slowed * base / rope.factor + (1 - slowed) * base


def _yarn_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
