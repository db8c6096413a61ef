"""Random numbers as a pure function of (seed, sequence length, token id): nothing is drawn in sequence, so no row can
disturb another.

Integer arithmetic in int32 that wraps, with the same results on every device. Both halves of the 64-bit seed and the
length are mixed into two 32-bit keys a row; the keys and the token id are mixed into the row's number for that id.
The mixer is MurmurHash3's finaliser.
"""

from __future__ import annotations

from typing import Final

import torch

# Odd constants as signed int32: the golden ratio's, two of MurmurHash3's finaliser, two of its body.
_GOLDEN: Final = 0x9E3779B1 - 2**32
_MIX_1: Final = 0x85EBCA6B - 2**32
_MIX_2: Final = 0xC2B2AE35 - 2**32
_SALT_1: Final = 0xCC9E2D51 - 2**32
_SALT_2: Final = 0x1B873593

_MAX_DRAW: Final = 30.0


def row_keys(seeds: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two keys for each (seed, length). Shapes: seeds [n] int64, lengths [n] int32 → two of [n] int32."""
    low, high = seeds.contiguous().view(torch.int32).view(-1, 2).unbind(1)
    steps = lengths * _GOLDEN
    first = _mix(_mix(_mix(low ^ _SALT_1) + high) + steps)
    second = _mix(_mix(_mix(high ^ _SALT_2) + low) ^ steps)
    return first, second


def exponential(seeds: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponential variates (rate 1) for every row and id, each above 0 and at most 30.

    Shapes: seeds [n] int64, lengths [n] int32, ids [V] int32 → [n, V] fp32.
    """
    first, second = row_keys(seeds, lengths)
    bits = ids * _GOLDEN + first[:, None]
    _shift_xor(bits, 16)
    bits.mul_(_MIX_1)
    _shift_xor(bits, 13)
    bits.bitwise_xor_(second[:, None])
    bits.mul_(_MIX_2)
    _shift_xor(bits, 16)
    # 31 bits near zero keep the smallest variates apart, which decide who wins a race among 150,000 ids.
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(-(2.0**-31))
    return uniform.log1p_().neg_().clamp_(max=_MAX_DRAW)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    _shift_xor(x, 16)
    x.mul_(_MIX_1)
    _shift_xor(x, 13)
    x.mul_(_MIX_2)
    _shift_xor(x, 16)
    return x


def _shift_xor(x: torch.Tensor, shift: int) -> None:
    """`x ^= x >>> shift`, where torch's shift of a signed number drags the sign along and must be cut off."""
    x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
