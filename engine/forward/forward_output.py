"""What a forward gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStates:
    """What the layers leave of all tokens of a step; the model makes of it what is asked for, for the tokens it is asked for.

    Of most prompt tokens nothing is, and so the last layer stops behind its attention. Shapes: residual [T, hidden], the
    stream before the last norm; attended [T, Hq, D], what the last layer has attended to and not yet added, its
    feed-forward still to come; None where all of it is in `residual`. Neither is written to.
    """

    residual: torch.Tensor
    attended: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Shapes: logits [S, vocab] of the model's dtype, compute lane: one row for each row of the batch that samples,
    in their order. states: of all tokens of the step.

    Lifetime: what a graph writes is a view, valid until the next replay; the rest is the step's own.
    """

    logits: torch.Tensor
    states: TokenStates
