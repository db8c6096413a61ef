"""Decode attention over pages on Hopper, for many sequences: the copy engine's ring goes on across their borders."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .decode_plan import PAGED_BLOCK_TOKENS
from .hopper import has_cuda_cpp

if TYPE_CHECKING:
    from .decode_attention import RopeInputs
    from .decode_plan import DecodeWorkspace
    from .nvrtc_kernel import NvrtcKernel

_SOURCE = "\n".join(
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("hopper.cuh", "head_vector.cuh", "attend_block.cuh", "paged_decode.cu")
)


class Arguments(ctypes.Structure):
    """What the kernel is given, in its own order."""

    _fields_ = (
        *[
            (name, ctypes.c_void_p)
            for name in (
                "q", "k_cache", "v_cache", "out", "table", "rows", "seq_lens", "plan", "share", "partial_out",
                "partial_stats", "arrivals", "q_norm", "k_norm", "cos_sin",
            )
        ],
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        *[(name, ctypes.c_int) for name in ("q_stride", "out_stride", "table_stride", "num_rows")],
    )  # fmt: skip


def has_paged_decode(k_cache: torch.Tensor, group: int) -> bool:
    """Whether `paged_decode` serves over such a cache [pages, page_size, Hk, D] with `group` queries of a KV head."""
    page_size, _, head_dim = k_cache.shape[1:]
    is_16_bit = k_cache.dtype in (torch.bfloat16, torch.float16)
    has_shape = page_size % PAGED_BLOCK_TOKENS == 0 and group <= 8 and head_dim in (64, 128)
    return is_16_bit and has_shape and has_cuda_cpp(k_cache.device)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float | None,
    rope: RopeInputs | None,
    ahead: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """As `decode_attention`, where there is one (`has_paged_decode`), with a plan in blocks of PAGED_BLOCK_TOKENS.

    Raises ValueError if page_table, rows or seq_lens are not int32, or q is not of the cache's dtype: the kernel reads them as
    they lie.
    """
    for name, tensor in (("page_table", page_table), ("rows", rows), ("seq_lens", seq_lens)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} is {tensor.dtype}, not int32")
    if q.dtype != k_cache.dtype:
        raise ValueError(f"q is {q.dtype}, the cache {k_cache.dtype}")
    from .nvrtc_kernel import tensor_map  # it needs a library that machines without CUDA lack

    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    has_norm = rope is not None and rope.q_norm is not None
    # Small heads have more blocks on their way, of as many bytes.
    stages = workspace.tiling(len(seq_lens)).blocks_in_flight * 128 // head_dim
    arguments = Arguments(
        *[
            None if tensor is None else tensor.data_ptr()
            for tensor in (
                q, k_cache, v_cache, out, page_table, rows, seq_lens, workspace.plan, workspace.share,
                workspace.partial_out, workspace.partial_stats, workspace.arrivals,
                None if rope is None else rope.q_norm, None if rope is None else rope.k_norm,
                None if rope is None else rope.cos_sin,
            )
        ],
        (head_dim**-0.5 if scale is None else scale) * math.log2(math.e), 0.0 if rope is None else rope.eps,
        q.stride(0), out.stride(0), page_table.stride(0), len(seq_lens),
    )  # fmt: skip
    maps = [
        tensor_map(cache.view(-1, num_kv_heads * head_dim // 64, 64), PAGED_BLOCK_TOKENS, head_dim // 64, 64)
        for cache in (k_cache, v_cache)
    ]
    with torch.cuda.device(q.device):
        kernel = _made(
            workspace.group, num_kv_heads, head_dim, page_size, stages, q.dtype,
            rope=rope is not None, norm=has_norm, ahead=ahead, device=q.device,
        )  # fmt: skip
        kernel.launch(workspace.num_programs(len(seq_lens)), 32, 1, (*maps, arguments))
    return out


@cache
def _made(
    group: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    stages: int,
    dtype: torch.dtype,
    *,
    rope: bool,
    norm: bool,
    ahead: bool,
    device: torch.device,
) -> NvrtcKernel:
    """`device`, the current one, is a key only: each has a module of its own."""
    from .nvrtc_kernel import NvrtcKernel

    defines = {
        "G": group, "HK": num_kv_heads, "D": head_dim, "PAGE": page_size, "STAGES": stages, "ROPE": int(rope),
        "NORM": int(norm), "AHEAD": int(ahead), "BFLOAT16": int(dtype == torch.bfloat16),
    }  # fmt: skip
    ring_bytes = stages * PAGED_BLOCK_TOKENS * head_dim * 2 * 2
    return NvrtcKernel(_SOURCE, "paged_decode", defines, shared_bytes=1024 + ring_bytes + 8 * stages)
