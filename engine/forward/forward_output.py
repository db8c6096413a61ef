"""What a forward gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Shapes: logits [S, vocab] of the model's dtype, compute lane: one row for each row of the batch that samples,
    in their order. hidden [T, hidden size], before the last norm: all tokens of the step.

    Lifetime: what a graph writes is a view, valid until the next replay; the rest is the step's own.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
