"""Tiles for `wgmma_gemm`, by a model of what a multiprocessor does with one: the least of a few that fill the device wins.

The model counts clocks. A step of 64 along K takes its instructions' time or, mostly, that of shared memory: every instruction
for 64 rows of x reads those and its whole tile of W, and the tiles must get there first. Steps follow one another without
gaps, so what is left is the number of waves, what a split sum costs at its end, and what CTAs of a cluster lose by waiting for
one another. The rates are the chip's; what blocks and splits cost was set by hand to agree with searches on an H200
(profiling/LOG.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

BLOCK_K: Final = 64
FEW_ROWS: Final = 256
"""Up to here one tile of W meets all rows at once, and is read once."""

_CLUSTERS: Final = {1: 132, 2: 66, 4: 30, 8: 15}
"""How many clusters of so many CTAs an H200 holds at once."""
_MOST_FEATURES: Final = {1: 256, 2: 240, 3: 176, 4: 128}
"""By row groups: what the registers hold."""
_SHARED_BYTES: Final = 227 << 10
_SHARED_BYTES_OF_ALL: Final = 228 << 10
"""What a CTA may have, and what those of a multiprocessor have together, 1 KiB each for the system included."""
_BESIDE_RING: Final = 1024 + 256
"""For its alignment and its barriers."""
_MOST_STAGES: Final = 16
_SHARED_BYTES_A_CLOCK: Final = 128
_MEMORY_BYTES_A_CLOCK: Final = 2400
_CLOCKS_OF_BLOCKS: Final = 1800
_CLOCKS_OF_SPLIT: Final = {1: 0, 2: 1500, 4: 1900}


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaConfig:
    """Tile of `wgmma_gemm`. A CTA computes `row_groups` times 64 rows of `block_n` features (of a gated product half of them
    gates and half ups). `blocks` CTAs of a cluster compute neighbouring rows and load W for one another; `split` of them share
    the sum of one tile. `resident`: so many CTAs fit a multiprocessor, of which one may belong to the kernel after this one.
    """

    row_groups: int
    block_n: int
    blocks: int = 1
    split: int = 1
    resident: int = 1

    @property
    def rows(self) -> int:
        """What a cluster computes at once."""
        return 64 * self.row_groups * self.blocks

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.blocks * self.split

    @property
    def threads(self) -> int:
        """Of a CTA: a warpgroup for each 64 rows, and one that loads."""
        return 128 * (self.row_groups + 1)

    @property
    def stages(self) -> int:
        """Steps of x and W that the ring holds."""
        room = min(_SHARED_BYTES, _SHARED_BYTES_OF_ALL // self.resident - 1024) - _BESIDE_RING
        return min(_MOST_STAGES, room // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA. Raises ValueError where it would not do: a split sum ends in the ring's memory."""
        ring = self.stages * self._stage_bytes
        sums = 64 * self.row_groups * (self.block_n + 8) * 4 if self.split > 1 else 0
        if self.stages < 2 or sums > ring:
            raise ValueError(f"{self} does not fit the shared memory")
        return ring + _BESIDE_RING

    def pieces(self, *, silu_mul: bool) -> int:
        """Copies that a tile of W takes: one for each block, and at least a half of gates and one of ups."""
        return max(2, self.blocks) if silu_mul else self.blocks

    def defines(self, features: int, width: int, *, silu_mul: bool, add: bool) -> dict[str, int]:
        """What the kernel's source is compiled with, but for the 16-bit type."""
        return {
            "ROW_GROUPS": self.row_groups, "BN": self.block_n, "STAGES": self.stages, "BLOCKS": self.blocks,
            "SPLIT": self.split, "RESIDENT": self.resident, "PIECES": self.pieces(silu_mul=silu_mul), "N": features,
            "K": width, "SILU": int(silu_mul), "ADD": int(add),
        }  # fmt: skip

    @property
    def _stage_bytes(self) -> int:
        return (64 * self.row_groups + self.block_n) * BLOCK_K * 2


@cache
def choose_tile(features: int, width: int, rows: int, *, gated: bool) -> WgmmaConfig | None:
    """The tile with the least modelled time for `[rows, width] @ [features, width].T`, or with `gated` [2 features, width].

    None where no tile serves: no rows, few of the inner side, no multiples of 8, or more rows than few, which are for cuBLAS.
    """
    if not 0 < rows <= FEW_ROWS or features % 8 or width % 8:
        return None
    weight_rows = 2 * features if gated else features
    tiles = _candidates(weight_rows, width, rows, gated=gated)
    return min(tiles, key=lambda tile: clocks(weight_rows, width, tile), default=None)


def clocks(weight_rows: int, width: int, config: WgmmaConfig) -> float:
    """Modelled time of one product whose rows are one cluster's."""
    groups = config.row_groups
    steps = _ceil_div(width, BLOCK_K * config.split)
    waves = _ceil_div(_ceil_div(weight_rows, config.block_n), _CLUSTERS[config.cluster])
    written = (64 * groups + config.block_n) * 2 * BLOCK_K
    read = groups * 4 * (64 + config.block_n) * 32
    computing = steps * waves * max((written + read) / _SHARED_BYTES_A_CLOCK, groups * 2 * config.block_n)
    streaming = weight_rows * width * 2 / _MEMORY_BYTES_A_CLOCK
    total = math.hypot(computing, streaming)
    if config.blocks > 1:
        total += _CLOCKS_OF_BLOCKS
    if config.split > 1:
        sums = 64 * groups * config.block_n * 4
        total += _CLOCKS_OF_SPLIT[config.split] + sums / 32
    return total


def _candidates(weight_rows: int, width: int, rows: int, *, gated: bool) -> Iterator[WgmmaConfig]:
    """Tiles that leave few multiprocessors without one."""
    for blocks in (1,) if rows <= 64 else (1, 2):
        groups = _ceil_div(rows, 64 * blocks)
        unit = 16 if gated or blocks > 1 else 8
        for split in (1,) if gated else (1, 2, 4):
            if blocks == split == 2:
                continue  # slower than it should be by more than the model knows
            for waves in (1, 2, 3) if split == 1 else (1,):
                spread = _ceil_div(weight_rows, _CLUSTERS[blocks * split] * waves)
                block_n = max(16, _ceil_div(spread, unit) * unit)
                if block_n <= _MOST_FEATURES[groups] and width >= 2 * BLOCK_K * split:
                    few_steps = split <= 2 and width <= 1024 * split and block_n <= 64 and groups <= 2
                    yield WgmmaConfig(
                        row_groups=groups, block_n=block_n, blocks=blocks, split=split, resident=2 if few_steps else 1
                    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
