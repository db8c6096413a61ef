"""What a forward gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Shapes: logits [S, vocab] of the model's dtype, compute lane: one row for each row of the batch that samples,
    in their order.

    Lifetime: the output of a graph is a view, valid until the next replay; the eager runner's is its own.
    """

    logits: torch.Tensor
