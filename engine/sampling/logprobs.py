"""Log-probabilities of drawn and of prompt tokens, of the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

import torch

from ..outputs import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE_POSITIONS: Final = 256  # of a prompt, whose logits are held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLogprobs:
    """Rows of logits kept from before they are changed. Shapes: logits [R, vocab] fp32, own memory."""

    logits: torch.Tensor
    num_top: int

    @classmethod
    def of(cls, logits: torch.Tensor, num_top: int) -> RawLogprobs:
        """Copy. Shapes: logits [R, vocab]."""
        return cls(logits=logits.to(torch.float32, copy=True), num_top=min(num_top, logits.shape[1]))

    def scored(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of `ids` [R] int64, and the likeliest ids with theirs.

        Shapes: → [R, 1 + 2 k] fp64: own, k log-probabilities, k ids (exact in fp64), in one block for one copy.
        """
        total = self.logits.logsumexp(-1, keepdim=True)
        own = self.logits.gather(1, ids[:, None]) - total
        if not self.num_top:
            return own.double()
        values, top_ids = self.logits.topk(self.num_top, -1)
        return torch.cat((own.double(), (values - total).double(), top_ids.double()), 1)


def scored_prompt(
    logits_of: Callable[[torch.Tensor], torch.Tensor], indices: torch.Tensor, targets: torch.Tensor, num_top: int
) -> torch.Tensor:
    """Log-probabilities of prompt tokens, a slice of the prompt at a time.

    `logits_of` computes the logits of some of the step's tokens. Shapes: indices, targets [N] int64: the token before each
    one scored, and its id → [N, 1 + 2 k] as `RawLogprobs.scored`.
    """
    parts = zip(indices.split(SLICE_POSITIONS), targets.split(SLICE_POSITIONS), strict=True)
    return torch.cat([RawLogprobs.of(logits_of(at), num_top).scored(ids) for at, ids in parts])


def read_scored(rows: Sequence[Sequence[float]], ids: Sequence[int], num_top: Sequence[int]) -> Iterator[TokenLogprobs]:
    """Rows of `scored`, on the host, as records; each with as many of the likeliest as it asked for."""
    for row, token_id, wanted in zip(rows, ids, num_top, strict=True):
        k = (len(row) - 1) // 2
        wanted = min(wanted, k)
        top_ids = tuple(int(value) for value in islice(row, 1 + k, 1 + k + wanted))
        yield TokenLogprobs(token_id, row[0], top_ids, tuple(row[1 : 1 + wanted]))
