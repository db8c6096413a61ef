"""Which kernel multiplies a few rows with a weight matrix: measured on an H200, by shape and number of rows."""

from dataclasses import dataclass

from .small_gemm import GemmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemv:
    """`gemv` with this tile."""

    rows_per_program: int | None = None
    num_warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallGemm:
    """`small_gemm` with this tile."""

    config: GemmConfig


@dataclass(frozen=True, slots=True)
class Library:
    """cuBLAS, with the operations around it as kernels of their own."""


MatrixChoice = Gemv | SmallGemm | Library


def choose(features: int, width: int, rows: int, *, gated: bool, split_allowed: bool) -> MatrixChoice:
    """The fastest kernel for `[rows, width] @ [features, width].T`; `gated`: a gate and an up half of `features` each."""
    if rows <= 4:
        return Gemv()
    if rows <= 32:
        return SmallGemm(config=GemmConfig(block_n=32 if gated else 64, block_k=128))
    return Library()
