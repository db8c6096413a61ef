"""Which token counts are worth a graph: a library picks its kernels by the size, and for some sizes so badly that a larger one
is the faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from ..models.llama import LlamaForCausalLM

MARGIN: Final = 0.1
"""So much less must a larger one take: two starts do not agree to the percent, and are to have the same buckets."""

_WARM_UPS: Final = 2
_REPEATS: Final = 5


def worthwhile(times: Mapping[int, float], *, margin: float = MARGIN) -> tuple[int, ...]:
    """The sizes, ascending, of which no larger one takes less time by more than `margin`. `times`: by size, of any unit."""
    kept: list[int] = []
    least = float("inf")
    for size in sorted(times, reverse=True):
        if times[size] * (1 - margin) <= least:
            kept.append(size)
        least = min(least, times[size])
    return tuple(reversed(kept))


@torch.inference_mode()
def product_times_blocking(model: LlamaForCausalLM, sizes: Iterable[int]) -> dict[int, float]:
    """Milliseconds that the products of one layer take for so many tokens, with what is computed between them, by size.
    CUDA only. Stops the host.
    """
    layer, config, weight = model.stack[0], model.config, model.embedding
    times = {}
    for size in sizes:
        residual = weight.new_zeros(size, config.hidden_size)
        attended = weight.new_zeros(size, config.num_heads, config.head_dim)
        taken = []
        for turn in range(_WARM_UPS + _REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            layer.attention.qkv(residual)
            layer.finish(attended, residual)
            end.record()
            end.synchronize()
            if turn >= _WARM_UPS:
                taken.append(start.elapsed_time(end))
        times[size] = statistics.median(taken)
    return times
