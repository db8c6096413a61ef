"""Which token counts are worth a graph: a library picks its kernels by the size, and for some sizes so badly that a larger one
is the faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from ..models.llama import LlamaForCausalLM

MARGIN: Final = 0.1
"""So much less must a larger one take: two starts do not agree to the percent, and are to have the same buckets."""

_ROUNDS: Final = 6


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

    Each is the least of several rounds over all sizes, largest first and without a wait between them: so the device has its
    pace before the small ones come, and is never found waiting for the host.
    """
    layer, config, weight = model.stack[0], model.config, model.embedding
    descending = sorted(sizes, reverse=True)
    residual = weight.new_zeros(descending[0], config.hidden_size)
    attended = weight.new_zeros(descending[0], config.num_heads, config.head_dim)
    times = dict.fromkeys(descending, float("inf"))
    for _ in range(_ROUNDS):
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in descending]
        for size, (start, end) in zip(descending, spans, strict=True):
            start.record()
            layer.attention.qkv(residual[:size])
            layer.finish(attended[:size], residual[:size])
            end.record()
        torch.cuda.synchronize(weight.device)
        for size, (start, end) in zip(descending, spans, strict=True):
            times[size] = min(times[size], start.elapsed_time(end))
    return times
