"""Which kernel multiplies a batch of rows with a weight matrix: measured on an H200, by shape and number of rows."""

from dataclasses import dataclass

from .resident_gemm import ResidentConfig
from .small_gemm import GemmConfig
from .wgmma_tiles import WgmmaConfig, choose_tile

_SMALL_ELEMENTS = 8 << 20
"""Up to here a matrix is over before a pipelined loop has paid for its start (the layers of a 0.6B model)."""
_LARGE_ELEMENTS = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemv:
    """`gemv` with this many warps."""

    num_warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """`resident_gemm` with this tile; `fuses_norm`: normalising in every program costs less than a kernel for it."""

    config: ResidentConfig
    fuses_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """`small_gemm` with this tile."""

    config: GemmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Wgmma:
    """`wgmma_gemm` with this tile."""

    config: WgmmaConfig


@dataclass(frozen=True, slots=True)
class Library:
    """cuBLAS, with the operations around it as kernels of their own."""


MatrixChoice = Gemv | Resident | Streamed | Wgmma | Library


def choose(features: int, width: int, rows: int, *, gated: bool, splittable: bool, has_wgmma: bool) -> MatrixChoice:
    """The fastest kernel for `[rows, width] @ [features, width].T`.

    `gated`: there are a gate and an up half of `features` each. `splittable`: the sum may be split over programs.
    `has_wgmma`: the device and the software can do `wgmma_gemm`.
    """
    elements = features * width * (2 if gated else 1)
    small = elements <= _SMALL_ELEMENTS
    if rows == 1 or (rows == 2 and small and width > 2048):
        return Gemv(num_warps=8 if width > 8192 or (rows == 2 and small) else 4)
    if small and width <= 2048 and rows <= 16:
        if width > 1024:
            return Resident(config=ResidentConfig(block_n=16, num_warps=8), fuses_norm=rows <= 8)
        narrow = gated and rows > 8
        return Resident(config=ResidentConfig(block_n=8 if narrow else 16), fuses_norm=rows <= 8)
    # Few rows of a large matrix are bound by the memory alone: there the streamed kernel is level. Many rows of one whose sum
    # must be split are bound by power, which cuBLAS spends better.
    if has_wgmma and rows > (16 if small else 32) and (rows <= 192 or gated or elements <= _LARGE_ELEMENTS):
        tile = choose_tile(features, width, rows, gated=gated)
        if tile is not None:
            return Wgmma(config=tile)
    if rows <= 64:
        return _streamed(features, width, rows, gated=gated, splittable=splittable)
    return Library()


def _streamed(features: int, width: int, rows: int, *, gated: bool, splittable: bool) -> MatrixChoice:
    """Sending for W ahead of the input helps where the whole matrix takes a few microseconds, and hurts large ones."""
    small = features * width * (2 if gated else 1) <= _SMALL_ELEMENTS
    if splittable and not gated and features <= 4096:
        if small:
            return Streamed(config=GemmConfig(block_n=64, block_k=128, split_k=4, ahead=8 if width > 2048 else 4))
        if rows <= 16:
            return Streamed(config=GemmConfig(block_n=64, block_k=128, split_k=4, ahead=0))
        return Streamed(config=GemmConfig(block_n=64, block_k=128, split_k=2, num_stages=5))
    if features > 65536:
        return Streamed(config=GemmConfig(block_n=128, block_k=128, num_warps=8))
    ahead = 4 if small and (rows > 32 or not gated) else 0
    return Streamed(config=GemmConfig(block_n=64, block_k=128, ahead=ahead))
