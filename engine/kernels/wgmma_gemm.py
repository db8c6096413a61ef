"""`x @ W.T` on Hopper's own tensor-core instructions, SiLU·mul or the residual add in the same kernel."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from .nvrtc_kernel import NvrtcKernel, tensor_map
from .wgmma_tiles import BLOCK_K, WgmmaConfig

_PRIMITIVES, _SOURCE = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("hopper.cuh", "wgmma_gemm.cu")
)


def wgmma_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: WgmmaConfig,
    *,
    out: torch.Tensor | None = None,
    silu_mul: bool = False,
    add: bool = False,
) -> torch.Tensor:
    """`y = x @ weight.T`, SiLU·mul or the residual add fused in. One kernel, one graph node.

    Shapes: x [B, K] (rows may be strided); weight [N, K] contiguous, or with `silu_mul` [2 N, K] with the gate half first;
    out [B, N] (rows may be strided). K and N are multiples of 8, rows aligned to 16 bytes. bfloat16 or float16.
    `silu_mul`: y = silu(x @ gate.T) * (x @ up.T). `add`: out += y (out is required). Sums are in fp32 and deterministic.

    Needs a Hopper GPU and `nvrtc_kernel`. The first call of a kind compiles and must not be inside a capture.
    """
    rows, width = x.shape
    features = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    if silu_mul and config.split > 1:
        raise ValueError("a split sum excludes silu_mul")
    if silu_mul and config.blocks > 2:
        raise ValueError(f"silu_mul is for one or two blocks, not {config.blocks}")
    if config.block_n % (8 * config.pieces(silu_mul=silu_mul)):
        raise ValueError(f"block_n {config.block_n} is not cut into multiples of 8")
    if out is None:
        if add:
            raise ValueError("add needs the tensor to add to")
        out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    if rows:
        with torch.cuda.device(x.device):
            kernel = _made(features, width, x.dtype, config, silu_mul=silu_mul, add=add, device=x.device)
            kernel(x, weight, out)
    return out


class WgmmaGemm:
    """The compiled kernel of one shape, tile and epilogue. Made once a process."""

    def __init__(
        self, features: int, width: int, dtype: torch.dtype, config: WgmmaConfig, *, silu_mul: bool, add: bool
    ) -> None:
        self._config = config
        self._piece = config.block_n // config.pieces(silu_mul=silu_mul)
        self._tiles = -(-features // (config.block_n // 2 if silu_mul else config.block_n))
        defines = {
            **config.defines(features, width, silu_mul=silu_mul, add=add),
            "BFLOAT16": int(dtype == torch.bfloat16),
        }
        source = source_of(config.block_n, dtype)
        self._kernel = NvrtcKernel(source, "wgmma_gemm", defines, shared_bytes=config.shared_bytes)
        self._most_clusters = self._kernel.max_clusters(config.threads, config.cluster)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        config = self._config
        x_map = tensor_map(x, 64 * config.row_groups, BLOCK_K)
        w_map = tensor_map(weight, self._piece, BLOCK_K)
        arguments = (x_map, w_map, ctypes.c_void_p(out.data_ptr()), ctypes.c_int(len(x)), ctypes.c_int(out.stride(0)))
        clusters = self._tiles * -(-len(x) // config.rows)
        if config.split == 1:  # else a sum ends in the memory that the next tile would be loaded into
            clusters = min(clusters, self._most_clusters)
        self._kernel.launch(clusters * config.cluster, config.threads, config.cluster, arguments)


@cache
def _made(
    features: int,
    width: int,
    dtype: torch.dtype,
    config: WgmmaConfig,
    *,
    silu_mul: bool,
    add: bool,
    device: torch.device,
) -> WgmmaGemm:
    """`device`, the current one, is a key only: each has a module of its own."""
    return WgmmaGemm(features, width, dtype, config, silu_mul=silu_mul, add=add)


def source_of(block_n: int, dtype: torch.dtype) -> str:
    """The kernel's source, and before it the instruction for `block_n` rows of W, which names each register of the sum."""
    count = block_n // 2
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    text = (
        f'"{{\\n .reg .pred p;\\n setp.ne.b32 p, %{count + 2}, 0;\\n'
        f" wgmma.mma_async.sync.aligned.m64n{block_n}k16.f32.{kind}.{kind} {{{registers}}}, "
        f'%{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"'
    )
    macro = (
        f'#define WGMMA(acc, x, w, accumulate) asm volatile({text} : {operands} : "l"(x), "l"(w), "r"(int(accumulate)))'
    )
    return f"{macro}\n{_PRIMITIVES}\n{_SOURCE}"
